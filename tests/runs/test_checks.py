"""What the checks of a run's own numbers say, and what they let pass; docs/results.md has the
faults behind them.
"""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mindspeed_qerl.algorithm.advantages import group_advantages
from mindspeed_qerl.algorithm.losses import LossInputs, loss, token_logprobs
from mindspeed_qerl.algorithm.metrics import mismatch
from mindspeed_qerl.aqn.schedule import NoiseLevel
from mindspeed_qerl.common.errors import EngineError
from mindspeed_qerl.recipe.types import (
    Algorithm,
    Batch,
    Correction,
    HardwareError,
    Noise,
    Quantization,
    Run,
)
from mindspeed_qerl.runs import checks
from mindspeed_qerl.runs.checks import StepChecks
from tests import numbers

MOE = {"routed": True}
BF16, NVFP4 = {"dtype": "bfloat16"}, {"format": "nvfp4"}
FOREIGN = {"rollout": ("gaussian",)}


def k3_fault(k3, routed=False, noise=0.0, sensitivity=0.02, **config):
    recipe = recipe_of(**config)
    return checks.mismatch_fault(
        k3, noise, sensitivity, checks.rounding_bound(recipe, routed), routed
    )


@pytest.mark.parametrize(
    "k3, given, said",
    [
        (2e-13, {}, None),
        (1.1e-6, {}, "stale sync"),
        (1.13e-6, MOE, None),  # one token of 4,480 met another expert
        (4.5e-4, MOE, "at most 0.0001"),  # a sync one step stale
        (1.9e-3, BF16, None),
        (0.116, BF16, "at most 0.05"),
        (0.116, BF16 | MOE, None),
        (1.1, BF16 | MOE, "at most 0.5"),
        (4e-3, NVFP4, None),
        (2.1, NVFP4, "at most 2"),
        (7.7, FOREIGN, None),
        (21, FOREIGN, "at most 20"),
        (0.0, {"noise": 0.05}, "impossible"),
        (2e-13, {"noise": 5e-4}, "come from the sampler"),
        (3e-9, {"noise": 5e-4}, None),
        (2e-13, {"noise": 1e-5}, None),  # noise too small to be seen
        (0.0, {"noise": 0.05, "sensitivity": 1e-7}, None),  # a policy that has no choice left
        # step 1,812 of benchmarks/long_run.py
        (1.64e-13, {"noise": 5e-4, "sensitivity": 1.9e-6}, None),
        # the quickstart's step 32, in which a token met another expert
        (7.1e-5, MOE | {"noise": 1.58e-3, "sensitivity": 0.024}, None),
        # SmolLM2-135M, QeRL's first sigma and that of aqn=strong
        (1.5, {"noise": 0.05, "sensitivity": 0.7}, None),
        (5.87, {"noise": 0.1, "sensitivity": 0.99}, None),
        (0.3, {"noise": 5e-4} | MOE, None),
        (7.7e-3, {"noise": 5e-4}, "temperature"),
        (0.02, {"noise": 5e-4, "sensitivity": 1e-7}, "at most 1e-06"),
        (0.6, {"noise": 5e-4} | BF16 | MOE, "and this noise"),
        (3.0, {"noise": 5e-4} | NVFP4, "and this noise"),
    ],
)
def test_k3_is_judged_by_noise_and_dtype(k3, given, said):
    fault = k3_fault(k3, **given)
    assert said in fault if said else fault is None


@pytest.mark.parametrize("k3", [50.0, math.inf, math.nan])
@pytest.mark.parametrize("noise", [0.0, 5e-4, 0.05, 1.0])
@pytest.mark.parametrize("config", [{}, BF16, NVFP4, FOREIGN])
@pytest.mark.parametrize("routed", [False, True])
def test_some_k3_stops_every_run(k3, noise, config, routed):
    assert f"is {k3:.3g} nats" in k3_fault(k3, routed, noise, **config)


