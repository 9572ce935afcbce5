"""The mathematics of GRPO (DeepSeekMath, arXiv 2402.03300) as pure functions on tensors.

What is deliberately absent: a value model, entropy bonus, reward shaping.
"""

from dataclasses import dataclass

import torch


def group_advantages(rewards: torch.Tensor, group_size: int) -> torch.Tensor:
    """(r - mean) / (std + 1e-6) within each group of answers to one prompt, std unbiased, in float64.

    Follows MindSpeed-RL trainer/utils/compute_utils.py:152 `compute_group_norm_advantage_return`.

    Args:
        rewards: [prompts * group_size], a prompt's answers side by side.

    Returns:
        float32 [prompts * group_size]; a group whose rewards are all equal gets zeros.

    Raises:
        ValueError: group_size < 2, or the number of rewards is no multiple of it.
    """
    if group_size < 2 or rewards.numel() % group_size:
        raise ValueError(f"{rewards.numel()} rewards cannot be grouped by {group_size}: groups need at least 2 equal parts")
    groups = rewards.double().reshape(-1, group_size)
    normed = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-6)
    return normed.reshape(-1).float()


def token_logprobs(logits: torch.Tensor, tokens: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """log p(tokens) under softmax(logits / temperature).

    Args:
        logits: [batch, length, vocab], where position t predicts tokens[:, t]. tokens: int64 [batch, length].

    Returns:
        float32 [batch, length].
    """
    logits = logits.float() / temperature
    return logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1) - logits.logsumexp(-1)


def low_variance_kl(logprobs: torch.Tensor, reference_logprobs: torch.Tensor) -> torch.Tensor:
    """Schulman's k3 estimator of KL(policy || reference) per token: exp(d) - 1 - d with d = ref - policy; never negative."""
    difference = reference_logprobs - logprobs
    return difference.exp() - 1 - difference


def truncated_weights(old_logprobs: torch.Tensor, rollout_logprobs: torch.Tensor, cap: float) -> torch.Tensor:
    """Token-level truncated importance sampling: min(p_trained / p_sampled, cap) for each sampled token.

    The answers were sampled by another policy than the one that is trained (noise, other kernels, other hardware); these weights undo that in
    expectation, token by token, as far as `cap` lets them ("TIS", Yao et al. 2025, fengyao.notion.site/off-policy-rl; verl's
    rollout_correction, level token). The part of the bias that comes from tokens sampled before stays.

    Args:
        old_logprobs, rollout_logprobs: of the policy that is trained, before this update, and of the one that sampled; of equal shape.
        cap: largest weight.

    Returns:
        weights of that shape, without a gradient.
    """
    return (old_logprobs.detach() - rollout_logprobs).exp().clamp(max=cap)


@dataclass(frozen=True)
class LossTerms:
    """Sums over the valid tokens of one micro-batch; divide by the token count of the whole mini-batch for means."""

    policy: torch.Tensor
    kl: torch.Tensor
    clipped_tokens: torch.Tensor


def grpo_loss(logprobs: torch.Tensor, old_logprobs: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor,
              clip_low: float, clip_high: float, reference_logprobs: torch.Tensor | None = None,
              weights: torch.Tensor | None = None) -> LossTerms:
    """Clipped policy-gradient loss, summed over tokens (DAPO's token-level loss, arXiv 2503.14476, once divided by their number).

    Args:
        logprobs, old_logprobs: [batch, length]; old_logprobs carries no gradient.
        advantages: [batch], one per answer.
        mask: [batch, length], 1 on completion tokens.
        clip_low, clip_high: the ratio is clipped to [1 - clip_low, 1 + clip_high].
        reference_logprobs: [batch, length] of the base model, or None for no KL term.
        weights: [batch, length] of the tokens in the policy term (`truncated_weights`), or None for 1.
    """
    mask = mask.float()
    ratio = (logprobs - old_logprobs).exp()
    advantages = advantages.unsqueeze(1)
    unclipped, clipped = -advantages * ratio, -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    kl = low_variance_kl(logprobs, reference_logprobs) if reference_logprobs is not None else torch.zeros_like(logprobs)
    return LossTerms(
        policy=(torch.maximum(unclipped, clipped) * (mask if weights is None else mask * weights)).sum(),
        kl=(kl * mask).sum(),
        clipped_tokens=((clipped > unclipped) * mask).sum(),
    )
