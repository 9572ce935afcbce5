"""The proof that LoRA reached vLLM on NPUs, in each rank.

The training weights are synced twice, without noise: with the adapters' scaling at 0, which gives
the base, and as they are. What vLLM's kernels read then must be base + (alpha / r) B A. A and B are
put together from all ranks by what reads checkpoints (lora/checkpoint.py), which knows nothing of
how upstream moves weights to vLLM.
"""

import re
from argparse import Namespace
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from mindspeed_qerl.families.base import ModelShape
from mindspeed_qerl.lora.checkpoint import ADAPTER, EXPERTS, Pairs, Tensors, whole_adapters
from mindspeed_qerl.lora.held import Held, held_parts
from mindspeed_qerl.lora.proof import Movement, join, movement
from mindspeed_qerl.lora.rounding import dither_of
from mindspeed_qerl.recipe.types import Layout

from .merging import adapted_layers

LAYER = re.compile(r"model\.layers\.(\d+)\.")
# vLLM's modules, taken apart, by the last part of their names -> the LoRA target
TARGETS = {
    "q_proj": "linear_qkv",
    "k_proj": "linear_qkv",
    "v_proj": "linear_qkv",
    "o_proj": "linear_proj",
    "gate_proj": "linear_fc1",
    "up_proj": "linear_fc1",
    "down_proj": "linear_fc2",
}


def count_adapters(chunks: list[nn.Module], state: Any) -> dict[str, dict[str, int]]:
    """Counts what a rank trains: LoRA target -> its "modules" and "parameters". Over all ranks each
    layer counts as one module and each parameter once, however many hold copies. state: upstream's
    parallel state.
    """
    is_first_tp = state.get_tensor_model_parallel_rank() == 0
    is_first_ep = state.get_expert_model_parallel_rank() == 0
    counts = defaultdict(Counter)
    for _, module_name, module in adapted_layers(chunks):
        is_expert = module_name.endswith(".experts")
        replica = state.get_data_parallel_rank(with_context_parallel=True)
        if is_expert:
            replica = state.get_expert_data_parallel_rank()
        for name, parameter in module.named_parameters():
            if replica or "lora_" not in name or not parameter.requires_grad:
                continue
            # `weight1_lora_a` of grouped experts, `lora_A.default.weight` of a linear layer
            target = module_name.rpartition(".")[2]
            if is_expert:
                target = EXPERTS[name.split("_")[0]]
            if name.endswith(("lora_a", "lora_A.default.weight")):
                counts[target]["modules"] += is_first_tp and (is_first_ep or not is_expert)
            if is_first_tp or parameter.tensor_model_parallel:
                counts[target]["parameters"] += parameter.numel()
    return dict(counts)


def adapters_by_layer(chunks: list[nn.Module]) -> dict[int, Tensors]:
    """This rank's adapters on the CPU: layer of the whole model -> tensors by the names they have
    in layer 0.
    """
    adapters = defaultdict(dict)
    for layer, module_name, module in adapted_layers(chunks):
        for name, parameter in module.named_parameters(f"decoder.layers.0.{module_name}"):
            if ADAPTER.match(name):
                adapters[layer][name] = parameter.detach().to("cpu", copy=True)
    return adapters


def gather_layer(
    tensors: Tensors, place: tuple[int, int], args: Namespace, shape: ModelShape, layer: int
) -> Pairs:
    """A and B of `layer` by HF module name, whole, from all ranks; a collective call of all of
    them. Of ranks that should hold the same adapter and do not, one fails its proof.

    Args:
        tensors: this rank's, of `adapters_by_layer`; empty on other pipeline stages. place: its
            tensor and expert rank. args: upstream's configuration of Megatron.
    """
    ranks = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(ranks, (place, tensors))
    shards = {}
    for rank, held in ranks:
        shards.setdefault(rank, {}).update(held)
    return whole_adapters(shards, args, shape, layer)


def held_weights(model: nn.Module, layer: int | None = None) -> Iterator[Held]:
    """The matrices of `layer`, or of all layers, as vLLM holds them now; views."""
    for held in held_parts(model):
        match = LAYER.match(held.name)
        if match and layer in (None, int(match[1])) and held.part.dim() == 2:
            yield held


def copied_weights(model: nn.Module) -> Tensors:
    """All of `held_weights` by their names, copied to the CPU."""
    return {held.name: held.part.to("cpu", copy=True) for held in held_weights(model)}


def copies_of(name: str, layout: Layout, kv_heads: int) -> int:
    """Returns how many ranks of vLLM hold the same part of the Hugging Face tensor `name`, which is
    no new evidence.

    >>> names = [f"{name}_proj.weight" for name in ("experts.3.up", "attn.o", "attn.k")]
    >>> [copies_of(name, Layout(world=8, infer_tp=4, infer_ep=2), kv_heads=2) for name in names]
    [1, 2, 4]
    """
    tp = layout.infer_tp
    if "experts." in name:
        return layout.world // (tp * layout.infer_ep)
    if name.endswith(("k_proj.weight", "v_proj.weight")):
        tp = min(tp, kv_heads)
    return layout.world // tp


def movement_of_layer(
    weights: Iterable[Held],
    base: Tensors,
    pairs: Pairs,
    scaling: float,
    copies: Callable[[str], int],
    multiplied: Pairs,
) -> Movement:
    """Compares this rank's parts of one layer's weights; in sums over all ranks each counts once.

    Args:
        weights, base: of `held_weights`, with adapters and without. copies: `copies_of` by the
            tensor's name. multiplied: what kernels multiply with in their places, with adapters and
            without, where rollouts are quantized.
    """
    movements = []
    for held in weights:
        name = held.name.removesuffix(".weight")
        if name in pairs:
            a, b = pairs[name]
            start = held.start
            shape = held.part.shape
            device = held.part.device
            rows = b.narrow(0, start[0], shape[0]).to(device)
            columns = a.narrow(1, start[1], shape[1]).to(device)
            update = scaling * (rows.float() @ columns.float())
            dither = dither_of(held.name, (len(b), a.shape[1])).part(start, shape).to(device)
            pair = tuple(tensor.to(device) for tensor in multiplied.get(held.name, ()))
            found = movement(held.part, base[held.name].to(device), update, dither, pair)
            for key in ("product", "square", "variance"):
                found[key] /= copies(held.name)
            movements.append({TARGETS[name.rpartition(".")[2]]: found})
    return join(movements)
