"""Every option of the loss, the advantages and the corrections against verl's and TRL's own code:
values and gradients on random batches with padding, whole and cut into micro-batches of any size.
"""

import ast
import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mindspeed_qerl.algorithm.advantages import group_advantages, rewards_less_kl
from mindspeed_qerl.algorithm.losses import LossInputs, correction_weights, denominator, loss
from mindspeed_qerl.recipe.types import LOSS_MODES, Algorithm, Correction
from tests.algorithm import verl
from tests.tables import cells

AGGREGATIONS = (
    "token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
)
CLIP = {"clip_higher_enable": True, "clip_ratio_low": 0.15, "clip_ratio_high": 0.3}
LONGEST = 11
NONE = Correction()


def batch(seed=0, rows=8, dtype=torch.float64):
    """Policies far enough apart for every bound to act; answers of 1 to LONGEST tokens, one of them
    not trained.
    """
    torch.manual_seed(seed)
    logprobs = -2 * torch.rand(rows, LONGEST, dtype=dtype)
    old, rollout, reference = (
        (logprobs + 0.4 * torch.randn(rows, LONGEST, dtype=dtype)).clamp(max=-1e-3)
        for _ in range(3)
    )
    lengths = torch.randint(1, LONGEST + 1, (rows,))
    lengths[rows // 2] = 0
    mask = torch.arange(LONGEST) < lengths[:, None]
    entropy = (0.5 + torch.rand(rows, LONGEST, dtype=dtype)).requires_grad_()
    advantages = 2 * torch.randn(rows, dtype=dtype)
    return LossInputs(logprobs.requires_grad_(), old, rollout, advantages, mask, reference, entropy)


def with_gradients(total, inputs):
    """The loss, and its gradients in the log probabilities and the entropy."""
    of = [inputs.logprobs, inputs.entropy]
    gradients = torch.autograd.grad(total, of, allow_unused=True, materialize_grads=True)
    return total.detach(), gradients


def ours(inputs, algorithm, correction=NONE, parts=None):
    """The loss of the mini-batch, cut into `parts`, and its gradients in the log probabilities and
    the entropy.
    """
    whole = denominator(inputs.mask, algorithm)
    total = 0.0
    for rows in parts or [slice(None)]:
        part = LossInputs(*(value[rows] for value in vars(inputs).values()))
        summed, _ = loss(part, algorithm, correction)
        total = total + summed / whole
    return with_gradients(total, inputs)


def verls(inputs, algorithm):
    """verl's policy loss + KL - entropy, aggregated by its agg_loss, and the gradients."""
    info = {"dp_size": 1, "loss_scale_factor": algorithm.loss_scale_factor}
    settings = {
        "clip_ratio": 0.2,
        "clip_ratio_low": algorithm.clip_low,
        "clip_ratio_high": algorithm.clip_high,
        "clip_ratio_c": algorithm.clip_ratio_c or 1e9,
        "tau_pos": algorithm.tau_pos,
        "tau_neg": algorithm.tau_neg,
        "global_batch_info": info,
    }
    config = type(
        "ActorConfig",
        (SimpleNamespace,),
        {"get": lambda self, name, default: getattr(self, name, default)},
    )
    compute = getattr(verl.core, f"compute_policy_loss_{algorithm.loss_mode}")
    mask = inputs.mask.double()
    total, _ = compute(
        inputs.old_logprobs,
        inputs.logprobs,
        inputs.advantages[:, None].expand(mask.shape),
        mask,
        algorithm.loss_agg_mode,
        config(**settings),
    )
    if algorithm.kl_coefficient:
        kl = verl.core.kl_penalty_forward(
            inputs.logprobs, inputs.reference_logprobs, algorithm.kl_penalty
        )
        total = total + algorithm.kl_coefficient * verl.core.agg_loss(
            kl, mask, algorithm.loss_agg_mode, **info
        )
    if algorithm.entropy_coefficient:
        bonus = verl.core.agg_loss(inputs.entropy, mask, algorithm.loss_agg_mode, **info)
        total = total - algorithm.entropy_coefficient * bonus
    return with_gradients(total, inputs)


@pytest.fixture(autouse=True)
def _verls_gspo_asks_for_its_own_config(monkeypatch):
    """`isinstance(config, ActorConfig)` in verl's gspo, cispo and sapo."""
    for name in ("gspo", "cispo", "sapo"):
        function = getattr(verl.core, f"compute_policy_loss_{name}")
        monkeypatch.setitem(function.__globals__, "ActorConfig", SimpleNamespace)


PARTS = (
    [slice(None)],
    [slice(0, 1), slice(1, 4), slice(4, 8)],
    [slice(row, row + 1) for row in range(8)],
)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("mode", LOSS_MODES)
@pytest.mark.parametrize(
    "more",
    [
        {"kl_coefficient": 0.0},
        {"kl_coefficient": 0.3},
        {"kl_coefficient": 0.3, "kl_penalty": "kl"},
        {"kl_coefficient": 0.3, "kl_penalty": "mse"},
        {"kl_coefficient": 0.0, "entropy_coefficient": 0.2},
        {"kl_coefficient": 0.0, "clip_ratio_c": 1.4},
    ],
    ids=str,
)
def test_the_loss_is_verls_whatever_the_micro_batches(mode, aggregation, more):
    if mode in ("gspo", "cispo", "sapo") and "clip_ratio_c" in more:
        pytest.skip("verl does not read clip_ratio_c there")
    if mode == "sapo" and aggregation != "seq-mean-token-mean":
        pytest.skip("verl aggregates SAPO so whatever is asked")
    inputs = batch()
    algorithm = Algorithm(
        loss_mode=mode, loss_agg_mode=aggregation, loss_scale_factor=20.0, **CLIP, **more
    )
    expected = verls(inputs, algorithm)
    for parts in PARTS:
        found = ours(inputs, algorithm, parts=parts)
        torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-7)  # by a length + 1e-8
    assert expected[1][0].norm() > 0.01


