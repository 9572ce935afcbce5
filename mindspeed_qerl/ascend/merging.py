"""W + (alpha / r) B A as MindSpeed-LLM's layers hold W, A and B: the random bits of each adapted
weight (lora/rounding.py), and experts, which lie in one matrix.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from mindspeed_qerl.families.base import ModelShape
from mindspeed_qerl.lora.checkpoint import EXPERTS, table_of_layer
from mindspeed_qerl.lora.rounding import Dither, dither_of_part, rounded, set_dither


def merge_experts(weight: Tensor, a: Tensor, b: Tensor, rank: int, scaling: float) -> Tensor:
    """Returns W + scaling * A B of each local expert, computed in float32 and rounded once to W's
    dtype, by the attribute `dither` of `weight` if it has one. weight: weight1 (up: h -> 2f, gate
    and up side by side) or weight2 (down: f -> h).

    MindSpeed-LLM keeps E experts in one matrix (tasks/posttrain/lora/moe/experts.py:437-468):
    weight1 [h, E*2f], a [h, r*E], b [r, E*2f]; weight2 [E*f, h], a [E*f, r], b [r*E, h], each the
    memory of [E, in, out].
    """
    experts = a.numel() * b.numel() // (weight.numel() * rank**2)
    a = a.view(experts, -1, rank).float()
    b = b.view(experts, rank, -1).float()
    stacked = weight.view(experts, a.shape[1], -1)
    # no name holds the float32 copy while `exact` is rounded
    exact = torch.baddbmm(stacked.float(), a, b, alpha=scaling)
    return rounded(exact, weight.dtype, getattr(weight, "dither", None)).view(weight.shape)


def add_dither(chunks: list[nn.Module], shape: ModelShape, state: Any) -> None:
    """Give each adapted weight of this rank the random bits that it is rounded by, as its attribute
    `dither`. state: upstream's parallel state.
    """
    tp_rank = state.get_tensor_model_parallel_rank()
    tp_size = state.get_tensor_model_parallel_world_size()
    for layer, name, module in adapted_layers(chunks):
        table = table_of_layer(shape, layer)
        if hasattr(module, "base_layer"):
            set_dither(module.base_layer.weight, table[name], tp_rank, tp_size)
            continue
        # whole experts are dealt to expert ranks, and by those to their tensor ranks
        count = module.num_local_experts
        hidden = module.config.hidden_size
        first = (state.get_expert_model_parallel_rank() * tp_size + tp_rank) * count
        for which in module.adapted:
            weight = getattr(module, which)
            width = weight.numel() // (count * hidden)
            outputs_and_inputs = (width, hidden) if which == "weight1" else (hidden, width)
            bits = []
            for expert in range(first, first + count):
                mapping = table[f"mlp.experts.local_experts.{expert}.{EXPERTS[which]}"]
                bits.append(dither_of_part(mapping, outputs_and_inputs, 0, 1))
            by_input = torch.stack([each.across for each in bits])
            by_output = torch.stack([each.down for each in bits])
            weight.dither = Dither(by_input, by_output).to(weight.device)


def merge_adapters(chunks: list[nn.Module]) -> None:
    """Merge what the adapted layers multiply with, as far as it is not there since the last
    update: before the first pass, where all of it is merged at once.
    """
    for _, _, module in adapted_layers(chunks):
        module.merge_once()


def forget_merged(chunks: list[nn.Module]) -> None:
    """Free it: the adapters change."""
    for _, _, module in adapted_layers(chunks):
        module.forget_merged()


def adapted_layers(chunks: list[nn.Module]) -> Iterator[tuple[int, str, nn.Module]]:
    """Yields (layer of the whole model, name within it, LinearLoRA or ExpertLoRA) of this rank."""
    for chunk in chunks:
        modules = chunk.named_modules()
        decoder = next(module for name, module in modules if name.endswith("decoder"))
        for layer in decoder.layers:
            for name, module in layer.named_modules():
                if hasattr(module, "forget_merged"):
                    yield layer.layer_number - 1, name, module
