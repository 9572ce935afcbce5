"""Sigma that follows a target of what the noise does to the policy.

Plappert et al. (arXiv 1706.01905, section 3.1) scale the noise on a policy's parameters by the
distance that it makes from the clean policy, and let sigma grow or shrink by a factor of 1.01. Here
that distance is measured in each step (`mismatch/k3`) and grows as sigma^2 where the noise is small,
so that sigma can go where the target is.
"""

import logging
import math
from collections.abc import Mapping
from dataclasses import replace

from .schedule import NoiseLevel, NoiseSchedule

# Of the gap to the target, on a log scale, a step closes p / 4, where the distance grows as sigma^p:
# p is 2 in a smooth model, 1.4 where tokens change experts (docs/results.md).
GAIN = 0.25
MOST_CHANGE = 2.0  # of sigma in a step, since one step's estimate has heavy tails
FAR_BELOW = 0.1  # of what is wanted; there sigma grows by the logarithm of the gap

logger = logging.getLogger(__name__)


class NoiseController:
    """The noise of each step, by what that of the steps before did: a function of the schedule and
    of what metrics.jsonl has, so that a resumed run, which reads it again, goes on with the same
    bits.

        level = noise.level(step)                     # then apply, sample, train
        metrics |= noise.update(level, metrics)

    In its first stage, which is off, it sees what rounding, the rollout's format and other kernels
    do without noise. Of later steps that share is taken off, in proportion to
    `mismatch/sensitivity`, which falls as the policy becomes certain.

    Args:
        earlier: metrics of the steps before a run was resumed, by step.
    """

    def __init__(
        self, schedule: NoiseSchedule, earlier: Mapping[int, Mapping[str, float]] | None = None
    ):
        self.schedule = schedule
        self.sigma: float | None = None  # None until a step with noise was measured
        # over the steps without noise that were measured
        self.off_k3 = 0.0
        self.off_sensitivity = 0.0
        if not any(schedule.sigmas()):
            logger.warning(
                f"AQN never adds noise: with num_stages={schedule.num_stages} and "
                f"total_steps={schedule.total_steps} no step leaves stage 0, which is off"
            )
        for step, metrics in sorted((earlier or {}).items()):
            self.update(self.level(step), metrics)

    def level(self, step: int) -> NoiseLevel:
        """The noise of `step`, counted from 0."""
        level = self.schedule.level(step)
        if level.target is None or self.sigma is None:
            return level
        return replace(level, sigma=self.sigma)

    def update(self, level: NoiseLevel, metrics: Mapping[str, float]) -> dict[str, float]:
        """Takes what the noise of a step did, which the sigma of later steps follows; returns more
        metrics of the step.

        Args:
            level: the step's. metrics: of the step; without `mismatch/*`, where nothing was
                trained, sigma stays as it is.
        """
        schedule = self.schedule
        whole = metrics.get("mismatch/k3", math.nan)
        sensitivity = metrics.get("mismatch/sensitivity", math.nan)
        if schedule.schedule != "target" or not (math.isfinite(whole) and sensitivity > 0):
            return {}
        if level.target is None:
            self.off_k3 += whole
            self.off_sensitivity += sensitivity
            return {}
        if not (self.off_sensitivity or self.sigma):
            logger.warning(
                "AQN: none of the steps without noise had a signal, so that what rounding and the "
                "rollout's format do counts as noise, and sigma stays too small"
            )
        off = self.off_k3 / (self.off_sensitivity or 1.0) * sensitivity
        reached = whole - off  # below 0 by chance
        sigma = next_sigma(level.sigma, reached, level.target, off)
        self.sigma = min(max(sigma, schedule.sigma_min), schedule.sigma_max)
        return {"aqn/without_noise": off, "aqn/target_k3": level.target, "aqn/reached_k3": reached}


def next_sigma(sigma: float, reached: float, target: float, off: float = 0.0) -> float:
    """Sigma after a step whose noise made the k3 `reached`, beside `off` that is there without
    noise.

    What was seen of one step scatters in proportion to all of it, so the change is linear in it:
    then steps that saw too much and too little cancel, and the mean of `reached` is the target. (A
    logarithm would be below its mean, and a negative `reached`, half of all where `off` is large,
    is as good an estimate as any.) Where `off` hides the noise a step counts for less.

    >>> next_sigma(0.1, reached=0.16, target=0.01), next_sigma(0.1, reached=0.0, target=0.01)
    (0.05, 0.2)
    >>> round(next_sigma(0.1, reached=-0.01, target=0.01, off=0.05), 4)
    0.1226
    """
    wanted = target + off
    seen = (reached + off) / wanted
    gap = 1 - seen
    if seen < FAR_BELOW:
        gap = -math.log(max(seen, 1e-9))
    change = math.exp(min(GAIN * math.sqrt(wanted / target) * gap, math.log(MOST_CHANGE)))
    return sigma * max(change, 1 / MOST_CHANGE)
