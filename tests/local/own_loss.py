"""A loss by import path, as a user writes one."""

from mindspeed_qerl.algorithm.losses import LossInputs
from mindspeed_qerl.recipe.types import Algorithm


def truncated(inputs: LossInputs, algorithm: Algorithm):
    """REINFORCE with a truncated ratio."""
    ratio = (inputs.logprobs - inputs.old_logprobs).detach().exp()
    weight = ratio.clamp(max=1 + algorithm.clip_high)
    return -weight * inputs.advantages.unsqueeze(1) * inputs.logprobs, {"ratio": ratio}
