"""The noise of a run: its owner, and what of it a model's norms in bfloat16 cannot hold."""

from collections.abc import Iterable

from mindspeed_qerl.aqn.target import NoiseController
from mindspeed_qerl.recipe.types import Recipe
from mindspeed_qerl.runs.metrics import MetricsRow

LEAST_SIGMA = 8.7e-4  # of which bfloat16 keeps half on norms of 1; measured


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
    """Returns a warning of the steps of which bfloat16 keeps less than half, on norms of 1
    (`NoiseInjector` measures it on the model's); nothing where sigma follows a target, which makes
    up for the loss.
    """
    noise = recipe.noise
    if not noise.enabled or noise.schedule == "target" or recipe.model.dtype != "bfloat16":
        return []
    sigmas = noise.noise_schedule(recipe.run.train_iters).sigmas()
    lost = [step for step, sigma in enumerate(sigmas) if 0 < sigma < LEAST_SIGMA]
    if not lost:
        return []
    warning = (
        f"aqn: bfloat16 rounds more than half of a sigma below {LEAST_SIGMA:g} away on norms of 1: "
        f"{len(lost)} of {len(sigmas)} steps have less, from step {lost[0]}. Raise aqn.sigma_end, "
        "or take aqn=target, which makes up for the loss (docs/aqn.md)"
    )
    return [warning]
