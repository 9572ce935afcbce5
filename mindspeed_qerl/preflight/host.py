"""The host: CPUs, limits, disks; addresses of nodes and of Ray, the host's own name, and
HCCL's ports.
"""

import re
import socket

from mindspeed_qerl.ascend.limits import npu_environment

from .case import (
    Case,
    Check,
    enough,
    failed,
    passed,
    warning,
)

OPEN_FILES = 32768
SHARED_MEMORY = 10**10  # bytes


def cpus(case: Case) -> Check:
    have = case.machine.cpus()
    need = 5 * case.ranks
    return enough(have, 0, need, f"{have:,}, and vllm-ascend wants 5 for each rank: {need:,}")


def open_files(case: Case) -> Check:
    limit = case.machine.open_files()
    words = f"ulimit -n is {limit:,}; Ray's and HCCL's connections may need {OPEN_FILES:,}"
    return enough(limit, 0, OPEN_FILES, words)


def shared_memory(case: Case) -> Check:
    free = case.machine.disk("/dev/shm").free
    words = f"{free:,} bytes free; below {SHARED_MEMORY:,} Ray keeps its objects on the disk"
    return enough(free, 0, SHARED_MEMORY, words)


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
# of the launcher's Ray (examples/grpo/launch.sh): its head, its dashboard agent, its workers
RAY_PORTS = {6380, 6381, 52365, *range(20002, 30000)}
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
    if shared := sorted(RAY_PORTS.intersection(ours)):
        return failed(f"{words}: {shared[0]} to {shared[-1]} are those of the launcher's Ray")
    taken = ", ".join(str(port) for port in ours if not case.machine.may_listen(port=port))
    if taken:
        return failed(f"{words}: {taken} taken")
    return passed(f"{words} are free")


CHECKS = {
    "CPUs to run on": cpus,
    "open files": open_files,
    "user": user,
    "/dev/shm": shared_memory,
    "/tmp": temporary_files,
    "run.root": run_root,
    "ports of HCCL": hccl_ports,
    "host name": host_name,
}
