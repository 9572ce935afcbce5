"""The processes of a run and what they need of this machine: started together, gone together, whatever fails."""

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from mindspeed_qerl import private_ray
from mindspeed_qerl.local.workers import Team, Worker, free_port
from mindspeed_qerl.recipe.types import Recipe
from mindspeed_qerl.runs.directory import RunDirectory


@dataclass(frozen=True)
class Processes:
    """Of one run: the ranks that train, and the vLLM engines that share the rollout model."""

    team: Team
    ranks: list[Worker]
    rollouts: list[Worker]

    def on_ranks(self, method: str, *arguments: Any) -> list:
        """Call `method` on all ranks; the results in their order. Raises WorkerError."""
        return self.team.gather({rank: rank.call(method, *arguments) for rank in self.ranks})

    def on_rollouts(self, method: str, *arguments: Any) -> list:
        """The same on all rollout engines. They share the work: where each returns all of it, take the first one's."""
        return self.team.gather(self.start_on_rollouts(method, *arguments))

    def start_on_rollouts(self, method: str, *arguments: Any) -> dict[Worker, ray.ObjectRef]:
        """Start `method` on all rollout engines, for `team.gather`."""
        return {rollout: rollout.call(method, *arguments) for rollout in self.rollouts}


@contextmanager
def launch(recipe: Recipe, run: RunDirectory, epoch: int) -> Iterator[Processes]:
    """A Ray of this run's own and its processes, which are being built (`team.wait_until_ready`). Main thread only.

    Args:
        epoch: iterations of one pass over the training rows, for noise that restarts with it.

    SIGTERM is an interrupt inside. Afterwards, and after a failure anywhere, Ray, its processes and their temporary
    files are gone.
    """
    logs = run.path / "logs"
    logs.mkdir(exist_ok=True)  # a run that resumes adds to its logs
    rendezvous = logs.resolve() / "rendezvous"
    rendezvous.unlink(missing_ok=True)  # of a run that was killed
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"  # else Ray warns of what its next version will do
    world, rollouts = recipe.layout.world, recipe.layout.infer_tp
    with ExitStack() as undo:
        undo.callback(rendezvous.unlink, missing_ok=True)
        undo.callback(signal.signal, signal.SIGTERM, signal.getsignal(signal.SIGTERM))
        undo.callback(private_ray.stop)  # before the start, which may fail when half of Ray is there
        scratch = private_ray.start(num_cpus=world + rollouts)
        # A scheduler's stop is an interrupt; Ray's own handler would abort.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        _keep_compiled_code(scratch)
        team = Team()
        ranks = [
            team.start(f"rank {rank}", "mindspeed_qerl.local.rank", "TrainRank", logs / f"rank{rank}.log",
                       _environment(scratch, world), recipe=recipe, rank=rank, rendezvous=f"file://{rendezvous}")
            for rank in range(world)]
        noise, environment = _noise_arguments(recipe, epoch), _environment(scratch, rollouts)
        yield Processes(team, ranks, _start_rollouts(team, recipe, noise, logs, environment))


def _start_rollouts(team: Team, recipe: Recipe, noise: dict[str, Any] | None, logs: Path,
                    environment: dict[str, str]) -> list[Worker]:
    size, port = recipe.layout.infer_tp, free_port()
    arguments = dict(model_dir=recipe.model.path, dtype=recipe.model.dtype, max_model_len=recipe.batch.max_model_len,
                     max_num_seqs=recipe.rollout.max_num_seqs, kv_cache_gib=recipe.local.kv_cache_gib, aqn=noise,
                     tp_size=size, port=port)
    rollouts = []
    for rank in range(size):
        number = str(rank) if size > 1 else ""
        rollouts.append(team.start(f"rollout engine {number}".strip(), "mindspeed_qerl.local.rollout", "RolloutEngine",
                                   logs / f"rollout{number}.log", environment, tp_rank=rank, **arguments))
    return rollouts


def _environment(scratch: Path, processes: int) -> dict[str, str]:
    """Of one of `processes` that compute at the same time. Ranks and rollout engines take turns: threads that wait by
    spinning would hold the cores of those whose turn it is."""
    cores = len(os.sched_getaffinity(0))
    return {"OMP_NUM_THREADS": str(max(1, cores // processes)), "OMP_WAIT_POLICY": "PASSIVE", "TMPDIR": str(scratch)}


def _keep_compiled_code(scratch: Path) -> None:
    """Temporary files go with the run, but what torch has compiled stays where it always is."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    cache = Path(default_cache_dir())
    cache.mkdir(parents=True, exist_ok=True)
    (scratch / cache.name).symlink_to(cache)


def _noise_arguments(recipe: Recipe, epoch: int) -> dict[str, Any] | None:
    noise = recipe.noise
    if not noise.enabled:
        return None
    return dict(schedule=noise.noise_schedule(recipe.run.train_iters, epoch), targets=noise.targets,
                exclude=noise.exclude, multipliers=noise.factors, seed=recipe.noise_seed)
