"""HCCL's ports, against those that are taken now, those that the kernel may draw, and those of the
launcher's Ray. All others of a run are the kernel's draw: Ray's own, upstream's MASTER_PORT, its
ZMQ server's.
"""

import re

from mindspeed_qerl.ascend.limits import npu_environment
from mindspeed_qerl.preflight.case import Case, Check, failed, passed, warning

PORTS = range(1024, 65536)
RAY_PORT, WORKERS = 6380, range(20002, 30000)  # of the launcher's Ray (examples/grpo/launch.sh)
AGENT = 52365  # Ray's dashboard agent (ray_constants.py:DEFAULT_DASHBOARD_AGENT_LISTEN_PORT)
BASE = "HCCL_IF_BASE_PORT"


def hccl(case: Case) -> Check | None:
    """HCCL listens on one port a rank from HCCL_IF_BASE_PORT on, by the number of its die
    (vllm-ascend pull request 12318), or somewhere in HCCL_HOST_SOCKET_PORT_RANGE, which has a row
    of its own.
    """
    shell = case.machine.environment
    if "HCCL_HOST_SOCKET_PORT_RANGE" in shell:
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
    shared = ""
    if case.own_ray:
        shared = ", ".join(
            str(port) for port in ours if port in _ports_of_ray(shell.get("RAY_PORT"))
        )
    if shared:
        return failed(f"{words}: {shared} are of Ray too, its head (RAY_PORT), agent or workers")
    taken = ", ".join(str(port) for port in ours if not case.machine.may_listen(port=port))
    if taken:
        return failed(f"{words}: {taken} taken")
    drawn = _ports(case, "ip_local_port_range", r"(\d+)\s+(\d+)")
    kept = _ports(case, "ip_local_reserved_ports", r"(\d+)(?:-(\d+))?")
    if set(ours) & drawn - kept:
        return warning(
            f"{words} are free, and inside net.ipv4.ip_local_port_range: any connection of this "
            "machine may draw one before HCCL listens",
            f"sysctl -w net.ipv4.ip_local_reserved_ports={base}-{ours[-1]}",
        )
    return passed(f"{words} are free")


def _ports_of_ray(given: str | None) -> set[int]:
    """The ports that the launcher's Ray is told to take, and its agent's."""
    port = int(given) if given and given.isdecimal() else RAY_PORT  # the launcher refuses others
    return {port, port + 1, AGENT, *WORKERS}


def _ports(case: Case, name: str, spans: str) -> set[int]:
    """The ports of the spans, of a first and a last one, in a file below /proc/sys/net/ipv4."""
    ports = set()
    for first, last in re.findall(spans, case.machine.read(f"/proc/sys/net/ipv4/{name}")):
        ports |= set(range(int(first), int(last or first) + 1))
    return ports
