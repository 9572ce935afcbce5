"""The network: addresses of nodes and of Ray, the host's own name, between two nodes the NPUs' own
interfaces; and HCCL's ports, against those that are taken now, those that the kernel may draw, and
those of the launcher's Ray.
"""

import ipaddress
import re
import socket
from collections.abc import Mapping
from itertools import combinations

from mindspeed_qerl.ascend.limits import npu_environment
from mindspeed_qerl.preflight.case import Case, Check, Question, failed, passed, warning
from mindspeed_qerl.preflight.machine import ProbeError

HCCN = "/etc/hccn.conf"
TOOL = "/usr/local/Ascend/driver/tools/hccn_tool"
# All other ports of a run are the kernel's draw: Ray's own, upstream's MASTER_PORT, its ZMQ
# server's.
PORTS = range(1024, 65536)
# of the launcher's Ray (examples/grpo/launch.sh)
RAY_PORT = 6380
WORKERS = range(20002, 30000)
AGENT = 52365  # Ray's dashboard agent (ray_constants.py:DEFAULT_DASHBOARD_AGENT_LISTEN_PORT)
BASE = "HCCL_IF_BASE_PORT"
RANGE = "HCCL_HOST_SOCKET_PORT_RANGE"


def fault_of_address(name: str, value: str, nodes: int) -> str:
    """Why the address of a node, `value` of variable `name`, cannot be one; "" if it can.
    Upstream's servers listen at tcp://ADDRESS, which takes no IPv6. MASTER_ADDR may be a name: only
    Ray connects to it.

    >>> fault_of_address("NODE_ADDR", "fd00::5", 2)
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
    if nodes > 1 and address.is_loopback:
        return f"{name}={value} is this machine's own: the other node needs one that both reach"
    return ""


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


def device_addresses(case: Case) -> Check:
    """The addresses of the NPUs' own interfaces, which only the host has (vllm-ascend issues 7711,
    9447 and 14506). Whether TLS is the same on both nodes is not asked.
    """
    lines = re.findall(r"^address_(\d+)=", case.machine.read(HCCN), re.MULTILINE)
    missing = [str(die) for die in case.seen.mapped if str(die) not in lines]
    if not missing:
        return passed("an address for each die")
    return warning(
        f"{HCCN} has no address of die {', '.join(missing)}: between nodes HCCL was seen to say "
        "\"'device ip' is not set correctly\", or to hand on wrong values"
    )


def links(case: Case) -> Check | None:
    """Checks whether the links of the NPUs' own interfaces are up; nothing without hccn_tool."""
    down = []
    for die in case.seen.mapped:
        try:
            words = case.machine.run([TOOL, "-i", str(die), "-link", "-g"])
        except ProbeError:
            return None
        if "status: DOWN" in words:
            down.append(str(die))
    if not down:
        return passed("hccn_tool says of no die that its link is down")
    return warning(
        f"hccn_tool says of die {', '.join(down)}: link status: DOWN; HCCL would wait for the "
        "other node (EI0006)"
    )


def hccl_ports(case: Case) -> Check | None:
    """HCCL listens on one port a rank from HCCL_IF_BASE_PORT on, by the number of its die
    (vllm-ascend pull request 12318), or somewhere in HCCL_HOST_SOCKET_PORT_RANGE, which has a row
    of its own. No two listeners of a run may have a port in common.
    """
    shell = case.machine.environment
    if given := shell.get(RANGE):
        return _fault_of_shared({RANGE: _spans(given)} | _ports_of_ray(case))
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
    if fault := _fault_of_shared({BASE: set(ours)} | _ports_of_ray(case)):
        return fault
    taken = ", ".join(str(port) for port in ours if not case.machine.may_listen(port=port))
    if taken:
        return failed(f"{words}: {taken} taken")
    drawn, kept = (
        _spans(case.machine.read(f"/proc/sys/net/ipv4/ip_local_{name}"))
        for name in ("port_range", "reserved_ports")
    )
    if set(ours) & drawn - kept:
        return warning(
            f"{words} are free, and inside net.ipv4.ip_local_port_range: any connection of this "
            "machine may draw one before HCCL listens",
            f"sysctl -w net.ipv4.ip_local_reserved_ports={base}-{ours[-1]}",
        )
    return passed(f"{words} are free")


def _ports_of_ray(case: Case) -> dict[str, set[int]]:
    """Returns of each listener of the run's Ray the ports that it may take: of the one that is
    joined, or of the launcher's.
    """
    shell = case.machine.environment
    joined = shell.get("RAY_ADDRESS", "").rpartition(":")[2]
    if joined.isdecimal() and not case.own_ray:
        return {"RAY_ADDRESS": {int(joined)}}
    given = shell.get("RAY_PORT", "")
    port = int(given) if given.isdecimal() else RAY_PORT  # the launcher refuses others
    return {
        "Ray's head and its client server (RAY_PORT)": {port, port + 1},
        "Ray's dashboard agent": {AGENT},
        "Ray's workers": set(WORKERS),
    }


def _fault_of_shared(listeners: Mapping[str, set[int]]) -> Check | None:
    """A failure if two listeners may take the same port."""
    faults = []
    for (one, ports), (other, others) in combinations(listeners.items(), 2):
        if shared := sorted(ports & others):
            words = f"{shared[0]} to {shared[-1]}" if len(shared) > 1 else f"{shared[0]}"
            faults.append(f"{words}: of {one} and of {other}")
    return failed("; ".join(faults)) if faults else None


def _spans(text: str) -> set[int]:
    """The ports of a text's spans, each a first and a last one, or of its single ones.

    >>> sorted(_spans("60000-60002,7")), sorted(_spans("8 9"))
    ([7, 60000, 60001, 60002], [8, 9])
    """
    ports = set()
    for first, last in re.findall(r"(\d+)(?:[-\s]+(\d+))?", text):
        ports |= set(range(int(first), int(last or first) + 1))
    return ports


ROWS = [
    Question(
        "ports of HCCL",
        "Are HCCL's ports legal, free and nobody else's?",
        hccl_ports,
        "ss -ltnp | grep PORT    # whose?\n"
        "unset HCCL_IF_BASE_PORT, or export HCCL_IF_BASE_PORT=..., on every node    # other "
        "ports; or RAY_PORT",
        "on_npus",
    ),
    Question(
        "host name",
        "Has the host's name an address of this machine?",
        host_name,
        "echo 127.0.0.1 $(hostname) >> /etc/hosts    # on two nodes this node's address\n"
        "or export GLOO_SOCKET_IFNAME=INTERFACE    # lo on one node",
        "on_npus",
    ),
    Question(
        "hccn.conf",
        "Has /etc/hccn.conf an address of each die?",
        device_addresses,
        "Start the container with -v /etc/hccn.conf:/etc/hccn.conf",
        "several_nodes",
    ),
    Question(
        "links of the NPUs",
        "Are the NPUs' own network ports up?",
        links,
        "hccn_tool -i DIE -link -g; hccn_tool -i DIE -optical -g    # cable and switch are a "
        "case for their owner",
        "several_nodes",
    ),
]
