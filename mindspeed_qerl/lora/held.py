"""Which parts of a Hugging Face model's tensors a vLLM model computes with: fused and stacked
parameters taken apart again, by names and sizes alone, not by vLLM's own loader; and which cannot
be taken apart, and why.

Read with vLLM 0.11 (also under vllm-ascend) to 0.32; Qwen2, Qwen3, their mixtures, Llama.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

# vLLM's fused module -> the modules of transformers whose outputs it concatenates, unless the
# model's `packed_modules_mapping` has others: its own name, where the files are fused (Phi-3)
FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
EXPERT_PARTS = {"w13_weight": ("gate_proj", "up_proj"), "w2_weight": ("down_proj",)}
# kernels that swap or shuffle w13 and w2 when they are loaded (fused_moe/oracle/unquantized.py:457)
OWN_LAYOUT = ("AITER", "FLASHINFER_CUTLASS", "FLASHINFER_TRTLLM", "MOONEP")

# why a worker cannot say anything about a tensor
ELSEWHERE = "another stage of the pipeline has it"
QUANTIZED = "its layer is quantized in a form that is not taken apart"
SHUFFLED = "the kernel of the experts keeps them in a layout of its own"
PACKED = "vLLM fuses its layer in a way that is not known"

Named = tuple[str, Tensor]  # a tensor behind its name
Part = tuple[str, Tensor, tuple[int, ...]]  # the first three of a Held


@dataclass(frozen=True)
class Held:
    """A part of a tensor that one vLLM worker has.

    Attributes:
        name: of the whole tensor in the Hugging Face model.
        part: a view of what the worker's kernels read, in the axes of the whole tensor.
        start: index of the part's first element in the whole tensor; (): it is all of it.
        parameter: vLLM's name of the parameter that it is in.
    """

    name: str
    part: Tensor
    start: tuple[int, ...]
    parameter: str = ""


def held_parts(model: nn.Module) -> Iterator[Held]:
    """All parameters of vLLM's `model` that this worker holds, apart; without adapters."""
    return take_apart(model, kernel_tensors(model))


def kernel_tensors(model: nn.Module) -> Iterator[Named]:
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


def take_apart(model: nn.Module, tensors: Iterable[Named]) -> Iterator[Held]:
    """Takes apart what is fused or stacked in `tensors`, which have the names and shapes of
    parameters of vLLM's `model`.
    """
    for parameter, tensor in tensors:
        path, _, kind = parameter.rpartition(".")
        module = model.get_submodule(path)
        name = path.replace(".base_layer", "")  # of a module with adapters beside it
        names = _names_of(model, name)
        reason = _unreadable(module, names)
        if reason and not (reason is PACKED and names[0].rpartition(".")[2] in FUSED):
            continue
        parts: Iterable[Part]
        if kind in EXPERT_PARTS:
            parts = _experts(name.removesuffix(".routed_experts"), module, kind, tensor)
        elif hasattr(module, "output_size"):  # a linear layer
            parts = _linear(module, kind, tensor, names)
        elif vocabulary := getattr(module, "shard_indices", None):
            first = vocabulary.org_vocab_start_index
            rows = tensor[: vocabulary.org_vocab_end_index - first]  # without the padding
            parts = [(f"{name}.weight", rows, (first, 0))]
        else:
            parts = [(f"{name}.{kind}", tensor, ())]
        for part in parts:
            yield Held(*part, parameter)


def not_compared(model: nn.Module) -> dict[str, str]:
    """Returns why a worker cannot say anything, or not of all, about tensors of the Hugging Face
    model, by the beginning of their names.
    """
    reasons = {}
    for path, module in model.named_modules():
        name = path.replace(".base_layer", "").removesuffix(".routed_experts")
        if type(module).__name__ == "PPMissingLayer":
            reasons[f"{name}."] = ELSEWHERE
            continue
        names = _names_of(model, name)
        if reason := _unreadable(module, names):
            reasons |= {f"{each}.": reason for each in names}
    return reasons


