"""One iteration of the real engine, number by number: weights that reach vLLM, noise,
log-probabilities, rewards, advantages, gradients.

Training and rollout compute in bfloat16 (upstream's grouped experts refuse float32), the references
in float32. bfloat16 keeps 8 bits, so a single rounding moves a number by up to 2^-9 = 0.2 % of it.
Weights are compared to one rounding of the merged weight, up or down. A log-probability is a sum of some
hundred products rounded on its way through two layers; transformers' own bfloat16 is the yardstick
there. All 8 experts are active, so that no rounding can change a route; or two are, and those that
vLLM chose are replayed by upstream and by the references.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from reference import (
    full_weights,
    grpo_loss,
    log_probs,
    random_adapters,
    shard,
    to_hf,
    unpacked,
    vllm_shard,
    with_adapters,
)
from rehearsal import HERE, PACKED, environment, finished, make_config, run_module, run_python
from varied_reward import varied

from mindspeed_qerl.aqn.injector import standard_normal
from mindspeed_qerl.lora.rounding import dither_of
from mindspeed_qerl.tasks.gsm8k.verifier import VERIFIERS

SIGMA, KL, SAMPLES = 0.05, 0.1, 8
LR = 0.001  # so that the policy of the second update is far enough for clipping to act
REPLAYED = {
    "algorithm": {"routing_replay": "rollout"},
    "rl_config.init_kl_coef": 0.0,
}  # the reference routes itself
PLAIN = {}  # GRPO with clip-higher and the mean of all tokens
CISPO = {
    "algorithm": {"loss_mode": "cispo"},
    "rollout_correction": {"method": "token_tis", "cap": 1.01},
}
DR_GRPO = {
    "algorithm": {"norm_adv_by_std_in_grpo": False, "loss_agg_mode": "seq-mean-token-sum-norm"},
    "rollout_correction": {"method": "icepop", "floor": 0.99, "cap": 1.01},
    "rl_config.entropy_coeff": 0.01,
}
# what each option makes of a batch is in test_loss.py, on ranks as here
CASES = [
    ("qwen3_moe", dict(npus=2, ep=2, infer_ep=2), PLAIN),
    ("qwen3_moe", dict(npus=2, ep=2, infer_ep=2), REPLAYED),
    ("qwen3_moe", dict(npus=4, tp=2, ep=2, infer_ep=4), CISPO),
    ("qwen3_moe", dict(npus=2, pp=2, ep=1, infer_ep=2), DR_GRPO),
    ("qwen2_moe", dict(npus=2, tp=2, ep=1, infer_ep=2), PLAIN),
    ("llama", dict(npus=2, tp=2, infer_tp=1), PLAIN),
    ("Llama-3.2-1B", dict(npus=2, tp=1, infer_tp=2), PLAIN),
    ("Qwen3-4B", dict(npus=2, tp=2, infer_tp=2), PLAIN),
    ("Qwen3-32B", dict(npus=2, tp=1, infer_tp=2), PLAIN),
    ("Qwen2.5-72B", dict(npus=2, tp=2, infer_tp=1), PLAIN),
    ("qwen3_moe", dict(npus=4, ep=4, infer_ep=4), PACKED | REPLAYED),
    ("qwen3_moe", dict(npus=4, tp=2, ep=1, infer_ep=2), PACKED | REPLAYED),
    ("qwen3_moe", dict(npus=2, pp=2, ep=1, infer_ep=2), PACKED),
]


class Probe:
    """What one probed iteration left behind."""

    def __init__(self, folder: Path, model: Path, family: str, layout: dict, options: dict):
        from transformers import AutoModelForCausalLM, AutoTokenizer

        def load(name: str) -> dict:
            return torch.load(folder / f"{name}.pt", weights_only=False)

        self.full, self.adapters = load("full")["full"], load("full")["adapters"]
        self.ranks = [load(f"rank{rank}") for rank in range(layout["npus"])]
        self.grad_norm = [rank["grad_norm"] for rank in self.ranks]
        self.local = {dtype: load(f"local_{dtype}") for dtype in ("float32", "bfloat16")}
        self.experience = load("experience")["experience"]
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.family, self.layout, self.options = family, layout, options
        self.moe, self.replayed = "moe" in family, replays(options)
        [metrics] = folder.glob("*/*/metrics.jsonl")
        self.metrics = json.loads(metrics.read_text())

    def hf(self, full: dict) -> dict:
        hf = to_hf(full, self.model.config)
        return {name: tensor.contiguous() for name, tensor in hf.items()}

    def batch(self) -> list[dict]:
        """The dock's answers without padding."""
        rows = []
        columns = self.experience
        for i, response in enumerate(columns["responses"]):
            length = int(columns["response_length"][i])
            names = ["advantages", "old_log_prob"]
            if not self.replayed:
                names.append("ref_log_prob")
            row = {name: columns[name][i][:length] for name in names}
            row |= {
                "prompt": columns["prompts"][i].tolist(),
                "response": response[:length].tolist(),
                "routes": unpacked(columns["routes"][i]) if self.replayed else None,
                "label": self.tokenizer.decode(columns["labels"][i]),
                "reward": float(columns["rm_scores"][i]),
            }
            rows.append(row)
        return rows


