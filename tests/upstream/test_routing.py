"""Routing replay on the real engine: a tiny Qwen3-MoE, two of eight experts, random adapters, no
noise, bfloat16, one iteration with two updates; and what stops a run. Each test prints its numbers.

References are transformers' float32 with the routes of the transfer dock forced upon it, and its
bfloat16 as the yardstick of what rounding costs.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from reference import full_weights, log_probs, random_adapters, to_hf, with_adapters
from rehearsal import finished, make_config, run_script

from mindspeed_qerl.runs.metrics import read_jsonl

LAYERS, TOP_K, SAMPLES, EPOCHS = 2, 2, 8, 2
RECOMPUTED = {
    "actor_config.recompute_granularity": "full",
    "actor_config.recompute_method": "block",
    "actor_config.recompute_num_layers": 2,
}
EP2 = ("rollout", dict(npus=2, ep=2, infer_ep=2), RECOMPUTED)
CASES = [
    EP2,
    (
        "rollout",
        dict(npus=2, tp=2, ep=1, infer_tp=2),
        {"generate_config.enable_expert_parallel": True},
    ),
    ("rollout", dict(npus=4, tp=2, ep=2, infer_ep=4), {}),
    (
        "record",
        dict(npus=2, pp=2, ep=1, infer_ep=2),
        {**RECOMPUTED, "actor_config.recompute_num_layers": 1, "rl_config.epochs": 1},
    ),
]


def run(case: tuple, folder: Path, upstream: Path, tiny, *fault: str):
    from transformers import AutoModelForCausalLM

    mode, layout, options = case
    model, data = tiny("qwen3_moe")
    full = full_weights(AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16))
    torch.save({"full": full, "adapters": random_adapters(full)}, folder / "full.pt")
    changes = {
        "algorithm": {"routing_replay": mode},
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
    return run_script("routing_probe.py", config, upstream, folder, *fault)


class Replayed:
    """What one run left behind."""

    def __init__(self, case: tuple, folder: Path, model: Path):
        from transformers import AutoModelForCausalLM

        self.mode, self.layout, self.options = case
        dock = torch.load(folder / "experience.pt", weights_only=False)["experience"]
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        content = torch.load(folder / "full.pt", weights_only=False)
        self.weights = {
            name: tensor.contiguous()
            for name, tensor in to_hf(
                with_adapters(content["full"], content["adapters"]), self.model.config
            ).items()
        }
        self.prompts, self.responses = (
            [row.tolist() for row in dock[name]] for name in ("prompts", "responses")
        )
        self.rollout = [logprobs.float() for logprobs in dock["rollout_log_prob"]]
        self.routes = [
            np.frombuffer(row.numpy()[3:].tobytes(), np.uint8)[: row[:3].prod()].reshape(*row[:3])
            for row in dock["routes"]
        ]
        seen = [torch.load(file, weights_only=False) for file in sorted(folder.glob("dp*.pt"))]
        ids = [
            row.tolist() for rank in seen for row in rank["input_ids"]
        ]  # as long as each rank's longest
        whole = [prompt + response for prompt, response in zip(self.prompts, self.responses)]
        assert [row[: len(sequence)] for row, sequence in zip(ids, whole, strict=True)] == whole
        self.trained = {
            name: [
                row[: len(response)].float()
                for row, response in zip(
                    (row for rank in seen for part in rank[name] for row in part),
                    self.responses,
                    strict=True,
                )
            ]
            for name in ("replayed", "native", "shifted", "swapped")
            if name in seen[0]
        }
        [metrics] = folder.glob("*/*/metrics.jsonl")
        [self.metrics] = read_jsonl(metrics)

    def by_transformers(self, dtype: torch.dtype, change=lambda routes: routes) -> torch.Tensor:
        """Log-probs of all answers' tokens, by the experts of the dock, changed."""
        weights = {name: tensor.to(dtype) for name, tensor in self.weights.items()}
        with torch.no_grad():
            return torch.cat(
                [
                    log_probs(self.model.to(dtype), weights, prompt, response, change(routes))
                    for prompt, response, routes in zip(self.prompts, self.responses, self.routes)
                ]
            )


@pytest.fixture(
    scope="module",
    params=CASES,
    ids=["-".join([mode, *(f"{k}{v}" for k, v in layout.items())]) for mode, layout, _ in CASES],
)
def replayed(request, upstream, tiny, tmp_path_factory) -> Replayed:
    folder = tmp_path_factory.mktemp("routing")
    finished(run(request.param, folder, upstream, tiny), folder / "rehearsal")
    return Replayed(request.param, folder, tiny("qwen3_moe")[0])


