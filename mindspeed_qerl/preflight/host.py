"""The host: its user and disks; addresses of nodes and of Ray, the host's own name, HCCL's ports; and
the variables of the shell, what the engine would set otherwise and what is left from a recipe, a
Dockerfile or an earlier repair: the launchers' raylet inherits the shell, so every worker has them.
"""

import re
import socket
from collections.abc import Callable, Iterator, Mapping

from mindspeed_qerl.ascend.limits import npu_environment

from .case import LIST, Case, Check, Question, enough, failed, passed, warning


def temporary_files(case: Case) -> Check:
    """As Ray asks (src/ray/common/file_system_monitor.cc)."""
    usage = case.machine.disk("/tmp")
    left = usage.free / usage.total
    return enough(
        left,
        0.05,
        0.07,
        f"{left:.1%} of its disk are free; below 5 % Ray spills no object, and a run ends with "
        "OutOfDiskError",
    )


def user(case: Case) -> Check:
    """HCCL asks for the user's name (vllm-ascend issue 9490: error 19, and nothing else)."""
    name = case.machine.user()
    if name.isdecimal():
        return warning(
            f"the user {name} of this process has no name in /etc/passwd: HCCL was seen to end with "
            '"HcclGetRootInfo ... error code is 19"'
        )
    return passed(name)


def run_root(case: Case) -> Check | None:
    root = case.recipe.run.root
    if case.machine.writable(root):
        return None
    return failed(f"run.root = {root} cannot be written")


# ---- the network ----


PORTS = range(1024, 65536)
BASE = "HCCL_IF_BASE_PORT"


def fault_of_ray_address(address: str) -> str:
    """Why no run can join Ray there; "" if it is in a form in which one may: HOST:PORT, in which an
    IPv6 address has brackets.

    >>> [bool(fault_of_ray_address(a)) for a in ("10.0.0.1:6379", "[fd00::5]:6379", "ray://x:1")]
    [False, False, True]
    """
    if re.fullmatch(r"([\w.-]+|\[[\w.:]+\]):\d{1,5}", address, re.ASCII):
        return ""
    return (
        f"{address!r} is none that a run can join: it must be HOST:PORT of Ray's head, such as "
        "10.0.0.1:6379 or [fd00::5]:6379, auto, or local for a Ray of the run's own. Ray's client "
        "cannot do what upstream asks of Ray"
    )


def host_name(case: Case) -> Check | None:
    """Gloo binds to the address that the host's name has, unless an interface is named (verl issue
    849, vllm issue 7074); half an hour later c10d gives up.
    """
    name = socket.gethostname()
    if case.machine.environment.get("GLOO_SOCKET_IFNAME") or case.machine.may_listen(name):
        return None
    return warning(
        f"{name} is the name of no address that a network interface here has: gloo and c10d "
        "connect to it, and wait for half an hour"
    )


def hccl_ports(case: Case) -> Check | None:
    """HCCL listens on one port a rank from HCCL_IF_BASE_PORT on, by the number of its die
    (vllm-ascend pull request 12318), unless HCCL_HOST_SOCKET_PORT_RANGE, which has a row of its
    own, says otherwise.
    """
    shell = case.machine.environment
    if shell.get("HCCL_HOST_SOCKET_PORT_RANGE"):
        return None
    given = shell.get(BASE) or npu_environment()[BASE]
    base = int(given) if given.isdecimal() else 0
    dies = {*range(case.ranks), *case.seen.mapped[: case.ranks]}
    ours = sorted(base + die for die in dies)
    if ours[0] not in PORTS or ours[-1] not in PORTS:
        return failed(
            f"{BASE}={given}: it and the ports behind it, one a rank, must be numbers from "
            f"{PORTS[0]} to {PORTS[-1]}"
        )
    words = f"{base} to {ours[-1]}"
    of_ray = ports_of_ray(shell)
    if shared := [str(port) for port in ours if port in of_ray]:
        return failed(f"{words}: {', '.join(shared)} of Ray")
    if taken := [str(port) for port in ours if not case.machine.may_listen(port=port)]:
        return failed(f"{words}: {', '.join(taken)} taken")
    return passed(f"{words} are free")


def ports_of_ray(shell: Mapping[str, str]) -> set[int]:
    """Returns the ports that the run's Ray listens at: the one that is joined, or the launcher's
    (examples/grpo/grpo_trainer.sh) with its client server, dashboard agent and workers.
    """
    joined = shell.get("RAY_ADDRESS", "").rpartition(":")[2]
    if joined.isdecimal():
        return {int(joined)}
    given = shell.get("RAY_PORT", "")
    head = int(given) if given.isdecimal() else 6380  # the launcher refuses others
    return {head, head + 1, 52365, *range(20002, 30000)}


# ---- variables of the shell ----