def replays(options: dict) -> bool:
    return options.get("algorithm", {}).get("routing_replay") == "rollout"


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}-{case[1]}-{case[2]}")
def probe(request, upstream, tiny, tmp_path_factory) -> Probe:
    from transformers import AutoModelForCausalLM

    family, layout, options = request.param
    folder = tmp_path_factory.mktemp("probe")
    model, data = tiny(family)
    full = full_weights(AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16))
    torch.save({"full": full, "adapters": random_adapters(full)}, folder / "full.pt")
    # Two epochs: with one, upstream takes the current log-probabilities for the old ones and
    # computes none.
    changes = {
        "rl_config.epochs": 2,
        "rl_config.init_kl_coef": KL,
        "actor_config.lr": LR,
        "rl_config.clip_higher_enable": True,
        "actor_config.clip_grad": 1e9,
        "megatron_training.use_distributed_optimizer": False,
        "aqn.sigma_start": SIGMA,
        "aqn.num_stages": 2,
        "rl_config.verifier_function": ["varied_reward:varied", "gsm8k_strict"],
        "rl_config.verifier_weight": [1.0, 0.5],
        "generate_config.offload_train_optimizer": False,
    }
    if "moe" in family:
        changes["model.tiny.moe_aux_loss_coeff"] = 0.0
    if "moe" in family and not replays(options):
        changes["model.tiny.moe_router_topk"] = 8
        model = shutil.copytree(model, folder / "model")
        text = (model / "config.json").read_text()  # vLLM must route to all experts too
        text = text.replace('"num_experts_per_tok": 2', '"num_experts_per_tok": 8')
        (model / "config.json").write_text(text)
    changes |= options
    sizes = dict(train_iters=1, samples=SAMPLES)
    config = make_config(family, model, data, folder, **layout, **sizes, changes=changes)
    finished(run_module("probe", config, upstream, folder), folder / "rehearsal")
    for dtype in ("float32", "bfloat16"):
        words = [HERE / "local_side.py", folder / "config.yaml", model, folder, dtype]
        done = run_python(words, environment(upstream, HERE))
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return Probe(folder, model, family, layout, options)


def vllm_place(probe, rank: int) -> tuple[int, int, range]:
    """Tensor rank and size, and the experts, of a rank of vLLM: whole experts in order over the
    ranks of an expert group.
    """
    tp = probe.layout.get("infer_tp", 1)
    group = tp * probe.layout.get("infer_ep", 1)
    count = 8 // group
    return rank % tp, tp, range(rank % group * count, (rank % group + 1) * count)


def test_vllm_has_base_plus_scaled_b_a(probe):
    """Within one rounding of the merged weight, up or down, and with the move plainly there."""
    exact, base = probe.hf(with_adapters(probe.full, probe.adapters)), probe.hf(probe.full)
    moved = set()
    for rank in probe.ranks:
        place = vllm_place(probe, rank["rank"])
        for name, tensor in rank["vllm"].items():
            expected, before = (
                vllm_shard(name, exact, *place),
                vllm_shard(name, base, *place).float(),
            )
            step = expected.abs() * 2**-7 + 1e-6
            assert ((tensor.float() - expected).abs() <= step).all(), name
            if (expected != before).any():
                moved.add(name.split(".", 3)[-1])
                assert (tensor.float() - before).norm() == pytest.approx(
                    (expected - before).norm(), rel=0.01
                ), name
    kinds = {"self_attn.qkv_proj.weight", "self_attn.o_proj.weight"}
    mlp = ["mlp.experts.w13_weight", "mlp.experts.w2_weight"]
    if not probe.moe:
        mlp = ["mlp.gate_up_proj.weight", "mlp.down_proj.weight"]
    if probe.family == "qwen2_moe":
        shared = "mlp.shared_expert"
        mlp += [f"{shared}.gate_up_proj.weight", f"{shared}.down_proj.weight"]
    kinds.update(mlp)
    assert moved == kinds