@pytest.mark.parametrize("mode", LOSS_MODES)
@pytest.mark.parametrize("nats", [100.0, -100.0, 1000.0])
def test_ratios_that_float32_cannot_hold_train_as_verls_do(mode, nats):
    """One answer's tokens, some with advantages of 0; verl bounds gspo's at e^10, ours at e^20."""
    inputs = batch(dtype=torch.float32)
    inputs.advantages[1] = 0
    for row in (0, 1, 2):
        inputs.old_logprobs[row] -= nats
        inputs.reference_logprobs[row] += nats
    algorithm = Algorithm(loss_mode=mode, loss_agg_mode="seq-mean-token-mean", **CLIP)
    for coefficient in (0.0, 0.3):
        found = ours(inputs, replace(algorithm, kl_coefficient=coefficient))
        assert found[0].isfinite() and found[1][0].isfinite().all() and found[1][0].any()
    if mode != "gspo":
        without_kl = replace(algorithm, kl_coefficient=0.0)
        torch.testing.assert_close(ours(inputs, without_kl)[1], verls(inputs, without_kl)[1])


@pytest.mark.parametrize("is_far", [False, True])
@pytest.mark.parametrize(
    "method, mode, bounds",
    [
        ("token_tis", "token_truncate", (None, 1.3)),
        ("sequence_tis", "sequence_truncate", (None, 1.3)),
        ("sequence_mask", "sequence_mask", (0.8, 1.3)),
        ("icepop", "token_mask", (0.8, 1.3)),
    ],
)
def test_the_weights_of_a_correction_are_trls(method, mode, bounds, is_far):
    """TRL's own statements, out of the middle of the method that samples. is_far: ratios that
    float64 cannot hold.
    """
    inputs, correction = batch(), Correction(method, cap=1.3, floor=0.8)
    if is_far:
        inputs.rollout_logprobs[0] = -1000
    settings = SimpleNamespace(
        use_vllm=True,
        vllm_importance_sampling_correction=True,
        vllm_importance_sampling_mode=mode,
        vllm_importance_sampling_clip_min=bounds[0],
        vllm_importance_sampling_clip_max=bounds[1],
    )
    known = {
        "self": settings,
        "torch": torch,
        "math": math,
        "tool_mask": None,
        "completion_mask": inputs.mask.double(),
        "old_per_token_logps": inputs.old_logprobs,
        "sampling_per_token_logps": inputs.rollout_logprobs,
    }
    exec(trls_correction(), known)  # noqa: S102
    expected = known["vllm_importance_sampling_ratio"].expand(inputs.mask.shape)
    weights, _ = correction_weights(
        inputs.old_logprobs, inputs.rollout_logprobs, inputs.mask, correction
    )
    torch.testing.assert_close(weights[inputs.mask], expected[inputs.mask], rtol=1e-12, atol=0)
    total, gradients = ours(inputs, Algorithm(kl_coefficient=0.0, **CLIP), correction)
    assert total.isfinite() and all(gradient.isfinite().all() for gradient in gradients)


