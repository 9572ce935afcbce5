"""Variables of the shell: what the engine would set otherwise, and what is left from a recipe, a
Dockerfile or an earlier repair. The launchers' raylet inherits the shell, so every worker has them.
"""

import re
from collections.abc import Iterable

from mindspeed_qerl.ascend.limits import npu_environment
from mindspeed_qerl.preflight.case import Case, Check, failed, passed, warning
from mindspeed_qerl.preflight.machine import Machine
from mindspeed_qerl.preflight.network import address_fault

FAMILIES = ("HCCL_", "ASCEND_", "ATB_LLM_", "LCCL_", "OMP_", "PYTORCH_", "TORCH_", "VLLM_")
# Of these families: set by CANN's and NNAL's set_env.sh, or by the launchers.
KNOWN = """ASCEND_AICPU_PATH ASCEND_HOME_PATH ASCEND_OPP_PATH ASCEND_TOOLKIT_HOME ASCEND_ROOT
ASCEND_RT_VISIBLE_DEVICES HCCL_IF_IP HCCL_SOCKET_IFNAME""".split()


def harmful(
    machine: Machine,
    case: Case,
    name: str,
    values: str,
    state: str,
    why: str,
    experts: str | None = None,
) -> Check | None:
    """A variable with one of these values, a regular expression; `experts` is the state where vLLM
    spreads experts over ranks.
    """
    value = machine.environment.get(name)
    if value is None or not re.fullmatch(values, value.strip()):
        return None
    if experts and case.expert_parallel:
        state = experts
    return Check(state, f"{value!r} in the shell: {why}")


def of_engine(machine: Machine, case: Case) -> Check:
    """What the engine sets where the shell does not (engine.train)."""
    others = []
    for name, ours in npu_environment().items():
        value = machine.environment.get(name, ours)
        if value != ours:
            others.append(f"{name} is {value!r}, the engine would set {ours!r}")
    if others:
        return warning("; ".join(others))
    return passed("as the engine sets them")


def interface(machine: Machine, case: Case, name: str) -> Check | None:
    """A variable of HCCL, Gloo or TensorPipe that names a network interface."""
    value, there = machine.environment.get(name), sorted(machine.interfaces())
    of_hccl = name == "HCCL_SOCKET_IFNAME"
    if value and not _matches(value, there, prefixes=of_hccl):
        names = ", ".join(there)
        return failed(f"{value}: no network interface of this machine is that; here are {names}")
    # the launcher sets it
    if of_hccl and case.nodes > 1 and not (case.own_ray or value):
        return warning(f"not set, with {case.nodes} nodes: HCCL picks an interface by itself")
    return None


def _matches(value: str, interfaces: Iterable[str], prefixes: bool) -> bool:
    """Whether a list of interfaces has one that is there. HCCL's are prefixes; = before them asks
    for whole names, ^ for all others (CANN, HCCL_SOCKET_IFNAME). Gloo's and TensorPipe's are whole
    names.
    """
    mark = ""
    if prefixes:
        rest = value.lstrip("=^")
        mark, value = value.removesuffix(rest), rest
    names = tuple(name.strip() for name in value.split(","))
    for name in interfaces:
        listed = name.startswith(names) if prefixes and "=" not in mark else name in names
        if listed != ("^" in mark):
            return True
    return False


def hccl_address(machine: Machine, case: Case) -> Check | None:
    address = machine.environment.get("HCCL_IF_IP")
    if not address:
        return None
    if address.partition("%")[0].lower() not in machine.addresses():
        return failed(f"{address}: no network interface of this machine has it")
    if case.several_nodes:
        return address_fault(case, "HCCL_IF_IP", address)
    return None


def wandb(machine: Machine, case: Case) -> Check | None:
    shell = machine.environment
    reached = shell.get("WANDB_API_KEY") or shell.get("WANDB_MODE") == "offline"
    if case.recipe.run.wandb_project and not reached:
        return warning("run.wandb_project is set, and no WANDB_API_KEY")
    return None


def others(machine: Machine, case: Case) -> Check:
    """Those that nobody here sets, harmful or not, in one line."""
    names = {name for name in machine.environment if name.startswith(FAMILIES)}
    names -= {*KNOWN, *npu_environment()}
    words = ", ".join(sorted(names)) or "none"
    return passed(
        f"{words}; neither the engine nor set_env.sh sets them, and the workers have them"
    )
