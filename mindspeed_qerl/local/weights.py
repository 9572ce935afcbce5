"""Which Hugging Face tensors make up which Megatron parameter, and which part of it a tensor-parallel rank holds.

One table for each family, read in both directions: loading, the sync with the rollout engine, export. Megatron's `linear_qkv` holds, per
KV group, that group's query heads, its key head and its value head; `linear_fc1` holds gate and up.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from mindspeed_qerl.errors import ConfigError
from mindspeed_qerl.families.shapes import ModelShape


@dataclass(frozen=True)
class Split:
    """How a tensor-parallel group shares a tensor: along `dim`, the tensor being `blocks` stacked ones that are shared each by itself."""

    dim: int
    blocks: int = 1

    def shard(self, whole: torch.Tensor, rank: int, size: int) -> torch.Tensor:
        """The part of `rank` among `size` ranks."""
        return torch.cat([block.chunk(size, self.dim)[rank] for block in whole.chunk(self.blocks, self.dim)], self.dim)

    def join(self, shards: Sequence[torch.Tensor]) -> torch.Tensor:
        """The inverse: the whole from the parts of all ranks, in their order."""
        return torch.cat([part for block in zip(*(shard.chunk(self.blocks, self.dim) for shard in shards)) for part in block], self.dim)


COLUMN, ROW, GATED = Split(0), Split(1), Split(0, blocks=2)


@dataclass(frozen=True)
class Mapping:
    """One Megatron parameter, the HF tensors it is made of, how to get from one to the other, and how tensor-parallel ranks share it."""

    megatron: str
    hf: tuple[str, ...]
    merge: Callable[[list[torch.Tensor]], torch.Tensor] = lambda parts: parts[0]
    split: Callable[[torch.Tensor], list[torch.Tensor]] = lambda weight: [weight]
    shared: Split | None = None  # None: every rank has it whole


def merge_qkv(parts: list[torch.Tensor], groups: int) -> torch.Tensor:
    """q [heads*d, ...], k [groups*d, ...], v [groups*d, ...] -> [(heads + 2*groups)*d, ...], interleaved by KV group."""
    rest = parts[0].shape[1:]
    return torch.cat([part.reshape(groups, -1, *rest) for part in parts], dim=1).reshape(-1, *rest)


def split_qkv(weight: torch.Tensor, groups: int, head_dim: int) -> list[torch.Tensor]:
    """The inverse of `merge_qkv`: [q, k, v]."""
    rest = weight.shape[1:]
    by_group = weight.reshape(groups, -1, *rest)
    q, k, v = by_group.split([by_group.shape[1] - 2 * head_dim, head_dim, head_dim], dim=1)
    return [part.reshape(-1, *rest) for part in (q, k, v)]


def _gated(megatron: str, hf: str, shared: Split | None) -> Mapping:
    return Mapping(f"{megatron}linear_fc1.weight", (f"{hf}gate_proj.weight", f"{hf}up_proj.weight"), torch.cat,
                   lambda weight: list(weight.chunk(2)), shared)


def mappings(shape: ModelShape, layers: range, experts: range, first: bool = True, last: bool = True) -> list[Mapping]:
    """The table of what one rank holds, of any family in `layout.shapes`.

    Args:
        layers: global numbers of its layers; Megatron counts from 0 on each rank. experts: global numbers of its experts.
        first, last: it is the first, the last pipeline stage, which has the embedding, the final norm and the output layer.
    """
    groups, head_dim = shape.num_key_value_heads, shape.head_dim
    qkv = dict(merge=partial(merge_qkv, groups=groups), split=partial(split_qkv, groups=groups, head_dim=head_dim), shared=COLUMN)
    table = []
    if first:
        table.append(Mapping("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), shared=COLUMN))
    if last:
        table.append(Mapping("decoder.final_layernorm.weight", ("model.norm.weight",)))
        if not shape.tie_word_embeddings:
            table.append(Mapping("output_layer.weight", ("lm_head.weight",), shared=COLUMN))
        elif not first:  # a tied embedding has a copy on the last stage
            table.append(Mapping("output_layer.weight", ("model.embed_tokens.weight",), shared=COLUMN))
    for local, layer in enumerate(layers):
        ours, theirs = f"decoder.layers.{local}.", f"model.layers.{layer}."
        attention = ours + "self_attention."
        table += [
            Mapping(ours + "input_layernorm.weight", (theirs + "input_layernorm.weight",)),
            Mapping(attention + "linear_qkv.weight", tuple(f"{theirs}self_attn.{part}_proj.weight" for part in "qkv"), **qkv),
            Mapping(attention + "linear_proj.weight", (theirs + "self_attn.o_proj.weight",), shared=ROW),
            Mapping(ours + "pre_mlp_layernorm.weight", (theirs + "post_attention_layernorm.weight",)),
        ]
        if shape.qkv_bias:
            table.append(Mapping(attention + "linear_qkv.bias", tuple(f"{theirs}self_attn.{part}_proj.bias" for part in "qkv"), **qkv))
        if shape.qk_norm:
            table += [Mapping(f"{attention}{part}_layernorm.weight", (f"{theirs}self_attn.{part}_norm.weight",)) for part in "qk"]
        if not shape.moe:
            table += [_gated(ours + "mlp.", theirs + "mlp.", GATED),
                      Mapping(ours + "mlp.linear_fc2.weight", (theirs + "mlp.down_proj.weight",), shared=ROW)]
            continue
        table.append(Mapping(ours + "mlp.router.weight", (theirs + "mlp.gate.weight",)))
        if shape.shared_expert_intermediate_size:
            shared, hf_shared = ours + "mlp.shared_experts.", theirs + "mlp.shared_expert."
            table += [_gated(shared, hf_shared, GATED),
                      Mapping(shared + "linear_fc2.weight", (hf_shared + "down_proj.weight",), shared=ROW),
                      Mapping(shared + "gate_weight", (theirs + "mlp.shared_expert_gate.weight",))]
        for number, expert in enumerate(experts):
            mlp, hf_mlp = f"{ours}mlp.experts.local_experts.{number}.", f"{theirs}mlp.experts.{expert}."
            table += [_gated(mlp, hf_mlp, None), Mapping(mlp + "linear_fc2.weight", (hf_mlp + "down_proj.weight",))]
    return table


class Checkpoint:
    """A Hugging Face model directory's safetensors, read tensor by tensor; files are mapped into memory, opened once."""

    def __init__(self, directory: str | Path):
        self.directory = Path(directory)
        self._open = {}
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
        return self._file_of(name).get_tensor(name)

    def dtype(self, name: str) -> torch.dtype:
        """Of the tensor called `name`, which is not read; ConfigError if the checkpoint lacks it."""
        from safetensors.torch import _getdtype

        return _getdtype(self._file_of(name).get_slice(name).get_dtype())

    def _file_of(self, name: str):
        from safetensors import safe_open

        if name not in self.files:
            raise ConfigError(f"{self.directory} has no tensor {name!r}, which the model's config.json calls for")
        file = self.files[name]
        if file not in self._open:  # an index of thousands of experts takes longer to read than a tensor
            self._open[file] = safe_open(self.directory / file, "pt")
        return self._open[file]