def test_noise_is_on_the_norms_only_and_the_same_on_every_rank(probe):
    for rank in probe.ranks:
        changed = set()
        for name, noisy in rank["vllm_noisy"].items():
            clean = rank["vllm"][name]
            if not torch.equal(noisy, clean):
                changed.add(name)
                noise = SIGMA * standard_normal(1, 1, name, clean.shape)
                assert torch.equal(noisy, (clean.float() + noise).bfloat16()), name
        noisy = ["post_attention_layernorm.weight"]
        if not probe.moe:
            noisy += ["input_layernorm.weight", "model.norm.weight"]
        assert changed == {name for name in rank["vllm"] if name.endswith(tuple(noisy))}


def test_vllm_wakes_up_with_the_weights_and_the_noise_of_its_step(probe):
    """Through MindSpeed-RL's offloading, five times: what was on before has no part in what is
    sampled after; asleep vLLM holds no cache and no buffer, and training has back what it had.
    """
    for rank in probe.ranks:
        cycles = rank["cycles"]
        answers = {name: cycle["answers"] for name, cycle in cycles.items()}
        assert (
            answers["clean"] == answers["clean again"]
            and answers["noisy"] == answers["noisy again"]
        )
        assert answers["clean"] != answers["noisy"] != answers["other noise"] != answers["clean"]
        for cycle in cycles.values():
            assert cycle["training_held"] and not any(cycle["training_held"])
            assert not cycle["caches"] and cycle["buffers"] and set(cycle["buffers"]) == {None}
            assert cycle["asleep"] == cycle["all"]
        assert rank["train"].keys() == rank["train_after"].keys()
        assert all(
            torch.equal(weight, rank["train_after"][name]) for name, weight in rank["train"].items()
        )


def answers_log_probs(
    probe, weights: dict, dtype: torch.dtype = torch.float32, replayed: bool = True
) -> list[torch.Tensor]:
    """By transformers, for each answer that has tokens; with the routes in the dock, if there are
    some, or `replayed` is False.
    """
    model = probe.model.to(dtype)
    weights = {name: tensor.to(dtype) for name, tensor in weights.items()}
    return [
        log_probs(
            model, weights, row["prompt"], row["response"], row["routes"] if replayed else None
        )
        for row in probe.batch()
        if row["response"]
    ]


@pytest.mark.parametrize("column, adapted", [("old_log_prob", True), ("ref_log_prob", False)])
def test_log_probs_of_policy_and_reference(probe, column, adapted):
    """The policy has all adapters and the routes in the dock, the reference none of both. The
    yardstick of what bfloat16 costs is transformers' own bfloat16 on the same tokens: upstream may
    be off by no more than twice its mean error and three times its largest.
    """
    if probe.replayed and not adapted:
        pytest.skip("no pass of the reference, whose coefficient is 0")
    own, other = (
        probe.hf(with_adapters(probe.full, probe.adapters if on else {}))
        for on in (adapted, not adapted)
    )
    with torch.no_grad():
        rounded = torch.cat(answers_log_probs(probe, own, torch.bfloat16, adapted))
        expected = torch.cat(answers_log_probs(probe, own, replayed=adapted))
        gap = (torch.cat(answers_log_probs(probe, other, replayed=adapted)) - expected).abs()
    actual = torch.cat([row[column] for row in probe.batch()])
    error, yardstick = (actual - expected).abs(), (rounded - expected).abs()
    print(
        f"\n{column}: mean error {error.mean():.4f}, largest {error.max():.3f} nats; transformers "
        f"in bfloat16 {yardstick.mean():.4f}, {yardstick.max():.3f}; the adapters move it by "
        f"{gap.mean():.3f}"
    )
    assert error.mean() < 2 * yardstick.mean() and error.max() < 3 * yardstick.max()
    assert gap.mean() > 10 * error.mean()


