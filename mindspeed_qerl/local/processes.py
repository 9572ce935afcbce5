"""The processes of a run and what they need of this machine: started together, gone together,
whatever fails.

Each hosts one object, writes to a log file of its own, and is missed when it dies.
"""

import contextlib
import gc
import importlib
import os
import re
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import ray

from mindspeed_qerl.common.errors import ConfigError, EngineError
from mindspeed_qerl.engines import private_ray
from mindspeed_qerl.families import read_shape
from mindspeed_qerl.recipe.types import Recipe
from mindspeed_qerl.runs.directory import RunDirectory

# of a log's line that may say why its process died: "Segmentation fault", "Fatal Python error",
# "RuntimeError: ..."; and of one that does not: vLLM's log quotes in its warnings errors that it
# has caught
ERROR = re.compile(r"(?i:\b(segmentation fault|fatal|abort(ed)?|terminate called)\b)|Error\b")
NO_ERROR = re.compile(r"\b(DEBUG|INFO|WARNING)\b")
LOOK = 2  # seconds of waiting after which Ray's own processes are looked at


class WorkerError(EngineError):
    """A process of the engine failed or died; the message says which, why, and where its log is."""


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """For imports: they make a million objects that stay, which Python's garbage collector would
    walk again and again (a fifth of vLLM's import).
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextlib.contextmanager
def _errors_in_log() -> Iterator[None]:
    """Of an error the driver's message has the words; where it came from is in the log of its
    process. Words alone travel: an object of another library's class may not be pickled, or not be
    made again from its pickle.
    """
    try:
        yield
    except Exception as error:  # noqa: BLE001  any may come
        traceback.print_exc()
        said = isinstance(
            error, (RuntimeError, ConfigError)
        )  # in words; of a KeyError they are a key
        raise RuntimeError(str(error) if said else f"{type(error).__name__}: {error}") from None
    except BaseException:
        traceback.print_exc()
        raise


@ray.remote
class _Host:
    """An object in a process of its own, and calls forwarded to it."""

    def build(self, module: str, name: str, log_file: str, arguments: dict) -> int:
        """Make the object; returns the process id."""
        log = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(log, sys.stdout.fileno())
        os.dup2(log, sys.stderr.fileno())
        with _errors_in_log(), without_collection():
            self.target = getattr(importlib.import_module(module), name)(**arguments)
        return os.getpid()

    def call(self, method: str, *arguments):
        with _errors_in_log():
            return getattr(self.target, method)(*arguments)


class Worker:
    """A handle on one process, in which the class `cls` of `module` is built, after `environment`
    is set; only names travel, so imports happen there. name: what messages call it.
    """

    def __init__(
        self,
        name: str,
        module: str,
        cls: str,
        log_file: Path,
        environment: dict[str, str],
        **arguments,
    ):
        self.name, self.log_file = name, log_file
        self.log_begins = (
            log_file.stat().st_size if log_file.exists() else 0
        )  # bytes of runs that this one resumes
        self.actor = _Host.options(num_cpus=1, runtime_env={"env_vars": environment}).remote()
        self.built = self.actor.build.remote(module, cls, str(log_file), arguments)

    def call(self, method: str, *arguments) -> ray.ObjectRef:
        """Start `method` in the process. References among the arguments are resolved there, not
        here.
        """
        return self.actor.call.remote(method, *arguments)


class Processes:
    """Those of one run: the ranks that train, and the vLLM engines that share the rollout model.
    Waits for several at once, and names the one that died or was stopped, not the one that noticed.
    """

    def __init__(self, ranks: Sequence[Worker], rollouts: Sequence[Worker]):
        self.ranks, self.rollouts, self.started = ranks, rollouts, time.perf_counter()
        self.pids: dict[str, int] = {}

    def wait_until_ready(self) -> None:
        """Returns once every object is built."""
        workers = [*self.ranks, *self.rollouts]
        pids = self.gather({worker: worker.built for worker in workers})
        self.pids = {worker.name: pid for worker, pid in zip(workers, pids)}

    def on_ranks(self, method: str, *arguments: Any) -> list:
        """Call `method` on all ranks; the results in their order. Raises WorkerError."""
        return self.gather({rank: rank.call(method, *arguments) for rank in self.ranks})

    def on_rollouts(self, method: str, *arguments: Any) -> list:
        """The same on all rollout engines. They share the work: where each returns all of it, take
        the first one's.
        """
        return self.gather(self.start_on_rollouts(method, *arguments))

    def start_on_rollouts(self, method: str, *arguments: Any) -> dict[Worker, ray.ObjectRef]:
        """Start `method` on all rollout engines, for `gather`."""
        return {rollout: rollout.call(method, *arguments) for rollout in self.rollouts}

    def gather(
        self,
        calls: dict[Worker, ray.ObjectRef],
        given: Mapping[Worker, ray.ObjectRef] | None = None,
    ) -> list:
        """Results in the order of `calls`; WorkerError as soon as one failed, or one of Ray's own
        processes is gone: the rest may hang without the dead. given: calls whose results these wait
        for; one that failed fails these, too, and is the one to name.
        """
        owner = {reference: worker for worker, reference in calls.items()}
        pending, results = list(owner), {}
        try:
            while pending:
                done, pending = ray.wait(pending, num_returns=1, timeout=LOOK)
                results |= {call: self._result(owner[call], call, given or {}) for call in done}
                if not done and not private_ray.is_whole():
                    # what Ray has not started yet, it would wait for a minute or for ever
                    raise BrokenPipeError("one of Ray's own processes is gone")
        except OSError as error:  # the pipe to the raylet
            raise self._failure(next(iter(calls)), error) from error
        return [results[reference] for reference in calls.values()]

    def _result(
        self, worker: Worker, reference: ray.ObjectRef, given: Mapping[Worker, ray.ObjectRef]
    ) -> Any:
        try:
            return ray.get(reference)
        except (ray.exceptions.RayActorError, ray.exceptions.RayTaskError) as error:
            raise self._failure(_first_failed(given) or worker, error) from error
        except (ray.exceptions.OutOfDiskError, ray.exceptions.ObjectStoreFullError) as error:
            raise WorkerError(
                f"there is no room for what {worker.name} exchanges with the others: make room in "
                f"/dev/shm and in the folder of temporary files (TMPDIR). Ray says: {error}"
            ) from error
        except ray.exceptions.OutOfMemoryError as error:
            raise WorkerError(
                f"this machine's memory is full, and Ray stopped {worker.name}. Ask for fewer "
                "ranks, a smaller actor_config.micro_batch_size, or recompute_granularity=full. "
                f"Ray says: {error}"
            ) from error

    def _failure(self, caller: Worker, error: Exception) -> WorkerError:
        """What to say of a call that failed: `caller` may only have waited for another, which died."""
        stopped = private_ray.stopped()
        for name, pid in self.pids.items():
            if pid in stopped:
                return WorkerError(f"{name} {stopped[pid][1]}")
        dead = [
            worker
            for worker in (*self.ranks, *self.rollouts)
            if worker.name in self.pids and not _is_running(self.pids[worker.name])
        ]
        last = " ".join([*stopped.values()][-1]) if stopped else None
        is_pipe = isinstance(error, OSError) and not isinstance(error, ray.exceptions.RayError)
        if is_pipe or not private_ray.is_whole():  # it takes all workers along
            return WorkerError(
                last
                or "one of Ray's own processes (raylet, gcs_server, an agent) died: killed, or "
                "out of memory"
            )
        if "its node has died" in str(
            error
        ):  # by its health checks: the raylet may live, the workers do not
            return WorkerError(
                "Ray's node died, as Ray says, and all ranks and engines with it: "
                f"{str(error).splitlines()[-1].strip()}"
            )
        if dead:
            return self._dead(dead[0])
        if isinstance(
            error, ray.exceptions.RayActorError
        ):  # while it was built: its pid is not known yet
            return WorkerError(last) if last else self._dead(caller)
        return WorkerError(f"{caller.name} failed: {error.cause}\nIts log: {caller.log_file}")

    def _dead(self, worker: Worker) -> WorkerError:
        pid = f" (pid {self.pids[worker.name]})" if worker.name in self.pids else ""
        log = worker.log_file.read_bytes()[worker.log_begins :] if worker.log_file.exists() else b""
        error = last_error(log.decode(errors="replace"))
        words = f". Its last error: {error[:300]}" if error else ""
        return WorkerError(
            f"{worker.name}{pid} died: killed, or out of memory{words}\nIts log: {worker.log_file}"
        )


def _first_failed(calls: Mapping[Worker, ray.ObjectRef]) -> Worker | None:
    """The first whose call has failed by now."""
    for worker, reference in calls.items():
        if ray.wait([reference], timeout=0)[0]:
            try:
                ray.get(reference)
            except (ray.exceptions.RayActorError, ray.exceptions.RayTaskError):
                return worker
    return None


def last_error(log: str) -> str | None:
    """Of a dead process's log the last line that says why; its last line is often a library's
    warning.

    >>> last_error("RuntimeError: no room\\nWARNING [base.py:380] ValueError: Tokenizer not available\\nbye")
    'RuntimeError: no room'
    """
    errors = [line for line in log.splitlines() if ERROR.search(line) and not NO_ERROR.search(line)]
    return errors[-1] if errors else None


def _is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def memory_in_use(pids: Iterable[int]) -> int:
    """Bytes that the processes hold together, shared pages counted once among them (PSS)."""
    total = 0
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            total += psutil.Process(pid).memory_full_info().pss
    return total


def free_port() -> int:
    """A port of this machine that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def launch(recipe: Recipe, run: RunDirectory) -> Iterator[Processes]:
    """A Ray of this run's own and its processes, which are being built (`wait_until_ready`), the
    rollout engines without noise. Main thread only.

    SIGTERM is an interrupt inside. Afterwards, and after a failure anywhere, Ray, its processes and
    their temporary files are gone.
    """
    logs = run.path / "logs"
    logs.mkdir(exist_ok=True)  # a run that resumes adds to its logs
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = (
        "0"  # else Ray warns of what its next version will do
    )
    world, size = recipe.layout.world, recipe.layout.infer_tp
    with contextlib.ExitStack() as undo:
        undo.callback(signal.signal, signal.SIGTERM, signal.getsignal(signal.SIGTERM))
        undo.callback(
            private_ray.stop
        )  # before the start, which may fail when half of Ray is there
        scratch = private_ray.start(num_cpus=world + size)
        # A scheduler's stop is an interrupt; Ray's own handler would abort.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        ranks = [
            Worker(
                f"rank {rank}",
                "mindspeed_qerl.local.rank",
                "TrainRank",
                logs / f"rank{rank}.log",
                _environment(scratch, world),
                recipe=recipe,
                rank=rank,
                rendezvous=f"file://{scratch}/rendezvous",
            )
            for rank in range(world)
        ]
        routers = (
            read_shape(recipe.model.path).routers
            if recipe.algorithm.routing_replay == "rollout"
            else None
        )
        quantization = recipe.quantization if recipe.quantization.enabled else None
        shared = dict(
            model_dir=recipe.model.path,
            dtype=recipe.model.dtype,
            max_model_len=recipe.batch.max_model_len,
            max_num_seqs=recipe.rollout.max_num_seqs,
            kv_cache_gib=recipe.local.kv_cache_gib,
            routers=routers,
            quantization=quantization,
            tp_size=size,
            port=free_port(),
        )
        numbers = [str(rank) for rank in range(size)] if size > 1 else [""]
        yield Processes(
            ranks,
            [
                Worker(
                    f"rollout engine {number}".strip(),
                    "mindspeed_qerl.local.rollout",
                    "RolloutEngine",
                    logs / f"rollout{number}.log",
                    _environment(scratch, size),
                    tp_rank=rank,
                    **shared,
                )
                for rank, number in enumerate(numbers)
            ],
        )


def _environment(scratch: Path, processes: int) -> dict[str, str]:
    """Of one of `processes` that compute at the same time. Ranks and rollout engines take turns:
    threads that wait by spinning would hold the cores of those whose turn it is.
    """
    return {
        "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // processes)),
        "OMP_WAIT_POLICY": "PASSIVE",
        "TMPDIR": str(scratch),
    }
