"""The network: the host's own name, and between two nodes the NPUs' own interfaces."""

import ipaddress
import re
import socket
from collections.abc import Iterator

from mindspeed_qerl.preflight.case import PASSED, WARNING, Case, Check
from mindspeed_qerl.preflight.machine import Machine, ProbeError

HCCN = "/etc/hccn.conf"
TOOL = "/usr/local/Ascend/driver/tools/hccn_tool"


def host_name(machine: Machine, case: Case) -> Iterator[Check]:
    """Gloo binds to the address that the host's name has, unless an interface is named (verl issue 849, vllm issue
    7074); half an hour later c10d gives up."""
    if not case.on_npus or machine.environment.get("GLOO_SOCKET_IFNAME"):
        return
    name, here = socket.gethostname(), {each for many in machine.interfaces().values() for each in many}
    try:
        found = {line.split()[0] for line in machine.run(["getent", "ahosts", name]).splitlines()}
    except ProbeError as error:
        if "not installed" in str(error):
            return
        found = set()  # no such name
    ours = {each for each in found if each in here or ipaddress.ip_address(each.partition("%")[0]).is_loopback}
    if ours:
        yield Check("host name", PASSED, f"{name} is {', '.join(sorted(ours))}")
        return
    what = f"is {', '.join(sorted(found))}, which no network interface here has" if found else "has no address"
    yield Check("host name", WARNING, f"{name} {what}: gloo and c10d connect to it, and wait for half an hour",
                f"echo 127.0.0.1 {name} >> /etc/hosts    # on two nodes this node's address\n"
                f"or export GLOO_SOCKET_IFNAME={'lo' if case.nodes == 1 else 'INTERFACE'}")


def between_nodes(machine: Machine, case: Case) -> Iterator[Check]:
    """The addresses of the NPUs' own interfaces, which only the host has, and whether their links are up (vllm-ascend
    issues 7711, 9447 and 14506). Whether TLS is the same on both nodes is not asked."""
    if not case.on_npus or case.nodes == 1 or not case.seen.any:
        return
    addresses, dies = set(re.findall(r"^address_(\d+)=", machine.read(HCCN) or "", re.MULTILINE)), case.seen.mapped
    if missing := [str(die) for die in dies if str(die) not in addresses]:
        yield Check("hccn.conf", WARNING, f"{HCCN} has no address of die {', '.join(missing)}: between nodes HCCL "
                    "was seen to say \"'device ip' is not set correctly\", or to hand on wrong values",
                    f"Start the container with -v {HCCN}:{HCCN} -v {TOOL}:{TOOL}")
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
        yield Check("links of the NPUs", WARNING, f"hccn_tool says of die {', '.join(down)}: "
                    f"{' '.join(said.split())}; HCCL would wait for the other node (EI0006)",
                    f"for n in {' '.join(down)}; do {tool} -i $n -link "
                    f"-g; {tool} -i $n -optical -g; done    # cable and switch are a case for their owner")
    elif "status: UP" in said:
        yield Check("links of the NPUs", PASSED, f"hccn_tool says UP of {len(dies)} dies")
