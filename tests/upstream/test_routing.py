"""Routing replay on the real engine: a tiny Qwen3-MoE, two of eight experts, random adapters, no
noise, bfloat16, one iteration with two updates; and what stops a run. Each test prints its numbers.

References are transformers' float32 with the routes of the transfer dock forced upon it, and its
bfloat16 as the yardstick of what rounding costs.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from reference import (
    CHANGES,
    full_weights,
    log_probs,
    random_adapters,
    to_hf,
    unpacked,
    with_adapters,
)
from rehearsal import finished, make_config, run_module

from mindspeed_qerl.runs.metrics import read_jsonl

LAYERS, SAMPLES, EPOCHS = 2, 8, 2
RECOMPUTED = {
    "actor_config.recompute_granularity": "full",
    "actor_config.recompute_method": "block",
    "actor_config.recompute_num_layers": 2,
}
EP2 = (dict(npus=2, ep=2, infer_ep=2), RECOMPUTED)
TP2 = (dict(npus=2, tp=2, infer_tp=2), {"generate_config.enable_expert_parallel": True})
TP2_EP2 = (dict(npus=4, tp=2, ep=2, infer_ep=4), {})
PP2 = (dict(npus=2, pp=2, infer_ep=2), {**RECOMPUTED, "actor_config.recompute_num_layers": 1})


def run(case: tuple, folder: Path, upstream: Path, tiny, *fault: str):
    from transformers import AutoModelForCausalLM

    layout, options = case
    model, data = tiny("qwen3_moe")
    full = full_weights(AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16))
    torch.save({"full": full, "adapters": random_adapters(full)}, folder / "full.pt")
    changes = {
        "algorithm": {"routing_replay": "rollout"},
        "aqn.enabled": False,
        "rl_config.epochs": EPOCHS,
        "run.prove_every": 100,
        "eval.every": 100,
        "model.tiny.moe_aux_loss_coeff": 0.0,
        "megatron_training.use_distributed_optimizer": False,
        **options,
    }
    sizes = dict(train_iters=1, samples=SAMPLES)
    config = make_config("qwen3_moe", model, data, folder, **layout, **sizes, changes=changes)
    return run_module("routing_probe", config, upstream, folder, *fault)


class Replayed:
    """What one run left behind."""

    def __init__(self, folder: Path, model: Path):
        from transformers import AutoModelForCausalLM

        dock = torch.load(folder / "experience.pt", weights_only=False)["experience"]
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        content = torch.load(folder / "full.pt", weights_only=False)
        merged = to_hf(with_adapters(content["full"], content["adapters"]), self.model.config)
        self.weights = {name: tensor.contiguous() for name, tensor in merged.items()}
        self.prompts = [row.tolist() for row in dock["prompts"]]
        self.responses = [row.tolist() for row in dock["responses"]]
        self.rollout = torch.cat([logprobs.float() for logprobs in dock["rollout_log_prob"]])
        self.routes = [unpacked(row) for row in dock["routes"]]
        seen = [torch.load(file, weights_only=False) for file in sorted(folder.glob("dp*.pt"))]
        ids = [row.tolist() for rank in seen for row in rank["input_ids"]]
        whole = [prompt + response for prompt, response in zip(self.prompts, self.responses)]
        # as long as each rank's longest
        assert [row[: len(sequence)] for row, sequence in zip(ids, whole, strict=True)] == whole
        self.trained = {}
        for name in ("native", *CHANGES):
            rows = [row for rank in seen for part in rank[name] for row in part]
            pairs = zip(rows, self.responses, strict=True)
            answers = [row[: len(response)].float() for row, response in pairs]
            self.trained[name] = torch.cat(answers)
        [metrics] = folder.glob("*/*/metrics.jsonl")
        [self.metrics] = read_jsonl(metrics)

    def by_transformers(self, dtype: torch.dtype, change: Callable) -> torch.Tensor:
        """Log-probs of all answers' tokens, by the experts of the dock, changed."""
        weights = {name: tensor.to(dtype) for name, tensor in self.weights.items()}
        model, rows = self.model.to(dtype), []
        with torch.no_grad():
            for prompt, response, routes in zip(self.prompts, self.responses, self.routes):
                rows.append(log_probs(model, weights, prompt, response, change(routes)))
        return torch.cat(rows)


