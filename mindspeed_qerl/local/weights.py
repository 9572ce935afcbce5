"""Which Hugging Face tensors make up which Megatron parameter: one table, read in both directions.

Megatron's `linear_qkv` holds, per KV group, that group's query heads, its key head and its value head; `linear_fc1` holds gate and up.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from mindspeed_qerl.config import ConfigError


@dataclass(frozen=True)
class Mapping:
    """One Megatron parameter, the HF tensors it is made of, and how to get from one to the other."""

    megatron: str
    hf: tuple[str, ...]
    merge: Callable[[list[torch.Tensor]], torch.Tensor] = lambda parts: parts[0]
    split: Callable[[torch.Tensor], list[torch.Tensor]] = lambda weight: [weight]


def merge_qkv(parts: list[torch.Tensor], groups: int) -> torch.Tensor:
    """q [heads*d, h], k [groups*d, h], v [groups*d, h] -> [(heads + 2*groups)*d, h], interleaved by KV group."""
    hidden = parts[0].shape[-1]
    return torch.cat([part.reshape(groups, -1, hidden) for part in parts], dim=1).reshape(-1, hidden)


def split_qkv(weight: torch.Tensor, groups: int, head_dim: int) -> list[torch.Tensor]:
    """The inverse of `merge_qkv`: [q, k, v]."""
    hidden = weight.shape[-1]
    by_group = weight.reshape(groups, -1, hidden)
    q, k, v = by_group.split([by_group.shape[1] - 2 * head_dim, head_dim, head_dim], dim=1)
    return [part.reshape(-1, hidden) for part in (q, k, v)]


def qwen3_moe_mappings(config, experts: range) -> list[Mapping]:
    """The table of Qwen3-MoE.

    Args:
        config: transformers' Qwen3MoeConfig. experts: global ids of the experts held by this rank.
    """
    groups, head_dim = config.num_key_value_heads, config.head_dim
    table = [
        Mapping("embedding.word_embeddings.weight", ("model.embed_tokens.weight",)),
        Mapping("decoder.final_layernorm.weight", ("model.norm.weight",)),
    ]
    if not config.tie_word_embeddings:
        table.append(Mapping("output_layer.weight", ("lm_head.weight",)))
    for i in range(config.num_hidden_layers):
        ours, theirs = f"decoder.layers.{i}.", f"model.layers.{i}."
        table += [
            Mapping(ours + "input_layernorm.weight", (theirs + "input_layernorm.weight",)),
            Mapping(ours + "self_attention.linear_qkv.weight",
                    tuple(f"{theirs}self_attn.{part}_proj.weight" for part in "qkv"),
                    merge=lambda parts: merge_qkv(parts, groups), split=lambda weight: split_qkv(weight, groups, head_dim)),
            Mapping(ours + "self_attention.q_layernorm.weight", (theirs + "self_attn.q_norm.weight",)),
            Mapping(ours + "self_attention.k_layernorm.weight", (theirs + "self_attn.k_norm.weight",)),
            Mapping(ours + "self_attention.linear_proj.weight", (theirs + "self_attn.o_proj.weight",)),
            Mapping(ours + "pre_mlp_layernorm.weight", (theirs + "post_attention_layernorm.weight",)),
            Mapping(ours + "mlp.router.weight", (theirs + "mlp.gate.weight",)),
        ]
        for local, expert in enumerate(experts):
            mlp, hf_mlp = f"{ours}mlp.experts.local_experts.{local}.", f"{theirs}mlp.experts.{expert}."
            table += [
                Mapping(mlp + "linear_fc1.weight", (hf_mlp + "gate_proj.weight", hf_mlp + "up_proj.weight"),
                        merge=torch.cat, split=lambda weight: list(weight.chunk(2))),
                Mapping(mlp + "linear_fc2.weight", (hf_mlp + "down_proj.weight",)),
            ]
    return table


class Checkpoint:
    """A Hugging Face model directory's safetensors, read tensor by tensor."""

    def __init__(self, directory: str | Path):
        self.directory = Path(directory)
        index = self.directory / "model.safetensors.index.json"
        if index.exists():
            self.files = json.loads(index.read_text())["weight_map"]
        elif (self.directory / "model.safetensors").exists():
            from safetensors import safe_open

            with safe_open(self.directory / "model.safetensors", "pt") as file:
                self.files = dict.fromkeys(file.keys(), "model.safetensors")
        else:
            raise ConfigError(f"{self.directory} holds no model.safetensors and no model.safetensors.index.json")

    def read(self, name: str) -> torch.Tensor:
        """The tensor called `name`; ConfigError if the checkpoint lacks it."""
        from safetensors import safe_open

        if name not in self.files:
            raise ConfigError(f"{self.directory} has no tensor {name!r}, which the model's config.json calls for")
        with safe_open(self.directory / self.files[name], "pt") as file:
            return file.get_tensor(name)


@torch.no_grad()
def load_weights(model: torch.nn.Module, table: Iterable[Mapping], checkpoint: Checkpoint) -> None:
    """Fill every parameter of `model` from `checkpoint`; holds one merged tensor beside the model at a time.

    Raises:
        ConfigError: a tensor is missing or has another shape, or a parameter of the model is not in the table.
    """
    parameters = dict(model.named_parameters())
    for mapping in table:
        parameter = parameters.pop(mapping.megatron)
        value = mapping.merge([checkpoint.read(name) for name in mapping.hf])
        if value.shape != parameter.shape:
            raise ConfigError(f"{' + '.join(mapping.hf)} in {checkpoint.directory} gives shape {tuple(value.shape)}, "
                              f"the model's config.json calls for {tuple(parameter.shape)}")
        parameter.copy_(value)
    if parameters:
        raise ConfigError(f"no Hugging Face tensor is known for the parameters {', '.join(sorted(parameters)[:5])}")
