"""The processes of a run: started together, gone together, whatever fails. Each hosts one object
and writes to a log file of its own; a failed call names the process that died.
"""

import contextlib
import gc
import os
import pkgutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import psutil
import ray
from ray.exceptions import RayActorError, RayError

from mindspeed_qerl.common.errors import ConfigError, EngineError
from mindspeed_qerl.engines import private_ray
from mindspeed_qerl.families import read_shape
from mindspeed_qerl.recipe.types import Recipe
from mindspeed_qerl.runs.directory import RunDirectory

LOOK = 2  # seconds of waiting after which Ray's own processes are looked at
RAY_DIED = (
    "one of Ray's own processes (raylet, gcs_server, an agent) died, and all ranks and engines "
    "with it: killed, or out of memory"
)
Result = TypeVar("Result")


class WorkerError(EngineError):
    """A process of the engine failed or died; the message says which, why, and where its log is."""


@contextlib.contextmanager
def _errors_in_log() -> Iterator[None]:
    """The traceback of an error goes to the log of its process, its message alone to the driver: an
    object of another library's class may not be pickled, or not be made again from its pickle.
    """
    try:
        yield
    except Exception as error:  # noqa: BLE001  any may come
        traceback.print_exc()
        words = str(error)
        if not isinstance(error, (RuntimeError, ConfigError)):  # a KeyError's message is a key
            words = f"{type(error).__name__}: {words}"
        raise RuntimeError(words) from None


@ray.remote
class _Host:
    """An object in a process of its own, and calls forwarded to it."""

    def build(self, cls: str, log_file: str, arguments: dict) -> int:
        """Make the object; returns the process id."""
        log = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(log, sys.stdout.fileno())
        os.dup2(log, sys.stderr.fileno())
        gc.disable()  # what imports make stays, and to look through it takes a second
        with _errors_in_log():
            self.target = pkgutil.resolve_name(cls)(**arguments)
        gc.freeze()
        gc.enable()
        return os.getpid()

    def call(self, method: str, *arguments):
        with _errors_in_log():
            return getattr(self.target, method)(*arguments)


class Worker:
    """A handle on one process, started in `environment` (OpenMP reads it when it is loaded), in
    which the class `cls`, "module:Class", is built; only names travel, so imports happen there.
    name: what messages call it.
    """

    def __init__(
        self, name: str, cls: str, log_file: Path, environment: dict[str, str], **arguments: Any
    ):
        self.name = name
        self.log_file = log_file
        self.actor = _Host.options(  # type: ignore[attr-defined]  # Ray's decorator makes it
            num_cpus=1, runtime_env={"env_vars": environment}
        ).remote()
        self.built = self.actor.build.remote(cls, str(log_file), arguments)

    def call(self, method: Callable[..., Result], *arguments: Any) -> "ray.ObjectRef[Result]":
        """Start `method`, of the object's class, in the process. References among the arguments are
        resolved there, not here.
        """
        return self.actor.call.remote(method.__name__, *arguments)


