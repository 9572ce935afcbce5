"""Which parts of a Hugging Face model's tensors a vLLM model computes with: fused and stacked
parameters taken apart again, by names and sizes alone, not by vLLM's own loader.

Read with vLLM 0.11 (also under vllm-ascend) to 0.32; Qwen2, Qwen3, their mixtures, Llama.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

# vLLM's fused module -> the modules of transformers whose outputs it concatenates
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
EXPERT_PARTS = {"w13_weight": ("gate_proj", "up_proj"), "w2_weight": ("down_proj",)}


Part = tuple[str, Tensor, tuple[int, ...]]  # the first three of a Held


@dataclass(frozen=True)
class Held:
    """A part of a tensor that one vLLM worker has.

    Attributes:
        name: of the whole tensor in the Hugging Face model.
        part: a view of what the worker's kernels read, in the axes of the whole tensor.
        start: index of the part's first element in the whole tensor.
        parameter: vLLM's name of the parameter that it is in.
    """

    name: str
    part: Tensor
    start: tuple[int, ...]
    parameter: str = ""


def held_parts(model: nn.Module) -> Iterator[Held]:
    """All parameters of vLLM's `model` that this worker holds, apart; without adapters."""
    return take_apart(model, kernel_tensors(model))


def kernel_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(vLLM's name, tensor) of each parameter, as kernels compute with it. On CPUs that may be a
    packed copy, which a new `weight` does not reach: the image of the identity then.
    """
    for path, module in model.named_modules():
        kernel = getattr(module, "cpu_linear", None)
        for kind, tensor in module.named_parameters(recurse=False):
            if kernel and kind == "weight":
                inputs = getattr(module, "input_size_per_partition", module.input_size)
                tensor = kernel(torch.eye(inputs, dtype=module.params_dtype), tensor, None).t()
            yield f"{path}.{kind}", tensor.detach()


def take_apart(model: nn.Module, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[Held]:
    """Takes apart what is fused or stacked in `tensors`, which have the names and shapes of
    parameters of vLLM's `model`.
    """
    for parameter, tensor in tensors:
        path, _, kind = parameter.rpartition(".")
        module = model.get_submodule(path)
        name = path.replace(".base_layer", "")  # of a module with adapters beside it
        parts: Iterable[Part]
        if kind in EXPERT_PARTS:
            parts = _experts(name.removesuffix(".routed_experts"), module, kind, tensor)
        elif hasattr(module, "output_size"):  # a linear layer
            parts = _linear(name, module, kind, tensor)
        elif vocabulary := getattr(module, "shard_indices", None):
            first = vocabulary.org_vocab_start_index
            rows = tensor[: vocabulary.org_vocab_end_index - first]  # without the padding
            parts = [(f"{name}.weight", rows, (first, 0))]
        else:
            parts = [(f"{name}.{kind}", tensor, (0,) * tensor.dim())]
        for part in parts:
            yield Held(*part, parameter)


def held_adapters(model: nn.Module, slot: int) -> Iterator[Held]:
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
            a = a[slot, 0]
            b = b[slot, 0]
            row, column = _start(module.base_layer, part_name, b.shape[0], a.shape[1])
            yield Held(f"{parent}.{part_name}.lora_A.weight", a, (0, column))
            yield Held(f"{parent}.{part_name}.lora_B.weight", b, (row, 0))


def _linear(name: str, module: nn.Module, kind: str, tensor: Tensor) -> Iterator[Part]:
    parent, _, leaf = name.rpartition(".")
    leaves = FUSED.get(leaf, (leaf,))
    sizes = getattr(module, "output_partition_sizes", [len(tensor)])
    for part_name, part in zip(leaves, tensor.split(sizes), strict=True):
        start = _start(module, part_name, part.shape[0], part.shape[-1])
        yield f"{parent}.{part_name}.{kind}", part, start[: part.dim()]


def _start(module: nn.Module, leaf: str, rows: int, columns: int) -> tuple[int, int]:
    """Row and column of this rank's part [rows, columns] in the whole weight of vLLM's `module`."""
    # of a replicated layer, such as a router, each rank has all
    rank = module.tp_rank if hasattr(module, "output_size_per_partition") else 0
    whole = getattr(module, "input_size", columns)
    if getattr(module, "input_size_per_partition", whole) < whole:
        return 0, rank * columns
    if leaf in ("k_proj", "v_proj"):  # of few heads several ranks hold the same
        rank //= getattr(module, "num_kv_head_replicas", 1)
    return rank * rows, 0


def _experts(name: str, module: nn.Module, kind: str, tensor: Tensor) -> Iterator[Part]:
    """Each expert's weights. vllm-ascend holds them as [in, out] (ops/common_fused_moe.py)."""
    places = getattr(module, "expert_map", None)
    if places is None:
        places = torch.arange(len(tensor))
    leaves = EXPERT_PARTS[kind]
    hidden = module.hidden_size
    # of a square matrix the other parameter tells
    if not module.w13_weight.shape[2] == module.w2_weight.shape[1] == hidden:
        tensor = tensor.transpose(1, 2)
    for expert, place in enumerate(places.tolist()):
        if place < 0:  # on another rank
            continue
        for leaf, part in zip(leaves, tensor[place].chunk(len(leaves)), strict=True):
            width = part.numel() // hidden
            offset = getattr(module, "tp_rank", 0) * width
            start = (0, offset) if leaf == "down_proj" else (offset, 0)
            yield f"{name}.{expert}.{leaf}.weight", part, start