@pytest.mark.parametrize(
    "k3, given, is_warned",
    [
        (6e-3, BF16, True),
        (6e-3, BF16 | MOE, True),
        (2e-3, BF16, False),
        (6e-3, {}, False),
        (6e-3, BF16 | {"noise": 0.01}, False),
        (6e-3, BF16 | FOREIGN, False),
    ],
)
def test_what_bfloat16_may_be_is_warned_of(k3, given, is_warned):
    config = {"noise": 0.0, "routed": False, **given}
    noise, routed = config.pop("noise"), config.pop("routed")
    rounding = checks.rounding_bound(recipe_of(**config), routed)
    assert (checks.mismatch_warning(k3, noise, rounding) is not None) == is_warned


@pytest.mark.parametrize("certainty", [0, 4, 8])
def test_k3_of_noisy_logits_is_foretold_by_the_sensitivity(certainty):
    """E k3 = sigma^2 / 2 (1 - p)^2, and at most as much from the other tokens; the sure see
    nothing.
    """
    torch.manual_seed(0)
    logits, tokens = torch.randn(400, 50, 40), torch.randint(0, 40, (400, 50))
    mask = torch.ones(400, 50).bool()
    logits.scatter_add_(2, tokens[..., None], torch.full((400, 50, 1), float(certainty)))
    noisy = token_logprobs(logits + 0.01 * torch.randn_like(logits), tokens, 1.0)
    metrics = mismatch(noisy, token_logprobs(logits, tokens, 1.0), mask)
    k3, sensitivity = (metrics[f"mismatch/{name}"].value() for name in ("k3", "sensitivity"))
    assert 0.5 < k3 / (0.01**2 * sensitivity) < 1


@pytest.mark.parametrize(
    "changed",
    [
        {"loss/kl": -1},
        {"loss/policy": -1},
        {"loss/entropy": -1},
        {"loss/total": -1},
        {"loss/total": 1.01},
        {},
    ],
)
@pytest.mark.parametrize("in_reward", [False, True])
def test_the_loss_that_was_backpropagated_is_the_sum_of_its_parts(changed, in_reward):
    """Of which KL is none where it is in the reward, and logged."""
    torch.manual_seed(0)
    logprobs, old, reference, entropy = (-torch.rand(4, 6) for _ in range(4))
    algorithm = Algorithm(
        kl_coefficient=0.1, entropy_coefficient=0.01, use_kl_in_reward=in_reward, log_kl=True
    )
    inputs = LossInputs(
        logprobs, old, old, torch.randn(4), torch.rand(4, 6) < 0.7, reference, -entropy
    )
    values = numbers(loss(inputs, algorithm, Correction())[1])
    fault = checks.loss_fault(
        values | {name: factor * values[name] for name, factor in changed.items()}, algorithm
    )
    is_wrong = bool(changed) and not (in_reward and "loss/kl" in changed)
    assert ("the loss that was backpropagated is" in fault) if is_wrong else fault is None
    if not changed and not in_reward:
        assert checks.loss_fault(values, replace(algorithm, kl_coefficient=0.2))


@pytest.mark.parametrize("trained, is_fault", [(20, False), (18, True), (10, True), (22, True)])
def test_trained_tokens_are_those_that_were_sampled(trained, is_fault):
    fault = checks.tokens_fault(trained, 10, epochs=2, verb="replayed")
    assert (fault is not None) == is_fault
    assert not fault or f"{trained} tokens were replayed, and 10 were sampled" in fault


@pytest.mark.parametrize("estimator", ["group_norm", "rloo"])
def test_advantages_add_up_to_0_in_each_group(estimator):
    rewards = torch.tensor([1.0, 0.0, 0.0, 3.0, 1.0, 1.0, 1e-6, 0.0, 0.3, 0.1, 0.7, 9.0])
    algorithm = Algorithm(adv_estimator=estimator)
    advantages = group_advantages(rewards, 4, algorithm).numpy()
    assert checks.advantages_fault(advantages, 4) is None
    other = group_advantages(rewards.reshape(3, 4).T.reshape(-1), 3, algorithm).numpy()
    for wrong in (other, advantages + 0.01, advantages * math.nan):
        assert "do not add up to 0" in checks.advantages_fault(wrong, 4)