class Processes:
    """The processes of one run: the ranks that train (`TrainRank`), and the `RolloutEngine`."""

    def __init__(self, ranks: Sequence[Worker], rollout: Worker):
        self.ranks = ranks
        self.rollout = rollout
        self.started = time.perf_counter()
        self.workers = [*ranks, rollout]
        self.pids: dict[str, int] = {}

    def wait_until_ready(self) -> None:
        """Returns once every object is built."""
        pids: list[int] = self.gather({worker: worker.built for worker in self.workers})
        self.pids = {worker.name: pid for worker, pid in zip(self.workers, pids)}

    def on_ranks(self, method: Callable[..., Result], *arguments: Any) -> list[Result]:
        """Call `method` on all ranks; the results in their order. Raises WorkerError."""
        return self.gather({rank: rank.call(method, *arguments) for rank in self.ranks})

    def on_rollout(self, method: Callable[..., Result], *arguments: Any) -> Result:
        """Calls it on the rollout engine."""
        return self.gather({self.rollout: self.rollout.call(method, *arguments)})[0]

    def gather(self, calls: "Mapping[Worker, ray.ObjectRef[Result]]") -> list[Result]:
        """Results in the order of `calls`; WorkerError as soon as one failed, or one of Ray's own
        processes is gone: the rest may wait for ever for the dead.
        """
        workers = {call: worker for worker, call in calls.items()}
        pending = list(workers)
        results = {}
        try:
            while pending:
                done, pending = ray.wait(pending, num_returns=1, timeout=LOOK)
                for call in done:
                    results[call] = self._result(workers[call], call)
                if not done and not private_ray.is_whole():
                    raise BrokenPipeError("one of Ray's own processes is gone")
        except OSError as error:  # the pipe to the raylet
            raise WorkerError(RAY_DIED) from error
        return [results[call] for call in calls.values()]

    def _result(self, caller: Worker, call: ray.ObjectRef) -> Any:
        try:
            return ray.get(call)
        except RayError as error:
            if not private_ray.is_whole() or "its node has died" in str(error):
                raise WorkerError(RAY_DIED) from error
            # the caller may only have waited for another, which died
            dead = next(filter(self._is_dead, self.workers), None)
            worker = dead or caller
            what = f"failed: {getattr(error, 'cause', error)}"  # in Ray's own words of a full disk
            if dead or isinstance(error, RayActorError):
                what = "died: killed, or out of memory"
            raise WorkerError(f"{worker.name} {what}\nIts log: {worker.log_file}") from error

    def _is_dead(self, worker: Worker) -> bool:
        if worker.name not in self.pids:  # it is still built
            return False
        try:
            return psutil.Process(self.pids[worker.name]).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True


@contextlib.contextmanager
def launch(recipe: Recipe, run: RunDirectory) -> Iterator[Processes]:
    """A Ray of this run's own and its processes, which are being built (`wait_until_ready`). Main
    thread only.

    SIGTERM is an interrupt inside. Afterwards, and after a failure anywhere, Ray, its processes and
    their temporary files are gone.
    """
    logs = run.path / "logs"
    logs.mkdir(exist_ok=True)  # a run that resumes adds to its logs
    # else Ray warns of what its next version will do
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    world = recipe.layout.world
    shape = read_shape(recipe.model.path)
    with contextlib.ExitStack() as undo:
        undo.callback(signal.signal, signal.SIGTERM, signal.getsignal(signal.SIGTERM))
        # before the start, which may fail when half of Ray is there
        undo.callback(private_ray.stop)
        scratch = private_ray.start(num_cpus=world + 1)
        # A scheduler's stop is an interrupt; Ray's own handler would abort.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        # the first of them, since it takes longest
        rollout = Worker(
            "rollout engine",
            "mindspeed_qerl.local.rollout:RolloutEngine",
            logs / "rollout.log",
            _environment(scratch, 1),
            model_dir=recipe.model.path,
            dtype=recipe.model.dtype,
            max_model_len=recipe.batch.max_model_len,
            max_num_seqs=recipe.rollout.max_num_seqs,
            kv_cache_gib=recipe.local.kv_cache_gib,
            records_routes=recipe.algorithm.routing_replay == "rollout",
            quantization=recipe.quantization if recipe.quantization.enabled else None,
            noise=recipe.noise_arguments,
        )
        ranks = []
        for rank in range(world):
            ranks.append(
                Worker(
                    f"rank {rank}",
                    "mindspeed_qerl.local.rank:TrainRank",
                    logs / f"rank{rank}.log",
                    _environment(scratch, world),
                    recipe=recipe,
                    shape=shape,  # to ask transformers for it takes seconds in each process
                    rank=rank,
                    rendezvous=f"file://{scratch}/rendezvous",
                )
            )
        yield Processes(ranks, rollout)


def _environment(scratch: Path, processes: int) -> dict[str, str]:
    """Returns the environment of one of `processes` that compute at the same time. Ranks and
    rollout engine take turns: threads that wait by spinning would hold the cores of those whose
    turn it is.
    """
    return {
        "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // processes)),
        "OMP_WAIT_POLICY": "PASSIVE",
        "TMPDIR": str(scratch),
    }
