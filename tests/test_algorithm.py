"""The formulas against float64 written out by hand, and against autograd where a gradient is the point."""

import math

import numpy as np
import pytest
import torch

from mindspeed_qerl.algorithm.losses import group_advantages, grpo_loss, low_variance_kl, token_logprobs, truncated_weights


def test_advantages_are_group_normalised_with_unbiased_std():
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.5, 0.0])
    expected = []
    for group in np.split(rewards.double().numpy(), 2):
        expected += list((group - group.mean()) / (group.std(ddof=1) + 1e-6))
    torch.testing.assert_close(group_advantages(rewards, 4), torch.tensor(expected).float())


def test_equal_rewards_give_no_advantage():
    assert group_advantages(torch.ones(8), 4).abs().max() == 0


@pytest.mark.parametrize("count, size", [(8, 3), (8, 1)])
def test_impossible_groups_are_refused(count, size):
    with pytest.raises(ValueError, match=f"{count} rewards cannot be grouped by {size}"):
        group_advantages(torch.ones(count), size)


def test_token_logprobs_match_log_softmax_at_a_temperature():
    torch.manual_seed(0)
    logits, tokens = torch.randn(3, 5, 11), torch.randint(0, 11, (3, 5))
    expected = (logits.double() / 0.7).log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(token_logprobs(logits, tokens, 0.7).double(), expected, atol=1e-6, rtol=0)


def test_low_variance_kl_is_unbiased():
    """E_policy[k3] = KL(policy || reference), summed over every outcome."""
    policy, reference = torch.randn(7).double().log_softmax(0), torch.randn(7).double().log_softmax(0)
    exact = (policy.exp() * (policy - reference)).sum()
    torch.testing.assert_close((policy.exp() * low_variance_kl(policy, reference)).sum(), exact)


def _loss_by_hand(logprobs, old, advantages, mask, low, high, reference):
    policy = kl = clipped = 0.0
    for row in range(len(logprobs)):
        for column in range(len(logprobs[row])):
            if not mask[row][column]:
                continue
            ratio = math.exp(logprobs[row][column] - old[row][column])
            bounded = min(max(ratio, 1 - low), 1 + high)
            policy -= min(ratio * advantages[row], bounded * advantages[row])
            clipped += bounded * advantages[row] < ratio * advantages[row]
            difference = reference[row][column] - logprobs[row][column]
            kl += math.exp(difference) - 1 - difference
    return policy, kl, clipped


def test_loss_matches_the_formula_token_by_token():
    torch.manual_seed(1)
    logprobs, reference = -torch.rand(4, 6).double(), -torch.rand(4, 6).double()
    old = logprobs + 0.5 * torch.randn(4, 6)
    advantages, mask = torch.tensor([1.0, -1.0, 0.5, -2.0]).double(), torch.rand(4, 6) < 0.7
    terms = grpo_loss(logprobs, old, advantages, mask, 0.2, 0.28, reference)
    policy, kl, clipped = _loss_by_hand(*(x.tolist() for x in (logprobs, old, advantages, mask)), 0.2, 0.28, reference.tolist())
    assert clipped > 0
    assert terms.policy.item() == pytest.approx(policy, rel=1e-6)
    assert terms.kl.item() == pytest.approx(kl, rel=1e-6)
    assert terms.clipped_tokens.item() == clipped


def test_on_policy_gradient_is_advantage_times_score():
    """At ratio 1 the gradient of the loss in logprobs is -advantage on completion tokens, 0 elsewhere."""
    logprobs = (-torch.rand(3, 4)).requires_grad_()
    advantages, mask = torch.tensor([1.5, -0.5, 0.0]), torch.tensor([[0, 1, 1, 0]] * 3).bool()
    grpo_loss(logprobs, logprobs.detach(), advantages, mask, 0.2, 0.28).policy.backward()
    torch.testing.assert_close(logprobs.grad, -advantages.unsqueeze(1) * mask.float())


