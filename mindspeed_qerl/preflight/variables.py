"""Variables of the shell: what the engine would set otherwise, and what is left from a recipe, a
Dockerfile or an earlier repair. The launchers' raylet inherits the shell, so every worker has them.
"""

import re
from itertools import chain

from mindspeed_qerl.ascend.limits import npu_environment
from mindspeed_qerl.preflight.case import LIST, Case, Check, failed, passed, warning

FAMILIES = ("HCCL_", "ASCEND_", "ATB_LLM_", "LCCL_", "OMP_", "PYTORCH_", "TORCH_", "VLLM_")
# Of these families: set by CANN's and NNAL's set_env.sh, or by the launchers.
KNOWN = """ASCEND_AICPU_PATH ASCEND_HOME_PATH ASCEND_OPP_PATH ASCEND_TOOLKIT_HOME ASCEND_ROOT
HCCL_IF_IP HCCL_SOCKET_IFNAME""".split()


def harmful(
    case: Case,
    name: str,
    pattern: str,
    state: str,
    why: str,
    experts: str | None = None,
    variable: str | None = None,
    unset: str | None = None,
) -> Check | None:
    """A variable, `name` unless it says another, whose value does harm, by a regular expression;
    `unset` is its value where it has none. `experts` is the state for a mixture of experts.
    """
    value = case.machine.environment.get(variable or name, unset)
    if value is None or not re.fullmatch(pattern, value.strip()):
        return None
    if experts and case.recipe.model.arguments.get("num_experts"):
        state = experts
    return Check(state, f"{value!r} in the shell: {why}")


def of_engine(case: Case) -> Check:
    """What the engine sets where the shell does not (engine.train), and what else the shell has of
    these families.
    """
    shell, ours = case.machine.environment, npu_environment()
    others = []
    for name, value in ours.items():
        if shell.get(name, value) != value:
            others.append(f"{name} is {shell[name]!r}, the engine would set {value!r}")
    if others:
        return warning("; ".join(others))
    names = {name for name in shell if name.startswith(FAMILIES)} - {*KNOWN, *ours, LIST}
    return passed(
        f"as the engine sets them; the workers have these too, which neither it nor set_env.sh "
        f"sets: {', '.join(sorted(names)) or 'none'}"
    )


def interface(case: Case, name: str) -> Check | None:
    """A variable of HCCL, Gloo or TensorPipe that names network interfaces. HCCL's are prefixes;
    = before them asks for whole names, ^ for all others (CANN, HCCL_SOCKET_IFNAME).
    """
    value, there = case.machine.environment.get(name), case.machine.interfaces()
    if not value or value.startswith("^"):
        return None
    names = tuple(value.removeprefix("=").split(","))
    if any(interface.startswith(names) for interface in there):
        return None
    return failed(
        f"{value}: no network interface of this machine is that; here are {', '.join(there)}"
    )


def hccl_address(case: Case) -> Check | None:
    address = case.machine.environment.get("HCCL_IF_IP", "").partition("%")[0].lower()
    if not address or address in chain.from_iterable(case.machine.interfaces().values()):
        return None
    return failed(f"{address}: no network interface of this machine has it")
