"""The loss: what is trained, and what is logged about it. docs/algorithms.md has each option's
formula and paper.
"""

from dataclasses import dataclass

import torch

from mindspeed_qerl.algorithm.corrections import correction_weights
from mindspeed_qerl.algorithm.metrics import Mean, Metrics, entropy_metrics, kl_estimate, mismatch
from mindspeed_qerl.recipe.types import Algorithm, Correction


def token_logprobs(logits: torch.Tensor, tokens: torch.Tensor, temperature: float) -> torch.Tensor:
    """log p(tokens) under softmax(logits / temperature).

    Args:
        logits: [batch, length, vocab], where position t predicts tokens[:, t]. tokens: int64
            [batch, length].

    Returns:
        float32 [batch, length].
    """
    logits = logits.float() / temperature
    return logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1) - logits.logsumexp(-1)


def token_entropy(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Entropy of softmax(logits / temperature) over the whole vocabulary, in nats.

    Args:
        logits: [batch, length, vocab].

    Returns:
        float32 [batch, length].

    >>> token_entropy(torch.zeros(1, 1, 4), temperature=1.0).exp()
    tensor([[4.]])
    """
    logprobs = (logits.float() / temperature).log_softmax(-1)
    return -(logprobs.exp() * logprobs).sum(-1)


@dataclass(frozen=True)
class LossInputs:
    """One micro-batch. What stands outside the mask, even NaN or infinity, changes neither the loss
    nor its gradient.

    Attributes:
        logprobs: float [batch, length], of the policy that is trained, with its gradient.
        old_logprobs: [batch, length], of that policy before this iteration's first update.
        rollout_logprobs: [batch, length], of the policy that sampled.
        advantages: [batch], one per answer.
        mask: bool [batch, length], True on completion tokens; an answer without any is not trained.
        reference_logprobs: [batch, length], of the base model, or None where there is no KL term.
        entropy: [batch, length], of the trained policy's distribution, with its gradient where
            there is an entropy bonus; or None.
    """

    logprobs: torch.Tensor
    old_logprobs: torch.Tensor
    rollout_logprobs: torch.Tensor
    advantages: torch.Tensor
    mask: torch.Tensor
    reference_logprobs: torch.Tensor | None = None
    entropy: torch.Tensor | None = None


def denominator(mask: torch.Tensor, algorithm: Algorithm) -> torch.Tensor:
    """What the sum that `loss` returns is divided by, in the whole mini-batch, float64 []: add up
    those of its micro-batches.

    token-mean: its tokens (DAPO, arXiv 2503.14476). seq-mean-*: its answers that have tokens;
    seq-mean-token-sum-norm: those times loss_scale_factor (Dr. GRPO, arXiv 2503.20783).

    >>> mask = torch.tensor([[True, True], [True, False]])
    >>> denominator(mask, Algorithm(loss_agg_mode="token-mean"))
    tensor(3., dtype=torch.float64)
    """
    if algorithm.loss_agg_mode == "token-mean":
        return mask.sum().double()
    answers = mask.any(1).sum().double()
    if algorithm.loss_agg_mode == "seq-mean-token-sum-norm":
        assert algorithm.loss_scale_factor is not None, "the reader gives it its default"
        return answers * algorithm.loss_scale_factor
    return answers


def loss(
    inputs: LossInputs, algorithm: Algorithm, correction: Correction
) -> tuple[torch.Tensor, Metrics]:
    """The loss of one micro-batch as a sum, and its metrics: policy + loss_kl_coefficient KL -
    entropy_coefficient entropy.

    Divided by the `denominator` of the whole mini-batch it does not depend on how that is cut into
    micro-batches.
    """
    mask, count = inputs.mask, denominator(inputs.mask, algorithm)
    metrics = mismatch(inputs.rollout_logprobs, inputs.old_logprobs, mask)
    per_token, clipped_low, clipped_high = policy_loss(inputs, algorithm)
    if correction.method != "none":
        weights, weight_metrics = correction_weights(
            inputs.old_logprobs, inputs.rollout_logprobs, mask, correction
        )
        per_token = per_token * weights
        metrics |= weight_metrics

    def total_of(values: torch.Tensor) -> torch.Tensor:
        values = _inside(mask, values)
        if algorithm.loss_agg_mode == "seq-mean-token-mean":
            values = values / mask.sum(1, keepdim=True).clamp(min=1)
        return values.sum()

    def mean(values: torch.Tensor) -> Mean:
        return Mean(values.detach().double(), count)

    total = policy = total_of(per_token)
    metrics["loss/policy"], metrics["loss/kl"] = mean(policy), Mean(0.0, count)
    if algorithm.loss_has_kl:
        logprobs = _inside(mask, inputs.logprobs)
        reference = _inside(mask, inputs.reference_logprobs)
        kl = total_of(kl_estimate(logprobs, reference, algorithm.kl_penalty))
        metrics["loss/kl"] = mean(kl)
        if algorithm.loss_kl_coefficient:
            total = total + algorithm.loss_kl_coefficient * kl
    if algorithm.entropy_coefficient:
        entropy = total_of(inputs.entropy)
        total = total - algorithm.entropy_coefficient * entropy
        metrics["loss/entropy"] = mean(entropy)
    if inputs.entropy is not None:
        metrics |= entropy_metrics(inputs.entropy, mask)
    clipped = {"": clipped_low | clipped_high, "_low": clipped_low, "_high": clipped_high}
    for side, tokens in clipped.items():
        metrics[f"clip_fraction{side}"] = Mean((mask & tokens).sum(), mask.sum())
    metrics["loss/total"] = mean(total)
    return total, metrics


def policy_loss(
    inputs: LossInputs, algorithm: Algorithm
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The policy's part of the loss by `algorithm.loss_mode`.

    vanilla: PPO's clipped loss of each token's ratio p_new / p_old (arXiv 1707.06347), with one
        bound below and one above (DAPO) and, where the advantage is negative, one on the loss
        itself (clip_ratio_c: dual clip, arXiv 1912.09729).
    gspo: the same of each answer's ratio, the geometric mean of its tokens' (arXiv 2507.18071); its
        value is the answer's, its gradient each token's share (verl's GSPO-token).
    cispo: -clip(ratio) A log p, where the clipped ratio has no gradient (arXiv 2506.13585): every
        token is trained.

    Returns:
        (loss, whether clipping from below acted, whether from above), each [batch, length].
    """
    low, high, advantages = algorithm.clip_low, algorithm.clip_high, inputs.advantages.unsqueeze(1)
    logprobs = _inside(inputs.mask, inputs.logprobs)
    log_ratio = _inside(inputs.mask, inputs.logprobs - inputs.old_logprobs)
    if algorithm.loss_mode == "cispo":
        ratio = log_ratio.detach().exp()
        return (
            -ratio.clamp(1 - low, 1 + high) * advantages * logprobs,
            ratio < 1 - low,
            ratio > 1 + high,
        )
    if algorithm.loss_mode == "gspo":
        of_answer = log_ratio.sum(1, keepdim=True) / inputs.mask.sum(1, keepdim=True).clamp(min=1)
        log_ratio = logprobs - logprobs.detach() + of_answer.detach()
    ratio = log_ratio.exp()
    unclipped, clipped = -advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high)
    per_token = torch.maximum(unclipped, clipped)
    if algorithm.clip_ratio_c is not None:
        dual_clipped = torch.minimum(per_token, -advantages * algorithm.clip_ratio_c)
        per_token = torch.where(advantages < 0, dual_clipped, per_token)
    is_clipped = clipped > unclipped
    return per_token, is_clipped & (advantages < 0), is_clipped & (advantages > 0)


def _inside(mask: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """`values` inside the mask, 0 outside. A product with the mask would keep NaN, and infinity
    would become it; so would the gradient of whatever overflows outside, which is why arguments of
    exp() pass through here first.
    """
    return torch.where(mask, values, 0.0)
