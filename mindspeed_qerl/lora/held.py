"""Which parts of a Hugging Face model's tensors a vLLM model computes with: fused and stacked
parameters taken apart again, by names and sizes alone, not by vLLM's own loader.

Read with vLLM 0.11 (also under vllm-ascend) to 0.32; Qwen2, Qwen3, their mixtures, Llama.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

# vLLM's fused module -> the modules of transformers whose outputs it concatenates
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
EXPERT_PARTS = {"w13_weight": ("gate_proj", "up_proj"), "w2_weight": ("down_proj",)}


@dataclass(frozen=True)
class Held:
    """A part of a tensor that one vLLM worker has.

    Attributes:
        name: of the whole tensor in the Hugging Face model.
        part: a view of what the worker's kernels read, in the axes of the whole tensor.
        start: index of the part's first element in the whole tensor.
    """

    name: str
    part: torch.Tensor
    start: tuple[int, ...]


def held_parts(model: torch.nn.Module) -> Iterator[Held]:
    """All parameters of vLLM's `model` that this worker holds, apart; without adapters."""
    for path, module in model.named_modules():
        name = path.replace(".base_layer", "")  # of a module with adapters beside it
        classes = {cls.__name__ for cls in type(module).__mro__}
        if classes & {"FusedMoE", "RoutedExperts"}:
            yield from _experts(name.removesuffix(".routed_experts"), module)
        elif "LinearBase" in classes:
            yield from _linear(name, module)
        elif "VocabParallelEmbedding" in classes:
            yield from _vocabulary(name, module)
        elif isinstance(getattr(module, "weight", None), torch.nn.Parameter):
            yield Held(f"{name}.weight", module.weight, (0,) * module.weight.dim())


def held_adapters(model: torch.nn.Module, slot: int) -> Iterator[Held]:
    """The adapters beside the weights, in vLLM's `slot`, as "...lora_A.weight" [r, in] and
    "...lora_B.weight" [out, r], which has the scaling in it; those of linear layers.
    """
    for name, module in model.named_modules():
        if not isinstance(getattr(module, "lora_a_stacked", None), tuple):
            continue
        parent, _, leaf = name.rpartition(".")
        leaves = FUSED.get(leaf, (leaf,))
        factors = zip(leaves, module.lora_a_stacked, module.lora_b_stacked, strict=True)
        for part_name, a, b in factors:
            a, b = a[slot, 0], b[slot, 0]
            row, column = _start(module.base_layer, part_name, b.shape[0], a.shape[1])
            yield Held(f"{parent}.{part_name}.lora_A.weight", a, (0, column))
            yield Held(f"{parent}.{part_name}.lora_B.weight", b, (row, 0))


def _linear(name: str, module: torch.nn.Module) -> Iterator[Held]:
    parent, _, leaf = name.rpartition(".")
    leaves = FUSED.get(leaf, (leaf,))
    weight = _kernel_weight(module)
    sizes = getattr(module, "output_partition_sizes", [weight.shape[0]])
    for kind, tensor in (("weight", weight), ("bias", getattr(module, "bias", None))):
        if tensor is None:
            continue
        for part_name, part in zip(leaves, tensor.split(sizes), strict=True):
            start = _start(module, part_name, part.shape[0], part.shape[-1])
            yield Held(f"{parent}.{part_name}.{kind}", part, start[: part.dim()])


def _kernel_weight(module: torch.nn.Module) -> torch.Tensor:
    """The weight [out, in] of a linear layer that its kernel computes with. On CPUs that may be a
    packed copy, which a new `weight` does not reach: the image of the identity then.
    """
    kernel = getattr(module, "cpu_linear", None)
    if kernel is None:
        return module.weight
    inputs = getattr(module, "input_size_per_partition", module.input_size)
    identity = torch.eye(inputs, dtype=module.params_dtype)
    return kernel(identity, module.weight, None).t()


def _start(module: torch.nn.Module, leaf: str, rows: int, columns: int) -> tuple[int, int]:
    """Row and column of this rank's part [rows, columns] in the whole weight of vLLM's `module`."""
    rank = getattr(module, "tp_rank", 0)
    whole = getattr(module, "input_size", columns)
    if getattr(module, "input_size_per_partition", whole) < whole:
        return 0, rank * columns
    if leaf in ("k_proj", "v_proj"):  # of few heads several ranks hold the same
        rank //= getattr(module, "num_kv_head_replicas", 1)
    return rank * rows, 0


def _vocabulary(name: str, module: torch.nn.Module) -> Iterator[Held]:
    """Rows of the embedding or output layer, without the padding."""
    indices = module.shard_indices
    rows = indices.org_vocab_end_index - indices.org_vocab_start_index
    yield Held(f"{name}.weight", module.weight[:rows], (indices.org_vocab_start_index, 0))


def _experts(name: str, module: torch.nn.Module) -> Iterator[Held]:
    """Each expert's three weights. vllm-ascend holds them as [in, out] (ops/common_fused_moe.py)."""
    places = getattr(module, "expert_map", None)
    if places is None:
        places = torch.arange(module.w13_weight.shape[0])
    hidden = module.hidden_size
    for kind, leaves in EXPERT_PARTS.items():
        stacked = getattr(module, kind)
        hidden_axis = 2 if kind == "w13_weight" else 1
        if stacked.shape[hidden_axis] != hidden:
            stacked = stacked.transpose(1, 2)
        for expert, place in enumerate(places.tolist()):
            if place < 0:  # on another rank
                continue
            for leaf, part in zip(leaves, stacked[place].chunk(len(leaves)), strict=True):
                width = math.prod(part.shape) // hidden
                offset = getattr(module, "tp_rank", 0) * width
                start = (0, offset) if leaf == "down_proj" else (offset, 0)
                yield Held(f"{name}.{expert}.{leaf}.weight", part, start)