def test_the_last_trained_token_of_a_finished_answer_is_an_end_token():
    tokens = np.array([[5, 7, 2, 0], [5, 5, 7, 8], [5, 7, 9, 3], [5, 1, 2, 0]])
    mask = np.array(
        [[1, 1, 0], [0, 1, 1], [1, 1, 1], [0, 0, 0]], dtype=bool
    )  # the last one trains nothing
    finished = np.array([True, False, True, True])
    assert checks.ends_fault(tokens, mask, finished, {2, 3}) is None
    assert "of 1 of 3 answers" in checks.ends_fault(tokens, mask, finished, {2})
    assert checks.ends_fault(tokens, mask, finished, set()) is None
    mask[0, 1] = False  # the end token is left out of the loss
    assert "the first one's is 7" in checks.ends_fault(tokens, mask, finished, {2, 3})


STEADY = [(0.05, 0.052), (0.05, 0.048), (0.03, 0.03), (0.03, 0.031)]


@pytest.mark.parametrize(
    "sigma, seen, said",
    [
        (0.03, STEADY, None),
        (0.0, STEADY, "sigma 0, its schedule says 0.03"),
        (0.03, [(0.03, 0.06)], "twice"),
        (0.03, [(0.03, math.nan)], "twice"),
        (0.03, [(0.03, 0.044)], None),  # chance, in a single step
        (0.03, [(e, 1.3 * m) for e, m in STEADY], "has 1.31 of the std"),
        (0.03, [(e, 0.6 * m) for e, m in STEADY], "aqn.sigma_start"),
        (0.03, [(e, 0.6 * m) for e, m in STEADY[:3]], None),  # too few to judge
        (0.03, [*STEADY, (5e-4, 2e-5)], None),  # swallowed by bfloat16, at a schedule's end
    ],
)
def test_noise_is_judged_in_each_step_and_over_the_run(sigma, seen, said):
    fault = checks.noise_fault(sigma, 0.03, seen)
    assert said in fault if said else fault is None


ARRIVED = dict(
    tensors=2,
    moved=1.0,
    expected=1.0,
    max_error=1e-8,
    resolution=1e-7,
    lost=1e-4,
    arrived=0.99,
    arrived_error=0.004,
)


@pytest.mark.parametrize(
    "changed, is_fault",
    [
        ({}, False),
        ({"max_error": 3e-7}, True),
        ({"lost": 0.2}, True),
        ({"max_error": math.inf}, True),
        ({"lost": math.nan}, True),
        ({"moved": 0.0, "expected": 0.0}, False),
    ],
)
def test_a_sync_is_judged_by_target(changed, is_fault):
    movement = {"linear_qkv": ARRIVED, "linear_fc1": {**ARRIVED, **changed}}
    faults = checks.sync_faults(movement)
    assert len(faults) == int(is_fault)
    assert not faults or faults[0].startswith("linear_fc1: the rollout engine's weights differ")


@pytest.mark.parametrize(
    "share, error, least, is_fault",
    [
        (1.0, 0.0, 0.9, False),
        (0.89, 0.0, 0.9, True),
        (0.61, 0.1, 0.9, False),
        (0.59, 0.1, 0.9, True),
        (0.02, 0.01, 0.0, False),
        (-1.0, 0.1, 0.0, False),
        (math.nan, 0.1, 0.9, True),
    ],
)
def test_a_share_is_judged_by_its_standard_error(share, error, least, is_fault):
    movement = {"linear_qkv": ARRIVED, "linear_fc1": {"arrived": share, "arrived_error": error}}
    faults = checks.arrival_faults(movement, least, "nvfp4")
    assert len(faults) == int(is_fault)
    assert not faults or "rounded away on its way into weights of nvfp4" in faults[0]


VALUES = {
    "mismatch/k3": 2e-13,
    "mismatch/sensitivity": 0.02,
    "loss/policy": 0.5,
    "loss/kl": 0.2,
    "loss/total": 0.52,
    "selection/trained_tokens": 40,
}
NOISY = VALUES | {
    "mismatch/k3": 1e-4,
    "aqn/sigma": 0.05,
    "aqn/expected_std": 0.05,
    "aqn/measured_std": 0.049,
}