def test_vllm_answers_the_chat_prompt_with_the_adapted_weights(probe):
    """vLLM's own log-probabilities of what it sampled, with the noise that it sampled with, against
    transformers on the prompt with its chat tokens; upstream would have sent the text without them.
    """
    weights = probe.hf(with_adapters(probe.full, probe.adapters))
    for name, noisy in probe.ranks[0]["vllm_noisy"].items():
        if not torch.equal(noisy, probe.ranks[0]["vllm"][name]):  # a norm
            weights[name] = noisy.float()
    rounded = {name: tensor.bfloat16() for name, tensor in weights.items()}
    special = set(probe.tokenizer.all_special_ids)
    errors, yardstick, gaps = [], [], []
    with torch.no_grad():
        for prompt, answers, routes in [each for rank in probe.ranks for each in rank["rollouts"]]:
            answer, kept = answers[0]
            assert prompt[0] == probe.tokenizer.convert_tokens_to_ids("<|im_start|>")
            expected = log_probs(probe.model.float(), weights, prompt, answer, routes[0])
            bare = [token for token in prompt if token not in special]
            gaps.append((log_probs(probe.model, weights, bare, answer) - expected).abs())
            errors.append((torch.tensor(kept) - expected).abs())
            yardstick.append(
                (
                    log_probs(probe.model.bfloat16(), rounded, prompt, answer, routes[0]) - expected
                ).abs()
            )
    errors, yardstick, gaps = map(torch.cat, (errors, yardstick, gaps))
    print(
        f"\nvLLM: mean error {errors.mean():.4f}, largest {errors.max():.3f} nats; transformers in "
        f"bfloat16 {yardstick.mean():.4f}, {yardstick.max():.3f}; without the chat tokens "
        f"{gaps.mean():.3f}"
    )
    assert errors.mean() < 2 * yardstick.mean() + 1e-3 and gaps.mean() > 10 * errors.mean()


def test_rewards_and_advantages(probe):
    batch = probe.batch()
    texts = [probe.tokenizer.decode(row["response"], skip_special_tokens=True) for row in batch]
    labels = [row["label"] for row in batch]
    strict = VERIFIERS["gsm8k_strict"](texts, labels)
    scores = [a + 0.5 * b for a, b in zip(varied(texts, labels, []), strict)]
    assert [row["reward"] for row in batch] == pytest.approx(scores, rel=1e-6)
    rewards = torch.tensor(scores, dtype=torch.float64).reshape(-1, SAMPLES)
    assert rewards.std(1).min() > 0
    expected = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-6)
    if probe.options is DR_GRPO:
        expected = rewards - rewards.mean(1, keepdim=True)
    for row, advantage in zip(batch, expected.flatten()):
        assert torch.allclose(row["advantages"].double(), advantage.expand(len(row["response"])))


