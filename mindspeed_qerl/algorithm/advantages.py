"""From rewards to advantages."""

import torch


def group_advantages(rewards: torch.Tensor, group_size: int) -> torch.Tensor:
    """(r - mean) / (std + 1e-6) within each group of answers to one prompt, std unbiased, in float64.

    Follows MindSpeed-RL trainer/utils/compute_utils.py:152 `compute_group_norm_advantage_return`. Rewards and result
    are [prompts * group_size], a prompt's answers side by side; a group whose rewards are all equal gets zeros.
    ValueError: group_size < 2, or the number of rewards is no multiple of it.

    >>> group_advantages(torch.tensor([1.0, 0.0, 1.0, 1.0]), group_size=2)
    tensor([ 0.7071, -0.7071,  0.0000,  0.0000])
    """
    if group_size < 2 or rewards.numel() % group_size:
        raise ValueError(f"{rewards.numel()} rewards cannot be grouped by {group_size}: groups need at least 2 equal "
                         "parts")
    groups = rewards.double().reshape(-1, group_size)
    normed = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-6)
    return normed.reshape(-1).float()
