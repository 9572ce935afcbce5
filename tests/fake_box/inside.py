"""The first process of a fake box: makes its mounts, runs its command, reaps what the command
leaves, ends with it.

    unshare ... python inside.py PLAN.json

Standard library only; tests/fake_box/__init__.py writes the plan.
"""

import ctypes
import fcntl
import json
import os
import signal
import socket
import struct
import subprocess
import sys
from itertools import count
from pathlib import Path

BIND, MOVE = 4096 | 16384, 8192  # MS_BIND with MS_REC, MS_MOVE (linux/mount.h)
LIBC = ctypes.CDLL(None, use_errno=True)
NUMBERS = count()


def main():
    plan = json.loads(Path(sys.argv[1]).read_text())
    stage = Path(plan["folder"]) / "stage"
    if socket.if_nameindex() == [(1, "lo")]:
        loopback_up(plan["address"])
    mount("proc", "/proc", "proc")
    devices(stage, plan["devices"], plan["shm"])
    mirror(
        stage,
        "/usr/local",
        {"Ascend": f"{plan['folder']}/Ascend"},
        without=("bin", "Ascend"),
        inside={"bin": {file.name: str(file) for file in Path(plan["folder"], "bin").iterdir()}},
    )
    if plan["without"]:
        for place in ("/usr/bin", "/usr/sbin"):
            mirror(stage, place, {}, without=plan["without"])
    if plan["cgroup"]:
        mount("tmpfs", "/sys/fs/cgroup", "tmpfs")
        for name, content in plan["cgroup"].items():
            Path("/sys/fs/cgroup", name).write_text(content)
    for path, content in plan["binds"].items():
        mount(content, path, flags=BIND)
    for path in plan["hidden"]:
        mount("tmpfs", path, "tmpfs")
    Path(plan["runs"]).mkdir(exist_ok=True)
    mount("tmpfs", plan["runs"], "tmpfs", data=f"size={plan['disk']}")
    mirror(
        stage,
        "/tmp",
        {},
        without=("ray", *(file.name for file in Path("/tmp").glob("mindspeed_qerl*"))),
    )
    return wait_for(plan["command"], Path(plan["left"]))


def mount(source, target, kind="", flags=0, data=""):
    if LIBC.mount(
        *(os.fsencode(word) for word in (source, target, kind)),
        ctypes.c_ulong(flags),
        data.encode(),
    ):
        code = ctypes.get_errno()
        raise OSError(code, f"mount {source} at {target}: {os.strerror(code)}")


def mirror(stage, place, more, without=(), inside=None):
    """Make the folder `place` the box's own: what is in it stays, but for `without`; `more`, name
    -> source, comes in. inside: the same for folders in it.
    """
    copy = own(stage)
    for name, files in (inside or {}).items():
        (copy / name).mkdir()
        fill(copy / name, {**there(Path(place, name)), **files})
    fill(
        copy,
        {name: source for name, source in there(Path(place)).items() if name not in without} | more,
    )
    mount(str(copy), place, flags=MOVE)


def there(place):
    return {entry.name: entry.path for entry in os.scandir(place)} if place.is_dir() else {}


def fill(place, sources):
    for name, source in sources.items():
        new = place / name
        if os.path.islink(source):
            new.symlink_to(os.readlink(source))
        elif os.path.exists(source):
            new.mkdir() if os.path.isdir(source) else new.touch()
            try:
                mount(source, new, flags=BIND)
            except FileNotFoundError:
                pass  # somebody's temporary file, gone since


def own(stage):
    folder = stage / str(next(NUMBERS))
    folder.mkdir(parents=True, exist_ok=True)
    mount("tmpfs", folder, "tmpfs", data="mode=1777")
    return folder


def devices(stage, names, shm):
    """/dev of a container: the usual nodes, a /dev/shm of its own, and for each NPU a node that is
    /dev/null.
    """
    dev = own(stage)
    fill(
        dev,
        {
            name: f"/dev/{name}"
            for name in ("null", "zero", "full", "random", "urandom", "tty", "pts")
        }
        | dict.fromkeys(names, "/dev/null"),
    )
    for name, target in (("fd", ""), ("stdin", "/0"), ("stdout", "/1"), ("stderr", "/2")):
        (dev / name).symlink_to(f"/proc/self/fd{target}")
    (dev / "ptmx").symlink_to("pts/ptmx")
    (dev / "shm").mkdir()
    mount("tmpfs", dev / "shm", "tmpfs", data=f"size={shm},mode=1777")
    mount(str(dev), "/dev", flags=MOVE)


def loopback_up(address):
    """ip link set lo up (netdevice(7): SIOCSIFFLAGS with IFF_UP); ip address add ADDRESS/32 dev lo,
    unless it is "" (rtnetlink(7): RTM_NEWADDR with IFA_ADDRESS and IFA_LOCAL).
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, 0x8914, struct.pack("16sh14x", b"lo", 1))
    if address:
        packed = socket.inet_aton(address)
        body = struct.pack("BBBBi", socket.AF_INET, 32, 0, 0, 1)
        body += struct.pack("HH4sHH4s", 8, 1, packed, 8, 2, packed)
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as kernel:
            kernel.send(struct.pack("IHHII", 16 + len(body), 20, 1 | 0x400, 1, 0) + body)


def wait_for(command, left):
    """The exit status of `command`; a signal is for the command, not for this process, whose end is
    that of all.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # not ignored: the command would inherit that
    try:
        child = subprocess.Popen(command).pid
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)
        return 127
    while True:
        pid, status = os.wait()
        if pid == child:
            left.write_text(json.dumps(list(running())))
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def running():
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if folder.name != "1" and any(words):  # a process that was not waited for has no words
            yield b" ".join(words).decode(errors="replace").strip()


if __name__ == "__main__":
    sys.exit(main())
