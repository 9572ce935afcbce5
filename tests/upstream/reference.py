"""An independent view of the tiny models: unsharded training weights made from the Hugging Face
model, their shards by rank, and the model with adapters in float32 by transformers.

"Full" tensors are those of Megatron with all parallel sizes at 1, by the training name with the global layer number:
    decoder.layers.1.self_attention.linear_qkv.weight   rows grouped by key/value head: its queries, its key, its value
    decoder.layers.1.mlp.linear_fc1.weight              gate rows above up rows
    decoder.layers.1.mlp.experts.weight1                [E, h, 2f], gate left of up; weight2 [E, f, h]
Adapters: full name of the adapted weight -> (A, B) with delta = scaling B A for linears (A [r, in],
B [out, r]) and, for experts, delta = scaling A B per expert (A [E, in, r], B [E, r, out]).
"""

import re
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from mindspeed_qerl.aqn.injector import standard_normal

R, ALPHA = 4, 8
SCALING = ALPHA / R
COLUMN = ("linear_qkv", "linear_fc1")  # split over their output
ROW = ("linear_proj", "linear_fc2")  # split over their input
VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")
# Hugging Face's name -> Megatron's, of what is one tensor in both; below a layer, and outside.
IN_LAYER = {
    "self_attn.o_proj.weight": "self_attention.linear_proj.weight",
    "input_layernorm.weight": "input_layernorm.weight",
    "post_attention_layernorm.weight": "pre_mlp_layernorm.weight",
    "self_attn.q_norm.weight": "self_attention.q_layernorm.weight",
    "self_attn.k_norm.weight": "self_attention.k_layernorm.weight",
    "mlp.down_proj.weight": "mlp.linear_fc2.weight",
    "mlp.gate.weight": "mlp.router.weight",
    "mlp.shared_expert.down_proj.weight": "mlp.shared_experts.linear_fc2.weight",
    "mlp.shared_expert_gate.weight": "mlp.shared_experts.gate_weight",
}
OUTSIDE = {
    "model.embed_tokens.weight": "embedding.word_embeddings.weight",
    "model.norm.weight": "decoder.final_layernorm.weight",
    "lm_head.weight": "output_layer.weight",
}
FC1 = {"mlp": "mlp.linear_fc1", "mlp.shared_expert": "mlp.shared_experts.linear_fc1"}
# what is made of an answer's routes before they are replayed
CHANGES = {
    "replayed": lambda routes: routes,
    "shifted": lambda routes: np.roll(routes, 1, axis=0),
    "swapped": lambda routes: routes[:, ::-1],
}


@dataclass(frozen=True)
class Place:
    """Where a rank is: its rank in each group and their sizes, and the first layer it holds."""

    tp: int
    tp_size: int
    ep: int
    ep_size: int
    first_layer: int


def full_weights(model) -> dict[str, torch.Tensor]:
    """Full training weights of a transformers model (4.57: experts are modules), in its dtype."""
    hf, config = model.state_dict(), model.config
    full = {megatron: hf[name] for name, megatron in OUTSIDE.items()}
    for i in range(config.num_hidden_layers):
        source, target = f"model.layers.{i}.", f"decoder.layers.{i}."
        layer = {name.removeprefix(source): hf[name] for name in hf if name.startswith(source)}
        for kind in ("weight", "bias"):
            if f"self_attn.q_proj.{kind}" in layer:
                parts = [layer[f"self_attn.{part}_proj.{kind}"] for part in "qkv"]
                grouped = [part.unflatten(0, (config.num_key_value_heads, -1)) for part in parts]
                rows = torch.cat(grouped, 1).flatten(0, 1)
                full[f"{target}self_attention.linear_qkv.{kind}"] = rows
        for name, megatron in IN_LAYER.items():
            if name in layer:
                full[target + megatron] = layer[name]
        for module, megatron in FC1.items():
            if f"{module}.gate_proj.weight" in layer:
                parts = [layer[f"{module}.{part}_proj.weight"] for part in ("gate", "up")]
                full[f"{target}{megatron}.weight"] = torch.cat(parts)
        if "mlp.experts.0.gate_proj.weight" in layer:
            up, down = [], []
            for e in range(config.num_experts):
                expert = [layer[f"mlp.experts.{e}.{p}_proj.weight"] for p in ("gate", "up", "down")]
                up.append(torch.cat(expert[:2]).t())
                down.append(expert[2].t())
            full[f"{target}mlp.experts.weight1"] = torch.stack(up)
            full[f"{target}mlp.experts.weight2"] = torch.stack(down)
    return {name: tensor.detach().clone() for name, tensor in full.items()}


def random_adapters(full: dict[str, torch.Tensor]) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """float32 adapters of bfloat16 values on all four targets."""
    generator, adapters = torch.Generator().manual_seed(5), {}

    def draw(*shape: int) -> torch.Tensor:
        return (0.05 * torch.randn(shape, generator=generator)).bfloat16().float()

    for name, weight in full.items():
        if re.search(r"mlp\.experts\.weight[12]$", name):
            experts, inputs, outputs = weight.shape
            adapters[name] = draw(experts, inputs, R), draw(experts, R, outputs)
        elif name.endswith(".weight") and name.split(".")[-2] in COLUMN + ROW:
            adapters[name] = draw(R, weight.shape[1]), draw(weight.shape[0], R)
    return adapters