def check_tensors(checkpoint: Checkpoint, shape: ModelShape, dtype: torch.dtype | None, tensors: Iterable[str] = ()) -> None:
    """Whether `checkpoint` is of the model that its config.json describes.

    Args:
        dtype: what config.json says the tensors are; None if it does not say. tensors: names whose content is looked at (their dtype is).

    Raises:
        ConfigError: a tensor is missing, is more than config.json calls for, has another dtype, is an output layer of its own beside a tied
            embedding, or holds other rotary frequencies.
    """
    directory, called_for = checkpoint.directory, {
        name for mapping in mappings(shape, range(shape.num_hidden_layers), range(shape.num_experts)) for name in mapping.hf}
    if missing := sorted(called_for - set(checkpoint.files)):
        tied = ", or set tie_word_embeddings" if missing == ["lm_head.weight"] else ""
        raise ConfigError(f"{directory} has no tensor {missing[0]!r}, which config.json calls for ({len(missing)} are missing). Fetch the whole "
                          f"model{tied}")
    for name in sorted(set(checkpoint.files) - called_for):
        if name == "lm_head.weight" and shape.tie_word_embeddings:
            if not torch.equal(checkpoint.read(name), checkpoint.read("model.embed_tokens.weight")):
                raise ConfigError(f"{directory}: config.json has tie_word_embeddings = true, but lm_head.weight differs from "
                                  "model.embed_tokens.weight: set it to false")
        elif name.endswith("rotary_emb.inv_freq"):
            expected = shape.rope_theta ** -(torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim)
            found = checkpoint.read(name).float()
            if found.shape != expected.shape or not torch.allclose(found, expected, rtol=1e-2):
                raise ConfigError(f"{directory}: {name} is not what rope_theta = {shape.rope_theta:g} and head_dim = {shape.head_dim} in "
                                  "config.json give: one of them is of another model")
        else:
            raise ConfigError(f"{directory} has a tensor {name!r}, which config.json does not call for: it is of another model (more layers or "
                              "experts, a bias?)")
    for name in tensors:
        found = checkpoint.dtype(name)
        if not found.is_floating_point or found.itemsize < 2:
            raise ConfigError(f"{directory}: {name} is {_name(found)}; give the model in bfloat16, float16 or float32, not quantised")
        if dtype is not None and found != dtype:
            raise ConfigError(f"{directory}: {name} is {_name(found)} and config.json says {_name(dtype)}: one of them is of another model")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@torch.no_grad()
def load_weights(model: torch.nn.Module, table: Iterable[Mapping], checkpoint: Checkpoint, tp_rank: int = 0, tp_size: int = 1) -> None:
    """Fill every parameter of `model` with this rank's part of `checkpoint`; holds one whole Megatron tensor beside the model at a time.

    Raises:
        ConfigError: a tensor is missing or has another shape, or a parameter of the model is not in the table.
    """
    parameters = dict(model.named_parameters())
    for mapping in table:
        parameter = parameters.pop(mapping.megatron)
        value = mapping.merge([checkpoint.read(name) for name in mapping.hf])
        if mapping.shared:
            value = mapping.shared.shard(value, tp_rank, tp_size)
        if value.shape != parameter.shape:
            raise ConfigError(f"{' + '.join(mapping.hf)} in {checkpoint.directory} gives shape {tuple(value.shape)}, "
                              f"the model's config.json calls for {tuple(parameter.shape)}")
        parameter.copy_(value)
    if parameters:
        raise ConfigError(f"no Hugging Face tensor is known for the parameters {', '.join(sorted(parameters)[:5])}")
