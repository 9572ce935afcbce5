"""What one rank trains and logs where model, loss, optimizer and schedule are joined, against
float64.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from .conftest import recipe_of, run_ranks
from .test_megatron import random_batch

LOW, HIGH, KL, ENTROPY, CAP, TEMPERATURE, LR, CLIP_GRAD, ITERATIONS = (
    0.01,
    0.05,
    0.1,
    0.02,
    2.0,
    0.7,
    3e-3,
    0.05,
    40,
)


def batch_of_another_policy():
    """Sampled by one that is far from any of ours, on both sides; the longest answers first, as a
    rank takes them.
    """
    batch = random_batch()
    batch = batch.rows(np.argsort(-batch.lengths, kind="stable"))
    logprobs = np.random.default_rng(1).uniform(-9, -4, batch.mask.shape).astype(np.float32)
    return replace(batch, rollout_logprobs=logprobs * batch.mask)


def joined_rank(start, config):
    """Two iterations of two epochs, a skipped one between them; then two of one epoch in which
    nothing moves. Of each micro-batch that was trained, its log probabilities and entropies and the
    gradients that reached them.
    """
    from mindspeed_qerl.local import passes

    batch, trained = batch_of_another_policy(), {"token_logprobs": [], "token_entropy": []}

    def watched(name):
        function = getattr(passes, name)

        def call(*arguments):
            values = function(*arguments)
            if values.requires_grad:
                values.retain_grad()
                trained[name].append(values)
            return values

        return call

    for name in trained:
        setattr(passes, name, watched(name))
    trainer = start(config)
    metrics = [trainer.train(batch)]
    trainer.skip()
    metrics.append(trainer.train(batch))
    trainer.optimizer.step = lambda: None
    trainer.recipe = replace(config, batch=replace(config.batch, epochs=1))
    metrics += [trainer.train(batch) for _ in range(2)]
    norm = math.sqrt(
        sum(parameter.grad.double().square().sum().item() for parameter in trainer.parameters)
    )
    result = {
        "metrics": metrics,
        "norm": norm,
        **{name: [(values.detach(), values.grad) for values in of] for name, of in trained.items()},
    }
    trainer.parameters[0].data.fill_(math.nan)
    with pytest.raises(
        RuntimeError, match=r"the trained model gave nan as the log probability of token 1 of"
    ):
        trainer.train(batch)
    return result


@pytest.fixture(scope="module")
def joined(model_dirs, data_dir):
    """One micro-batch, KL > 0, an entropy bonus, unequal bounds of the clipping, weights against
    the policy that sampled, a temperature.
    """
    config = recipe_of(
        model_dirs["qwen3"],
        data_dir,
        rl_config__actor_resource__num_npus=1,
        actor_config__expert_model_parallel_size=1,
        rl_config__clip_ratio_low=LOW,
        rl_config__clip_ratio_high=HIGH,
        rl_config__init_kl_coef=KL,
        rl_config__entropy_coeff=ENTROPY,
        rl_config__epochs=2,
        actor_config__lr=LR,
        actor_config__lr_decay_style="linear",
        actor_config__clip_grad=CLIP_GRAD,
        megatron_training__train_iters=ITERATIONS,
        rollout_correction__method="token_tis",
        rollout_correction__cap=CAP,
        generate_config__sampling_config__temperature=TEMPERATURE,
    )
    [result] = run_ranks(joined_rank, 1, config)
    width = random_batch().mask.shape[1]  # what precedes the first answer is not computed
    arrays = {
        name: [
            [
                np.pad(values.double().numpy(), ((0, 0), (width - values.shape[1], 0)))
                for values in pair
            ]
            for pair in result[name]
        ]
        for name in ("token_logprobs", "token_entropy")
    }
    return result | arrays


def test_the_first_policy_is_the_base_model_at_the_temperature_of_sampling(joined, model_dirs):
    from transformers import AutoModelForCausalLM

    batch = batch_of_another_policy()
    tokens, length = torch.from_numpy(batch.tokens), batch.tokens.shape[1]
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(model_dirs["qwen3"], dtype=torch.float32)(
            tokens,
            attention_mask=(torch.arange(length) < torch.from_numpy(batch.lengths)[:, None]).long(),
        ).logits
    policy = torch.distributions.Categorical(logits=logits[:, :-1].double() / TEMPERATURE)
    for name, expected in (
        ("token_logprobs", policy.log_prob(tokens[:, 1:])),
        ("token_entropy", policy.entropy()),
    ):
        assert np.abs((joined[name][0][0] - expected.numpy()) * batch.mask).max() < 1e-5, name


def test_what_is_trained_and_logged_is_the_formula(joined):
    """The gradients that reach log probabilities and entropies, and the loss in the metrics; the
    first policy is the reference, since B starts at 0.
    """
    batch, policies = batch_of_another_policy(), joined["token_logprobs"]
    reference, tokens, losses, sides = policies[0][0], batch.mask.sum(), [], set()
    # the update that the policy before an iteration is of
    for (new, gradient), (entropy, of_entropy), before in zip(
        policies, joined["token_entropy"], (0, 0, 2, 2, 4, 5), strict=True
    ):
        old, total = policies[before][0], 0.0
        for row, column in np.argwhere(batch.mask):
            advantage, ratio = (
                float(batch.advantages[row]),
                np.exp(new[row, column] - old[row, column]),
            )
            weight = min(np.exp(old[row, column] - batch.rollout_logprobs[row, column]), CAP)
            away = reference[row, column] - new[row, column]
            is_clipped = ratio > 1 + HIGH if advantage > 0 else ratio < 1 - LOW
            expected = (0 if is_clipped else -weight * advantage * ratio) + KL * (1 - np.exp(away))
            assert gradient[row, column] == pytest.approx(expected / tokens, rel=1e-4, abs=1e-7), (
                row,
                column,
            )
            bounded = min(max(ratio, 1 - LOW), 1 + HIGH)
            total += -weight * min(advantage * ratio, advantage * bounded) + KL * (
                np.exp(away) - 1 - away
            )
            sides |= {(advantage > 0, bool(is_clipped))}
        np.testing.assert_allclose(of_entropy, -ENTROPY / tokens * batch.mask, rtol=1e-6)
        assert not gradient[~batch.mask].any()
        losses.append((total - ENTROPY * entropy[batch.mask].sum()) / tokens)
    assert sides == {(True, True), (True, False), (False, True), (False, False)}
    metrics, updates = joined["metrics"], (slice(0, 2), slice(2, 4), slice(4, 5), slice(5, 6))
    for of_iteration, part in zip(metrics, updates, strict=True):
        assert of_iteration["loss/total"] == pytest.approx(
            np.mean(losses[part]), rel=1e-4, abs=1e-6
        )
        assert of_iteration["selection/trained_tokens"] == len(losses[part]) * tokens
        assert (
            of_iteration["loss/kl"] > 0,
            of_iteration["rollout_correction/truncated_fraction"] > 0,
        ) == (True, True)


def test_an_update_starts_from_no_gradient_and_ends_with_a_clipped_one(joined):
    """Twice the same update in which nothing moves."""
    one, other = joined["metrics"][2:]
    assert one["grad_norm"] == other["grad_norm"] > 2 * CLIP_GRAD
    assert joined["norm"] == pytest.approx(CLIP_GRAD, rel=1e-3)


def test_the_learning_rate_goes_by_iterations_skipped_ones_included(joined):
    assert [metrics["lr"] for metrics in joined["metrics"]] == pytest.approx(
        [LR * (1 - iteration / ITERATIONS) for iteration in (0, 2, 3, 4)]
    )
