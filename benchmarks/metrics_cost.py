"""What the metrics of the loss cost: the update of our local engine with them and without, in one
run.

    python benchmarks/step.py --metrics                    both sizes of the step benchmark, 8 pairs
    python benchmarks/step.py --metrics --size large --pairs 4

Two ranks (expert parallel 2, one thread each) update on the same batch again and again, in turn
with all metrics and with the loss alone: no entropy, no mismatch, no effective sample size, no clip
fractions, nothing but what is backpropagated. Which comes first changes from pair to pair. Of each
pair the ratio is taken, of all pairs the median, of seconds and of the seconds that the processors
were busy with it, which others on the machine disturb less. A third update of each pair has a clock
around the functions that differ: what they take beyond the loss alone, by all that the update
takes, which nothing beside them disturbs. A step has sampling, too (`benchmarks/step.py`): of that
it is less.
"""

import contextlib
import os
import statistics
import time
from pathlib import Path
from unittest import mock


def batch_of(setting):
    """A batch of the setting's size: answers that a uniform policy might have sampled."""
    import numpy as np

    from mindspeed_qerl.local.batch import build_batch

    rng = np.random.default_rng(1)
    prompts = [rng.integers(3, 60, 48).tolist() for _ in range(setting.answers)]
    answers = [rng.integers(3, 60, setting.tokens).tolist() for _ in range(setting.answers)]
    logprobs = [(-4 - rng.random(setting.tokens)).tolist() for _ in range(setting.answers)]
    return build_batch(prompts, answers, logprobs, rng.normal(size=setting.answers))


def loss_alone(inputs, algorithm, correction):
    """`losses.loss` of the setting's algorithm without a metric."""
    import torch

    from mindspeed_qerl.algorithm.losses import policy_loss

    inputs = inputs.without_padding()
    per_token, _ = policy_loss(algorithm.loss_mode)(inputs, algorithm)
    return torch.where(inputs.mask, per_token, 0.0).sum(), {}


class Clock:
    """Processor seconds in the functions that make metrics: `spent`, those of the loss alone taken
    off; `added` are those that the clock itself costs.
    """

    def __init__(self, module):
        self.module, self.loss, self.entropy = module, module.loss, module.token_entropy
        self.spent = self.added = 0.0

    def timed_loss(self, *arguments):
        started = time.process_time()
        result = self.loss(*arguments)
        middle = time.process_time()
        loss_alone(*arguments)
        ended = time.process_time()
        self.spent += (middle - started) - (ended - middle)
        self.added += ended - middle
        return result

    def timed_entropy(self, *arguments):
        started = time.process_time()
        entropy = self.entropy(*arguments)
        self.spent += time.process_time() - started
        return entropy


def measure_rank(rank: int, recipe, setting, pairs: int, folder: str) -> None:
    """In a process of its own; rank 0 writes `measure_cost`'s result."""
    import torch
    import torch.distributed as dist

    from mindspeed_qerl.families import read_shape
    from mindspeed_qerl.local import passes as module
    from mindspeed_qerl.local.batch import deal
    from mindspeed_qerl.local.rank import TrainRank

    torch.set_num_threads(1)
    trainer = TrainRank(recipe, read_shape(recipe.model.path), rank, f"file://{folder}/rendezvous")
    batch = batch_of(setting)
    [rows] = deal(batch.lengths, len(batch), recipe.layout.dp)[rank]
    shards = [batch.rows(rows)]

    def update(**changed) -> tuple[float, float]:
        with mock.patch.multiple(module, **changed) if changed else contextlib.nullcontext():
            dist.barrier()
            started, busy = time.perf_counter(), time.process_time()
            metrics = trainer.train(shards)
            seconds, busy = time.perf_counter() - started, torch.tensor(time.process_time() - busy)
        assert ("entropy/mean" in metrics) == (changed != alone)
        dist.all_reduce(busy)
        return seconds, busy.item()

    alone = {"loss": loss_alone, "token_entropy": lambda *_: None}
    update(), update(**alone)
    measured = []
    for pair in range(pairs):
        first, second = (
            update(**changed) for changed in (({}, alone) if pair % 2 else (alone, {}))
        )
        clock = Clock(module)
        _, busy = update(loss=clock.timed_loss, token_entropy=clock.timed_entropy)
        own = torch.tensor([clock.spent, clock.added])
        dist.all_reduce(own)
        measured.append(
            (*((first, second) if pair % 2 else (second, first)), (own[0] / (busy - own[1])).item())
        )
    if rank == 0:
        torch.save(measured, f"{folder}/measured.pt")


def report(setting, parameters: int, measured: list, console) -> None:
    from rich.table import Table

    table = Table(
        "an update",
        "with metrics",
        "without",
        "with / without",
        "lowest - highest",
        title=f"{parameters / 1e6:.1f}M parameters, {setting.answers} answers of {setting.tokens} "
        "tokens",
        caption=f"medians of {len(measured)} pairs; load average {os.getloadavg()[0]:.1f}",
    )
    for column, name in enumerate(("seconds", "processor seconds")):
        both = [(one[column], other[column]) for one, other, _ in measured]
        ratios = [one / other for one, other in both]
        table.add_row(
            name,
            *(f"{statistics.median(side):.3f}" for side in zip(*both)),
            f"{statistics.median(ratios):.3f}",
            f"{min(ratios):.3f} - {max(ratios):.3f}",
        )
    shares = [share for *_, share in measured]
    table.add_row(
        "in metrics, of it",
        "",
        "",
        f"{statistics.median(shares):.2%}",
        f"{min(shares):.2%} - {max(shares):.2%}",
    )
    console.print(table)


def measure_cost(setting, overrides: list[str], pairs: int, work: Path) -> list:
    """[(with, without, share)]: (seconds, processor seconds of all ranks) of an update with metrics
    and without, and the share of an update that its metrics take. overrides: of the quickstart's
    config.
    """
    import torch
    import torch.multiprocessing as mp

    from mindspeed_qerl.recipe.compose import compose
    from mindspeed_qerl.recipe.reader import read_recipe

    recipe = read_recipe(compose("grpo_tiny_moe_cpu", overrides))
    os.environ["OMP_NUM_THREADS"] = "1"
    mp.spawn(measure_rank, (recipe, setting, pairs, str(work)), recipe.layout.world)
    return torch.load(work / "measured.pt")
