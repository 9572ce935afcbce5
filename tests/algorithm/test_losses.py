"""The formulas against float64 written out by hand."""

import math
import re
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats

from mindspeed_qerl.algorithm.losses import (
    LossInputs,
    correction_weights,
    loss,
    policy_loss,
    token_entropy,
    token_logprobs,
    try_policy_loss,
)
from mindspeed_qerl.algorithm.metrics import (
    EffectiveSampleSize,
    draw_metrics,
    entropy_metrics,
    merge,
    mismatch,
    on_host,
    reward_metrics,
)
from mindspeed_qerl.common.errors import ConfigError
from mindspeed_qerl.recipe.compose import compose
from mindspeed_qerl.recipe.reader import read_recipe
from mindspeed_qerl.recipe.types import Algorithm, Correction
from tests import numbers


def test_token_logprobs_match_log_softmax_at_a_temperature():
    torch.manual_seed(0)
    logits, tokens = torch.randn(3, 5, 11), torch.randint(0, 11, (3, 5))
    expected = (logits.double() / 0.7).log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(
        token_logprobs(logits, tokens, 0.7).double(), expected, atol=1e-6, rtol=0
    )


def test_token_entropy_is_that_of_the_distribution_at_a_temperature():
    torch.manual_seed(0)
    logits = torch.randn(3, 5, 11)
    expected = torch.distributions.Categorical(logits=logits.double() / 0.7).entropy()
    torch.testing.assert_close(token_entropy(logits, 0.7).double(), expected, atol=1e-6, rtol=0)


def test_metrics_of_rewards():
    assert reward_metrics(np.array([1.0, 0.0, 2.0, 2.0]), 2) == {
        "reward/mean": 1.25,
        "reward/std": pytest.approx(np.std([1, 0, 2, 2])),
        "reward/groups_with_signal": 0.5,
    }
    assert reward_metrics(np.array([1.0, np.nan, 2.0, np.nan, 0.0, 3.0, np.nan, np.nan]), 4) == {
        "reward/mean": 1.5,
        "reward/std": pytest.approx(np.std([1, 2, 0, 3])),
        "reward/groups_with_signal": 1.0,
        "reward/not_computed": 4,
    }
    assert reward_metrics(np.array([1.0, np.nan] * 2), 2)["reward/groups_with_signal"] == 0


def test_entropy_of_first_tokens_is_that_of_each_answers_first_eight():
    entropy, mask = torch.arange(24.0).reshape(2, 12), torch.ones(2, 12).bool()
    mask[0, :3] = mask[1, 5:] = False  # a prompt of three tokens, and an answer of five
    found = numbers(entropy_metrics(entropy, mask))
    first = [*range(3, 11), *range(12, 17)]
    assert found == {"entropy/mean": np.mean([*first, 11]), "entropy/first_tokens": np.mean(first)}


def options(low, high, kl_coefficient=0.0, cap=None):
    """The arguments of `loss` besides its inputs."""
    algorithm = Algorithm(
        clip_higher_enable=True,
        clip_ratio_low=low,
        clip_ratio_high=high,
        kl_coefficient=kl_coefficient,
    )
    return algorithm, Correction("token_tis", cap) if cap else Correction()


OPTIONS = [
    options(0.1, 0.6),
    options(0.1, 0.6, kl_coefficient=0.3),
    options(0.1, 0.6, kl_coefficient=0.3, cap=1.3),
]


def micro_batch(seed=1, rows=6, columns=8):
    """Policies far enough apart that each bound of the clipping and of the correction acts."""
    torch.manual_seed(seed)
    logprobs, advantages = -torch.rand(rows, columns).double(), torch.randn(rows).double()
    old, rollout, reference = (logprobs + 0.5 * torch.randn(rows, columns) for _ in range(3))
    return LossInputs(
        logprobs.requires_grad_(),
        old,
        rollout,
        advantages,
        torch.rand(rows, columns) < 0.7,
        reference,
    )


def rows_of(inputs, rows):
    return LossInputs(*(value if value is None else value[rows] for value in vars(inputs).values()))


