"""What the preflight asks a machine, in one class, so that a test can answer in a machine's place."""

import importlib.metadata
import importlib.util
import multiprocessing
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from glob import glob
from pathlib import Path

import psutil

from mindspeed_qerl.ascend.contract import Report, check, installed


class ProbeError(RuntimeError):
    """A question that the machine did not answer, and why: no such command, no answer in time, or the command's own
    complaint."""


class Machine:
    """The machine that this process runs on. Sizes are bytes."""

    environment: Mapping[str, str] = os.environ
    python_version = sys.version_info[:2]

    def run(self, command: Sequence[str], timeout: float = 20, environment: Mapping[str, str] | None = None) -> str:
        """What `command` prints on stdout. After `timeout` seconds it is killed together with all that it started.

        Raises:
            ProbeError: it cannot be started, gave no answer in time, or failed.
        """
        try:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                       stderr=subprocess.PIPE, text=True, errors="replace", env=environment,
                                       start_new_session=True)
        except FileNotFoundError:
            raise ProbeError(f"{command[0]} is not installed here") from None
        except OSError as error:
            raise ProbeError(f"{command[0]}: {error.strerror}") from error
        try:
            output, complaint = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # the leader of a session: what it started holds the pipes too
            with suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=1)  # no longer: a process that hangs inside a driver cannot be killed
            raise ProbeError(f"{command[0]}: no answer within {timeout:g} s") from None
        if process.returncode:
            lines = [line for line in (complaint or output).splitlines() if line.strip()]
            why = f": {lines[-1].strip()[:200]}" if lines else ""
            raise ProbeError(f"{command[0]}: exit {process.returncode}{why}")
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

    def importable(self, module: str) -> bool:
        return importlib.util.find_spec(module) is not None

    def upstream(self) -> list[Report]:
        """Each repository of upstream that is installed here, beside ascend/contract.yaml."""
        return check(installed())

    def disk_free(self, path: str | Path) -> int:
        """Bytes free where `path` is, or where it would be made."""
        place = Path(path).absolute()
        while not place.exists():
            place = place.parent
        return shutil.disk_usage(place).free

    def cpus(self) -> int:
        """Logical CPUs as Ray counts them: the cgroup's if it has a quota (ray/_private/utils.py:get_num_cpus)."""
        count = multiprocessing.cpu_count()
        quota, _, period = (self.read("/sys/fs/cgroup/cpu.max") or "max").partition(" ")
        if quota.strip() == "max":
            quota, period = (self.read(f"/sys/fs/cgroup/cpu/cpu.cfs_{name}_us") or "-1"
                             for name in ("quota", "period"))
        return min(count, max(1, int(quota) // int(period))) if int(quota) > 0 else count

    def open_files(self) -> int:
        """RLIMIT_NOFILE, the soft limit."""
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return sys.maxsize if soft == resource.RLIM_INFINITY else soft

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

    def processes(self, name: str) -> dict[int, dict[str, str]]:
        """pid -> environment, {} where it may not be read, of the running processes of that name; one that has ended
        and was not waited for is none."""
        found = {}
        for process in psutil.process_iter(["name", "status"]):
            if process.info["name"] == name and process.info["status"] != psutil.STATUS_ZOMBIE:
                try:
                    found[process.pid] = process.environ()
                except (psutil.Error, OSError):  # another user's, or gone by now
                    found[process.pid] = {}
        return found
