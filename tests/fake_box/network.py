"""Two networks joined by a cable, a fake box in each: own addresses, interfaces and ports. Needs
`ip` and no root.

Everything is in one user namespace, which ends with its last process.
"""

import shutil
import subprocess
from contextlib import ExitStack, contextmanager

ADDRESSES = ("10.0.0.1", "10.0.0.2")
# an interface that both have and that leads nowhere, as a container engine's bridge
UNREACHABLE = "172.17.0.1"


@contextmanager
def joined():
    """For each of the two networks the words before a command that is to run in it."""
    with ExitStack() as ends:
        first = ends.enter_context(_held(["unshare", "--user", "--map-root-user", "--net"]))
        second = ends.enter_context(_held([*_enter(first)[:-1], "--", "unshare", "--net"]))
        both = _enter(first), _enter(second)
        _ip(both[0], f"link add eth0 type veth peer name eth0 netns {second}")
        for enter, address in zip(both, ADDRESSES):
            _ip(enter, f"addr add {address}/24 dev eth0")
            _ip(enter, "link add docker0 type veth peer name docker1")
            _ip(enter, f"addr add {UNREACHABLE}/16 dev docker0")
            for name in ("lo", "eth0", "docker0", "docker1"):
                _ip(enter, f"link set {name} up")
        yield both


def why_no_cable():
    """Why there can be no two networks here; "" if there can."""
    if not shutil.which("ip"):
        return "two networks need ip (iproute2)"
    try:
        with joined():
            return ""
    except (OSError, subprocess.CalledProcessError) as error:
        return f"two networks cannot be joined here: {getattr(error, 'stderr', None) or error}"


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