def test_what_is_logged_of_the_loss_is_counted_token_by_token():
    """Losses and gradients themselves: test_against_others.py."""
    inputs, (algorithm, correction) = micro_batch(), OPTIONS[-1]
    metrics = numbers(loss(inputs, algorithm, correction)[1])
    of_tokens = {"clip_fraction_low": [], "clip_fraction_high": [], "loss/kl": []}
    weights = []
    for row, column in inputs.mask.nonzero().tolist():
        new, old, rollout, reference = (
            getattr(inputs, name)[row, column].item()
            for name in ("logprobs", "old_logprobs", "rollout_logprobs", "reference_logprobs")
        )
        ratio, gains = math.exp(new - old), inputs.advantages[row] > 0
        of_tokens["clip_fraction_low"].append(not gains and ratio < 1 - 0.1)
        of_tokens["clip_fraction_high"].append(gains and ratio > 1 + 0.6)
        of_tokens["loss/kl"].append(math.exp(reference - new) - 1 - (reference - new))
        weights.append(math.exp(old - rollout) > 1.3)
    for name, values in of_tokens.items():
        assert metrics[name] == pytest.approx(np.mean(values)) and metrics[name] > 0
    assert metrics["rollout_correction/truncated_fraction"] == np.mean(weights) > 0


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(
    "outside",
    [
        {"logprobs": -100.0, "reference_logprobs": 0.0},
        {"old_logprobs": -200.0},
        {"rollout_logprobs": math.nan},
        {"old_logprobs": math.nan, "reference_logprobs": math.inf},
    ],
)
def test_nothing_outside_the_mask_reaches_the_loss_or_its_gradient(options, outside):
    """exp(100) is infinite in float32, and 0 times it NaN."""
    values = {name: value for name, value in vars(micro_batch()).items() if value is not None}
    inputs = LossInputs(
        **{name: value if name == "mask" else value.float() for name, value in values.items()}
    )
    changed = {
        name: torch.where(inputs.mask, values[name].float().detach(), value)
        for name, value in outside.items()
    }
    results = []
    for different in ({}, changed):
        both = vars(inputs) | different
        both["logprobs"] = both["logprobs"].detach().requires_grad_()
        total, metrics = loss(LossInputs(**both), *options)
        total.backward()
        results.append((total.item(), numbers(metrics), both["logprobs"].grad.tolist()))
    assert results[0] == results[1]


@pytest.mark.parametrize("options", OPTIONS)
def test_metrics_of_parts_are_joined_to_those_of_the_whole(options):
    """Parts with unequal numbers of tokens, one of them without any."""
    inputs = micro_batch(rows=9)
    inputs.mask[8] = False
    parts = [
        loss(rows_of(inputs, rows), *options)[1]
        for rows in (slice(0, 1), slice(1, 3), slice(3, 8), slice(8, 9))
    ]
    whole, joined = loss(inputs, *options)[1], merge(parts)
    assert joined.keys() == whole.keys()
    for name, metric in whole.items():
        assert joined[name].value() == pytest.approx(metric.value(), rel=1e-12), name
    ratio = (inputs.old_logprobs - inputs.rollout_logprobs).exp()[inputs.mask]
    effective = joined["mismatch/effective_sample_size"]
    assert isinstance(effective, EffectiveSampleSize)
    assert effective.value() == pytest.approx((ratio.mean() ** 2 / (ratio**2).mean()).item())
    assert joined["mismatch/ratio_mean"].value() == pytest.approx(ratio.mean().item())
    probabilities = [
        values[inputs.mask].exp() for values in (inputs.rollout_logprobs, inputs.old_logprobs)
    ]
    difference = (probabilities[0] - probabilities[1]).abs()
    assert joined["mismatch/mean_abs_prob_diff"].value() == pytest.approx(difference.mean().item())
    assert joined["mismatch/max_abs_prob_diff"].value() == difference.max().item()


