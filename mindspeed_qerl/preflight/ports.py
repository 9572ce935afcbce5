"""HCCL's ports, against those that are taken now, those that the kernel may draw, and those of the
launcher's Ray. All others of a run are the kernel's draw: Ray's own, upstream's MASTER_PORT, its
ZMQ server's.
"""

import re

from mindspeed_qerl.ascend.limits import npu_environment
from mindspeed_qerl.preflight.case import Case, Check, failed, passed, warning
from mindspeed_qerl.preflight.machine import Machine

PORTS = range(1024, 65536)
RAY_PORT, WORKERS = 6380, range(20002, 30000)  # of the launcher's Ray (examples/grpo/launch.sh)
AGENT = 52365  # Ray's dashboard agent (ray_constants.py:DEFAULT_DASHBOARD_AGENT_LISTEN_PORT)
BASE, RANGE = "HCCL_IF_BASE_PORT", "HCCL_HOST_SOCKET_PORT_RANGE"


def hccl(machine: Machine, case: Case) -> Check:
    """HCCL listens on one port a rank from HCCL_IF_BASE_PORT on, by the number of its die
    (vllm-ascend pull request 12318), or somewhere in HCCL_HOST_SOCKET_PORT_RANGE.
    """
    if machine.environment.get(RANGE):
        return _of_range(machine, case)
    dies = _dies(case)
    given = machine.environment.get(BASE) or npu_environment()[BASE]
    base, last = int(given) if given.isdecimal() else 0, PORTS[-1] - dies[-1]
    if not PORTS[0] <= base <= last:
        return failed(
            f"{BASE}={given} must be a whole number from {PORTS[0]} to {last}: each of the "
            f"{case.ranks} ranks has the next port",
            f"unset {BASE}",
        )
    ours = [base + die for die in dies]
    words = f"{base} to {ours[-1]}"
    shared = _shared(machine, ours) if case.own_ray else []
    if shared:
        return failed(f"{words}: {'; '.join(shared)}")
    taken = [str(port) for port in ours if not machine.port_free(port)]
    if taken:
        return failed(
            f"{words}: {', '.join(taken)} taken",
            f"ss -ltnp '( sport >= :{base} and sport <= :{ours[-1]} )'    # whose?\n"
            f"or export {BASE}=..., on every node",
        )
    drawn = _ports(machine, "ip_local_port_range", r"(\d+)\s+(\d+)")
    kept = _ports(machine, "ip_local_reserved_ports", r"(\d+)(?:-(\d+))?")
    if set(ours) & drawn - kept:
        return warning(
            f"{words} are free, and inside net.ipv4.ip_local_port_range = {min(drawn)}-"
            f"{max(drawn)}: any connection of this machine may draw one before HCCL listens",
            f"sysctl -w net.ipv4.ip_local_reserved_ports={base}-{ours[-1]}",
        )
    return passed(f"{words} are free")


def _of_range(machine: Machine, case: Case) -> Check:
    given = machine.environment[RANGE].replace(" ", "")
    ours = sorted(_spans(r"(\d+)(?:-(\d+))?", given))
    if given == "auto":
        return passed(f"{RANGE}=auto: HCCL takes free ones")
    if len(ours) < case.ranks or ours[0] < PORTS[0] or ours[-1] > PORTS[-1]:
        return failed(
            f"{RANGE}={given} must be auto, or at least {case.ranks} ports from {PORTS[0]} to "
            f"{PORTS[-1]}, such as 60000-60050",
            f"unset {RANGE}",
        )
    shared = _shared(machine, ours) if case.own_ray else []
    if shared:
        return failed(f"{given}: {'; '.join(shared)}")
    free = sum(machine.port_free(port) for port in ours)
    if free < case.ranks:
        return failed(f"{RANGE}={given}: {free} of them are free, for {case.ranks} ranks")
    return passed(f"{RANGE}={given}")


def _dies(case: Case) -> list[int]:
    """The numbers that a rank's port may go by: its own, its die's in /dev and in npu-smi."""
    taken = [die.number for die in case.seen.taken(case.ranks)]
    return sorted({*range(case.ranks), *case.seen.mapped[: case.ranks], *taken})


def _shared(machine: Machine, ours: list[int]) -> list[str]:
    """The ports that the launcher's Ray is told to take, too."""
    given = machine.environment.get("RAY_PORT", "")
    port = int(given) if given.isdecimal() else RAY_PORT  # the launcher refuses others
    owners = {
        f"Ray's head (RAY_PORT={port})": [port],
        "Ray's client server (RAY_PORT + 1)": [port + 1],
        "Ray's workers": WORKERS,
        "Ray's dashboard agent": [AGENT],
    }
    shared = []
    for owner, theirs in owners.items():
        common = [str(port) for port in ours if port in theirs]
        if common:
            shared.append(f"{' to '.join(sorted({common[0], common[-1]}))}: {owner} too")
    return shared


def _ports(machine: Machine, name: str, spans: str) -> set[int]:
    """The ports of a file below /proc/sys/net/ipv4."""
    return _spans(spans, machine.read(f"/proc/sys/net/ipv4/{name}") or "")


def _spans(pattern: str, text: str) -> set[int]:
    """The ports of first and last numbers in a text."""
    ports = set()
    for first, last in re.findall(pattern, text):
        ports |= set(range(int(first), int(last or first) + 1))
    return ports