def k3_of(log_ratio: torch.Tensor) -> torch.Tensor:
    return log_ratio.exp() - 1 - log_ratio


@pytest.fixture(
    scope="module", params=[EP2, TP2, TP2_EP2, PP2], ids=["ep2", "tp2", "tp2-ep2", "pp2"]
)
def replayed(request, upstream, tiny, tmp_path_factory) -> Replayed:
    folder = tmp_path_factory.mktemp("routing")
    finished(run(request.param, folder, upstream, tiny), folder / "rehearsal")
    return Replayed(folder, tiny("qwen3_moe")[0])


@pytest.mark.parametrize("name", CHANGES)
def test_log_probs_are_those_of_the_replayed_experts(name, replayed):
    """With vLLM's routes, and with wrong ones: as transformers computes with the same experts
    forced upon it.
    """
    expected = replayed.by_transformers(torch.float32, CHANGES[name])
    yardstick = (replayed.by_transformers(torch.bfloat16, CHANGES[name]) - expected).abs()
    error = (replayed.trained[name] - expected).abs()
    print(
        f"\n{name:9} mean error {error.mean():.4f}, largest {error.max():.3f} nats; transformers "
        f"in bfloat16 {yardstick.mean():.4f}, {yardstick.max():.3f}"
    )
    assert error.mean() < 2 * yardstick.mean() and error.max() < 3 * yardstick.max()


def test_replay_ends_the_flips(replayed):
    """What replay leaves of the mismatch is rounding's, of both sides. Without it the mean is of
    the few tokens with a flipped route, a hundredth, which are far off or, by chance, are not.
    """
    trained = replayed.trained
    k3 = {name: k3_of(logprobs - replayed.rollout) for name, logprobs in trained.items()}
    native, left = k3["native"], k3["replayed"]
    exact, rounded = (
        replayed.by_transformers(dtype, CHANGES["replayed"])
        for dtype in (torch.float32, torch.bfloat16)
    )
    rounding = 2 * k3_of(rounded - exact).mean()
    distance = (trained["native"] - trained["replayed"]).abs()
    moved = distance.topk(len(distance) // 100).indices
    nearer = native[moved].mean() / left[moved].mean()
    print(
        f"\nk3 {native.mean():.2g}, replayed {left.mean():.2g}, of rounding {rounding:.2g}; of what "
        f"replay moves most {nearer:.1f} times less"
    )
    assert left.mean() < min(1.5 * rounding, native.mean()) and nearer > 1.5
    assert left.max() < native.max()
    assert min(k3["shifted"].mean(), k3["swapped"].mean()) > 20 * native.mean()


def test_every_token_is_replayed_once_an_epoch(replayed):
    tokens, metrics = sum(map(len, replayed.routes)), replayed.metrics
    assert metrics["routing/captured_tokens"] == tokens
    assert metrics["routing/replayed_tokens"] == tokens * EPOCHS
    # each answer's last, and padding
    assert metrics["routing/native_tokens"] >= len(replayed.responses) * EPOCHS
    shares = [metrics[f"routing/flipped/layer_{layer}"] for layer in range(LAYERS)]
    assert metrics["routing/flipped"] == pytest.approx(sum(shares) / LAYERS)
    assert 0 < min(shares) and max(shares) < 0.05


@pytest.mark.parametrize(
    "fault, message",
    [
        ("uninstalled", "to be replayed 2 times"),
        ("twice", "layer 1 sends token 0 to the same expert twice: [5, 5]"),
        ("lost", "no routes for 1 of its"),
    ],
)
def test_a_run_that_does_not_replay_is_stopped(fault, message, upstream, tiny, tmp_path):
    result = run(EP2, tmp_path, upstream, tiny, fault)
    assert result.returncode == 1 and message in result.stderr, (
        result.stdout[-2000:] + result.stderr[-2000:]
    )