@pytest.mark.parametrize("nats", [0.05, -0.05, 1.0, -1.0, 80.0, -80.0])
@pytest.mark.parametrize("length", [1, 8192])
def test_answers_of_any_length_and_distance_have_their_metrics(nats, length):
    """Two answers whose weights are as 1 to q: (1 + q)^2 / 2 (1 + q^2), on two ranks and one
    without an answer.
    """
    trained = torch.full((2, length), -90.0).double()
    sampled, mask = trained - nats, torch.ones(2, length).bool()
    sampled[1, 0] -= 0.3
    ranks = []
    for rows in (slice(0, 1), slice(1, 2), slice(0, 0)):
        metrics = mismatch(sampled[rows], trained[rows], mask[rows])
        ranks.append(on_host(merge([metrics, mismatch(sampled, trained, mask & False)])))
    found = numbers(merge(ranks))
    size = found["mismatch/effective_sample_size_of_answers"]
    q = math.exp(0.3)
    assert size == pytest.approx((1 + q) ** 2 / 2 / (1 + q**2), rel=1e-9)
    assert math.isfinite(found["mismatch/k3"]) and math.isfinite(found["mismatch/ratio_mean"])


def test_k3_of_answers_is_that_of_their_probabilities():
    """Of an answer all that counts is the product of its tokens' probabilities."""
    sampled, trained = (torch.randn(3, 4).double().mul(0.3).sub(2) for _ in range(2))
    lengths = torch.tensor([4, 2, 0])
    mask = torch.arange(4) < lengths[:, None]
    found = mismatch(sampled, trained, mask)["mismatch/k3_of_answers"].value()
    whole = [
        mismatch(*(each[i, :n].sum().view(1, 1) for each in (sampled, trained)), mask[:1, :1])
        for i, n in ((0, 4), (1, 2))
    ]
    assert found == pytest.approx(merge(whole)["mismatch/k3"].value(), rel=1e-12)


def test_what_draws_explain_is_an_analysis_of_variance():
    """Of one group against scipy's F = between / within; of many, what was put in."""
    rng = np.random.default_rng(3)
    effects = rng.normal(size=(4000, 4, 1)) * math.sqrt(0.3)
    rewards = effects + rng.normal(size=(4000, 4, 2)) * math.sqrt(0.7)
    f = stats.f_oneway(*rewards[0]).statistic
    one = draw_metrics(rewards[0].flatten(), 8)["aqn/explained_by_draws"]
    assert one == pytest.approx((f - 1) / (f + 1))
    # a question's own mean explains nothing
    questions = rng.normal(size=(4000, 1, 1))
    found = draw_metrics((rewards + questions).flatten(), 8)["aqn/explained_by_draws"]
    assert found == pytest.approx(0.3, abs=0.02)
    assert draw_metrics(np.array([1.0, 1, 1, 1, 0, 0, 0, 0]), 4) == {}


def test_k1_and_k3_estimate_the_same_divergence():
    """KL(sampler || trained), by their expectation over every outcome."""
    sampled, trained = (
        torch.randn(7).double().log_softmax(0),
        torch.randn(7).double().log_softmax(0),
    )
    exact = (sampled.exp() * (sampled - trained)).sum().item()
    one = torch.ones(1, 1).bool()
    for name in ("mismatch/k1", "mismatch/k3"):
        each = [
            mismatch(sampled[i : i + 1, None], trained[i : i + 1, None], one)[name].value()
            for i in range(7)
        ]
        assert sum(p * k for p, k in zip(sampled.exp().tolist(), each)) == pytest.approx(exact)


@pytest.mark.parametrize(
    "method, floor, cap",
    [
        ("token_tis", 0.0, 2.0),
        ("sequence_tis", 0.0, 2.0),
        ("sequence_mask", 0.5, 2.0),
        ("icepop", 0.5, 5.0),
        ("geometric_mask", 0.99, 1.01),
    ],
)
def test_a_correction_acts_with_its_own_bounds_and_has_no_gradient(method, floor, cap):
    """However its method is chosen, also in the place of another one. Not even a policy before the
    update that is the one which is trained, with its gradient, gives the weights one.
    """
    for overrides in (
        [f"rollout_correction={method}"],
        [f"rollout_correction.method={method}"],
        ["rollout_correction=icepop", f"rollout_correction.method={method}"],
    ):
        correction = read_recipe(compose("grpo_tiny_moe_cpu", overrides)).correction
        assert (correction.method, correction.floor, correction.cap) == (method, floor, cap)
        changed = read_recipe(
            compose("grpo_tiny_moe_cpu", [*overrides, "rollout_correction.cap=3"])
        )
        assert changed.correction == replace(correction, cap=3.0)
    inputs = micro_batch(rows=40)
    weights, metrics = correction_weights(
        inputs.logprobs, inputs.rollout_logprobs, inputs.mask, correction
    )
    assert inputs.logprobs.requires_grad and not weights.requires_grad
    assert 0.005 < next(iter(metrics.values())).value() < 1