def held_adapters(model: nn.Module, slot: int) -> Iterator[Held]:
    """The adapters beside the weights, in vLLM's `slot`, as "...lora_A.weight" [r, in] and
    "...lora_B.weight" [out, r], which has the scaling in it; those of linear layers.
    """
    for name, module in model.named_modules():
        if not isinstance(getattr(module, "lora_a_stacked", None), tuple):
            continue
        names = _names_of(model, name)
        sizes = getattr(module.base_layer, "output_partition_sizes", names)
        if not len(names) == len(sizes) == len(module.lora_b_stacked):
            continue
        shards = zip(names, module.lora_a_stacked, module.lora_b_stacked, strict=True)
        for shard, (part, a, b) in enumerate(shards):
            a = a[slot, 0]
            b = b[slot, 0]
            row, column, _ = _place(module.base_layer, shard, b.shape[0], a.shape[1])
            yield Held(f"{part}.lora_A.weight", a, (0, column))
            yield Held(f"{part}.lora_B.weight", b, (row, 0))


def _names_of(model: nn.Module, name: str) -> list[str]:
    """Returns the names that the module `name` has in the files."""
    packing = FUSED | getattr(model, "packed_modules_mapping", {})
    parent, dot, leaf = name.rpartition(".")
    return [parent + dot + part for part in packing.get(leaf, [leaf])]


def _unreadable(module: nn.Module, names: list[str]) -> str | None:
    """Returns why the weights of vLLM's linear layer, vocabulary or experts are not known as such,
    None if they are.
    """
    is_linear = hasattr(module, "output_size")
    if not (is_linear or hasattr(module, "w13_weight") or hasattr(module, "shard_indices")):
        return None
    for name, parameter in module.named_parameters(recurse=False):
        is_number = parameter.is_floating_point() and parameter.itemsize > 1
        if "scale" in name or not is_number:
            return QUANTIZED
    backend = getattr(getattr(module, "quant_method", None), "unquantized_backend", None)
    if getattr(backend, "name", None) in OWN_LAYOUT:
        return SHUFFLED
    shards = len(getattr(module, "output_partition_sizes", names))
    return PACKED if is_linear and shards != len(names) else None


def _linear(module: nn.Module, kind: str, tensor: Tensor, names: list[str]) -> Iterator[Part]:
    first = 0  # row of the shard in a tensor that is fused in the files, too
    sizes = getattr(module, "output_partition_sizes", [len(tensor)])
    for shard, part in enumerate(tensor.split(sizes)):
        row, column, whole = _place(module, shard, part.shape[0], part.shape[-1])
        start = (first + row, column)
        yield f"{names[shard % len(names)]}.{kind}", part, start[: part.dim()]
        first += whole if len(names) == 1 else 0


def _place(module: nn.Module, shard: int, rows: int, columns: int) -> tuple[int, int, int]:
    """Row and column of this rank's part [rows, columns] in a shard's whole weight, and the rows
    of that.
    """
    # of a replicated layer, such as a router, each rank has all
    is_shared = hasattr(module, "output_size_per_partition")
    rank = module.tp_rank if is_shared else 0
    ranks = getattr(module, "tp_size", 1) if is_shared else 1
    inputs = getattr(module, "input_size", columns)
    if getattr(module, "input_size_per_partition", inputs) < inputs:
        return 0, rank * columns, rows
    if shard:  # keys and values: of few heads several ranks hold the same
        copies = getattr(module, "num_kv_head_replicas", 1)
        rank //= copies
        ranks //= copies
    return rank * rows, 0, ranks * rows


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
            offset = getattr(getattr(module, "moe_config", module), "tp_rank", 0) * width
            start = (0, offset) if leaf == "down_proj" else (offset, 0)
            yield f"{name}.{expert}.{leaf}.weight", part, start
