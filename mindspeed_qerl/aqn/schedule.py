"""How much noise at which step: QeRL's stages (arXiv 2510.11696; code NVlabs/QeRL
trl_trainer/noise_scheduler.py), of sigma or of a target that sigma follows (target.py).
"""

import math
from dataclasses import dataclass, replace
from typing import Literal, get_args

Kind = Literal["exponential", "linear", "cosine", "constant", "target"]
KINDS: tuple[str, ...] = get_args(Kind)
Draws = Literal["step", "group", "answer"]  # who has a draw of the noise of its own
DRAWS: tuple[str, ...] = get_args(Draws)
# Measured by configured noise, root mean square over a run. Wide enough for chance, since one norm
# of 128 weights at one step gives 1 +- 1 / sqrt(2 * 128) = 1 +- 0.06; and for rounding, since
# weights of 1 in bfloat16 show 0.85 to 1.10 of any sigma above 1.5e-3. Narrow enough for noise of
# the next stage (0.56 in QeRL's schedule) or twice (1.41).
LEAST_NOISE = 0.8
MOST_NOISE = 1.25


@dataclass(frozen=True)
class NoiseLevel:
    """The noise of one step, counted from 0: its stage; sigma; the k3 that it is to make, nats per
    token, None where it has no target.
    """

    step: int
    stage: int
    sigma: float
    target: float | None = None


def draw_numbers(
    draws: str, prompts: int, n: int, first: int = 0, repeats: bool = False
) -> list[int]:
    """Returns the draw, counted from 1, of each of `prompts` x n answers, those to one prompt side
    by side.

    Args:
        draws: "group" or "answer". first: answers of this step that were sampled before.
        repeats: whether two answers in turn have one draw, so that what draws explain shows.

    >>> draw_numbers("answer", 2, 2), draw_numbers("group", 2, 2)
    ([1, 2, 3, 4], [1, 1, 3, 3])
    >>> draw_numbers("answer", 1, 4, first=8, repeats=True)
    [9, 9, 11, 11]
    """
    together = {"group": n, "answer": 2 if repeats else 1}[draws]
    return [1 + first + answer - answer % together for answer in range(prompts * n)]