# ---- a loss by import path ----

OWN = """
import torch

def reinforce(inputs, algorithm):
    ratio = (inputs.logprobs - inputs.old_logprobs).exp()
    return -ratio * inputs.advantages[:, None], {"ratio": ratio}

def by_entropy_and_reference(inputs, algorithm):
    weight = inputs.entropy.detach() + (inputs.logprobs - inputs.reference_logprobs).detach()
    return -weight * inputs.logprobs * inputs.advantages[:, None], {}

class Clipped:
    def __call__(self, inputs, algorithm):
        from mindspeed_qerl.algorithm.losses import vanilla
        return vanilla(inputs, algorithm)

def mean_of_the_batch(inputs, algorithm):
    loss = -inputs.logprobs * inputs.advantages[:, None]
    return loss - loss.mean(), {}

def a_number(inputs, algorithm):
    return (inputs.logprobs * inputs.advantages[:, None]).sum(), {}

def no_gradient(inputs, algorithm):
    return -inputs.logprobs.detach() * inputs.advantages[:, None], {}

def raises(inputs, algorithm):
    return inputs.log_probs, {}

def infinite(inputs, algorithm):
    return inputs.logprobs / (inputs.logprobs - inputs.logprobs), {}

def by_advantage(inputs, algorithm):
    advantages = inputs.advantages[:, None]
    return inputs.logprobs * advantages / advantages.abs(), {}

def only_a_loss(inputs, algorithm):
    return inputs.logprobs
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "own_losses.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "own_losses", raising=False)
    policy_loss.cache_clear()


def of_mode(mode):
    return Algorithm(loss_mode=mode, kl_coefficient=0.0)


def test_ones_own_loss_is_trained_with_its_metrics(own):
    inputs = micro_batch()
    try_policy_loss(of_mode("own_losses:reinforce"))
    total, metrics = loss(inputs, of_mode("own_losses:reinforce"), Correction())
    ratio = (inputs.logprobs - inputs.old_logprobs).exp()[inputs.mask]
    advantages = inputs.advantages[:, None].expand(inputs.mask.shape)[inputs.mask]
    assert total.item() == pytest.approx(-(ratio * advantages).sum().item())
    assert metrics["policy_loss/ratio"].value() == pytest.approx(ratio.mean().item())


def test_a_loss_is_tried_with_what_it_gets_in_training(own):
    name = "own_losses:by_entropy_and_reference"
    try_policy_loss(Algorithm(loss_mode=name, kl_coefficient=0.1))
    with pytest.raises(ConfigError, match="NoneType"):  # no reference, as in training
        try_policy_loss(of_mode(name))


def test_a_class_that_calls_ours_is_ours(own):
    try_policy_loss(of_mode("own_losses:Clipped"))
    found = loss(micro_batch(), of_mode("own_losses:Clipped"), Correction())[0]
    assert found == loss(micro_batch(), of_mode("vanilla"), Correction())[0]


@pytest.mark.parametrize(
    "name, words",
    [
        ("own_losses:mean_of_the_batch", "depends on the other answers of its micro-batch"),
        ("own_losses:a_number", "must be finite numbers of shape [batch, length] = [3, 3]"),
        ("own_losses:no_gradient", "does not require grad"),
        ("own_losses:raises", "AttributeError: 'LossInputs' object has no attribute 'log_probs'"),
        ("own_losses:infinite", "must be finite numbers"),
        ("own_losses:by_advantage", "must be finite numbers"),  # of a group of equal rewards
        ("own_losses:only_a_loss", "returns (loss, {name: values})"),
        ("own_losses:reinforced", "unknown function 'reinforced', did you mean 'reinforce'?"),
        ("no_losses:f", "loss 'no_losses:f' cannot be loaded"),
        ("vanila", "unknown loss 'vanila', did you mean 'vanilla'?"),
    ],
)
def test_a_loss_that_cannot_be_trained_is_refused_before_anything_starts(own, name, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        try_policy_loss(of_mode(name))
