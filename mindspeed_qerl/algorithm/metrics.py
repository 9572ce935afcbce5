"""Numbers that say how they are reduced over micro-batches, updates and ranks; and those that compare two policies.

A loss returns {name: metric} for one micro-batch. Wherever metrics meet, `merge` joins those of one name, in the order
they are given; `value` is the number that is logged. All sums are Python floats, so float64.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class Mean:
    """total / count; of tokens: the sum over them and their number. NaN without any."""

    total: float
    count: float

    def join(self, other: Mean) -> Mean:
        return Mean(self.total + other.total, self.count + other.count)

    def value(self) -> float:
        return self.total / self.count if self.count else math.nan


@dataclass(frozen=True)
class Max:
    """The largest."""

    largest: float

    def join(self, other: Max) -> Max:
        return Max(max(self.largest, other.largest))

    def value(self) -> float:
        return self.largest


@dataclass(frozen=True)
class EffectiveSampleSize:
    """(sum w)^2 / (N sum w^2) of importance weights w (Kish 1965), in 0..1; 1 is none lost. NaN without any."""

    total: float
    squares: float
    count: float

    def join(self, other: EffectiveSampleSize) -> EffectiveSampleSize:
        return EffectiveSampleSize(self.total + other.total, self.squares + other.squares, self.count + other.count)

    def value(self) -> float:
        return self.total**2 / (self.count * self.squares) if self.count else math.nan


Metric = Mean | Max | EffectiveSampleSize  # `join` gives one of two of a kind, `value` the number they give at last


def merge(parts: Iterable[dict[str, Metric]]) -> dict[str, Metric]:
    """The metrics of several micro-batches or ranks as one; a part may lack a name.

    >>> merge([{"loss": Mean(3.0, 2)}, {}, {"loss": Mean(1.0, 2), "largest": Max(5.0)}])
    {'loss': Mean(total=4.0, count=4), 'largest': Max(largest=5.0)}
    """
    merged: dict[str, Metric] = {}
    for part in parts:
        for name, metric in part.items():
            merged[name] = merged[name].join(metric) if name in merged else metric
    return merged


def reward_metrics(rewards: np.ndarray, group_size: int) -> dict[str, float]:
    """Of the rewards of one iteration, a prompt's answers side by side: mean and standard deviation, and the fraction
    of prompts whose answers' rewards differ.

    >>> reward_metrics(np.array([0.0, 1.0, 1.0, 1.0]), group_size=2)["reward/groups_with_signal"].item()
    0.5
    """
    groups = rewards.reshape(-1, group_size)
    return {"reward/mean": rewards.mean(), "reward/std": rewards.std(),
            "reward/groups_with_signal": (groups != groups[:, :1]).any(1).mean()}


def low_variance_kl(logprobs: torch.Tensor, reference_logprobs: torch.Tensor) -> torch.Tensor:
    """Schulman's k3 estimate of KL(policy || reference) per token: exp(d) - 1 - d with d = reference - policy, >= 0.

    >>> low_variance_kl(torch.tensor([0.5]).log(), torch.tensor([0.25]).log())
    tensor([0.1931])
    """
    difference = reference_logprobs - logprobs
    return difference.exp() - 1 - difference


def mismatch(sampled: torch.Tensor, trained: torch.Tensor) -> dict[str, Metric]:
    """How far the policy that sampled is from the one that is trained, before its update, from log probabilities of
    the sampled tokens, [tokens], in float64.

    KL estimates k1 = log p_sampled - log p_trained and k3, in nats per token; |difference| of the probabilities, its
    mean and largest; of the ratio p_trained / p_sampled the mean, which is 1 in expectation, and the effective sample
    size.

    >>> mismatch(torch.tensor([0.5, 0.5]).log(), torch.tensor([0.5, 0.25]).log())["mismatch/max_abs_prob_diff"]
    Max(largest=0.25)
    """
    sampled, trained = sampled.double(), trained.double()
    count = sampled.numel()
    difference, ratio = (sampled.exp() - trained.exp()).abs(), (trained - sampled).exp()
    ratio_total = ratio.sum().item()
    return {
        "mismatch/k1": Mean((sampled - trained).sum().item(), count),
        "mismatch/k3": Mean(low_variance_kl(sampled, trained).sum().item(), count),
        "mismatch/mean_abs_prob_diff": Mean(difference.sum().item(), count),
        "mismatch/max_abs_prob_diff": Max(difference.max().item() if count else 0.0),
        "mismatch/ratio_mean": Mean(ratio_total, count),
        "mismatch/effective_sample_size": EffectiveSampleSize(ratio_total, ratio.square().sum().item(), count),
    }
