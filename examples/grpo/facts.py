"""What launch.sh needs of a config, as assignments for its shell: python facts.py --config-name NAME [key=value ...]"""

import argparse
import shlex
import sys

from mindspeed_qerl.ascend.convert import conversion_command
from mindspeed_qerl.ascend.settings import needed_cpus
from mindspeed_qerl.config import ConfigError, compose


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config-name", required=True)
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_intermixed_args()
    try:
        raw = compose(args.config_name, args.overrides)
        training, actor, rl, gsm8k = (raw[section] for section in ("megatron_training", "actor_config", "rl_config", "gsm8k"))
        npus = rl["actor_resource"]["num_npus"]
        facts = {
            "npus": npus,
            "cpus": needed_cpus(npus, rl["num_cpus_for_placement_group"], rl["num_cpus_for_local_task"]),
            "max_prompt_length": rl["max_prompt_length"],
            "model": training["tokenizer_name_or_path"],
            "data_path": training["data_path"],
            "train_file": gsm8k["train_file"],
            "test_file": gsm8k["test_file"],
            "load": actor.get("load") or "",
        }
        conversion = conversion_command(raw) if facts["load"] else []
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyError as error:
        print(f"error: {args.config_name} has no {error}: the launchers are for configs of NPUs", file=sys.stderr)
        return 2
    for name, value in facts.items():
        print(f"{name}={shlex.quote(str(value))}")
    print(f"conversion=({shlex.join(conversion)})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
