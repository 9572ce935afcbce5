"""Which Hugging Face tensors make up which Megatron parameter, and which part of it a
tensor-parallel rank holds.

One table, read in both directions: loading, the sync with the rollout engine, its proof, export.
Megatron's `linear_qkv` holds, per KV group, that group's query heads, its key head and its value
head; `linear_fc1` holds gate and up.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from . import ModelShape, family_of

HfTensors = list[Tensor]  # of one Megatron parameter


@dataclass(frozen=True)
class Split:
    """Describes how a tensor-parallel group shares a tensor: along `dim`, the tensor being `blocks`
    stacked ones that are shared each by itself.
    """

    dim: int
    blocks: int = 1

    def shard(self, whole: Tensor, rank: int, size: int) -> Tensor:
        """The part of `rank` among `size` ranks."""
        blocks = whole.chunk(self.blocks, self.dim)
        return torch.cat([block.chunk(size, self.dim)[rank] for block in blocks], self.dim)

    def join(self, shards: Sequence[Tensor]) -> Tensor:
        """The inverse: the whole from the parts of all ranks, in their order."""
        parts: list[Tensor] = []
        for block in zip(*(shard.chunk(self.blocks, self.dim) for shard in shards)):
            parts += block
        return torch.cat(parts, self.dim)


COLUMN = Split(0)
ROW = Split(1)
GATED = Split(0, blocks=2)


@dataclass(frozen=True)
class ParameterMapping:
    """One Megatron parameter, the HF tensors it is made of, how to get from one to the other, and
    how tensor-parallel ranks share it.
    """

    megatron: str
    hf: tuple[str, ...]
    merge: Callable[[HfTensors], Tensor] = lambda parts: parts[0]
    split: Callable[[Tensor], HfTensors] = lambda weight: [weight]
    shared: Split | None = None  # None: every rank has it whole


def merge_qkv(parts: HfTensors, groups: int) -> Tensor:
    """q [heads*d, ...], k [groups*d, ...], v [groups*d, ...] -> [(heads + 2*groups)*d, ...],
    interleaved by KV group.
    """
    by_group = [part.unflatten(0, (groups, -1)) for part in parts]
    return torch.cat(by_group, dim=1).flatten(0, 1)


def split_qkv(weight: Tensor, groups: int, head_dim: int) -> HfTensors:
    """The inverse of `merge_qkv`: [q, k, v]."""
    by_group = weight.unflatten(0, (groups, -1))
    queries = by_group.shape[1] - 2 * head_dim
    return [part.flatten(0, 1) for part in by_group.split([queries, head_dim, head_dim], dim=1)]


def _mlp(megatron: str, hf: str, whole: bool = False) -> list[ParameterMapping]:
    """A gated MLP; `whole`: an expert, which no rank shares with another."""
    return [
        ParameterMapping(
            f"{megatron}linear_fc1.weight",
            (f"{hf}gate_proj.weight", f"{hf}up_proj.weight"),
            torch.cat,
            lambda weight: list(weight.chunk(2)),
            None if whole else GATED,
        ),
        ParameterMapping(
            f"{megatron}linear_fc2.weight",
            (f"{hf}down_proj.weight",),
            shared=None if whole else ROW,
        ),
    ]


def mappings(
    shape: ModelShape, layers: range, experts: range, first: bool = True, last: bool = True
) -> list[ParameterMapping]:
    """The table of what one rank holds: for loading, sync, proof and export.

    Args:
        layers, experts: global numbers of its layers, which Megatron counts from 0 on each rank,
            and of its experts.
        first, last: it is the first, the last pipeline stage, which has the embedding, the final
            norm and the output.
    """
    embedding = ("model.embed_tokens.weight",)
    rows = []
    if first:
        rows.append(ParameterMapping("embedding.word_embeddings.weight", embedding, shared=COLUMN))
    if last:
        rows.append(ParameterMapping("decoder.final_layernorm.weight", ("model.norm.weight",)))
        tied = shape.tie_word_embeddings
        if not (first and tied):  # a tied embedding has a copy on the last stage
            output = embedding if tied else ("lm_head.weight",)
            rows.append(ParameterMapping("output_layer.weight", output, shared=COLUMN))
    for local, layer in enumerate(layers):
        rows += layer_mappings(shape, layer, experts, f"decoder.layers.{local}.")
    return rows


def layer_mappings(
    shape: ModelShape, layer: int, experts: range, ours: str = ""
) -> list[ParameterMapping]:
    """The table of one layer, whose Megatron parameters begin with `ours`."""
    family = family_of(shape)
    groups = shape.num_key_value_heads
    theirs = f"model.layers.{layer}."
    rows = []

    def add(megatron: str, hf: str, shared: Split | None = None) -> None:
        rows.append(ParameterMapping(ours + megatron, (theirs + hf,), shared=shared))

    add("input_layernorm.weight", "input_layernorm.weight")
    for kind in ("weight", "bias") if family.qkv_bias else ("weight",):
        rows.append(
            ParameterMapping(
                f"{ours}self_attention.linear_qkv.{kind}",
                tuple(f"{theirs}self_attn.{part}_proj.{kind}" for part in "qkv"),
                partial(merge_qkv, groups=groups),
                partial(split_qkv, groups=groups, head_dim=shape.head_dim),
                COLUMN,
            )
        )
    add("self_attention.linear_proj.weight", "self_attn.o_proj.weight", ROW)
    add("pre_mlp_layernorm.weight", "post_attention_layernorm.weight")
    if family.qk_norm:
        for part in "qk":
            add(f"self_attention.{part}_layernorm.weight", f"self_attn.{part}_norm.weight")
    if not family.experts:
        return rows + _mlp(f"{ours}mlp.", f"{theirs}mlp.")
    add("mlp.router.weight", "mlp.gate.weight")
    if shape.shared_expert_intermediate_size:
        rows += _mlp(f"{ours}mlp.shared_experts.", f"{theirs}mlp.shared_expert.")
        add("mlp.shared_experts.gate_weight", "mlp.shared_expert_gate.weight")
    for number, expert in enumerate(experts):
        place = f"{ours}mlp.experts.local_experts.{number}."
        rows += _mlp(place, f"{theirs}mlp.experts.{expert}.", whole=True)
    return rows
