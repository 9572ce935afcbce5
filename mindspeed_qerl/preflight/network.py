"""The network: the host's own name, and between two nodes the NPUs' own interfaces."""

import ipaddress
import re
import socket
from urllib.parse import urlsplit

from mindspeed_qerl.preflight.case import Case, Check, failed, passed, warning
from mindspeed_qerl.preflight.machine import Machine, ProbeError

HCCN = "/etc/hccn.conf"
TOOL = "/usr/local/Ascend/driver/tools/hccn_tool"


def fault_of_address(name: str, value: str, nodes: int) -> str:
    """Why the address of a node, `value` of variable `name`, cannot be one; "" if it can.
    MASTER_ADDR may be a name: only Ray connects to it.

    >>> fault_of_address("NODE_ADDR", "fd00::5", 2)
    "NODE_ADDR=fd00::5 must be an IPv4 address: upstream's servers listen at tcp://ADDRESS"
    """
    host = re.fullmatch(r"(?=.*[A-Za-z])[A-Za-z0-9][A-Za-z0-9.-]*", value)
    if name == "MASTER_ADDR" and host:
        if value != "localhost":
            return ""
        value = "127.0.0.1"
    try:
        address = ipaddress.ip_address(value)
    except ValueError:
        return (
            f"{name}={value} must be an IPv4 address, such as 10.0.0.1: no port, no spaces, no name"
        )
    if address.version != 4:
        return f"{name}={value} must be an IPv4 address: upstream's servers listen at tcp://ADDRESS"
    if address.is_unspecified or address.is_multicast or address.is_reserved:
        return f"{name}={value} is the address of no machine"
    if nodes > 1 and address.is_loopback:
        return f"{name}={value} is this machine's own: the other node needs one that both reach"
    return ""


def host_and_port(address: str) -> tuple[str, int] | None:
    """Of HOST:PORT, in which an IPv6 address has brackets; None of anything else.

    >>> [host_and_port(a) for a in ("10.0.0.1:6379", "[fd00::5]:6379", "ray://10.0.0.1:10001")]
    [('10.0.0.1', 6379), ('fd00::5', 6379), None]
    """
    try:
        parts = urlsplit(f"//{address}")
        host, port = parts.hostname, parts.port
    except ValueError:
        return None
    if host and port and re.fullmatch(r"[\w.:\[\]-]+", address, re.ASCII):
        return host, port
    return None


def fault_of_ray_address(address: str) -> str:
    """Why no run can join Ray there; "" if it is in a form in which one may."""
    if host_and_port(address):
        return ""
    return (
        f"{address!r} is none that a run can join: it must be HOST:PORT of Ray's head, such as "
        "10.0.0.1:6379 or [fd00::5]:6379, auto, or local for a Ray of the run's own. Ray's client "
        "cannot do what upstream asks of Ray"
    )


def address(machine: Machine, case: Case, name: str) -> Check | None:
    """What the launcher of two nodes is told; it looks too."""
    return address_fault(case, name, machine.environment.get(name))


def address_fault(case: Case, name: str, value: str | None) -> Check | None:
    fault = value and fault_of_address(name, value, case.nodes)
    if fault:
        return failed(fault)
    return None


def host_name(machine: Machine, case: Case) -> Check | None:
    """Gloo binds to the address that the host's name has, unless an interface is named (verl issue
    849, vllm issue 7074); half an hour later c10d gives up.
    """
    if machine.environment.get("GLOO_SOCKET_IFNAME"):
        return None
    name, has = socket.gethostname(), set()
    try:
        lines = machine.run(["getent", "ahosts", name]).splitlines()
        has = {line.split()[0] for line in lines}
    except ProbeError as error:
        if error.reason == "missing":
            return None
    here = {each for addresses in machine.interfaces().values() for each in addresses}
    local = {each for each in has if ipaddress.ip_address(each.partition("%")[0]).is_loopback}
    ours = has & here | local
    if ours:
        return passed(f"{name} is {', '.join(sorted(ours))}")
    what = "has no address"
    if has:
        what = f"is {', '.join(sorted(has))}, which no network interface here has"
    return warning(
        f"{name} {what}: gloo and c10d connect to it, and wait for half an hour",
        f"echo 127.0.0.1 {name} >> /etc/hosts    # on two nodes this node's address\nor export "
        "GLOO_SOCKET_IFNAME=INTERFACE    # lo on one node",
    )


def device_addresses(machine: Machine, case: Case) -> Check:
    """The addresses of the NPUs' own interfaces, which only the host has (vllm-ascend issues 7711,
    9447 and 14506). Whether TLS is the same on both nodes is not asked.
    """
    lines = re.findall(r"^address_(\d+)=", machine.read(HCCN) or "", re.MULTILINE)
    missing = [str(die) for die in case.seen.mapped if str(die) not in lines]
    if not missing:
        return passed(f"an address for each of {case.seen.davinci} dies")
    return warning(
        f"{HCCN} has no address of die {', '.join(missing)}: between nodes HCCL was seen to say "
        "\"'device ip' is not set correctly\", or to hand on wrong values"
    )


def links(machine: Machine, case: Case) -> Check | None:
    """Whether the links of the NPUs' own interfaces are up; nothing without hccn_tool."""
    tool = TOOL if machine.glob(TOOL) else "hccn_tool"
    down, words = [], ""
    for die in case.seen.mapped:
        try:
            words = machine.run([tool, "-i", str(die), "-link", "-g"])
        except ProbeError:
            return None
        if "status: DOWN" in words:
            down.append(str(die))
    if down:
        return warning(
            f"hccn_tool says of die {', '.join(down)}: link status: DOWN; HCCL would wait for the "
            "other node (EI0006)",
        )
    return passed(f"hccn_tool says nothing else of {case.seen.davinci} dies")
