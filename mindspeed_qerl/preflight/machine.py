"""What the preflight asks a machine, in one class: a test can answer in a machine's place."""

import importlib.metadata
import os
import re
import shutil
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from glob import glob
from pathlib import Path
from typing import Any

import psutil

CGROUPS = "/sys/fs/cgroup"  # where a container sees its own, of version 2 or 1
# limit, use, and what of it is cached of files
MEMORY_FILES = (
    ("memory.max", "memory.current", "memory.stat"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
)


class ProbeError(RuntimeError):
    """A question that the machine did not answer."""


class LateError(ProbeError):
    """A question that was not answered within the time that it had."""


class Machine:
    """The machine that this process runs on. Sizes are bytes."""

    environment: Mapping[str, str] = os.environ

    def run(
        self,
        command: Sequence[str],
        timeout: float = 20,
        environment: Mapping[str, str] | None = None,
    ) -> str:
        """Returns what `command` prints on stdout. After `timeout` seconds it is killed together
        with all that it started.

        Raises:
            ProbeError: it cannot be started, gave no answer in time (LateError), or failed.
        """
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                errors="replace",  # which makes it text
                env=environment,
                start_new_session=True,
            )
        except OSError:
            raise ProbeError(f"{command[0]} is not installed here") from None
        try:
            output, complaint = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            # what it started holds the pipes too; what hangs inside a driver cannot be killed
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            complaint = ""
            with suppress(subprocess.TimeoutExpired):
                _, complaint = process.communicate(timeout=1)
            fault = f"{command[0]}: no answer within {timeout:g} s: {_last_line(complaint)}"
            raise LateError(fault) from None
        if process.returncode:
            last_line = _last_line(complaint or output)
            raise ProbeError(f"{command[0]}: exit {process.returncode}: {last_line}")
        return output

    def glob(self, pattern: str) -> list[str]:
        return sorted(glob(pattern))

    def read(self, path: str | Path) -> str:
        """The text of a small file; "" if it cannot be read."""
        try:
            return Path(path).read_text()
        except OSError:
            return ""

    def version(self, distribution: str) -> str | None:
        """The installed version of a Python distribution; None if there is none."""
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            return None

    def disk(self, path: str | Path) -> Any:
        """Bytes of the disk where `path` is, or would be made: `total`, `used` and `free`."""
        return shutil.disk_usage(_nearest(path))

    def user(self) -> str:
        """The name of this process's user; the number if /etc/passwd, or what stands for it, has
        none.
        """
        return psutil.Process().username()

    def may_listen(self, host: str = "", port: int = 0) -> bool:
        """Returns True if this process can listen there on TCP: the address is this machine's, and
        nobody else has the port.
        """
        try:
            socket.create_server((host, port)).close()
        except OSError:
            return False
        return True

    def listens(self, address: str) -> bool:
        """Returns True if a TCP connection is taken at HOST:PORT within 5 s."""
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
        except (OSError, OverflowError):
            return False
        return True

    def interfaces(self) -> dict[str, list[str]]:
        """The network interfaces, with their addresses."""
        return {
            name: [each.address.partition("%")[0] for each in addresses]
            for name, addresses in psutil.net_if_addrs().items()
        }

    def opens(self, node: str) -> bool:
        """Returns True if this process can read and write a device node."""
        return os.access(node, os.R_OK | os.W_OK)

    def writable(self, path: str | Path) -> bool:
        """Returns True if `path`, or the nearest folder above it that is there, can be written: not
        on a file system that is mounted read-only, for root either (access(2)).
        """
        return os.access(_nearest(path), os.W_OK | os.X_OK)

    def may_execute(self, path: str | Path) -> bool:
        """Returns True if programs and libraries that lie in `path`, or would be made there, can be
        run: not with noexec.
        """
        return not os.statvfs(_nearest(path)).f_flag & os.ST_NOEXEC

    def memory(self) -> tuple[int, str]:
        """Bytes that new processes can have, and who limits them: the machine, or the container."""
        rooms = [(psutil.virtual_memory().available, "MemAvailable")]
        for names in MEMORY_FILES:
            limit, used, stat = (self.read(f"{CGROUPS}/{name}") for name in names)
            if limit.strip().isdigit():  # version 1 writes 2^63 for none
                cached = re.search(r"^inactive_file (\d+)", stat, re.MULTILINE)
                free = int(limit) - int(used) + int(cached[1] if cached else 0)
                rooms.append((free, f"{names[0]} = {int(limit) / 1e9:,.1f} GB"))
        return min(rooms)

    def runs(self, name: str) -> bool:
        """Returns True if a process of that name runs; one that has ended and was not waited for
        does not.
        """
        return any(
            process.info["name"] == name and process.info["status"] != psutil.STATUS_ZOMBIE
            for process in psutil.process_iter(["name", "status"])
        )


def _last_line(text: str) -> str:
    """The end of what a command said, 200 characters at most."""
    return text.strip().rpartition("\n")[2][:200]


def _nearest(path: str | Path) -> Path:
    """`path`, or the nearest folder above it that is there."""
    place = Path(path).absolute()
    while not place.exists():
        place = place.parent
    return place
