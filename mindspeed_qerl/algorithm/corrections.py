"""Weights for tokens that were sampled by another policy than the one that is trained."""

import torch


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