def recipe_of(noise=True, dtype="float32", correction="none", format="none", **hardware_error):
    """Of a run whose steps 11..20 of 20 have noise, 2 epochs."""
    return SimpleNamespace(
        run=Run(train_iters=20),
        batch=Batch(epochs=2),
        algorithm=Algorithm(kl_coefficient=0.1),
        model=SimpleNamespace(dtype=dtype),
        noise=Noise(enabled=noise, num_stages=2),
        correction=Correction(correction),
        quantization=Quantization(format),
        hardware_error=HardwareError(**hardware_error),
    )


def checks_of(**config):
    return StepChecks(recipe_of(**config), routed=False, earlier=[])


def noise_of_step(step):
    return Noise(enabled=True, num_stages=2).noise_schedule(20).level(step - 1)


@pytest.mark.parametrize(
    "step, values, said",
    [
        (10, VALUES, None),
        (11, NOISY, None),
        (10, {"reward/mean": 0.0}, None),  # a step that trained nothing
        (11, VALUES, "sigma 0, its schedule says 0.05"),
        (10, NOISY, "its schedule says 0"),
        (11, NOISY | {"aqn/measured_std": 0.1}, "put on twice"),
        (11, NOISY | {"mismatch/k3": 0.0}, "impossible"),
        (11, NOISY | {"mismatch/k3": math.nan}, "nan nats"),
        (11, NOISY | {"mismatch/sensitivity": math.nan}, "at most nan"),
        (10, VALUES | {"mismatch/k3": 7.7e-3}, "temperature"),
        (10, VALUES | {"loss/total": 0.48}, "backpropagated"),
        (10, VALUES | {"selection/trained_tokens": 36}, "36 tokens were trained, and 20"),
    ],
)
def test_a_step_that_cannot_be_right_stops_the_run(step, values, said):
    tokens = 20 if "loss/total" in values else 0
    told = step, values, tokens, 0, noise_of_step(step)
    if said is None:
        assert checks_of().check(*told) == []
    else:
        with pytest.raises(EngineError, match=rf"(?s)^step {step} cannot be right:.*{said}"):
            checks_of().check(*told)


def test_arithmetic_of_other_hardware_explains_a_mismatch_and_bfloat16_is_warned_of_once():
    far = VALUES | {"mismatch/k3": 7.7e-3}
    assert checks_of(rollout=("gaussian",)).check(10, far, 20) == []
    assert checks_of(**NVFP4).check(10, far, 20) == []
    of_run = checks_of(noise=False, dtype="bfloat16")
    said = [of_run.check(step, far, 20) for step in (1, 2)]
    assert said[0][0].startswith("k3 between") and said[1] == []


def test_the_warning_of_uneven_weights_comes_once():
    plain, corrected = checks_of(), checks_of(correction="token_tis")
    steps = ((1, VALUES, 0.1), (11, NOISY, 0.9), (12, NOISY, 0.4), (13, NOISY, 0.3))
    warnings = []
    for step, values, size in steps:
        values = values | {"mismatch/effective_sample_size": size}
        told = step, values, 20, 0, noise_of_step(step)
        warnings += plain.check(*told)
        assert corrected.check(*told) == []
    assert len(warnings) == 1
    assert "effective sample size is 40% of the tokens" in warnings[0]


@pytest.mark.parametrize(
    "sigma, target, warned",
    [(1.0, 0.01, True), (1e-4, 0.001, True), (0.5, 0.01, False), (1.0, 0.001, False)],
)
def test_a_target_that_sigma_cannot_reach_is_warned_of_once(sigma, target, warned):
    level = NoiseLevel(step=1, stage=1, sigma=sigma, target=target)
    values = NOISY | {
        "aqn/sigma": sigma,
        "aqn/expected_std": sigma,
        "aqn/measured_std": sigma,
        "aqn/reached_k3": 0.002,
        "mismatch/k3": 1e-5,
    }
    checks = checks_of()
    said = [checks.check(step, values, 20, 0, level) for step in (11, 12)]
    assert len(said[0]) == warned and said[1] == []
    if warned:
        assert f"at its bound of {sigma:g}" in said[0][0] and "0.002" in said[0][0]
