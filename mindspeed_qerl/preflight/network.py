"""The network: the host's own name, and between two nodes the NPUs' own interfaces."""

import ipaddress
import re
import socket
from collections.abc import Iterator
from contextlib import suppress
from urllib.parse import urlsplit

from mindspeed_qerl.preflight.case import FAILED, PASSED, WARNING, Case, Check
from mindspeed_qerl.preflight.machine import Machine, ProbeError

HCCN = "/etc/hccn.conf"
TOOL = "/usr/local/Ascend/driver/tools/hccn_tool"


def fault_of_address(name: str, value: str, nodes: int) -> str:
    """Why the address of a node, `value` of variable `name`, cannot be one; "" if it can.
    MASTER_ADDR may be a name: only Ray connects to it.

    >>> fault_of_address("NODE_ADDR", "fd00::5", 2)
    "NODE_ADDR=fd00::5 must be an IPv4 address: upstream's servers listen at tcp://ADDRESS, without brackets"
    """
    if name == "MASTER_ADDR" and re.fullmatch(r"(?=.*[A-Za-z])[A-Za-z0-9][A-Za-z0-9.-]*", value):
        value = "127.0.0.1" if value == "localhost" else ""
        if not value:
            return ""
    try:
        address = ipaddress.ip_address(value)
    except ValueError:
        return (
            f"{name}={value} must be an IPv4 address, such as 10.0.0.1: no port, no spaces, no name"
        )
    if address.version != 4:
        return f"{name}={value} must be an IPv4 address: upstream's servers listen at tcp://ADDRESS, without brackets"
    if address.is_unspecified or address.is_multicast or address.is_reserved:
        return f"{name}={value} is the address of no machine"
    if nodes > 1 and address.is_loopback:
        return f"{name}={value} is this machine's own for itself: the other node needs one that both reach"
    return ""


def plain_address(text: str) -> str:
    """An address as psutil writes it, without the interface; other text as it is.

    >>> plain_address("FD00:0::5%eth0")
    'fd00::5'
    """
    with suppress(ValueError):
        return str(ipaddress.ip_address(text.partition("%")[0]))
    return text


def host_and_port(address: str) -> tuple[str, int] | None:
    """Of HOST:PORT, in which an IPv6 address has brackets; None of anything else.

    >>> host_and_port("10.0.0.1:6379"), host_and_port("[fd00::5]:6379"), host_and_port("ray://10.0.0.1:10001")
    (('10.0.0.1', 6379), ('fd00::5', 6379), None)
    """
    try:
        parts = urlsplit(f"//{address}")
        found = parts.hostname, parts.port
    except ValueError:
        return None
    plain = re.fullmatch(r"[\w.:\[\]-]+", address, re.ASCII)
    return found if all(found) and plain and parts.netloc == address else None


def fault_of_ray_address(address: str) -> str:
    """Why no run can join Ray there; "" if it is in a form in which one may."""
    if host_and_port(address):
        return ""
    client = (
        "Ray's client cannot do what upstream asks of Ray"
        if address.startswith("ray://")
        else (
            "it must be HOST:PORT of Ray's head, [IPv6]:PORT, auto, or local for a Ray of the "
            "run's own"
        )
    )
    return f"{address!r} is none that a run can join: {client}. Its head is asked by HOST:PORT, such as 10.0.0.1:6379"


def addresses(machine: Machine, case: Case) -> Iterator[Check]:
    """What the launcher of two nodes is told; it looks too."""
    if not case.on_npus or case.nodes == 1 or not case.own_ray:
        return
    for name in ("NODE_ADDR", "MASTER_ADDR"):
        value = machine.environment.get(name)
        if value and (fault := fault_of_address(name, value, case.nodes)):
            yield Check(
                name,
                FAILED,
                fault,
                f"export {name}=ADDRESS    # in the network that the nodes share",
            )


def host_name(machine: Machine, case: Case) -> Iterator[Check]:
    """Gloo binds to the address that the host's name has, unless an interface is named (verl issue
    849, vllm issue 7074); half an hour later c10d gives up.
    """
    if not case.on_npus or machine.environment.get("GLOO_SOCKET_IFNAME"):
        return
    name, here = (
        socket.gethostname(),
        {each for many in machine.interfaces().values() for each in many},
    )
    try:
        found = {line.split()[0] for line in machine.run(["getent", "ahosts", name]).splitlines()}
    except ProbeError as error:
        if "not installed" in str(error):
            return
        found = set()  # no such name
    ours = {
        each
        for each in found
        if each in here or ipaddress.ip_address(each.partition("%")[0]).is_loopback
    }
    if ours:
        yield Check("host name", PASSED, f"{name} is {', '.join(sorted(ours))}")
        return
    what = (
        f"is {', '.join(sorted(found))}, which no network interface here has"
        if found
        else "has no address"
    )
    yield Check(
        "host name",
        WARNING,
        f"{name} {what}: gloo and c10d connect to it, and wait for half an hour",
        f"echo 127.0.0.1 {name} >> /etc/hosts    # on two nodes this node's address\n"
        f"or export GLOO_SOCKET_IFNAME={'lo' if case.nodes == 1 else 'INTERFACE'}",
    )


def between_nodes(machine: Machine, case: Case) -> Iterator[Check]:
    """The addresses of the NPUs' own interfaces, which only the host has, and whether their links
    are up (vllm-ascend issues 7711, 9447 and 14506). Whether TLS is the same on both nodes is not
    asked.
    """
    if not case.on_npus or case.nodes == 1 or not case.seen.any:
        return
    addresses, dies = (
        set(re.findall(r"^address_(\d+)=", machine.read(HCCN) or "", re.MULTILINE)),
        case.seen.mapped,
    )
    if missing := [str(die) for die in dies if str(die) not in addresses]:
        yield Check(
            "hccn.conf",
            WARNING,
            f"{HCCN} has no address of die {', '.join(missing)}: between nodes HCCL "
            "was seen to say \"'device ip' is not set correctly\", or to hand on wrong values",
            f"Start the container with -v {HCCN}:{HCCN} -v {TOOL}:{TOOL}",
        )
    else:
        yield Check("hccn.conf", PASSED, f"an address for each of {len(dies)} dies")
    tool = TOOL if machine.glob(TOOL) else "hccn_tool"
    down, said = [], ""
    for die in dies:
        try:
            said = machine.run([tool, "-i", str(die), "-link", "-g"])
        except ProbeError as error:
            said = str(error)
            break
        down += [str(die)] * ("status: DOWN" in said)
    if down:
        yield Check(
            "links of the NPUs",
            WARNING,
            f"hccn_tool says of die {', '.join(down)}: "
            f"{' '.join(said.split())}; HCCL would wait for the other node (EI0006)",
            f"for n in {' '.join(down)}; do {tool} -i $n -link "
            f"-g; {tool} -i $n -optical -g; done    # cable and switch are a case for their owner",
        )
    elif "status: UP" in said:
        yield Check("links of the NPUs", PASSED, f"hccn_tool says UP of {len(dies)} dies")
