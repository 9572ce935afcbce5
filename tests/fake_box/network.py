"""Networks joined by a switch, a fake box in each: own addresses, interfaces and ports. Needs `ip`
and no root.

Everything is in one user namespace, which ends with its last process.
"""

import shutil
import subprocess
from contextlib import ExitStack, contextmanager

ADDRESSES = [f"10.0.0.{number}" for number in range(1, 5)]
# an interface that all have and that leads nowhere, as a container engine's bridge
UNREACHABLE = "172.17.0.1"


@contextmanager
def joined(count):
    """For each of `count` networks the words before a command that is to run in it."""
    with ExitStack() as ends:
        switch = ends.enter_context(_held(["unshare", "--user", "--map-root-user", "--net"]))
        inside = _enter(switch)
        _ip(inside, "link add switch type bridge")
        _ip(inside, "link set switch up")
        networks = []
        for number, address in enumerate(ADDRESSES[:count]):
            enter = _enter(ends.enter_context(_held([*inside[:-1], "--", "unshare", "--net"])))
            _ip(enter, f"link add eth0 type veth peer name node{number} netns {switch}")
            _ip(inside, f"link set node{number} master switch up")
            _ip(enter, f"addr add {address}/24 dev eth0")
            _ip(enter, "link add docker0 type veth peer name docker1")
            _ip(enter, f"addr add {UNREACHABLE}/16 dev docker0")
            for name in ("lo", "eth0", "docker0", "docker1"):
                _ip(enter, f"link set {name} up")
            networks.append(enter)
        yield networks


def why_no_cable():
    """Why there can be no two networks here; "" if there can."""
    if not shutil.which("ip"):
        return "several networks need ip (iproute2)"
    try:
        with joined(2):
            return ""
    except (OSError, subprocess.CalledProcessError) as error:
        return f"networks cannot be joined here: {getattr(error, 'stderr', None) or error}"


@contextmanager
def _held(new):
    """A process in the namespaces that the words `new` make, which keeps them."""
    process = subprocess.Popen(
        [*new, "sh", "-c", "echo; exec sleep infinity"], stdout=subprocess.PIPE
    )
    try:
        process.stdout.readline()  # it is in them
        yield process.pid
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def _enter(process):
    return ["nsenter", "--user", "--preserve-credentials", "--target", str(process), "--net"]


def _ip(enter, words):
    subprocess.run([*enter, "ip", *words.split()], check=True, capture_output=True, text=True)
