"""What grpo_trainer.sh needs of a config and of this machine's network, checked, as assignments for its
shell: python facts.py --config-name NAME [--nodes N] [--address ADDRESS] [--master ADDRESS]
[key=value ...]

exit status: 0, or 2 for an address that cannot be one, a config that cannot be launched, whose
layout cannot exist, or whose base weights would be converted into the folder of another layout
"""

import argparse
import ipaddress
import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # a file of a checkout
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from mindspeed_qerl.common.entry import use_checkout

    use_checkout()

import psutil

from mindspeed_qerl.ascend.limits import needed_cpus
from mindspeed_qerl.common.errors import ConfigError
from mindspeed_qerl.common.files import TRACKER
from mindspeed_qerl.engines import engine_of
from mindspeed_qerl.layout.plan import plan_of
from mindspeed_qerl.layout.rules import broken
from mindspeed_qerl.preflight.case import Case, case_of, conversion
from mindspeed_qerl.preflight.host import fault_of_ray_address
from mindspeed_qerl.recipe.compose import compose
from mindspeed_qerl.recipe.reader import read_recipe

ROOT = Path(__file__).parents[2]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config-name", required=True)
    parser.add_argument(
        "--nodes", type=int, help="nodes that share the NPUs equally (default: as the config says)"
    )
    parser.add_argument("--address", default="", help="of this node; its interface is looked up")
    parser.add_argument("--master", default="", help="address of node 0")
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_intermixed_args()
    try:
        facts, words = read(args.config_name, args.nodes, args.overrides)
        check_addresses(args, facts["nodes"])
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for name, value in {**facts, **network(args.address)}.items():
        print(f"{name}={shlex.quote(str(value))}")
    print(f"conversion=({shlex.join(words)})")
    return 0


def fault_of_address(name: str, value: str) -> str:
    """Why the address of a node among several, `value` of variable `name`, cannot be one; "" if it
    can. Upstream's servers listen at tcp://ADDRESS, which takes no IPv6. MASTER_ADDR may be a name: only
    Ray connects to it.

    >>> fault_of_address("NODE_ADDR", "fd00::5")
    'NODE_ADDR=fd00::5 must be an IPv4 address, such as 10.0.0.1: no IPv6, no port, no spaces, no name'
    """
    host = re.fullmatch(r"(?=.*[A-Za-z])[A-Za-z0-9][A-Za-z0-9.-]*", value)
    if name == "MASTER_ADDR" and host:
        if value != "localhost":
            return ""
        value = "127.0.0.1"
    try:
        address = ipaddress.IPv4Address(value)
    except ValueError:
        return (
            f"{name}={value} must be an IPv4 address, such as 10.0.0.1: no IPv6, no port, no "
            "spaces, no name"
        )
    if address.is_unspecified or address.is_multicast:
        return f"{name}={value} is the address of no machine"
    if address.is_loopback:
        return f"{name}={value} is this machine's own: nodes need one that all of them reach"
    return ""


def check_addresses(args: argparse.Namespace, nodes: int) -> None:
    """ConfigError unless several nodes can have these addresses, where they are given, and Ray be
    joined at RAY_ADDRESS.
    """
    addresses = {"NODE_ADDR": args.address, "MASTER_ADDR": args.master} if nodes > 1 else {}
    for variable, value in addresses.items():
        if value and (fault := fault_of_address(variable, value)):
            raise ConfigError(fault)
    ray = os.environ.get("RAY_ADDRESS", "")
    if ray not in ("", "auto") and (fault := fault_of_ray_address(ray)):
        raise ConfigError(f"RAY_ADDRESS={fault}")


