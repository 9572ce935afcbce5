"""What launch.sh needs of a config, checked, as assignments for its shell: python facts.py --config-name NAME [--nodes N] [key=value ...]

exit status: 0, or 2 for a config that cannot be launched, whose layout cannot exist, or whose base weights would be converted into the folder
of another layout
"""

import argparse
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # a file of a checkout
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from mindspeed_qerl.entry import use_checkout

    use_checkout()

from mindspeed_qerl.ascend.convert import TRACKER
from mindspeed_qerl.ascend.settings import needed_cpus
from mindspeed_qerl.errors import ConfigError
from mindspeed_qerl.preflight.case import Case, check_engine
from mindspeed_qerl.preflight.files import conversion
from mindspeed_qerl.preflight.npus import Seen
from mindspeed_qerl.recipe.compose import compose

ROOT = Path(__file__).parents[2]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config-name", required=True)
    parser.add_argument("--nodes", type=int, default=1, help="nodes that share the NPUs equally")
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_intermixed_args()
    try:
        facts, words = read(args.config_name, args.nodes, args.overrides)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for name, value in facts.items():
        print(f"{name}={shlex.quote(str(value))}")
    print(f"conversion=({shlex.join(words)})")
    return 0


def read(name: str, nodes: int, overrides: list[str]) -> tuple[dict[str, Any], list[str]]:
    """What the launcher needs to know, and the words of the conversion of base weights, none if they are there or there are none."""
    raw = compose(name, overrides)
    check_for_npus(raw, name)
    npus = whole(raw, "rl_config.actor_resource.num_npus")
    if npus % nodes:
        raise ConfigError(f"rl_config.actor_resource.num_npus = {npus} cannot be shared equally by {nodes} nodes")
    cpus = needed_cpus(npus, whole(raw, "rl_config.num_cpus_for_placement_group"), whole(raw, "rl_config.num_cpus_for_local_task"))
    facts = {
        "npus": npus,
        "cpus": cpus,
        "max_prompt_length": whole(raw, "rl_config.max_prompt_length"),
        "model": path(raw, "megatron_training.tokenizer_name_or_path"),
        "data_path": path(raw, "megatron_training.data_path"),
        "train_file": path(raw, "gsm8k.train_file"),
        "test_file": path(raw, "gsm8k.test_file"),
        "load": "" if at(raw, "actor_config.load") is None else path(raw, "actor_config.load"),
    }
    check_layout(name, npus // nodes, overrides)
    if not facts["load"] or (Path(facts["load"]) / TRACKER).is_file():
        return facts, []
    return facts, conversion(Case(raw, name, nodes, True, Seen()))


def check_for_npus(raw: Mapping[str, Any], name: str) -> None:
    check_engine(raw)
    if raw["engine"] == "mindspeed_rl":
        return
    if compose(name)["engine"] != "mindspeed_rl":
        raise ConfigError(f"{name} has engine = {raw['engine']}: the launchers are for configs of NPUs. It needs none: "
                          f"python cli/train_grpo.py --config-name {name}")
    raise ConfigError(f"engine = {raw['engine']}: the launchers are for NPUs. On CPUs {name} is rehearsed: "
                      f"python cli/train_grpo.py --config-name {name} engine=local rehearsal.enabled=true")


def check_layout(name: str, npus_per_node: int, overrides: list[str]) -> None:
    """ConfigError with what tools/plan_layout.py says, unless it finds the layout legal."""
    done = subprocess.run([sys.executable, "tools/plan_layout.py", "--config-name", name, "--ranks-per-node", str(npus_per_node), *overrides],
                          check=False, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise ConfigError(f"{name}, as it is overridden here, has no layout that can be trained. tools/plan_layout.py says:\n{done.stdout.rstrip()}")


def at(raw: Mapping[str, Any], key: str) -> Any:
    """The value at a dotted key; None where there is none."""
    value: Any = raw
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def whole(raw: Mapping[str, Any], key: str) -> int:
    value = at(raw, key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{key} = {value!r} must be a whole number of at least 1")
    return value


def path(raw: Mapping[str, Any], key: str) -> str:
    value = at(raw, key)
    if not isinstance(value, str) or not value.strip():
        raise ConfigError(f"{key} = {value!r} must be a path, where the launcher looks and converts to: leave it as the config has it, or name another")
    return value


if __name__ == "__main__":
    sys.exit(main())
