"""Numbers that say how they are reduced over micro-batches, updates and ranks; and those that
compare two policies.

A loss returns {name: metric} for one micro-batch, of numbers on its device. Wherever metrics meet,
`merge` joins those of one name, in the order they are given; at the end of a step `on_host` copies
them, and `value` is the number that is logged. Sums over tokens are float64.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

FIRST_TOKENS = 8
MOST_NATS = 20.0  # by which an answer's ratio counts as no more in its k3, a mean of few answers


@dataclass(frozen=True)
class Metric:
    """Sums, each one number, which are added up where two of a kind are joined."""

    def join(self, other: Self) -> Self:
        pairs = zip(vars(self).values(), vars(other).values())
        return type(self)(*(mine + theirs for mine, theirs in pairs))

    def value(self) -> float:
        raise NotImplementedError


Metrics = dict[str, Metric]  # by name


@dataclass(frozen=True)
class Mean(Metric):
    """total / count; of tokens: the sum over them and their number. NaN without any."""

    total: Tensor
    count: Tensor

    def value(self) -> float:
        return float(self.total) / float(self.count) if self.count else math.nan


@dataclass(frozen=True)
class Max(Metric):
    """The largest."""

    largest: Tensor

    def join(self, other: Self) -> Self:
        return type(self)(torch.maximum(_float64(self.largest), _float64(other.largest)))

    def value(self) -> float:
        return float(self.largest)


@dataclass(frozen=True)
class EffectiveSampleSize(Metric):
    """(sum w)^2 / (N sum w^2) of importance weights w (Kish 1965), in 0..1; 1 is none lost. NaN
    without any. The sums are kept as logarithms: the weight of an answer of 8,192 tokens that are
    0.05 nats off is e^410, whose square no float64 holds.
    """

    log_total: Tensor
    log_squares: Tensor
    count: Tensor

    def join(self, other: Self) -> Self:
        log_total = torch.logaddexp(_float64(self.log_total), _float64(other.log_total))
        log_squares = torch.logaddexp(_float64(self.log_squares), _float64(other.log_squares))
        return type(self)(log_total, log_squares, self.count + other.count)

    def value(self) -> float:
        log_size = 2 * float(self.log_total) - float(self.log_squares)
        return math.exp(min(log_size - math.log(self.count), 0.0)) if self.count else math.nan


def _float64(value: Any) -> Tensor:
    return torch.as_tensor(value, dtype=torch.float64)


def merge(parts: Iterable[Metrics]) -> Metrics:
    """The metrics of several micro-batches or ranks as one; a part may lack a name.

    >>> merge([{"loss": Mean(3.0, 2)}, {}, {"loss": Mean(1.0, 2), "largest": Max(5.0)}])
    {'loss': Mean(total=4.0, count=4), 'largest': Max(largest=5.0)}
    """
    merged: Metrics = {}
    for part in parts:
        for name, metric in part.items():
            merged[name] = merged[name].join(metric) if name in merged else metric
    return merged


def on_host(metrics: Metrics) -> Metrics:
    """With numbers in the place of tensors, by one copy from the device.

    >>> on_host({"loss/total": Mean(torch.tensor(1.5), count=3)})
    {'loss/total': Mean(total=1.5, count=3)}
    """
    tensors = {}
    for name, metric in metrics.items():
        for field, value in vars(metric).items():
            if isinstance(value, Tensor):
                tensors[name, field] = value.double()
    numbers = torch.stack(list(tensors.values())).tolist() if tensors else []
    copied = dict(metrics)
    for (name, field), number in zip(tensors, numbers):
        copied[name] = replace(copied[name], **{field: number})
    return copied


def groups_with_signal(rewards: np.ndarray, group_size: int) -> np.ndarray:
    """Checks whether the rewards of a prompt's answers differ: others have no advantage and train
    nothing (DAPO's dynamic sampling, arXiv 2503.14476; MindSpeed-RL
    workers/dynamic_sampling.py:84).

    Args:
        rewards: [prompts * group_size], a prompt's answers side by side; NaN where there is none.

    Returns:
        bool [prompts].

    >>> groups_with_signal(np.array([1.0, 0.0, 1.0, 1.0]), group_size=2)
    array([ True, False])
    """
    groups = rewards.reshape(-1, group_size)
    return np.fmax.reduce(groups, axis=1) > np.fmin.reduce(groups, axis=1)  # of numbers


def reward_metrics(rewards: np.ndarray, group_size: int, repeats: bool = False) -> dict[str, float]:
    """Summarizes the rewards of one iteration, a prompt's answers side by side: mean and standard
    deviation, and the fraction of prompts whose answers' rewards differ; and how many are NaN,
    which could not be computed and count in none of these, if there are any. repeats: two answers
    in turn have one draw of the noise (`draw_metrics`).

    >>> metrics = reward_metrics(np.array([0.0, 1.0, 1.0, math.nan]), group_size=2)
    >>> float(metrics["reward/groups_with_signal"]), metrics["reward/not_computed"]
    (0.5, 1)
    """
    metrics = {
        "reward/mean": np.nanmean(rewards),
        "reward/std": np.nanstd(rewards),
        "reward/groups_with_signal": groups_with_signal(rewards, group_size).mean(),
    }
    if missing := int(np.isnan(rewards).sum()):
        metrics["reward/not_computed"] = missing
    if repeats:
        metrics |= draw_metrics(rewards, group_size)
    return metrics


def draw_metrics(rewards: np.ndarray, group_size: int) -> dict[str, float]:
    """Estimates which share of the variance of rewards in a group is between draws of the noise, in
    a step in which two answers in turn have one draw: the intraclass correlation by one-way
    analysis of variance (Shrout and Fleiss 1979, ICC(1)), with the mean squares of all groups;
    below 0 by chance.

    Args:
        rewards: [prompts * group_size], a prompt's answers side by side; group_size: even, from 4.

    Returns:
        Nothing where all rewards of each group are the same. A group with a NaN does not count.

    >>> draw_metrics(np.array([1.0, 1, 0, 0, 1, 0, 0, 0, 1, 0, 1, 1, math.nan, 0, 0, 0]), group_size=8)
    {'aqn/explained_by_draws': 0.5714285714285715}
    """
    pairs = rewards.reshape(-1, group_size // 2, 2)
    pairs = pairs[~np.isnan(pairs).any(axis=(1, 2))]
    between = 2 * pairs.mean(2).var(1, ddof=1).mean()
    within = pairs.var(2, ddof=1).mean()
    if not between + within > 0:  # NaN without a group
        return {}
    return {"aqn/explained_by_draws": float((between - within) / (between + within))}


def kl_estimate(
    logprobs: Tensor, reference_logprobs: Tensor, kind: str = "low_var_kl", most: float = math.inf
) -> Tensor:
    """Schulman's estimates of KL(policy || reference) of each token
    (joschu.net/blog/kl-approx.html), with d = policy - reference, by MindSpeed-RL's names
    (utils/compute.py `compute_kl_penalty`, without its bounds).

    kl (k1): d. abs: |d|. mse (k2): d^2 / 2. low_var_kl (k3): exp(-d) - 1 + d, never negative. As a
    loss on the policy's own samples k2 has the gradient of KL, k3 that of the KL the other way
    round, k1 none in expectation.

    Args:
        most: nats at which -d counts as no more, for k3 whose exponential would overflow.

    >>> policy, reference = torch.tensor([0.5]).log(), torch.tensor([0.25]).log()
    >>> kl_estimate(policy, reference), kl_estimate(policy, reference, "kl")
    (tensor([0.1931]), tensor([0.6931]))
    """
    difference = reference_logprobs - logprobs
    if kind == "low_var_kl":
        difference = difference.clamp(max=most)
        return difference.exp() - 1 - difference
    return {"kl": -difference, "abs": difference.abs(), "mse": 0.5 * difference.square()}[kind]


def mismatch(sampled: Tensor, trained: Tensor, mask: Tensor) -> Metrics:
    """Returns how far the policy that sampled is from the one that is trained, before its update.

    Args:
        sampled, trained: log probabilities of the sampled tokens, [batch, length], by each of the
            two; computed in float64. mask: bool [batch, length], True on completion tokens.

    Returns:
        KL estimates k1 = log p_sampled - log p_trained and k3, in nats per token; |difference| of
        the probabilities, its mean and largest; of the ratio p_trained / p_sampled the mean, which
        is 1 in expectation, and the effective sample size, of tokens and, by the product of its
        tokens' ratios, of answers, whose k3 is in nats per answer; and how sensitive k3 is here:
        the mean square of d log p / d logit = 1 - p of the sampled tokens, which nothing can move
        where p is 1.

    >>> sampled, trained = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.5, 0.25]]).log()
    >>> mismatch(sampled, trained, torch.ones(1, 2).bool())["mismatch/max_abs_prob_diff"]
    Max(largest=tensor(0.2500, dtype=torch.float64))
    """
    # 0 where nothing is compared: an index by the mask would make the host wait for the device
    sampled = torch.where(mask, sampled.double(), 0.0)
    trained = torch.where(mask, trained.double(), 0.0)
    count = mask.sum()
    is_answer = mask.any(1)
    difference = (sampled.exp() - trained.exp()).abs()
    log_ratio = trained - sampled
    ratio = torch.where(mask, log_ratio.exp(), 0.0)
    of_answers = kl_estimate(sampled.sum(1), trained.sum(1), most=MOST_NATS)
    return {
        "mismatch/k1": Mean((sampled - trained).sum(), count),
        "mismatch/k3": Mean(kl_estimate(sampled, trained).sum(), count),
        "mismatch/k3_of_answers": Mean(of_answers.sum(), is_answer.sum()),
        "mismatch/sensitivity": Mean((1 - trained.exp()).square().sum(), count),
        "mismatch/mean_abs_prob_diff": Mean(difference.sum(), count),
        "mismatch/max_abs_prob_diff": Max(difference.max() if difference.numel() else 0.0),
        "mismatch/ratio_mean": Mean(ratio.sum(), count),
        "mismatch/effective_sample_size": _effective(log_ratio, mask),
        "mismatch/effective_sample_size_of_answers": _effective(log_ratio.sum(1), is_answer),
    }


def _effective(log_ratio: Tensor, counted: Tensor) -> EffectiveSampleSize:
    weights = torch.where(counted, log_ratio, -math.inf).flatten()
    return EffectiveSampleSize(weights.logsumexp(0), (2 * weights).logsumexp(0), counted.sum())


def entropy_metrics(entropy: Tensor, mask: Tensor) -> Metrics:
    """Mean entropy of a token's distribution, in nats: of all tokens, and of each answer's first
    `FIRST_TOKENS`, where a method of solution is chosen.

    Args:
        entropy: [batch, length]. mask: bool [batch, length], True on completion tokens.
    """
    metrics: Metrics = {}
    parts = {"mean": mask, "first_tokens": mask & (mask.cumsum(1) <= FIRST_TOKENS)}
    for name, part in parts.items():
        total = torch.where(part, entropy.detach().double(), 0.0).sum()
        metrics[f"entropy/{name}"] = Mean(total, part.sum())
    return metrics