def delta(name: str, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """What the adapter adds to the full weight."""
    return SCALING * (a @ b if "experts.weight" in name else b @ a)


def to_hf(full: dict[str, torch.Tensor], config) -> dict[str, torch.Tensor]:
    """The inverse of `full_weights`, differentiable."""
    hf = {name: full[megatron] for name, megatron in OUTSIDE.items()}
    groups, heads = config.num_key_value_heads, config.num_attention_heads
    names = {megatron: name for name, megatron in IN_LAYER.items()}
    for name, tensor in full.items():
        match = re.match(r"decoder\.layers\.(\d+)\.(.*)", name)
        if not match:
            continue
        layer, rest = f"model.layers.{match[1]}.", match[2]
        if rest in names:
            hf[layer + names[rest]] = tensor
        elif rest.startswith("self_attention.linear_qkv"):
            grouped = tensor.view(groups, heads // groups + 2, -1, *tensor.shape[1:])
            kind = rest.rpartition(".")[2]
            for part, rows in zip("qkv", grouped.tensor_split([-2, -1], 1)):
                hf[f"{layer}self_attn.{part}_proj.{kind}"] = rows.reshape(-1, *tensor.shape[1:])
        elif rest.endswith("linear_fc1.weight"):
            module = "mlp.shared_expert" if "shared" in rest else "mlp"
            for part, weight in zip(("gate", "up"), tensor.chunk(2)):
                hf[f"{layer}{module}.{part}_proj.weight"] = weight
        else:
            parts = {"mlp.experts.weight1": ("gate", "up"), "mlp.experts.weight2": ("down",)}[rest]
            for e, weight in enumerate(tensor):
                for part, share in zip(parts, weight.t().chunk(len(parts))):
                    hf[f"{layer}mlp.experts.{e}.{part}_proj.weight"] = share
    return hf


def with_adapters(full: dict[str, torch.Tensor], adapters: dict) -> dict[str, torch.Tensor]:
    """Full float32 weights, adapters merged."""
    return {
        name: weight.float() + (delta(name, *adapters[name]) if name in adapters else 0)
        for name, weight in full.items()
    }


def _tp_share(tensor: torch.Tensor, dim: int, place: Place, gated: bool = False) -> torch.Tensor:
    if gated:
        return torch.cat([_tp_share(half, dim, place) for half in tensor.chunk(2, dim)], dim)
    return tensor.chunk(place.tp_size, dim)[place.tp]


def _experts(tensor: torch.Tensor, place: Place) -> torch.Tensor:
    """This rank's whole experts, counted over expert ranks first and tensor ranks within them
    (moe_tp_extend_ep).
    """
    return tensor.chunk(place.ep_size * place.tp_size)[place.ep * place.tp_size + place.tp]


def shard(
    training_name: str, full: dict[str, torch.Tensor], adapters: dict, place: Place
) -> torch.Tensor:
    """What the rank at `place` must hold under `training_name` (its own layer numbers,
    `.base_layer` and LoRA names as PEFT makes them).
    """
    name = re.sub(
        r"layers\.(\d+)\.", lambda m: f"layers.{int(m[1]) + place.first_layer}.", training_name
    )
    if match := re.match(r"(.*\.experts\.weight([12]))_lora_([ab])$", name):
        part = _experts(adapters[match[1]][match[3] == "b"], place)
        flat = {
            ("1", "a"): (part.shape[1], -1),
            ("1", "b"): (R, -1),
            ("2", "a"): (-1, R),
            ("2", "b"): (-1, part.shape[2]),
        }
        return part.reshape(flat[match[2], match[3]])
    if match := re.match(r"(.*)\.lora_([AB])\.default\.weight$", name):
        tensor, linear = (
            adapters[f"{match[1]}.weight"][match[2] == "B"],
            match[1].rpartition(".")[2],
        )
        if linear in COLUMN and match[2] == "B":
            return _tp_share(tensor, 0, place, gated=linear == "linear_fc1")
        return _tp_share(tensor, 1, place) if linear in ROW and match[2] == "A" else tensor
    name = name.replace(".base_layer", "")
    tensor = full[name]
    if "experts.weight" in name:
        part = _experts(tensor, place)
        return (
            part.reshape(part.shape[1], -1)
            if name.endswith("1")
            else part.reshape(-1, part.shape[2])
        )
    owner = name.split(".")[-2]
    if name in VOCABULARY or owner in COLUMN:
        return _tp_share(tensor, 0, place, gated=owner == "linear_fc1")
    return _tp_share(tensor, 1, place) if owner in ROW else tensor


def vllm_shard(
    name: str, hf: dict[str, torch.Tensor], tp: int, tp_size: int, experts: range
) -> torch.Tensor:
    """What vLLM's rank must hold: query, key and value (gate and up) stacked, each split over the
    tensor ranks; whole experts [in, out].
    """

    def split(tensor: torch.Tensor, dim: int) -> torch.Tensor:
        return tensor.chunk(tp_size, dim)[tp]

    prefix, _, rest = name.partition(".mlp.experts.")
    if rest:
        parts = {"w13_weight": ("gate_proj", "up_proj"), "w2_weight": ("down_proj",)}[rest]
        return torch.stack(
            [
                torch.cat([hf[f"{prefix}.mlp.experts.{e}.{part}.weight"] for part in parts]).t()
                for e in experts
            ]
        )
    for fused, parts in {
        "qkv_proj": ("q_proj", "k_proj", "v_proj"),
        "gate_up_proj": ("gate_proj", "up_proj"),
    }.items():
        if fused in name:
            return torch.cat([split(hf[name.replace(fused, part)], 0) for part in parts])
    if "o_proj" in name or "down_proj" in name:
        return split(hf[name], 1)
    return split(hf[name], 0) if "embed_tokens" in name or "lm_head" in name else hf[name]


class ForcedExperts(TorchFunctionMode):
    """transformers' mixtures with other experts: each asks torch.topk once, one layer after the
    other, and is answered with `routes` [tokens but the last, layers, top_k] and the scores at
    them. The last token keeps its own.
    """

    def __init__(self, routes: np.ndarray):
        super().__init__()
        self.layers = iter(torch.from_numpy(routes.astype(np.int64)).unbind(1))

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **kwargs or {})
        if function is not torch.topk:
            return result
        ids = torch.cat([next(self.layers), result.indices[-1:]])
        return args[0].gather(-1, ids), ids


def log_probs(
    model,
    weights: dict[str, torch.Tensor],
    prompt: list[int],
    response: list[int],
    routes: np.ndarray | None = None,
) -> torch.Tensor:
    """Log-probabilities of the response's tokens by transformers in float32 with `weights` (Hugging
    Face names), by the experts in `routes` if there are some.
    """
    everything = {**weights, **dict(model.named_buffers())}
    weighted = partial(
        torch.func.functional_call, model, everything, strict=True, tie_weights=False
    )
    with nullcontext() if routes is None else ForcedExperts(routes):
        return scored(weighted, prompt, response)


def unpacked(row: torch.Tensor) -> np.ndarray:
    """The routes in a row of the dock [tokens but the last, layers, top_k], of which the first
    numbers are their own shape.
    """
    content = np.frombuffer(row.numpy()[3:].tobytes(), np.uint8)
    return content[: row[:3].prod()].reshape(*row[:3])


def drawn(answer) -> tuple[list[int], list[float]]:
    """Token ids of an answer of vLLM's, and the log-probs that they were drawn by."""
    pairs = zip(answer.token_ids, answer.logprobs, strict=True)
    return list(answer.token_ids), [of_token[token].logprob for token, of_token in pairs]


def scored(twin, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    """Log-probs of an answer's tokens by transformers' model."""
    logits = twin(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].float()
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]


@torch.no_grad()
def scored_by_draws(twin, clean, seed, level, answers, draws) -> list[torch.Tensor]:
    """Log-probs of `answers`, (prompt, tokens), with the noise of each one's draw on the norms of
    `clean`, weights by module name.
    """
    found = []
    for answer, draw in zip(answers, draws, strict=True):
        for name, weight in clean.items():
            noise = standard_normal(seed, level.step, f"{name}.weight/{draw}", weight.shape)
            noisy = (weight + level.sigma * noise).to(weight.dtype)
            twin.get_parameter(f"{name}.weight").copy_(noisy)
        found.append(scored(twin, *answer))
    return found


def expert_name(name: str) -> tuple[str, int | None]:
    """The full tensor that a layer of the local engine is in, and which expert it is there, if it
    is one.

    >>> expert_name("decoder.layers.1.mlp.experts.local_experts.3.linear_fc2")
    ('decoder.layers.1.mlp.experts.weight2', 3)
    """
    if match := re.match(r"(.*\.experts\.)local_experts\.(\d+)\.linear_fc([12])$", name):
        return f"{match[1]}weight{match[3]}", int(match[2])
    return f"{name}.weight", None


def grpo_loss(
    current: list[torch.Tensor],
    reference: list[torch.Tensor],
    advantages: list[float],
    kl_coefficient: float,
) -> torch.Tensor:
    """Mean over the tokens of all answers of -A ratio + k (exp(ref - lp) - (ref - lp) - 1)
    (DeepSeekMath, eq. 3 and 4; DAPO's mean), at the first update, where the old policy is the
    current one: the ratio is 1, nothing is clipped.
    """
    losses = []
    for log_prob, ref, advantage in zip(current, reference, advantages):
        ratio = (log_prob - log_prob.detach()).exp()
        losses.append(
            -advantage * ratio + kl_coefficient * ((ref - log_prob).exp() - (ref - log_prob) - 1)
        )
    return torch.cat(losses).mean()