def gradients_by_autograd(
    probe, dtype: torch.dtype, is_unbiased: bool = False
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Of the loss of the probed update for every full adapter, by autograd through transformers'
    model in `dtype`, whose merged weights are rounded to nearest, or by the engines' bits if
    `is_unbiased`; float32 leaves.
    """
    leaves = {
        name: tuple(t.clone().requires_grad_() for t in pair)
        for name, pair in probe.adapters.items()
    }
    with torch.no_grad():
        reference = answers_log_probs(probe, probe.hf(with_adapters(probe.full, {})), dtype)
    merged = to_hf(with_adapters(probe.full, leaves), probe.model.config)
    if is_unbiased:
        for name, weight in merged.items():
            if weight.requires_grad:
                exact = weight.detach().contiguous()
                rounded = dither_of(name, weight.shape).rounded(exact)
                merged[name] = weight + (rounded - exact)  # straight through
    current = answers_log_probs(probe, merged, dtype)
    advantages = [row["advantages"][0] for row in probe.batch() if row["response"]]
    assert any(advantages)
    grpo_loss(
        current, reference, advantages, probe.options.get("rl_config.init_kl_coef", KL)
    ).backward()
    return {name: tuple(t.grad for t in pair) for name, pair in leaves.items()}


def norm_of(gradients: dict) -> torch.Tensor:
    return torch.stack([g.norm() for pair in gradients.values() for g in pair]).norm()


def test_gradients_of_every_adapter(probe):
    """Against autograd of the same loss on the float32 model. The yardstick is transformers' own
    bfloat16, with weights to nearest and by the bits of lora/rounding.py, whose chance moves all
    gradients one way: upstream's worst tensor may be off by no more than twice its worst. The
    gradient norm that upstream clips by counts each parameter once.
    """
    options = {key: value for key, value in probe.options.items() if key not in PACKED}
    if options not in (PLAIN, REPLAYED):
        pytest.skip("of GRPO's own loss; with other options the local engine is compared")
    exact = gradients_by_autograd(probe, torch.float32)
    to_nearest = gradients_by_autograd(probe, torch.bfloat16)
    unbiased = gradients_by_autograd(probe, torch.bfloat16, is_unbiased=True)
    compare_gradients(probe, exact, [to_nearest, unbiased], "transformers")


def compare_gradients(probe, exact: dict, roundings: list[dict], whose: str) -> None:
    norm = norm_of(exact)

    def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
        return (
            (actual.float().view(expected.shape) - expected).norm()
            / (expected.norm() + 1e-2 * norm)
        ).item()

    errors = [
        max(error(r, e) for name in exact for r, e in zip(rounded[name], exact[name]))
        for rounded in roundings
    ]
    yardstick = max(errors)
    worst = max(
        error(actual, shard(name, probe.full, exact, rank["place"]))
        for rank in probe.ranks
        for name, actual in rank["gradients"].items()
    )
    print(
        f"\ngradients: worst relative error of a tensor {worst:.4f}, {whose} in bfloat16 "
        f"{errors}; norm {norm:.4f}, upstream's {probe.grad_norm[0]:.4f}, {whose} in "
        f"bfloat16 {norm_of(roundings[-1]):.4f}"
    )
    assert all(len(rank["gradients"]) > 4 for rank in probe.ranks)
    assert worst < 2 * yardstick
    for upstreams in probe.grad_norm:
        assert float(upstreams) == pytest.approx(norm.item(), rel=yardstick)


def compare_token_by_token(probe, exact: torch.Tensor, rounded: torch.Tensor) -> None:
    """Log-probs of the tokens that are trained, and their mean beside the sampler's: the roundings
    of a mean with a sign cancel in one run and not in another.
    """
    columns, sampled, policy = probe.experience, [], []
    for i, trained in enumerate(columns["trained"]):
        if trained.item():
            length = int(columns["response_length"][i])
            sampled.append(columns["rollout_log_prob"][i][:length])
            policy.append(columns["old_log_prob"][i][:length])
    k1 = (torch.cat(sampled) - torch.cat(policy)).mean().item()
    assert probe.metrics["mismatch/k1"] == pytest.approx(k1, abs=1e-5)
    # the roundings of an answer's tokens multiply in its ratio: by definition, from these log-probs
    ratios = torch.stack([(p - s).double().sum() for p, s in zip(policy, sampled)]).exp()
    effective = (ratios.sum() ** 2 / (len(ratios) * ratios.square().sum())).item()
    found = probe.metrics["mismatch/effective_sample_size_of_answers"]
    assert found == pytest.approx(effective, rel=1e-4)
    error, yardstick = (torch.cat(policy) - exact).abs().mean(), (rounded - exact).abs().mean()
    print(f"\nlog-probs: mean error {error:.4f}, the local engine in bfloat16 {yardstick:.4f}")
    assert error < 2 * yardstick


def test_the_local_engine_computes_the_same(probe):
    """The same prompts, answers, log-probs of the policy that sampled, weights and advantages on
    both engines, two updates: every adapter's gradient in the first, and what is logged of both.
    """
    exact, rounded = probe.local["float32"], probe.local["bfloat16"]
    compare_gradients(probe, exact["gradients"], [rounded["gradients"]], "the local engine")
    compared = [
        name
        for name in exact["metrics"]
        if name in probe.metrics
        and not name.startswith(("time/", "lr", "mismatch/k1"))
        and not name.endswith("of_answers")
    ]
    assert ("routing/replayed_tokens" in compared) == probe.replayed
    expected = {"loss/total", "loss/kl", "entropy/mean", "mismatch/k3", "grad_norm"}
    assert expected | {"clip_fraction_high"} < set(compared)
    # bfloat16 moves a few tokens over an edge of clipping, masking or routing
    over_an_edge = 3 / sum(map(int, probe.experience["response_length"]))
    # the answers' terms of a loss, whose sum is near 0
    advantages = [values[0].item() for values in probe.experience["advantages"]]
    term = sum(map(abs, advantages)) / len(advantages)
    compare_token_by_token(probe, exact["logprobs"], rounded["logprobs"])
    for name in compared:
        value, in_bf16, actual = (
            exact["metrics"][name],
            rounded["metrics"][name],
            probe.metrics[name],
        )
        print(f"{name:45} {value:12.6f} bf16 {in_bf16:12.6f} NPU {actual:12.6f}")
        share = 0.1 if "max" in name else 0.02  # a maximum is one token's
        is_counted = "fraction" in name or "flipped" in name
        count = over_an_edge if is_counted else 1e-3
        if name.startswith("loss/"):
            count = 0.01 * term
        assert abs(actual - value) <= 2 * abs(in_bf16 - value) + share * abs(value) + count, name
    if probe.family == "qwen3_moe" and not probe.options:
        assert probe.metrics["clip_fraction_low"] > 0 and probe.metrics["clip_fraction_high"] > 0
