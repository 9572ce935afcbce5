"""The loss: what is trained, and what is logged about it."""

from dataclasses import dataclass

import torch

from mindspeed_qerl.algorithm.metrics import Mean, Metric, low_variance_kl, mismatch
from mindspeed_qerl.recipe.types import Algorithm, Correction


def token_logprobs(logits: torch.Tensor, tokens: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """log p(tokens) under softmax(logits / temperature), float32 [batch, length]. In logits [batch, length, vocab]
    position t predicts tokens[:, t], int64 [batch, length]."""
    logits = logits.float() / temperature
    return logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1) - logits.logsumexp(-1)


@dataclass(frozen=True)
class LossInputs:
    """One micro-batch, [batch, length]. What stands outside the mask, even NaN or infinity, changes neither the loss
    nor its gradient."""

    logprobs: torch.Tensor  # of the policy that is trained, with its gradient
    old_logprobs: torch.Tensor  # of that policy before this iteration's first update
    rollout_logprobs: torch.Tensor  # of the policy that sampled
    advantages: torch.Tensor  # [batch], one per answer
    mask: torch.Tensor  # bool, True on completion tokens
    reference_logprobs: torch.Tensor | None = None  # of the base model; None where there is no KL term


def loss(inputs: LossInputs, algorithm: Algorithm, correction: Correction) -> tuple[torch.Tensor, dict[str, Metric]]:
    """The loss of one micro-batch as a *sum* over its tokens, and its metrics.

    Divided by the number of tokens of the whole mini-batch it is DAPO's token-level loss (arXiv 2503.14476):
    policy + kl_coefficient KL. Whoever calls `backward` logs what it really gets as loss/total.
    """
    tokens = int(inputs.mask.sum())
    ratio = _inside(inputs.mask, inputs.logprobs - inputs.old_logprobs).exp()
    advantages = inputs.advantages.unsqueeze(1)
    per_token, is_clipped = clipped_loss(ratio, advantages, algorithm.clip_low, algorithm.clip_high)
    sampled, trained = inputs.rollout_logprobs[inputs.mask], inputs.old_logprobs[inputs.mask]
    metrics = mismatch(sampled, trained)
    if cap := correction.active_cap:
        per_token = per_token * truncated_weights(inputs.old_logprobs, inputs.rollout_logprobs, cap)
        above = (trained.double() - sampled.double()).exp() > cap
        metrics["rollout_correction/truncated_fraction"] = Mean(above.sum().item(), tokens)
    policy = _inside(inputs.mask, per_token).sum()
    total, kl = policy, 0.0
    if algorithm.kl_coefficient:
        logprobs, reference = (_inside(inputs.mask, values) for values in (inputs.logprobs, inputs.reference_logprobs))
        kl_sum = low_variance_kl(logprobs, reference).sum()
        total, kl = policy + algorithm.kl_coefficient * kl_sum, kl_sum.item()
    clipped = _inside(inputs.mask, is_clipped).sum().item()
    return total, {"loss/policy": Mean(policy.item(), tokens), "loss/kl": Mean(kl, tokens),
                   "clip_fraction": Mean(clipped, tokens), **metrics}


def clipped_loss(ratio: torch.Tensor, advantages: torch.Tensor, clip_low: float,
                 clip_high: float) -> tuple[torch.Tensor, torch.Tensor]:
    """PPO's clipped policy loss per token (arXiv 1707.06347), with one bound below and one above (DAPO).

    ratio: p_new / p_old of each token, clipped to [1 - clip_low, 1 + clip_high]. advantages: of a shape that fits.
    Returns the loss, of `ratio`'s shape, and where the clipping took the gradient away, bool.

    >>> clipped_loss(torch.tensor([1.5, 0.5]), torch.tensor([1.0, 1.0]), clip_low=0.2, clip_high=0.28)
    (tensor([-1.2800, -0.5000]), tensor([ True, False]))
    """
    unclipped, clipped = -advantages * ratio, -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    return torch.maximum(unclipped, clipped), clipped > unclipped


def truncated_weights(old_logprobs: torch.Tensor, rollout_logprobs: torch.Tensor, cap: float) -> torch.Tensor:
    """Token-level truncated importance sampling: min(p_trained / p_sampled, cap) for each sampled token, without a
    gradient.

    These weights undo in expectation, token by token, that another policy sampled than is trained (noise, other
    kernels, other hardware), as far as `cap` lets them ("TIS", Yao et al. 2025, fengyao.notion.site/off-policy-rl;
    verl's rollout_correction, level token). The bias that comes from tokens sampled before stays. old_logprobs are of
    the policy that is trained, before this update; rollout_logprobs, of the same shape, of the one that sampled.

    >>> truncated_weights(torch.tensor([0.5, 0.5]).log(), torch.tensor([0.4, 0.1]).log(), cap=2.0)
    tensor([1.2500, 2.0000])
    """
    return (old_logprobs.detach() - rollout_logprobs).exp().clamp(max=cap)


def _inside(mask: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """`values` inside the mask, 0 outside. A product with the mask would keep NaN, and infinity would become it; so
    would the gradient of whatever overflows outside, which is why arguments of exp() pass through here first."""
    return torch.where(mask, values, torch.zeros((), dtype=values.dtype, device=values.device))