@dataclass(frozen=True, kw_only=True)
class NoiseSchedule:
    """Noise level sigma by training step, constant within each of K = `num_stages` equal stages.

    Stage 0 is always off. Stages 1..K-1 go from `sigma_start` to `sigma_end`; with f =
    (stage-1)/(K-2) in [0, 1]:

    - exponential: sigma_start * (sigma_end / sigma_start)**f  (QeRL's)
    - linear:      sigma_start + (sigma_end - sigma_start) * f
    - cosine:      sigma_end + (sigma_start - sigma_end) * (1 + cos(pi f)) / 2
    - constant:    sigma_start; sigma_end is not used
    - target:      sigma_start until a step was measured, then what makes the target; sigma_end is
      not used. The target goes from target_start to target_end as `exponential` does.

    K=2 has one noisy stage, at sigma_start (QeRL's code gives NaN there). K=1 has only the stage
    that is off: no noise at all.

    Args:
        schedule: one of `KINDS`.
        sigma_start, sigma_end: standard deviations, in units of the norm weight. A start below the
            end is a rising schedule.
        num_stages: K, the stage that is off included.
        total_steps: T, the training steps of the run. If T < K some stages are skipped, never the
            first.
        target_start, target_end: of `mismatch/k3`, nats per token above 0.
        sigma_min, sigma_max: bounds of the sigma that follows the target.

    Raises:
        ValueError: a field is out of its range; the message names the field, its value and the
            rule.
    """

    schedule: str = "exponential"
    sigma_start: float = 0.05
    sigma_end: float = 0.0005
    num_stages: int = 10
    total_steps: int
    target_start: float = 0.01
    target_end: float = 0.001
    sigma_min: float = 1e-4
    sigma_max: float = 1.0

    def __post_init__(self):
        if self.schedule not in KINDS:
            raise ValueError(f"unknown noise schedule {self.schedule!r}; known: {', '.join(KINDS)}")
        counts = (self.num_stages, self.total_steps)
        if not all(isinstance(count, int) and count > 0 for count in counts):
            raise ValueError(
                f"num_stages = {self.num_stages!r} and total_steps = {self.total_steps!r} must be "
                "integers >= 1"
            )
        if not (0 < self.sigma_start < math.inf and 0 <= self.sigma_end < math.inf):
            raise ValueError(
                f"sigma_start = {self.sigma_start!r} must be above 0, sigma_end = "
                f"{self.sigma_end!r} at least 0, both finite; to run without noise, use aqn=off"
            )
        if self.schedule == "exponential" and self.sigma_end == 0:
            raise ValueError(
                "an exponential schedule never reaches sigma_end = 0; use a small number, or "
                "schedule 'linear'"
            )
        if self.schedule != "target":
            return
        for name in ("target_start", "target_end"):
            target = getattr(self, name)
            if not 0 < target < math.inf:
                raise ValueError(
                    f"{name} = {target!r} of k3 must be above 0 and finite (0.01, say); to run "
                    "without noise, use aqn=off"
                )
        if not 0 < self.sigma_min <= self.sigma_start <= self.sigma_max < math.inf:
            raise ValueError(
                f"sigma_start = {self.sigma_start!r} must lie between sigma_min = "
                f"{self.sigma_min!r}, which is above 0, and sigma_max = {self.sigma_max!r}"
            )

    def stage(self, step: int) -> int:
        """Stage of `step`, 0..K-1: floor(step / (T/K)), in integers. As in QeRL, steps from T on
        stay in the last stage.

        QeRL divides by the rounded float T/K and so enters a few stages one step late, e.g. stage 5
        of T=22, K=10 at step 12.
        """
        if step < 0:
            raise ValueError(f"step must be >= 0, not {step}")
        return min(step * self.num_stages // self.total_steps, self.num_stages - 1)

    def sigma(self, step: int) -> float:
        """Standard deviation of the noise at `step`; 0.0 in stage 0."""
        return self.level(step).sigma

    def level(self, step: int) -> NoiseLevel:
        """The noise of `step`, whatever the steps before have shown."""
        stage = self.stage(step)
        if stage == 0:
            return NoiseLevel(step, stage, 0.0)
        # of the way from start to end
        fraction = (stage - 1) / (self.num_stages - 2) if self.num_stages > 2 else 0.0
        start = self.sigma_start
        end = self.sigma_end
        sigma = start
        target = None
        if self.schedule == "exponential":
            sigma = start * (end / start) ** fraction
        elif self.schedule == "linear":
            sigma = start + (end - start) * fraction
        elif self.schedule == "cosine":
            sigma = end + (start - end) * (1 + math.cos(math.pi * fraction)) / 2
        elif self.schedule == "target":
            target = self.target_start * (self.target_end / self.target_start) ** fraction
        return NoiseLevel(step, stage, sigma, target)

    def sigmas(self) -> list[float]:
        """`sigma` of every step of the run."""
        return list(map(self.sigma, range(self.total_steps)))


def skipped_strongest_noise(schedule: NoiseSchedule) -> str | None:
    """Returns what to warn about a run too short to reach its schedule's strongest noise; None if
    it does.

    Falling noise is strongest in stage 1, which has a step if T > K/2; rising noise in stage K-1,
    which has one if T >= K.

    >>> skipped_strongest_noise(NoiseSchedule(total_steps=6)) is None
    True
    >>> skipped_strongest_noise(NoiseSchedule(total_steps=5))[:60]
    'the strongest noise of the schedule, sigma 0.05, is in none '
    """
    one_step_a_stage = replace(schedule, total_steps=schedule.num_stages)
    strongest = max(one_step_a_stage.sigmas())
    reached = max(schedule.sigmas())
    if reached == strongest:
        return None
    return (
        f"the strongest noise of the schedule, sigma {strongest:.3g}, is in none of the run's "
        f"{schedule.total_steps} steps, which have at most {reached:.3g}. Train more steps, or take "
        "fewer stages (aqn.num_stages)"
    )
