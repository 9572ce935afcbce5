"""Processes: each hosts one object, writes to a log file of its own, and is missed when it dies."""

import contextlib
import importlib
import os
import socket
import sys
from collections.abc import Iterable
from pathlib import Path

import psutil
import ray

from mindspeed_qerl.errors import EngineError


class WorkerError(EngineError):
    """A process of the engine failed or died; the message says which, why, and where its log is."""


@ray.remote
class _Host:
    """An object in a process of its own, and calls forwarded to it."""

    def build(self, module: str, name: str, log_file: str, arguments: dict) -> int:
        """Make the object; returns the process id."""
        log = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(log, sys.stdout.fileno())
        os.dup2(log, sys.stderr.fileno())
        self.target = getattr(importlib.import_module(module), name)(**arguments)
        return os.getpid()

    def call(self, method: str, *arguments):
        return getattr(self.target, method)(*arguments)


class Worker:
    """A handle on one process.

    Args:
        name: what messages call it. module, cls: the class to build there; only names travel, so heavy imports happen there.
        environment: set before anything is imported there.
    """

    def __init__(self, name: str, module: str, cls: str, log_file: Path, environment: dict[str, str], **arguments):
        self.name = name
        self.log_file = log_file
        self.actor = _Host.options(num_cpus=1, runtime_env={"env_vars": environment}).remote()
        self.built = self.actor.build.remote(module, cls, str(log_file), arguments)

    def call(self, method: str, *arguments) -> ray.ObjectRef:
        """Start `method` in the process. Arguments that are references are resolved there, without passing through here."""
        return self.actor.call.remote(method, *arguments)


def memory_in_use(pids: Iterable[int]) -> int:
    """Bytes that the processes hold together, shared pages counted once among them (PSS; /proc/PID/smaps_rollup)."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError, StopIteration):
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            total += 1024 * int(next(line for line in lines if line.startswith("Pss:")).split()[1])
    return total


class Team:
    """The workers of a run: waits for several at once, and names the one that died rather than the one that noticed."""

    def __init__(self):
        self.workers: list[Worker] = []
        self.pids: dict[str, int] = {}

    def start(self, *arguments, **named) -> Worker:
        worker = Worker(*arguments, **named)
        self.workers.append(worker)
        return worker

    def wait_until_ready(self) -> None:
        """Returns once every object is built."""
        pids = self.gather({worker: worker.built for worker in self.workers})
        self.pids = {worker.name: pid for worker, pid in zip(self.workers, pids)}

    def gather(self, calls: dict[Worker, ray.ObjectRef]) -> list:
        """Results in the order of `calls`.

        Raises:
            WorkerError: as soon as one call failed, without waiting for the rest, which may hang for want of the dead one.
        """
        owner = {reference: worker for worker, reference in calls.items()}
        pending, results = list(owner), {}
        while pending:
            done, pending = ray.wait(pending, num_returns=1)
            try:
                results[done[0]] = ray.get(done[0])
            except (ray.exceptions.RayActorError, ray.exceptions.RayTaskError) as error:
                caller = owner[done[0]]
                for worker in self.workers:  # also where the caller only waited for another's result, as in a sync
                    if worker.name in self.pids and not _is_running(self.pids[worker.name]):
                        raise self._dead(worker) from error
                if isinstance(error, ray.exceptions.RayActorError):
                    raise self._dead(caller) from error
                raise WorkerError(f"{caller.name} failed: {error.cause}\nIts log: {caller.log_file}") from error
            except ray.exceptions.OutOfMemoryError as error:
                raise WorkerError(f"this machine's memory is full, and Ray stopped {owner[done[0]].name}. Ask for fewer ranks, a smaller "
                                  f"actor_config.micro_batch_size, or recompute_granularity=full. Ray says: {error}") from error
        return [results[reference] for reference in calls.values()]

    def _dead(self, worker: Worker) -> WorkerError:
        pid = f" (pid {self.pids[worker.name]})" if worker.name in self.pids else ""
        last = _last_line(worker.log_file)
        return WorkerError(f"{worker.name}{pid} died: killed, or out of memory" + (f". Its last words: {last}" if last else "")
                           + f"\nIts log: {worker.log_file}")


def free_port() -> int:
    """A port of this machine that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _last_line(log_file: Path) -> str:
    lines = log_file.read_text(errors="replace").strip().splitlines() if log_file.exists() else []
    return lines[-1][:300] if lines else ""
