"""From rewards to advantages."""

import numpy as np
import torch
from torch import Tensor

from mindspeed_qerl.recipe.types import Algorithm, Selection

from .metrics import kl_estimate


def overlong_penalty(lengths: np.ndarray, selection: Selection) -> np.ndarray:
    """Returns what is added to the reward of an answer that nears `rollout_max_tokens`: 0 up to
    `overlong_buffer` tokens before it, from there linearly down to -overlong_buffer_penalty_factor
    (DAPO's soft overlong punishment; MindSpeed-RL models/rule_verifier.py:114-120).

    Args:
        lengths: [answers], tokens. selection: its overlong_buffer is 1..rollout_max_tokens.

    Returns:
        float64 [answers], at most 0.

    >>> selection = Selection(rollout_max_tokens=100, overlong_buffer=20)
    >>> overlong_penalty(np.array([60, 85, 100]), selection)
    array([ 0.  , -0.25, -1.  ])
    """
    most = selection.rollout_max_tokens
    nears = most - selection.overlong_buffer
    return np.interp(lengths, (nears, most), (0.0, -selection.overlong_buffer_penalty_factor))


def rewards_less_kl(
    rewards: Tensor,
    old_logprobs: Tensor,
    reference_logprobs: Tensor,
    mask: Tensor,
    algorithm: Algorithm,
) -> tuple[Tensor, Tensor]:
    """KL in the reward: each answer's reward - kl_coefficient * sum over its tokens of the
    `kl_penalty` estimate of KL(policy before the update || base model), computed in float64 and
    without a gradient.

    verl takes the estimate off token by token (trainer/ppo/ray_trainer.py:78 `apply_kl_penalty`),
    and GRPO's outcome is the sum over tokens (core_algos.py:304): the same, but for verl's bounds
    on low_var_kl.

    Args:
        rewards: [answers]. old_logprobs, reference_logprobs: [answers, length], of the policy
            before this iteration's first update and of the base model. mask: bool [answers,
            length], True on completion tokens.

    Returns:
        float64 [answers], and the mean of that sum, in nats an answer, before its coefficient,
        float64 [].

    >>> old = torch.tensor([[0.5, 0.5], [0.5, 0.9]]).log()
    >>> base = torch.tensor([[0.25, 0.5], [0.5, 0.1]]).log()
    >>> mask = torch.tensor([[True, True], [True, False]])
    >>> algorithm = Algorithm(kl_coefficient=0.1, kl_penalty="kl")
    >>> rewards, kl = rewards_less_kl(torch.ones(2), old, base, mask, algorithm)
    >>> rewards, kl.item()
    (tensor([0.9307, 1.0000], dtype=torch.float64), 0.3465735912322998)
    """
    old = torch.where(mask, old_logprobs.detach().double(), 0.0)
    reference = torch.where(mask, reference_logprobs.detach().double(), 0.0)
    # every kind is 0 outside the mask
    kl = kl_estimate(old, reference, algorithm.kl_penalty).sum(1)
    return rewards.double() - algorithm.kl_coefficient * kl, kl.mean()


def group_advantages(rewards: Tensor, group_size: int, algorithm: Algorithm) -> Tensor:
    """Returns how much better each answer is than those to the same prompt, by the algorithm's
    `adv_estimator`, computed in float64.

    group_norm: (r - mean) / (std + 1e-6), std unbiased (GRPO; MindSpeed-RL
    trainer/utils/compute_utils.py:152 `compute_group_norm_advantage_return`); with
    norm_adv_by_std_in_grpo=False r - mean (Dr. GRPO, arXiv 2503.20783). rloo: r - mean of the others' rewards
    (leave-one-out, arXiv 2402.14740).

    Args:
        rewards: [prompts * group_size], a prompt's answers side by side. NaN where one could not be
            computed: its group is one of the others, and a single one has nothing to be compared with.

    Returns:
        float32 [prompts * group_size]; a group whose rewards are all equal gets zeros, and so does a
        NaN.

    >>> rewards = torch.tensor([1.0, 0.0, 1.0, 1.0])
    >>> group_advantages(rewards, 2, Algorithm())
    tensor([ 0.7071, -0.7071,  0.0000,  0.0000])
    >>> group_advantages(rewards, 2, Algorithm(adv_estimator="rloo"))
    tensor([ 1., -1.,  0.,  0.])
    >>> group_advantages(torch.tensor([1.0, torch.nan, 0.0]), 3, Algorithm())
    tensor([ 0.7071,  0.0000, -0.7071])
    """
    if rewards.isnan().any():
        advantages = torch.zeros(len(rewards))
        for places in torch.arange(len(rewards)).split(group_size):
            known = places[~rewards[places].isnan()]
            if len(known) > 1:
                advantages[known] = group_advantages(rewards[known], len(known), algorithm)
        return advantages
    groups = rewards.double().reshape(-1, group_size)
    advantages = groups - groups.mean(1, keepdim=True)
    if algorithm.adv_estimator == "rloo":
        advantages = advantages * (group_size / (group_size - 1))
    elif algorithm.norm_adv_by_std_in_grpo:
        advantages = advantages / (groups.std(1, keepdim=True) + 1e-6)
    return advantages.reshape(-1).float()
