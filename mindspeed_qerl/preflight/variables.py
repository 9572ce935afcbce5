"""Variables of the shell: what the engine would set otherwise, and what is left from a recipe, a
Dockerfile or an earlier repair. The launchers' raylet inherits the shell, so every worker has them.
"""

import re
from collections.abc import Iterator
from functools import partial
from itertools import chain

from mindspeed_qerl.ascend.limits import npu_environment

from .case import (
    FAILED,
    LIST,
    WARNING,
    Case,
    Check,
    Question,
    failed,
    passed,
    warning,
)

FAMILIES = ("HCCL_", "ASCEND_", "ATB_LLM_", "LCCL_", "OMP_", "PYTORCH_", "TORCH_", "VLLM_")
# Of these families: set by CANN's and NNAL's set_env.sh, or by the launchers.
KNOWN = """ASCEND_AICPU_PATH ASCEND_HOME_PATH ASCEND_OPP_PATH ASCEND_TOOLKIT_HOME ASCEND_ROOT
HCCL_IF_IP HCCL_SOCKET_IFNAME""".split()


def value(case: Case, variable: str, pattern: str, why: str, state: str) -> Check | None:
    """A variable whose value does harm, by a regular expression."""
    given = case.machine.environment.get(variable)
    if given is None or not re.fullmatch(pattern, given.strip()):
        return None
    return Check(state, f"{given!r} in the shell: {why}")


def harmful(state: str, name: str, pattern: str, why: str, needs: str = "") -> Question:
    """Asks for a variable of which the shell should have no such value."""
    verdict = partial(value, variable=name, pattern=pattern, why=why, state=state)
    return Question(name, verdict, f"unset {name}", needs)


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
    if address and address not in chain.from_iterable(there.values()):
        words = f"{address}: no network interface of this machine has it"
        yield failed(words, "unset HCCL_IF_IP", "HCCL_IF_IP")


LIBRARIES = [
    Question(
        "NNAL's libraries",
        partial(
            value,
            variable="LD_LIBRARY_PATH",
            pattern=".*cxx_abi_0.*cxx_abi_1.*|.*cxx_abi_1.*cxx_abi_0.*",
            why="cxx_abi_0 and cxx_abi_1: set_env.sh was sourced twice, once with another torch or "
            'none; with the wrong one libatb.so has "undefined symbol"',
            state=WARNING,
        ),
        "In a new shell, where python3 has torch: source /usr/local/Ascend/nnal/atb/set_env.sh",
        "npus_here",
    ),
]

# Variables: the values that do harm, as a regular expression; why; and what the check needs.
FATAL = {
    "VLLM_ASCEND_ENABLE_NZ": (
        "(?!0$).*",
        "upstream trains with 0, and later vllm-ascend refuses FRACTAL_NZ in RL",
    ),
    "VLLM_USE_V1": ("(?!1$).*", "upstream's workers are written for vLLM's V1 engine"),
    "VLLM_VERSION": ("(?!0.11.0$).*", "vllm-ascend would take the code for another vLLM"),
    "RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES": (
        "",
        "Ray would hide all but one die from a worker, and set_device(Ray's number) fails",
    ),
    "PYTORCH_NPU_ALLOC_CONF": (
        r"(?=.*expandable_segments\s*:\s*True)(?=.*(max_split_size_mb|garbage_collection_threshold)).*",
        "torch_npu does not take them together",
    ),
    "OMP_PROC_BIND": (
        "(?i)(true|close|spread|master|primary).*",
        "OpenMP binds a worker, and all that it starts, to one core as soon as torch is imported",
    ),
    "VLLM_PLUGINS": (
        r"(?!(.*,)?\s*ascend\s*(,|$)).*",
        'vLLM loads no other plugins, not vllm-ascend\'s platform: "Failed to infer device type"',
    ),
    "RANK_TABLE_FILE": (".+", "HCCL would take ranks and addresses from it, not from this run"),
    "HCCL_OP_EXPANSION_MODE": (
        "(?i)AIV.*",
        "the dispatch of experts waits for the vector cores, which HCCL takes: vLLM hung (107020)",
        "mixture",
    ),
}
DOUBTFUL = {
    "ASCEND_LAUNCH_BLOCKING": (
        "(?!0$).+",
        "every kernel is waited for, for debugging only",
    ),
    "HCCL_HOST_SOCKET_PORT_RANGE": (
        ".+",
        "HCCL listens there, and not from HCCL_IF_BASE_PORT on; of a guide for several runs on a die",
    ),
    "HCCL_NPU_SOCKET_PORT_RANGE": (
        ".+",
        "ports of the NPUs' own interfaces, of a guide for several nodes",
    ),
    "HCCL_INTRA_ROCE_ENABLE": (
        "(?i)1|true",
        "traffic inside this machine leaves HCCS for the NPUs' network ports",
    ),
    "HCCL_INTRA_PCIE_ENABLE": (
        "(?i)1|true",
        "traffic inside this machine leaves HCCS for PCIe",
    ),
    "HCCL_INTER_HCCS_DISABLE": (
        "(?i)1|true",
        "traffic leaves HCCS for the NPUs' network ports",
    ),
    "TORCH_DEVICE_BACKEND_AUTOLOAD": (
        "0",
        "torch has no torch.npu until torch_npu is imported by name",
    ),
    "RAY_grpc_enable_http_proxy": (
        "(?i)1|true",
        "Ray's processes look for each other through http_proxy",
    ),
}

ROWS = [
    Question("variables", of_engine, "unset NAME"),
    *[harmful(FAILED, name, *about) for name, about in FATAL.items()],
    *[harmful(WARNING, name, *about) for name, about in DOUBTFUL.items()],
    Question("network interfaces", network),
]
