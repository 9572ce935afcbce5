"""The formulas against float64 written out by hand."""

import math
import re
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from mindspeed_qerl.algorithm.advantages import group_advantages
from mindspeed_qerl.algorithm.corrections import correction_weights
from mindspeed_qerl.algorithm.losses import (
    LossInputs,
    loss,
    policy_loss,
    token_entropy,
    token_logprobs,
    try_policy_loss,
)
from mindspeed_qerl.algorithm.metrics import (
    EffectiveSampleSize,
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


def test_equal_rewards_give_no_advantage():
    assert group_advantages(torch.ones(8), 4).abs().max() == 0


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


def test_entropy_of_first_tokens_is_that_of_each_answers_first_eight():
    entropy, mask = torch.arange(24.0).reshape(2, 12), torch.ones(2, 12).bool()
    mask[0, :3] = mask[1, 5:] = False  # a prompt of three tokens, and an answer of five
    found = {name: metric.value() for name, metric in entropy_metrics(entropy, mask).items()}
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


def by_hand(inputs, algorithm, correction):
    """Loss, KL, clipped tokens, tokens above the cap, and the derivative of policy + c KL in each
    log probability: token by token, in Python.
    """
    policy = kl = clipped = above = 0.0
    gradient = torch.zeros(inputs.mask.shape).double()
    for row, column in inputs.mask.nonzero().tolist():
        new, old, rollout, reference = (
            values[row, column].item()
            for values in (
                inputs.logprobs,
                inputs.old_logprobs,
                inputs.rollout_logprobs,
                inputs.reference_logprobs,
            )
        )
        advantage, ratio = inputs.advantages[row].item(), math.exp(new - old)
        weight = math.exp(old - rollout) if correction.method != "none" else 1.0
        if correction.method != "none" and weight > correction.cap:
            weight, above = correction.cap, above + 1
        gain = ratio * advantage
        bounded = min(max(ratio, 1 - algorithm.clip_low), 1 + algorithm.clip_high) * advantage
        policy -= weight * min(gain, bounded)
        clipped += bounded < gain
        kl += math.exp(reference - new) - 1 - (reference - new)
        of_policy, of_kl = 0.0 if bounded < gain else -weight * gain, 1 - math.exp(reference - new)
        gradient[row, column] = of_policy + algorithm.kl_coefficient * of_kl
    return policy, kl if algorithm.kl_coefficient else 0.0, clipped, above, gradient


@pytest.mark.parametrize("options", OPTIONS)
def test_the_joined_loss_and_its_gradient_are_the_formula_token_by_token(options):
    inputs = micro_batch()
    total, metrics = loss(inputs, *options)
    total.backward()
    policy, kl, clipped, above, gradient = by_hand(inputs, *options)
    assert total.item() == pytest.approx(policy + options[0].kl_coefficient * kl, rel=1e-12)
    torch.testing.assert_close(inputs.logprobs.grad, gradient, rtol=1e-12, atol=1e-12)
    ratio = (inputs.logprobs - inputs.old_logprobs).exp()[inputs.mask]
    assert (ratio < 1 - 0.1).any() and (ratio > 1 + 0.6).any() and clipped > 2
    tokens = inputs.mask.sum().item()
    gains = (inputs.advantages > 0).unsqueeze(1).expand(inputs.mask.shape)[inputs.mask]
    for name, acted in (("low", (ratio < 1 - 0.1) & ~gains), ("high", (ratio > 1 + 0.6) & gains)):
        assert metrics[f"clip_fraction_{name}"].value() == acted.sum().item() / tokens > 0
    for name, expected in (("loss/policy", policy), ("loss/kl", kl), ("clip_fraction", clipped)):
        assert metrics[name].value() == pytest.approx(expected / tokens, rel=1e-12), name
    if options[1].method != "none":
        assert metrics["rollout_correction/truncated_fraction"].value() == above / tokens > 0


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
        numbers = {name: metric.value() for name, metric in metrics.items()}
        results.append((total.item(), numbers, both["logprobs"].grad))
    (total, metrics, gradient), (other_total, other_metrics, other_gradient) = results
    assert (total, metrics) == (other_total, other_metrics) and torch.equal(
        gradient, other_gradient
    )


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
    found = {name: metric.value() for name, metric in merge(ranks).items()}
    size = found["mismatch/effective_sample_size_of_answers"]
    q = math.exp(0.3)
    assert size == pytest.approx((1 + q) ** 2 / 2 / (1 + q**2), rel=1e-9)
    assert math.isfinite(found["mismatch/k3"]) and math.isfinite(found["mismatch/ratio_mean"])


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


# ---- DPPO, which TRL does not have, token by token ----


def bernoulli(probability):
    return torch.distributions.Bernoulli(torch.tensor(probability).double())


@pytest.mark.parametrize("mode, bound", [("dppo_tv", 0.08), ("dppo_kl", 0.02)])
def test_dppo_trains_the_tokens_within_a_divergence_of_two_coins(mode, bound):
    """Each token as a coin, "this one" or "another", whose divergences torch knows."""
    algorithm = Algorithm(loss_mode=mode, clip_ratio=bound, clip_ratio_c=1.4, kl_coefficient=0.0)
    inputs = micro_batch()
    inputs = replace(inputs, old_logprobs=inputs.old_logprobs.detach().clamp(max=-0.01))
    total, metrics = loss(inputs, algorithm, Correction())
    total.backward()
    expected, low, high = torch.zeros(inputs.mask.shape).double(), 0, 0
    for row, column in inputs.mask.nonzero().tolist():
        new, old = (
            math.exp(each[row, column].item()) for each in (inputs.logprobs, inputs.old_logprobs)
        )
        advantage = inputs.advantages[row].item()
        coins = bernoulli(old), bernoulli(new)
        if mode == "dppo_tv":
            outcomes = torch.tensor([0.0, 1.0]).double()
            before, now = (coin.log_prob(outcomes).exp() for coin in coins)
            divergence = (now - before).abs().sum().item() / 2
        else:
            divergence = torch.distributions.kl_divergence(*coins).item()
        if (new - old) * advantage > 0 and divergence > bound:
            low, high = low + (advantage < 0), high + (advantage > 0)
        else:
            expected[row, column] = -min(new / old, 1.4) * advantage
    torch.testing.assert_close(inputs.logprobs.grad, expected, rtol=1e-9, atol=1e-12)
    tokens = inputs.mask.sum().item()
    assert metrics["clip_fraction_low"].value() == low / tokens > 0
    assert metrics["clip_fraction_high"].value() == high / tokens > 0


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