@pytest.mark.parametrize("advantage, ratio, moves", [(1.0, 1.5, False), (1.0, 0.5, True), (-1.0, 0.5, False), (-1.0, 1.5, True)])
def test_clipping_stops_the_gradient_only_in_the_direction_of_gain(advantage, ratio, moves):
    logprobs = torch.tensor([[math.log(ratio)]], requires_grad=True)
    grpo_loss(logprobs, torch.zeros(1, 1), torch.tensor([advantage]), torch.ones(1, 1).bool(), 0.2, 0.28).policy.backward()
    assert (logprobs.grad.abs().item() > 0) is moves


def expected_gradient(logits, sampler, reward, cap=None):
    """Of the policy loss in `logits` [V, V + 1] (row 0: the first token's, row 1 + t: the second's after t), over every answer of two tokens,
    each with the probability that `sampler`, logits of the same shape, gives it; rewards [V, V] are the advantages."""
    logits = logits.clone().requires_grad_()
    size, total = logits.shape[1], 0.0

    def of(table):
        table = table.log_softmax(-1)
        first = torch.arange(size).repeat_interleave(size)
        second = torch.arange(size).repeat(size)
        return torch.stack([table[0, first], table[1 + first, second]], 1)

    logprobs, sampled = of(logits), of(sampler)
    weights = None if cap is None else truncated_weights(logprobs, sampled, cap)
    probability, mask = sampled.sum(1).exp(), torch.ones(2).bool()
    for row in range(size * size):
        part = slice(row, row + 1)
        terms = grpo_loss(logprobs[part], logprobs[part].detach(), reward.reshape(-1)[part], mask.expand(1, 2), 0.2, 0.28,
                          weights=None if weights is None else weights[part])
        total = total + probability[row] * terms.policy
    total.backward()
    return logits.grad


def answers_of_noisy_policy(seed, spread_of_second=1.0):
    """A policy over answers of two tokens out of five, the same with noise on its logits, and rewards of the answers."""
    torch.manual_seed(seed)
    logits = torch.randn(6, 5).double()
    noise = 0.5 * torch.randn(6, 5).double()
    noise[1:] *= spread_of_second
    return logits, logits + noise, torch.randn(5, 5).double()


def test_truncated_importance_sampling_removes_the_bias_of_a_noisy_sampler():
    """By enumeration, where the exact gradient is known: where a token's worth and probability do not depend on the other token, nothing is
    left of the bias; with the cap below the largest ratio, a part."""
    logits, sampler, _ = answers_of_noisy_policy(3)
    logits[1:], sampler[1:] = logits[1], sampler[1]  # the second token does not depend on the first
    reward = (torch.arange(5.0).double()[:, None] - 2) + torch.zeros(5)  # nor does the first token's worth on the second
    exact, biased = expected_gradient(logits, logits, reward), expected_gradient(logits, sampler, reward)
    first = lambda gradient: gradient[0]
    bias = (first(biased) - first(exact)).norm()
    assert bias > 0.1 * first(exact).norm()
    corrected = expected_gradient(logits, sampler, reward, cap=1e9)
    assert (first(corrected) - first(exact)).norm() < 1e-12
    largest = (logits[0].log_softmax(-1) - sampler[0].log_softmax(-1)).exp().max()
    assert 1.2 < largest < 10
    capped = expected_gradient(logits, sampler, reward, cap=1.2)
    assert 1e-3 < (first(capped) - first(exact)).norm() < bias


def test_what_token_level_weights_leave_is_the_bias_of_other_tokens():
    """Whole answers: the weights of the two tokens multiplied would be exact; each by itself leaves what the other token's sampler brings."""
    bias = left = 0.0
    for seed in range(20):
        logits, sampler, reward = answers_of_noisy_policy(seed)
        exact = expected_gradient(logits, logits, reward)
        bias, left = (total + (expected_gradient(logits, sampler, reward, cap) - exact).norm() for total, cap in ((bias, None), (left, 1e9)))
    assert 0.5 * bias < left < 0.75 * bias
    logits, sampler, reward = answers_of_noisy_policy(0, spread_of_second=0.0)  # then the first token's gradient is exact
    exact, corrected = expected_gradient(logits, logits, reward), expected_gradient(logits, sampler, reward, cap=1e9)
    assert (corrected - exact)[0].norm() < 1e-12 < (corrected - exact)[1:].norm()
