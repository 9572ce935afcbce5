"""Variables of the shell: what the engine would set otherwise, and what is left from a recipe, a
Dockerfile or an earlier repair. The launchers' raylet inherits the shell, so every worker has them.
"""

import re
from functools import partial
from itertools import chain

from mindspeed_qerl.ascend.limits import npu_environment
from mindspeed_qerl.preflight.case import (
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


def value(
    case: Case,
    variable: str,
    pattern: str,
    why: str,
    state: str = WARNING,
    experts: str | None = None,
    unset: str | None = None,
) -> Check | None:
    """A variable whose value does harm, by a regular expression; `unset` is its value where it has
    none. `experts` is the state for a mixture of experts.
    """
    given = case.machine.environment.get(variable, unset)
    if given is None or not re.fullmatch(pattern, given.strip()):
        return None
    if experts and case.recipe.model.arguments.get("num_experts"):
        state = experts
    return Check(state, f"{given!r} in the shell: {why}")


def harmful(
    name: str, pattern: str, why: str, state: str = WARNING, experts: str | None = None
) -> Question:
    """Asks for a variable of which the shell should have no such value (`value`)."""
    verdict = partial(value, variable=name, pattern=pattern, why=why, state=state, experts=experts)
    return Question(name, f"A value that does harm: {why}", verdict, f"unset {name}", "on_npus")


def of_engine(case: Case) -> Check:
    """Returns what the engine sets where the shell does not (engine.train), and what else the shell
    has of these families.
    """
    shell = case.machine.environment
    ours = npu_environment()
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
    value = case.machine.environment.get(name)
    there = case.machine.interfaces()
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


PRELOADED = [
    Question(
        "jemalloc",
        "Is jemalloc preloaded?",
        partial(
            value,
            variable="LD_PRELOAD",
            unset="",
            pattern="(?!.*jemalloc).*",
            state=WARNING,
            why="no jemalloc; the workers' host memory fragments without it",
        ),
        "apt install libjemalloc2 && export LD_PRELOAD=$(ls /usr/lib/*/libjemalloc.so.2)",
        "on_npus",
    ),
    Question(
        "NNAL's libraries",
        "Are they for one C++ ABI?",
        partial(
            value,
            variable="LD_LIBRARY_PATH",
            pattern=".*cxx_abi_0.*cxx_abi_1.*|.*cxx_abi_1.*cxx_abi_0.*",
            state=WARNING,
            why="cxx_abi_0 and cxx_abi_1: set_env.sh was sourced twice, once with another torch or "
            'none; with the wrong one libatb.so has "undefined symbol"',
        ),
        "In a new shell, where python3 has torch: source /usr/local/Ascend/nnal/atb/set_env.sh",
        "npus_here",
    ),
]

ROWS = [
    Question(
        "variables",
        "Has the shell other values than the engine would set, and which others of HCCL, "
        "CANN, vLLM and torch?",
        of_engine,
        "unset NAME",
        "upstream",
    ),
    harmful(
        "VLLM_ASCEND_ENABLE_NZ",
        "(?!0$).*",
        "upstream trains with 0, and later vllm-ascend refuses FRACTAL_NZ in RL",
        FAILED,
    ),
    harmful(
        "VLLM_USE_V1", "(?!1$).*", "upstream's workers are written for vLLM's V1 engine", FAILED
    ),
    harmful(
        "VLLM_VERSION", "(?!0.11.0$).*", "vllm-ascend would take the code for another vLLM", FAILED
    ),
    harmful(
        "RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES",
        "",
        "Ray would hide all but one die from a worker, and set_device(Ray's number) fails",
        FAILED,
    ),
    harmful(
        "PYTORCH_NPU_ALLOC_CONF",
        r"(?=.*expandable_segments\s*:\s*True)(?=.*(max_split_size_mb|garbage_collection_threshold)).*",
        "torch_npu does not take them together",
        FAILED,
    ),
    harmful(
        "HCCL_OP_EXPANSION_MODE",
        "(?i)AIV.*",
        "HCCL takes the vector cores, which the dispatch of experts waits for: vLLM was seen "
        "to hang in its profile run (107020)",
        experts=FAILED,
    ),
    harmful(
        "OMP_PROC_BIND",
        "(?i)(true|close|spread|master|primary).*",
        "OpenMP binds a worker, and all that it starts, to one core as soon as torch is imported",
        FAILED,
    ),
    harmful(
        "VLLM_PLUGINS",
        r"(?!(.*,)?\s*ascend\s*(,|$)).*",
        'vLLM loads no other plugins, not vllm-ascend\'s platform: "Failed to infer device type"',
        FAILED,
    ),
    harmful(
        "RANK_TABLE_FILE",
        ".+",
        "HCCL would take ranks and addresses from it, not from this run",
        FAILED,
    ),
    harmful("VLLM_DP_SIZE", ".+", "it is not used, the engine takes it from the config"),
    harmful("HCCL_BUFFSIZE", ".+", "it is not used, the engine takes it from the config"),
    harmful("ASCEND_LAUNCH_BLOCKING", "(?!0$).+", "every kernel is waited for, for debugging only"),
    harmful(
        "HCCL_HOST_SOCKET_PORT_RANGE",
        ".+",
        "HCCL listens there, and not from HCCL_IF_BASE_PORT on; of a guide for several runs "
        "on a die",
    ),
    harmful(
        "HCCL_NPU_SOCKET_PORT_RANGE",
        ".+",
        "ports of the NPUs' own interfaces, of a guide for several nodes",
    ),
    harmful(
        "HCCL_INTRA_ROCE_ENABLE",
        "(?i)1|true",
        "traffic inside this machine leaves HCCS for the NPUs' network ports",
    ),
    harmful(
        "HCCL_INTRA_PCIE_ENABLE", "(?i)1|true", "traffic inside this machine leaves HCCS for PCIe"
    ),
    harmful(
        "HCCL_INTER_HCCS_DISABLE", "(?i)1|true", "traffic leaves HCCS for the NPUs' network ports"
    ),
    harmful(
        "TORCH_DEVICE_BACKEND_AUTOLOAD",
        "0",
        "torch has no torch.npu until torch_npu is imported by name",
    ),
    harmful(
        "RAY_grpc_enable_http_proxy",
        "(?i)1|true",
        "Ray's processes look for each other through http_proxy",
    ),
    Question(
        "HCCL_SOCKET_IFNAME",
        "Is it an interface of this machine?",
        partial(interface, name="HCCL_SOCKET_IFNAME"),
        "unset HCCL_SOCKET_IFNAME",
        "on_npus",
    ),
    Question(
        "GLOO_SOCKET_IFNAME",
        "Is it an interface of this machine?",
        partial(interface, name="GLOO_SOCKET_IFNAME"),
        "unset GLOO_SOCKET_IFNAME",
        "on_npus",
    ),
    Question(
        "TP_SOCKET_IFNAME",
        "Is it an interface of this machine?",
        partial(interface, name="TP_SOCKET_IFNAME"),
        "unset TP_SOCKET_IFNAME",
        "on_npus",
    ),
    Question(
        "HCCL_IF_IP",
        "Is it an address of this machine?",
        hccl_address,
        "unset HCCL_IF_IP",
        "on_npus",
    ),
]