def trls_correction():
    """What computes `vllm_importance_sampling_ratio` in TRL's trainer, compiled."""
    from trl.trainer import grpo_trainer

    for node in ast.walk(ast.parse(Path(grpo_trainer.__file__).read_text())):
        text = ast.unparse(node) if isinstance(node, ast.If) else ""
        if text.startswith("if self.use_vllm and") and "importance_sampling_mode in" in text:
            return compile(ast.Module([node], []), "trl", "exec")
    raise AssertionError("TRL computes its weights elsewhere")


def test_the_geometric_mask_is_verls():
    """verl's bounds are of p_sampled / p_trained, ours of its inverse."""
    inputs, correction = batch(), Correction("geometric_mask", cap=1.1, floor=0.95)
    log_ratio, mask = (inputs.old_logprobs - inputs.rollout_logprobs).detach(), inputs.mask.double()
    bounds = f"{1 / 1.1}_{1 / 0.95}"
    expected, _ = verl.correction.compute_rollout_rejection_mask(
        log_ratio, mask, "seq_mean_k1", bounds
    )
    weights, metrics = correction_weights(
        inputs.old_logprobs, inputs.rollout_logprobs, inputs.mask, correction
    )
    assert torch.equal(weights * inputs.mask, expected)
    kept = expected.any(1).sum() / inputs.mask.any(1).sum()
    masked = metrics["rollout_correction/masked_fraction"].value()
    assert 0 < masked < 1 and masked == pytest.approx(1 - kept.item())


@pytest.mark.parametrize("missing", [[], [1], [0, 3, 9]])
@pytest.mark.parametrize(
    "estimator, by_std", [("group_norm", True), ("group_norm", False), ("rloo", True)]
)
def test_advantages_are_verls(estimator, by_std, missing):
    """Of groups without the answers whose rewards are missing, which have none."""
    torch.manual_seed(2)
    given = torch.rand(12).double().round(decimals=1)
    given[missing] = torch.nan
    known = ~given.isnan()
    rewards, index = given[known], np.arange(12)[known] // 4
    mask = torch.ones(len(rewards), 1).double()
    if estimator == "rloo":
        expected, _ = verl.core.compute_rloo_outcome_advantage(
            rewards[:, None].clone(), mask, index
        )
    else:
        expected, _ = verl.core.compute_grpo_outcome_advantage(
            rewards[:, None].clone(), mask, index, norm_adv_by_std_in_grpo=by_std
        )
    algorithm = Algorithm(adv_estimator=estimator, norm_adv_by_std_in_grpo=by_std)
    advantages = group_advantages(given, 4, algorithm).double()
    assert not advantages[~known].any()
    torch.testing.assert_close(advantages[known], expected[:, 0], rtol=1e-6, atol=1e-6)
    alone = torch.full((4,), torch.nan)
    alone[2] = 1.0
    assert not group_advantages(alone, 4, algorithm).any()  # nothing to be compared with


