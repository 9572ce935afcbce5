"""What the preflight asks a machine, in one class: a test can answer in a machine's place."""

import importlib.metadata
import importlib.util
import multiprocessing
import os
import pwd
import re
import resource
import shutil
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from glob import glob
from pathlib import Path

import psutil

from mindspeed_qerl.ascend.contract import Report, check, installed


class ProbeError(RuntimeError):
    """A question that the machine did not answer: `reason` is "missing" (no such command),
    "timeout", or "failed", with the command's own complaint.
    """

    def __init__(self, message: str, reason: str = "failed"):
        super().__init__(message)
        self.reason = reason


class Machine:
    """The machine that this process runs on. Sizes are bytes."""

    environment: Mapping[str, str] = os.environ
    python_version = sys.version_info[:2]

    def run(
        self,
        command: Sequence[str],
        timeout: float = 20,
        environment: Mapping[str, str] | None = None,
    ) -> str:
        """What `command` prints on stdout. After `timeout` seconds it is killed together with all
        that it started.

        Raises:
            ProbeError: it cannot be started, gave no answer in time, or failed.
        """
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                env=environment,
                start_new_session=True,
            )
        except OSError:
            raise ProbeError(f"{command[0]} is not installed here", "missing") from None
        try:
            output, complaint = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            # what it started holds the pipes too; what hangs inside a driver cannot be killed
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            complaint = ""
            with suppress(subprocess.TimeoutExpired):
                _, complaint = process.communicate(timeout=1)
            words = f"{command[0]}: no answer within {timeout:g} s{_last(complaint)}"
            raise ProbeError(words, "timeout") from None
        if process.returncode:
            raise ProbeError(f"{command[0]}: exit {process.returncode}{_last(complaint or output)}")
        return output

    def glob(self, pattern: str) -> list[str]:
        return sorted(glob(pattern))

    def read(self, path: str) -> str | None:
        """The text of a small file; None if it cannot be read."""
        try:
            return Path(path).read_text()
        except OSError:
            return None

    def version(self, distribution: str) -> str | None:
        """The installed version of a Python distribution; None if there is none."""
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            return None

    def entry_points(self, group: str) -> list[str]:
        """The names that installed distributions have in a group of entry points."""
        return [point.name for point in importlib.metadata.entry_points(group=group)]

    def importable(self, module: str) -> bool:
        return importlib.util.find_spec(module) is not None

    def upstream(self) -> list[Report]:
        """Each repository of upstream that is installed here, beside ascend/contract.yaml."""
        return check(installed())

    def checkout(self, package: str) -> Path | None:
        """The folder of the package of upstream that Python takes; None if there is none."""
        return installed().get(package)

    def disk_free(self, path: str | Path) -> int:
        """Bytes free where `path` is, or where it would be made."""
        return shutil.disk_usage(_nearest(path)).free

    def disk_left(self, path: str | Path) -> float:
        """The part of the disk of `path` that is free, as Ray asks
        (src/ray/common/file_system_monitor.cc).
        """
        usage = shutil.disk_usage(_nearest(path))
        return usage.free / usage.total

    def cpus(self) -> int:
        """Logical CPUs as Ray counts them: the cgroup's if it has a quota
        (ray/_private/utils.py:get_num_cpus).
        """
        count = multiprocessing.cpu_count()
        quota, _, period = (self.read("/sys/fs/cgroup/cpu.max") or "max").partition(" ")
        if quota.strip() == "max":
            quota, period = (
                self.read(f"/sys/fs/cgroup/cpu/cpu.cfs_{name}_us") or "-1"
                for name in ("quota", "period")
            )
        if int(quota) > 0:
            return min(count, max(1, int(quota) // int(period)))
        return count

    def may_use(self) -> int:
        """Logical CPUs that this process, and what it starts, may run on;
        `multiprocessing.cpu_count` has all.
        """
        return len(os.sched_getaffinity(0))

    def threads(self) -> dict[str, int]:
        """The limits of processes and threads that hold for this user, by who sets them; root has
        no `ulimit -u`.
        """
        soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
        limits = {
            "kernel.threads-max": int(self.read("/proc/sys/kernel/threads-max") or sys.maxsize)
        }
        if os.geteuid() and soft != resource.RLIM_INFINITY:
            limits["ulimit -u"] = soft
        return limits | cgroup_threads(self.read)

    def user(self) -> str | None:
        """The name of this process's user; None if /etc/passwd, or what stands for it, has none."""
        try:
            return pwd.getpwuid(os.geteuid()).pw_name
        except KeyError:
            return None

    def open_files(self) -> int:
        """RLIMIT_NOFILE, the soft limit."""
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft == resource.RLIM_INFINITY:
            return sys.maxsize
        return soft

    def port_free(self, port: int) -> bool:
        """Whether nobody listens on the TCP port, on any interface."""
        with socket.socket() as probe:
            # connections that are being closed do not count
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", port))
            except OSError:
                return False
        return True

    def listens(self, host: str, port: str | int) -> bool:
        """Whether a TCP connection is taken there within 5 s."""
        try:
            socket.create_connection((host, int(port)), timeout=5).close()
        except (OSError, OverflowError):
            return False
        return True

    def interfaces(self) -> dict[str, list[str]]:
        """The network interfaces, with their addresses."""
        return {
            name: [each.address.partition("%")[0] for each in addresses]
            for name, addresses in psutil.net_if_addrs().items()
        }

    def addresses(self) -> set[str]:
        """Of all its network interfaces."""
        return {each for addresses in self.interfaces().values() for each in addresses}

    def writable(self, path: str | Path) -> bool:
        """Whether `path`, or the nearest folder above it that is there, can be written: not on a
        file system that is mounted read-only, for root either (access(2)).
        """
        return os.access(_nearest(path), os.W_OK | os.X_OK)

    def closed(self, node: str) -> str:
        """Why this process cannot read and write a device node; "" if it can."""
        try:
            status = os.stat(node)
        except OSError:
            return "is not there"
        if os.access(node, os.R_OK | os.W_OK):
            return ""
        return (
            f"is {stat.filemode(status.st_mode)} of user {status.st_uid}, group {status.st_gid}: "
            f"user {os.geteuid()} cannot open it"
        )

    def may_execute(self, path: str | Path) -> bool:
        """Whether programs and libraries that lie in `path`, or would be made there, can be run:
        not with noexec.
        """
        return not os.statvfs(_nearest(path)).f_flag & os.ST_NOEXEC

    def memory(self) -> dict[str, int]:
        """Bytes that new processes can have, by who limits them: the machine, and each memory
        cgroup.
        """
        available = re.search(r"(?m)^MemAvailable:\s+(\d+) kB", self.read("/proc/meminfo") or "")
        room = cgroup_room(self.read)
        if available:
            room["MemAvailable"] = 1024 * int(available[1])
        return room

    def processes(self, name: str) -> dict[int, dict[str, str]]:
        """pid -> environment, {} where it may not be read, of the running processes of that name;
        one that has ended and was not waited for is none.
        """
        found = {}
        for process in psutil.process_iter(["name", "status"]):
            if process.info["name"] == name and process.info["status"] != psutil.STATUS_ZOMBIE:
                try:
                    found[process.pid] = process.environ()
                except (psutil.Error, OSError):  # another user's, or gone by now
                    found[process.pid] = {}
        return found


def _last(words: str) -> str:
    """The last line that is not empty, after a colon."""
    lines = [line.strip() for line in words.splitlines() if line.strip()]
    if lines:
        return f": {lines[-1][:200]}"
    return ""


def _nearest(path: str | Path) -> Path:
    """`path`, or the nearest folder above it that is there."""
    place = Path(path).absolute()
    while not place.exists():
        place = place.parent
    return place


Read = Callable[[str], str | None]  # Machine.read


def cgroup_room(read: Read) -> dict[str, int]:
    """Bytes left below each limit of this process's memory cgroups, its own and those above,
    version 2 or 1. What is cached of files counts as left.
    """
    room = {}
    for place, version in _cgroups(read, "memory"):
        most, current, cached = {
            2: ("memory.max", "memory.current", "inactive_file"),
            1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        }[version]
        limit, used = _number(read(f"{place}/{most}")), _number(read(f"{place}/{current}"))
        # version 1 writes 2^63 for none
        if limit is not None and used is not None and limit < 2**60:
            stat = re.search(rf"(?m)^{cached} (\d+)$", read(f"{place}/memory.stat") or "")
            files = int(stat[1]) if stat else 0
            room[f"{place}/{most} = {limit / 1e9:,.1f} GB"] = limit - used + files
    return room


def cgroup_threads(read: Read) -> dict[str, int]:
    """The limits of processes and threads of this process's cgroups, by where they are (docker's
    --pids-limit).
    """
    limits = {}
    for place, _ in _cgroups(read, "pids"):
        limit = _number(read(f"{place}/pids.max"))
        if limit is not None:
            limits[f"{place}/pids.max"] = limit
    return limits


def _number(text: str | None) -> int | None:
    """None for "max", and where there is no such file."""
    text = (text or "").strip()
    if text.isdigit():
        return int(text)
    return None


def _cgroups(read: Read, controller: str) -> Iterator[tuple[str, int]]:
    """The folders of this process's cgroup and of those above, and their version, 2 or 1."""
    for line in (read("/proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        version = {"": 2}.get(controllers, 1)
        if version == 2 or controller in controllers.split(","):
            root = Path("/sys/fs/cgroup") / (controller if version == 1 else "")
            for folder in (Path(path), *Path(path).parents):  # a container sees its own at the root
                yield str(root / str(folder).strip("/")), version