FAMILIES = tuple("HCCL_ ASCEND_ ATB_LLM_ LCCL_ OMP_ PYTORCH_ TORCH_ VLLM_".split())
# Of these families: set by CANN's and NNAL's set_env.sh, or by the launchers.
KNOWN = """ASCEND_AICPU_PATH ASCEND_HOME_PATH ASCEND_OPP_PATH ASCEND_TOOLKIT_HOME ASCEND_ROOT
HCCL_IF_IP HCCL_SOCKET_IFNAME""".split()


def harmful(
    name: str, answer: Callable[[str], Check], pattern: str, why: str, needs: str = ""
) -> Question:
    """The check of a variable whose whole value does harm if it matches `pattern`."""

    def verdict(case: Case) -> Check | None:
        given = case.machine.environment.get(name)
        if given is None or not re.fullmatch(pattern, given.strip()):
            return None
        return answer(f"{given!r} in the shell: {why}")

    return Question(name, verdict, f"unset {name}", needs)


HARMFUL = [
    harmful(
        "VLLM_ASCEND_ENABLE_NZ",
        failed,
        r"(?!0$).*",
        "upstream trains with 0, and later vllm-ascend refuses FRACTAL_NZ in RL",
    ),
    harmful(
        "VLLM_USE_V1", failed, r"(?!1$).*", "upstream's workers are written for vLLM's V1 engine"
    ),
    harmful(
        "VLLM_VERSION", failed, r"(?!0.11.0$).*", "vllm-ascend would take the code for another vLLM"
    ),
    harmful(
        "RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES",
        failed,
        r"",
        "Ray would hide all but one die from a worker, and set_device(Ray's number) fails",
    ),
    harmful(
        "PYTORCH_NPU_ALLOC_CONF",
        failed,
        r"(?=.*expandable_segments\s*:\s*True)(?=.*(max_split_size_mb|garbage_collection_threshold)).*",
        "torch_npu does not take them together",
    ),
    harmful(
        "OMP_PROC_BIND",
        failed,
        r"(?i)(true|close|spread|master|primary).*",
        "OpenMP binds a worker, and all that it starts, to one core as soon as torch is imported",
    ),
    harmful(
        "VLLM_PLUGINS",
        failed,
        r"(?!(.*,)?\s*ascend\s*(,|$)).*",
        'vLLM loads no other plugins, not vllm-ascend\'s platform: "Failed to infer device type"',
    ),
    harmful(
        "RANK_TABLE_FILE",
        failed,
        r".+",
        "HCCL would take ranks and addresses from it, not from this run",
    ),
    harmful(
        "HCCL_OP_EXPANSION_MODE",
        failed,
        r"(?i)AIV.*",
        "the dispatch of experts waits for the vector cores, which HCCL takes: vLLM hung (107020)",
        needs="mixture",
    ),
    harmful(
        "HCCL_HOST_SOCKET_PORT_RANGE",
        warning,
        r".+",
        "HCCL listens there, and not from HCCL_IF_BASE_PORT on; of a guide for several runs on a "
        "die",
    ),
    harmful(
        "HCCL_INTRA_ROCE_ENABLE",
        warning,
        r"(?i)1|true",
        "traffic inside this machine leaves HCCS for the NPUs' network ports",
    ),
    harmful(
        "HCCL_INTRA_PCIE_ENABLE",
        warning,
        r"(?i)1|true",
        "traffic inside this machine leaves HCCS for PCIe",
    ),
    harmful(
        "HCCL_INTER_HCCS_DISABLE",
        warning,
        r"(?i)1|true",
        "traffic leaves HCCS for the NPUs' network ports",
    ),
    harmful(
        "RAY_grpc_enable_http_proxy",
        warning,
        r"(?i)1|true",
        "Ray's processes look for each other through http_proxy",
    ),
]


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


CHECKS = [
    Question(
        "user",
        user,
        'echo "qerl:x:$(id -u):$(id -g)::$HOME:/bin/bash" >> /etc/passwd    # in the image, or as '
        "root",
    ),
    Question(
        "/tmp",
        temporary_files,
        "du -xh -d 2 /tmp | sort -h | tail    # what fills it? Or another disk for it: -v DIR:/tmp",
    ),
    Question("run.root", run_root, "run.root=DIR    # an override of the config"),
    Question(
        "ports of HCCL",
        hccl_ports,
        "ss -ltnp | grep PORT    # whose?\n"
        "unset HCCL_IF_BASE_PORT, or export HCCL_IF_BASE_PORT=..., on every node    # others",
    ),
    Question(
        "host name",
        host_name,
        "echo 127.0.0.1 $(hostname) >> /etc/hosts    # on several nodes this node's address\n"
        "or export GLOO_SOCKET_IFNAME=INTERFACE    # lo on one node",
    ),
]
VARIABLES = [
    Question("variables", of_engine, "unset NAME"),
    *HARMFUL,
    Question("network interfaces", network),
]
