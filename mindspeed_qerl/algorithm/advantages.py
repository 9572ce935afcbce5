"""From rewards to advantages."""

from typing import Literal

import torch


def group_advantages(rewards: torch.Tensor, group_size: int, estimator: Literal["group_norm", "rloo"] = "group_norm",
                     divide_by_std: bool = True) -> torch.Tensor:
    """How much better each answer is than those to the same prompt, computed in float64.

    group_norm: (r - mean) / (std + 1e-6), std unbiased (GRPO; MindSpeed-RL trainer/utils/compute_utils.py:152
    `compute_group_norm_advantage_return`); with divide_by_std=False r - mean (Dr. GRPO, arXiv 2503.20783).
    rloo: r - mean of the others' rewards (leave-one-out, arXiv 2402.14740).

    Args:
        rewards: [prompts * group_size], a prompt's answers side by side.

    Returns:
        float32 [prompts * group_size]; a group whose rewards are all equal gets zeros.

    Raises:
        ValueError: group_size < 2, or the number of rewards is no multiple of it.

    >>> rewards = torch.tensor([1.0, 0.0, 1.0, 1.0])
    >>> group_advantages(rewards, group_size=2)
    tensor([ 0.7071, -0.7071,  0.0000,  0.0000])
    >>> group_advantages(rewards, group_size=2, estimator="rloo")
    tensor([ 1., -1.,  0.,  0.])
    """
    if group_size < 2 or rewards.numel() % group_size:
        raise ValueError(f"{rewards.numel()} rewards cannot be grouped by {group_size}: "
                         "groups need at least 2 equal parts")
    groups = rewards.double().reshape(-1, group_size)
    above_mean = groups - groups.mean(1, keepdim=True)
    if estimator == "rloo":
        advantages = above_mean * (group_size / (group_size - 1))
    elif divide_by_std:
        advantages = above_mean / (groups.std(1, keepdim=True) + 1e-6)
    else:
        advantages = above_mean
    return advantages.reshape(-1).float()