@pytest.mark.parametrize("kind", ["low_var_kl", "kl", "abs", "mse"])
@pytest.mark.parametrize("by_std", [True, False])
def test_kl_in_the_reward_is_verls(kind, by_std):
    """Scores on the last token, KL off each, GRPO over the sum; ours with anything outside the
    mask.
    """
    inputs, scores, index = batch(), torch.rand(8).double(), np.arange(8) // 4
    inputs.mask[4, :3] = True  # verl's mean over a row without tokens is NaN
    mask, old = inputs.mask.double(), inputs.old_logprobs.detach()
    at_the_end = torch.zeros_like(mask)
    at_the_end[torch.arange(8), inputs.mask.sum(1) - 1] = scores
    controller = SimpleNamespace(value=0.3, update=lambda **_: None)
    tensors = type("Tensors", (dict,), {"batch_size": [8]})(
        response_mask=mask,
        token_level_scores=at_the_end,
        old_log_probs=old,
        ref_log_prob=inputs.reference_logprobs,
    )
    verl.ray_trainer.apply_kl_penalty(SimpleNamespace(batch=tensors), controller, kind)
    token_rewards = tensors["token_level_rewards"]
    expected = verl.core.compute_grpo_outcome_advantage(
        token_rewards.clone(), mask, index, norm_adv_by_std_in_grpo=by_std
    )[0]
    old, reference = (
        torch.where(inputs.mask, each, float("nan")) for each in (old, inputs.reference_logprobs)
    )
    algorithm = Algorithm(
        kl_coefficient=0.3, kl_penalty=kind, use_kl_in_reward=True, norm_adv_by_std_in_grpo=by_std
    )
    rewards, kl = rewards_less_kl(scores, old, reference, inputs.mask, algorithm)
    torch.testing.assert_close(rewards, token_rewards.sum(1), rtol=1e-12, atol=1e-12)
    advantages = group_advantages(rewards, 4, algorithm).double()
    torch.testing.assert_close(advantages[:, None] * mask, expected, rtol=1e-6, atol=1e-6)
    assert kl.item() == pytest.approx((scores - rewards).mean().item() / 0.3)
    assert abs(kl.item()) > 0.05


def test_kl_in_the_reward_is_not_in_the_loss():
    algorithm = Algorithm(kl_coefficient=0.3, use_kl_in_reward=True)
    total, gradients = ours(batch(), algorithm)
    expected, expected_gradients = ours(batch(), Algorithm(kl_coefficient=0.0))
    assert total == expected and torch.equal(gradients[0], expected_gradients[0])
    assert loss(batch(), algorithm, NONE)[1]["loss/kl"].value() == 0


def test_a_logged_kl_is_that_of_a_trained_one_and_trains_nothing():
    algorithm = Algorithm(kl_coefficient=0.0, log_kl=True)
    total, gradients = ours(batch(), algorithm)
    expected, expected_gradients = ours(batch(), Algorithm(kl_coefficient=0.0))
    assert total == expected and torch.equal(gradients[0], expected_gradients[0])
    logged, trained = (
        loss(batch(), each, NONE)[1]["loss/kl"].value()
        for each in (algorithm, Algorithm(kl_coefficient=0.3))
    )
    assert logged == trained > 0


# ---- TRL ----


def trained_answers(inputs):
    """Without the answer that is not trained: TRL counts it among the answers."""
    rows = inputs.mask.any(1)
    return LossInputs(
        *(
            value[rows].detach().requires_grad_(value.requires_grad)
            for value in vars(inputs).values()
        )
    )