def test_the_dock_has_the_routes_of_the_model(replayed):
    """Those that transformers' router chooses, but for near ties; of every token but an answer's
    last.
    """
    weights = {**replayed.weights, **dict(replayed.model.named_buffers())}
    below = []
    for prompt, response, routes in zip(replayed.prompts, replayed.responses, replayed.routes):
        assert routes.shape == (len(prompt) + len(response) - 1, LAYERS, TOP_K)
        with torch.no_grad():
            found = torch.func.functional_call(
                replayed.model.float(),
                weights,
                (torch.tensor([prompt + response]),),
                {"output_router_logits": True},
                strict=True,
                tie_weights=False,
            ).router_logits
        logits = torch.stack([layer[:-1] for layer in found], dim=1)
        weakest = logits.topk(TOP_K).values[..., -1:]
        chosen = logits.gather(-1, torch.from_numpy(routes.astype(np.int64)))
        below.append((weakest - chosen).flatten())
    below = torch.cat(below)
    print(
        f"\n{(below > 0).float().mean():.4f} of {len(below)} choices are other ones than "
        f"transformers' in float32, by up to {below.max():.3f} in the router's logits"
    )
    assert (below > 0).float().mean() < 0.03 and below.max() < 0.3


def test_log_probs_are_those_of_the_replayed_experts(replayed):
    """With vLLM's routes, and with wrong ones: as transformers computes with the same experts
    forced upon it.
    """
    if replayed.mode == "record":
        pytest.skip("its pass before the update is the one that routes are recorded in")
    changes = {
        "replayed": lambda routes: routes,
        "shifted": lambda routes: np.roll(routes, 1, axis=0),
        "swapped": lambda routes: routes[:, ::-1],
    }
    print()
    for name, change in changes.items():
        expected = replayed.by_transformers(torch.float32, change)
        yardstick = (replayed.by_transformers(torch.bfloat16, change) - expected).abs()
        error = (torch.cat(replayed.trained[name]) - expected).abs()
        print(
            f"{name:9} mean error {error.mean():.4f}, largest {error.max():.3f} nats; transformers "
            f"in bfloat16 {yardstick.mean():.4f}, {yardstick.max():.3f}"
        )
        assert error.mean() < 2 * yardstick.mean() and error.max() < 3 * yardstick.max()


def test_replay_ends_the_flips(replayed):
    """The mismatch of training and rollout with and without replay, of the same answers."""
    if replayed.mode == "record":
        pytest.skip("it replays no routes of the rollout")
    rollout, k3, worst = torch.cat(replayed.rollout), {}, {}
    print()
    for name, logprobs in replayed.trained.items():
        log_ratio = torch.cat(logprobs) - rollout
        k3[name], worst[name] = (
            (log_ratio.exp() - 1 - log_ratio).mean().item(),
            log_ratio.abs().max().item(),
        )
        print(
            f"{name:9} k3 {k3[name]:.1e}, mean {log_ratio.abs().mean():.4f}, largest "
            f"{worst[name]:.3f} nats, of {len(rollout)} tokens"
        )
    assert k3["replayed"] < k3["native"] / 1.5 and worst["replayed"] < worst["native"]
    assert min(k3["shifted"], k3["swapped"]) > 20 * k3["native"]


def test_every_token_is_replayed_once_an_epoch(replayed):
    tokens, metrics = sum(map(len, replayed.routes)), replayed.metrics
    epochs = replayed.options.get("rl_config.epochs", EPOCHS)
    assert metrics["routing/replayed_tokens"] == tokens * epochs
    assert (
        metrics["routing/native_tokens"] >= len(replayed.responses) * epochs
    )  # each answer's last, and padding
    shares = [metrics[f"routing/flipped/layer_{layer}"] for layer in range(LAYERS)]
    assert metrics["routing/flipped"] == pytest.approx(sum(shares) / LAYERS)
    print(f"\nflipped {shares}")
    if replayed.mode == "rollout":
        assert metrics["routing/captured_tokens"] == tokens
        assert 0 < min(shares) and max(shares) < 0.05
    else:  # one update, of the policy whose routes were recorded
        assert shares == [0.0] * LAYERS and "routing/captured_tokens" not in metrics


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
