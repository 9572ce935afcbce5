"""The Recipe's parts that say what a rollout has besides the policy: noise, another number format,
errors of other hardware, and the weights that correct for it.
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any, Literal, get_args

from pydantic import Field

from mindspeed_qerl.aqn.schedule import Draws, Kind, NoiseLevel, NoiseSchedule, draw_numbers

from .fields import AS_KINDS, Float, Names, Share, Size, part

# local/hardware_error.py has the formulas
HardwareErrorKind = Literal["gaussian", "bf16_blocks"]
# quantization/formats.py has the numerics
RolloutFormat = Literal["none", "int8_w8a8", "fp8", "mxfp8", "mxfp4", "nvfp4"]
HARDWARE_ERRORS = get_args(HardwareErrorKind)
ROLLOUT_FORMATS = get_args(RolloutFormat)
Kinds = Annotated[tuple[HardwareErrorKind, ...], AS_KINDS]
# (floor, cap) of p_trained / p_sampled by method: verl's, but for geometric_mask, whose 0.999 to
# 1.001 noise leaves at once
OWN_BOUNDS = {
    "none": (0.0, 2.0),
    "token_tis": (0.0, 2.0),
    "sequence_tis": (0.0, 2.0),
    "sequence_mask": (0.5, 2.0),
    "icepop": (0.5, 5.0),
    "geometric_mask": (0.99, 1.01),
}
MAX_STEPS = 1_000_000  # more are a typing error, and take minutes


@part("aqn")
class Noise:
    """AQN: noise on the RMSNorm weights of the rollout model (docs/aqn.md)."""

    enabled: bool = False
    schedule: Kind = "exponential"
    sigma_start: Float = 0.05
    sigma_end: Float = 0.0005
    num_stages: int = Field(10, le=MAX_STEPS)
    targets: Any = "auto"
    exclude: Names = ()
    # schedule "target": what the noise does to the policy, and the sigma that it takes
    target_start: Float = 0.01
    target_end: Float = 0.001
    sigma_min: Float = 1e-4
    sigma_max: Float = 1.0
    # of sigma, by layer or target: {"0-11": 2.0, "post_attention@12": 0}
    multipliers: Mapping[Any, Any] | None = None
    seed: int | None = None  # None: the run's
    draws: Draws = "step"
    # draws "answer": steps from one in which two answers have one draw to the next; 0: none
    repeat_every: int = Field(10, ge=0, le=MAX_STEPS)

    def repeats(self, level: NoiseLevel | None) -> bool:
        """Returns True in a step in which two answers to a prompt have one draw."""
        if not (level and level.sigma and self.repeat_every) or self.draws != "answer":
            return False
        return (level.step + 1) % self.repeat_every == 0

    def draws_of(self, level: NoiseLevel | None, prompts: int, n: int, first: int) -> list[int]:
        """Returns the draw of each of a step's answers (`draw_numbers`); none where all have one."""
        if not (level and level.sigma) or self.draws == "step":
            return []
        return draw_numbers(self.draws, prompts, n, first, self.repeats(level))

    def noise_schedule(self, total_steps: int) -> NoiseSchedule:
        """The schedule over a run of `total_steps`; ValueError if a value is out of range."""
        values = vars(self)
        own = {
            each.name: values[each.name] for each in fields(NoiseSchedule) if each.name in values
        }
        return NoiseSchedule(total_steps=total_steps, **own)


@part("rollout_correction")
class Correction:
    """Importance weights for answers that another policy sampled (algorithm/losses.py)."""

    method: Literal[
        "none", "token_tis", "sequence_tis", "sequence_mask", "icepop", "geometric_mask"
    ] = "none"
    # left out, the method's own; a cap below 1 would make the policy's own answers count for less
    cap: Float = Field(default_factory=lambda own: OWN_BOUNDS[own["method"]][1], ge=1)
    floor: Share = Field(default_factory=lambda own: OWN_BOUNDS[own["method"]][0])
    # effective sample size of tokens that is warned of, with AQN on
    warn_below: Share = 0.5


@part("rollout_quantization")
class Quantization:
    """Describes what the linear layers of the rollout model are rounded to (docs/quantization.md);
    training is not.
    """

    format: RolloutFormat = "none"
    evaluation: bool = False  # of what samples the rollouts; false: of the policy that is trained

    @property
    def enabled(self) -> bool:
        return self.format != "none"


@part("hardware_error")
class HardwareError:
    """Which side of a run on the local engine computes as other hardware would, and how
    (docs/quantization.md).
    """

    rollout: Kinds = ()
    training: Kinds = ()
    evaluation: Kinds = ()
    gaussian_std: Float = Field(0.05, gt=0, lt=1)  # relative error of each element
    block: Size = 64  # length of the blocks that are summed

    def arguments(self, side: str) -> dict[str, Any] | None:
        """For `HardwareErrorMode`; None if this side, "rollout", "training" or "evaluation",
        computes as it is.
        """
        kinds = getattr(self, side)
        if not kinds:
            return None
        return {"kinds": kinds, "gaussian_std": self.gaussian_std, "block": self.block}