def trls(inputs, loss_type, weights=None, beta=0.0, entropy=0.0, level="token", delta=None):
    """GRPOTrainer._compute_loss on our tensors."""
    from collections import defaultdict

    from trl.trainer.grpo_trainer import GRPOTrainer

    mask = inputs.mask.double()
    accelerator = SimpleNamespace(
        num_processes=1,
        gather=lambda value: value,
        sync_gradients=True,
        reduce=lambda value, reduction: value,
    )
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (inputs.logprobs, inputs.entropy, None),
        accelerator=accelerator,
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level=level,
        beta=beta,
        loss_type=loss_type,
        epsilon_low=CLIP["clip_ratio_low"],
        epsilon_high=CLIP["clip_ratio_high"] + (loss_type == "cispo"),
        use_vllm=weights is not None,
        vllm_importance_sampling_correction=True,
        max_completion_length=20,
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        _metrics={"train": defaultdict(list)},
        entropy_coef=entropy,
        _entropy_bonus_enabled=bool(entropy),
        use_adaptive_entropy=False,
        args=SimpleNamespace(
            use_bias_correction_kl=False,
            delta=delta,
            steps_per_generation=1,
            sapo_temperature_pos=1.3,
            sapo_temperature_neg=0.9,
        ),
    )
    total = GRPOTrainer._compute_loss(
        trainer,
        None,
        {
            "prompt_ids": torch.zeros(len(mask), 1),
            "prompt_mask": torch.ones(len(mask), 1),
            "completion_ids": torch.zeros_like(mask),
            "completion_mask": mask,
            "advantages": inputs.advantages,
            "old_per_token_logps": inputs.old_logprobs,
            "ref_per_token_logps": inputs.reference_logprobs,
            "num_items_in_batch": mask.sum(),
            "importance_sampling_ratio": weights,
        },
    )
    return total.detach(), torch.autograd.grad(total, [inputs.logprobs])[0]


# ours beside TRL's
SAME = """
{"loss_agg_mode": "token-mean"} ¦ {"loss_type": "dapo"}
{"loss_agg_mode": "token-mean", "kl_coefficient": 0.3} ¦ {"loss_type": "dapo", "beta": 0.3}
{"loss_agg_mode": "token-mean", "entropy_coefficient": 0.2} ¦ {"loss_type": "dapo", "entropy": 0.2}
{"loss_agg_mode": "token-mean", "clip_ratio_c": 1.4} ¦ {"loss_type": "dapo", "delta": 1.4}
{"loss_agg_mode": "token-mean", "loss_mode": "cispo", "clip_ratio_low": 1.0} ¦ \
{"loss_type": "cispo"}
{"loss_agg_mode": "seq-mean-token-mean"} ¦ {"loss_type": "grpo"}
{"loss_agg_mode": "seq-mean-token-mean", "loss_mode": "gspo"} ¦ \
{"loss_type": "grpo", "level": "sequence"}
{"loss_agg_mode": "seq-mean-token-mean", "loss_mode": "sapo", "tau_pos": 1.3, "tau_neg": 0.9} ¦ \
{"loss_type": "sapo"}
{"loss_agg_mode": "seq-mean-token-sum"} ¦ {"loss_type": "luspo"}
{"loss_agg_mode": "seq-mean-token-sum-norm", "loss_scale_factor": 20.0} ¦ {"loss_type": "dr_grpo"}
"""


@pytest.mark.parametrize("more, trl", cells(SAME))
def test_the_loss_is_trls_whatever_the_micro_batches(more, trl):
    inputs = trained_answers(batch())
    algorithm = Algorithm(**{"kl_coefficient": 0.0, **CLIP, **json.loads(more)})
    expected, expected_gradient = trls(inputs, **json.loads(trl))
    for parts in PARTS:
        value, gradients = ours(inputs, algorithm, parts=parts)
        torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(gradients[0], expected_gradient, rtol=1e-9, atol=1e-9)
