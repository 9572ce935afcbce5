"""Which Hugging Face tensors make up which Megatron parameter, and which part of it a
tensor-parallel rank holds.

One table, read in both directions: loading, the sync with the rollout engine, its proof, export.
Megatron's `linear_qkv` holds, per KV group, that group's query heads, its key head and its value
head; `linear_fc1` holds gate and up.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from mindspeed_qerl.families import ModelShape, family_of


@dataclass(frozen=True)
class Split:
    """How a tensor-parallel group shares a tensor: along `dim`, the tensor being `blocks` stacked
    ones that are shared each by itself.
    """

    dim: int
    blocks: int = 1

    def shard(self, whole: torch.Tensor, rank: int, size: int) -> torch.Tensor:
        """The part of `rank` among `size` ranks."""
        return torch.cat(
            [block.chunk(size, self.dim)[rank] for block in whole.chunk(self.blocks, self.dim)],
            self.dim,
        )

    def join(self, shards: Sequence[torch.Tensor]) -> torch.Tensor:
        """The inverse: the whole from the parts of all ranks, in their order."""
        return torch.cat(
            [
                part
                for block in zip(*(shard.chunk(self.blocks, self.dim) for shard in shards))
                for part in block
            ],
            self.dim,
        )


COLUMN, ROW, GATED = Split(0), Split(1), Split(0, blocks=2)


@dataclass(frozen=True)
class Mapping:
    """One Megatron parameter, the HF tensors it is made of, how to get from one to the other, and
    how tensor-parallel ranks share it.
    """

    megatron: str
    hf: tuple[str, ...]
    merge: Callable[[list[torch.Tensor]], torch.Tensor] = lambda parts: parts[0]
    split: Callable[[torch.Tensor], list[torch.Tensor]] = lambda weight: [weight]
    shared: Split | None = None  # None: every rank has it whole


def merge_qkv(parts: list[torch.Tensor], groups: int) -> torch.Tensor:
    """q [heads*d, ...], k [groups*d, ...], v [groups*d, ...] -> [(heads + 2*groups)*d, ...],
    interleaved by KV group.
    """
    rest = parts[0].shape[1:]
    return torch.cat([part.reshape(groups, -1, *rest) for part in parts], dim=1).reshape(-1, *rest)


def split_qkv(weight: torch.Tensor, groups: int, head_dim: int) -> list[torch.Tensor]:
    """The inverse of `merge_qkv`: [q, k, v]."""
    rest = weight.shape[1:]
    by_group = weight.reshape(groups, -1, *rest)
    q, k, v = by_group.split([by_group.shape[1] - 2 * head_dim, head_dim, head_dim], dim=1)
    return [part.reshape(-1, *rest) for part in (q, k, v)]


def _mlp(megatron: str, hf: str, whole: bool = False) -> list[Mapping]:
    """A gated MLP; `whole`: an expert, which no rank shares with another."""
    return [
        Mapping(
            f"{megatron}linear_fc1.weight",
            (f"{hf}gate_proj.weight", f"{hf}up_proj.weight"),
            torch.cat,
            lambda weight: list(weight.chunk(2)),
            None if whole else GATED,
        ),
        Mapping(
            f"{megatron}linear_fc2.weight",
            (f"{hf}down_proj.weight",),
            shared=None if whole else ROW,
        ),
    ]


def mappings(
    shape: ModelShape, layers: range, experts: range, first: bool = True, last: bool = True
) -> list[Mapping]:
    """The table of what one rank holds: for loading, sync, proof and export.

    Args:
        layers, experts: global numbers of its layers, which Megatron counts from 0 on each rank,
            and of its experts.
        first, last: it is the first, the last pipeline stage, which has the embedding, the final
            norm and the output.
    """
    rows = []
    if first:
        rows.append(
            Mapping(
                "embedding.word_embeddings.weight", ("model.embed_tokens.weight",), shared=COLUMN
            )
        )
    if last:
        rows.append(Mapping("decoder.final_layernorm.weight", ("model.norm.weight",)))
        if not shape.tie_word_embeddings:
            rows.append(Mapping("output_layer.weight", ("lm_head.weight",), shared=COLUMN))
        elif not first:  # a tied embedding has a copy on the last stage
            rows.append(
                Mapping("output_layer.weight", ("model.embed_tokens.weight",), shared=COLUMN)
            )
    for local, layer in enumerate(layers):
        rows += _layer(shape, f"decoder.layers.{local}.", f"model.layers.{layer}.", experts)
    return rows


def _layer(shape: ModelShape, ours: str, theirs: str, experts: range) -> list[Mapping]:
    family, attention = family_of(shape), ours + "self_attention."
    groups, head_dim = shape.num_key_value_heads, shape.head_dim
    qkv: dict[str, Any] = dict(
        merge=partial(merge_qkv, groups=groups),
        split=partial(split_qkv, groups=groups, head_dim=head_dim),
        shared=COLUMN,
    )
    rows = [
        Mapping(ours + "input_layernorm.weight", (theirs + "input_layernorm.weight",)),
        Mapping(
            attention + "linear_qkv.weight",
            tuple(f"{theirs}self_attn.{part}_proj.weight" for part in "qkv"),
            **qkv,
        ),
        Mapping(
            attention + "linear_proj.weight", (theirs + "self_attn.o_proj.weight",), shared=ROW
        ),
        Mapping(ours + "pre_mlp_layernorm.weight", (theirs + "post_attention_layernorm.weight",)),
    ]
    if family.qkv_bias:
        rows.append(
            Mapping(
                attention + "linear_qkv.bias",
                tuple(f"{theirs}self_attn.{part}_proj.bias" for part in "qkv"),
                **qkv,
            )
        )
    if family.qk_norm:
        rows += [
            Mapping(
                f"{attention}{part}_layernorm.weight", (f"{theirs}self_attn.{part}_norm.weight",)
            )
            for part in "qk"
        ]
    if not family.experts:
        return rows + _mlp(ours + "mlp.", theirs + "mlp.")
    rows.append(Mapping(ours + "mlp.router.weight", (theirs + "mlp.gate.weight",)))
    if shape.shared_expert_intermediate_size:
        rows += [
            *_mlp(ours + "mlp.shared_experts.", theirs + "mlp.shared_expert."),
            Mapping(
                ours + "mlp.shared_experts.gate_weight", (theirs + "mlp.shared_expert_gate.weight",)
            ),
        ]
    for number, expert in enumerate(experts):
        rows += _mlp(
            f"{ours}mlp.experts.local_experts.{number}.",
            f"{theirs}mlp.experts.{expert}.",
            whole=True,
        )
    return rows
