"""The noise of a run: its owner, and what of it a model's norms in bfloat16 cannot hold."""

from collections.abc import Iterable
from itertools import groupby

from mindspeed_qerl.aqn.target import NoiseController
from mindspeed_qerl.recipe.types import Recipe
from mindspeed_qerl.runs.metrics import MetricsRow

LEAST_KEPT = 0.5  # of the noise


def controller_of(recipe: Recipe, earlier: Iterable[MetricsRow]) -> NoiseController | None:
    """Returns what the loop of an engine asks for the noise of each step; None: a run without.

    Args:
        earlier: metrics of the steps before the run was resumed.
    """
    if not recipe.noise.enabled:
        return None
    schedule = recipe.noise.noise_schedule(recipe.run.train_iters)
    return NoiseController(schedule, {int(row["step"]) - 1: row for row in earlier})


def lost_noise(recipe: Recipe) -> list[str]:
    """Returns a warning that names the stages of which bfloat16 keeps less than half, on norms of 1
    (`NoiseInjector` measures it on the model's); nothing where sigma follows a target, which makes
    up for the loss.
    """
    noise = recipe.noise
    steps = recipe.run.train_iters
    if not noise.enabled or noise.schedule == "target" or recipe.model.dtype != "bfloat16":
        return []
    from mindspeed_qerl.aqn.injector import kept_in_bfloat16  # torch: seconds

    schedule = noise.noise_schedule(steps)
    stages = []
    for stage, group in groupby(range(steps), schedule.stage):
        first = next(group)
        sigma = schedule.sigma(first)
        if not sigma or (kept := kept_in_bfloat16(sigma)) >= LEAST_KEPT:
            continue
        stages.append(f"stage {stage} from step {first} (sigma {sigma:.2g}, {kept:.0%} left)")
    if not stages:
        return []
    warning = (
        "aqn: bfloat16 rounds more than half of the noise away on norms of 1 in "
        f"{', '.join(stages)}. Raise aqn.sigma_end above the largest sigma of these, or take "
        "aqn=target, which makes up for the loss (docs/aqn.md)"
    )
    return [warning]