def read(name: str, nodes: int | None, overrides: list[str]) -> tuple[dict[str, Any], list[str]]:
    """What the launcher needs to know, and the words of the conversion of base weights, none if
    they are there or there are none. `divided` is an override, where the config says another number
    of nodes; nodes: None for the config's.
    """
    case = case_of(compose(name, overrides), name)
    check_for_npus(case, name)
    if case.unread:
        raise ConfigError(*case.unread)
    layout = case.recipe.layout
    divided = ""
    if nodes is None:
        nodes = layout.nodes
    elif case.npus % nodes:
        raise ConfigError(
            f"rl_config.actor_resource.num_npus = {case.npus} cannot be shared equally by {nodes} "
            "nodes"
        )
    elif case.npus // nodes != layout.node_width:
        divided = f"npu.ranks_per_node={case.npus // nodes}"
        overrides = [*overrides, divided]
        case = case_of(compose(name, overrides), name)
    recipe = case.recipe
    facts = {
        "npus": case.npus,
        "nodes": nodes,
        "divided": divided,
        "cpus": needed_cpus(recipe),
        "max_prompt_length": recipe.sampling.max_prompt_length,
        "model": path("megatron_training.tokenizer_name_or_path", recipe.model.path),
        "data_path": path("megatron_training.data_path", recipe.task.data_path),
        "train_file": path("task.train_file", recipe.task.train_file),
        "test_file": path("task.test_file", recipe.task.test_file),
        "load": "" if recipe.model.load is None else path("actor_config.load", recipe.model.load),
    }
    check_layout(case, overrides)
    if not facts["load"] or (Path(facts["load"]) / TRACKER).is_file():
        return facts, []
    words = conversion(case)
    check_name(facts["load"], case)
    return facts, words


def check_name(load: str, case: Case) -> None:
    """ConfigError if the folder of the converted weights is named after another layout."""
    layout = case.recipe.layout
    sizes = (layout.tp, layout.pp, layout.ep)
    named = re.search(r"-tp(\d+)-pp(\d+)(?:-ep(\d+))?/*$", load)
    if named and any(size and int(size) != own for size, own in zip(named.groups(), sizes)):
        own = f"{load[: named.start()]}-tp{layout.tp}-pp{layout.pp}"
        if named[3]:
            own += f"-ep{layout.ep}"
        raise ConfigError(
            f"actor_config.load = {load} is named after another layout than the config's TP "
            f"{layout.tp} PP {layout.pp} EP {layout.ep}, and a folder holds the weights of one: "
            f"set actor_config.load={own}"
        )


def network(address: str) -> dict[str, str]:
    """The interface that has the address, "" if none has, and all there are; asked without `ip`,
    which may be missing.
    """
    found = [
        (name, each.address)
        for name, addresses in psutil.net_if_addrs().items()
        for each in addresses
        if each.family in (socket.AF_INET, socket.AF_INET6)
    ]
    return {
        "interface": next((name for name, each in found if each == address), ""),
        "interfaces": ", ".join(f"{name} {each}" for name, each in found),
    }


def check_for_npus(case: Case, name: str) -> None:
    if engine_of(case.recipe).UPSTREAM:
        return
    engine = case.recipe.engine
    if not engine_of(read_recipe(compose(name))).UPSTREAM:
        raise ConfigError(
            f"{name} has engine = {engine}: the launchers are for configs of NPUs. It needs none: "
            f"python cli/train_grpo.py --config-name {name}"
        )
    raise ConfigError(
        f"engine = {engine}: the launchers are for NPUs. On CPUs {name} is rehearsed: "
        f"python cli/train_grpo.py --config-name {name} engine=local rehearsal.enabled=true"
    )


def check_layout(case: Case, overrides: list[str]) -> None:
    """ConfigError with what tools/plan_layout.py says, unless the layout is legal."""
    try:
        if not broken(plan_of(case.recipe)):
            return
    except ConfigError:
        pass  # said by the tool
    done = subprocess.run(
        [sys.executable, "tools/plan_layout.py", "--config-name", case.name, *overrides],
        check=False,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        raise ConfigError(
            f"{case.name}, as it is overridden here, has no layout that can be trained. "
            f"tools/plan_layout.py says:\n{done.stdout.rstrip()}"
        )


def path(key: str, value: str) -> str:
    if not value.strip():
        raise ConfigError(
            f"{key} = {value!r} must be a path, where the launcher looks and converts to: leave it "
            "as the config has it, or name another"
        )
    return value


if __name__ == "__main__":
    sys.exit(main())
