"""Variables of the shell: what the engine would set otherwise, and what is left from a recipe, a
Dockerfile or an earlier repair. The launchers' raylet inherits the shell, so every worker has them.
"""

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import yaml

from mindspeed_qerl.ascend.limits import npu_environment

from .case import (
    LIST,
    Case,
    Check,
    failed,
    passed,
    warning,
)

FAMILIES = ("HCCL_", "ASCEND_", "ATB_LLM_", "LCCL_", "OMP_", "PYTORCH_", "TORCH_", "VLLM_")
# Of these families: set by CANN's and NNAL's set_env.sh, or by the launchers.
KNOWN = """ASCEND_AICPU_PATH ASCEND_HOME_PATH ASCEND_OPP_PATH ASCEND_TOOLKIT_HOME ASCEND_ROOT
HCCL_IF_IP HCCL_SOCKET_IFNAME""".split()
HARMFUL = yaml.safe_load(Path(__file__).with_name("variables.yaml").read_text(encoding="utf-8"))


def value(
    case: Case, variable: str, state: str, pattern: str, why: str, fix: str = ""
) -> Check | None:
    """A variable whose value does harm (variables.yaml)."""
    given = case.machine.environment.get(variable)
    if given is None or not re.fullmatch(pattern, given.strip()):
        return None
    return Check(state, f"{given!r} in the shell: {why}", fix or f"unset {variable}")


def of_engine(case: Case) -> Check:
    """Returns what the engine sets where the shell does not (engine.train), and what else the shell
    has of these families.
    """
    shell = case.machine.environment
    ours = npu_environment()
    others = [
        f"{name} is {shell[name]!r}, the engine would set {value!r}"
        for name, value in ours.items()
        if shell.get(name, value) != value
    ]
    if others:
        return warning("; ".join(others))
    names = {name for name in shell if name.startswith(FAMILIES)} - {*KNOWN, *ours, LIST}
    return passed(
        f"as the engine sets them; the workers have these too, which neither it nor set_env.sh "
        f"sets: {', '.join(sorted(names)) or 'none'}"
    )


def network(case: Case) -> Iterator[Check]:
    """Yields the variables of HCCL, Gloo and TensorPipe that name no network interface, or no
    address, of this machine. HCCL's names are prefixes; = before them asks for whole names, ^ for
    all others (CANN, HCCL_SOCKET_IFNAME).
    """
    shell = case.machine.environment
    there = case.machine.interfaces()
    for name in ("HCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"):
        value = shell.get(name, "")
        names = tuple(value.removeprefix("=").split(","))
        if value and value[0] != "^" and not any(each.startswith(names) for each in there):
            words = f"{value}: no network interface of this machine is that"
            yield failed(f"{words}; here are {', '.join(there)}", f"unset {name}", name)
    address = shell.get("HCCL_IF_IP", "").partition("%")[0].lower()
    if address and not any(address in addresses for addresses in there.values()):
        words = f"{address}: no network interface of this machine has it"
        yield failed(words, "unset HCCL_IF_IP", "HCCL_IF_IP")


CHECKS = {
    "variables": of_engine,
    **{name: partial(value, variable=name, **about) for name, about in HARMFUL.items()},
    "network interfaces": network,
}
