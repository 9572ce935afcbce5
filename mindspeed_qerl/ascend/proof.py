"""The proof that LoRA reached vLLM on NPUs, in each rank.

The training weights are synced twice, without noise: with the adapters' scaling at 0, which gives
the base, and as they are. What vLLM's kernels read then must be base + (alpha / r) B A. A and B are
put together from all ranks by what reads checkpoints (lora/checkpoint.py), which knows nothing of
how upstream moves weights to vLLM.
"""

import re
from argparse import Namespace
from collections.abc import Iterator

import torch
from vllm.model_executor.layers.fused_moe import FusedMoE
from vllm.model_executor.layers.linear import LinearBase

from mindspeed_qerl.families.base import ModelShape
from mindspeed_qerl.lora.checkpoint import (
    ADAPTER,
    Pair,
    Tensors,
    replicated,
    table_of_layer,
    whole_adapters,
)
from mindspeed_qerl.lora.proof import Movement, join, movement

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
SHARED_BY_INPUT = ("o_proj", "down_proj")


def adapters_by_layer(chunks: list[torch.nn.Module]) -> dict[int, Tensors]:
    """This rank's adapters on the CPU: layer of the whole model -> tensors by the names they have
    in layer 0.
    """
    found: dict[int, Tensors] = {}
    for chunk in chunks:
        layers = next(
            module.layers for name, module in chunk.named_modules() if name.endswith("decoder")
        )
        for name, parameter in chunk.named_parameters():
            name = name[name.find("decoder.layers.") :]
            if match := ADAPTER.match(name):
                layer = layers[int(match[1])].layer_number - 1
                in_first = name.replace(f"layers.{match[1]}.", "layers.0.", 1)
                found.setdefault(layer, {})[in_first] = parameter.detach().to("cpu", copy=True)
    return found


def gather_layer(
    tensors: Tensors, place: tuple[int, int], args: Namespace, shape: ModelShape, layer: int
) -> dict[str, Pair]:
    """A and B of `layer` by HF module name, whole, from all ranks; a collective call of all of
    them.

    Args:
        tensors: this rank's, of `adapters_by_layer`; empty on other pipeline stages. place: its
            tensor and expert rank. args: upstream's configuration of Megatron.

    Raises:
        ValueError: ranks that should hold the same adapter do not.
    """
    of_ranks: list[tuple[tuple[int, int], Tensors]] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(of_ranks, (place, tensors))
    copies: dict[tuple[int, int], list[Tensors]] = {}
    for at, found in of_ranks:
        if found:
            copies.setdefault(at, []).append(found)
    shards = {
        at: {name: replicated([one[name] for one in several], name) for name in several[0]}
        for at, several in copies.items()
    }
    return whole_adapters(shards, args, table_of_layer(shape), layer)


def held_weights(
    model: torch.nn.Module, layer: int | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """(HF module name, tensor [out, in]) of the linear weights of `layer`, or of all, as vLLM holds
    them now; fused and packed ones are taken apart.
    """
    for _, _, weights in held_layers(model, layer):
        yield from weights.items()


def held_layers(
    model: torch.nn.Module, layer: int | None = None
) -> Iterator[tuple[str, torch.nn.Module, Tensors]]:
    """(name in vLLM, module, its weights by HF module name, views [out, in] of what it holds) of
    each linear layer and each layer's experts. (Experts are [in, out] there, as NPUs multiply:
    vllm-ascend ops/common_fused_moe.py `process_weights_after_loading`.)
    """
    for name, module in model.named_modules():
        found = LAYER.match(name)
        if not found or layer is not None and int(found[1]) != layer:
            continue
        parent, _, leaf = name.rpartition(".")
        if isinstance(module, FusedMoE):
            places = (
                range(module.global_num_experts)
                if module.expert_map is None
                else module.expert_map.tolist()
            )
            held = {}
            for expert, place in enumerate(places):
                if place >= 0:  # -1: on another rank
                    parts = (*module.w13_weight[place].t().chunk(2), module.w2_weight[place].t())
                    held |= {
                        f"{name}.{expert}.{part}": weight
                        for part, weight in zip(
                            ("gate_proj", "up_proj", "down_proj"), parts, strict=True
                        )
                    }
            yield name, module, held
        elif isinstance(module, LinearBase):
            fused = model.packed_modules_mapping.get(leaf)
            weights = (
                module.weight.split(module.output_partition_sizes) if fused else [module.weight]
            )
            yield (
                name,
                module,
                {
                    f"{parent}.{part}": weight
                    for part, weight in zip(fused or [leaf], weights, strict=True)
                },
            )


def movement_of_layer(
    held: Iterator[tuple[str, torch.Tensor]],
    base: Tensors,
    pairs: dict[str, Pair],
    scaling: float,
    tp_rank: int,
    tp_size: int,
) -> Movement:
    """Of this rank's parts of one layer's weights. held, base: of `held_weights`, with adapters and
    without. tp_rank, tp_size: of vLLM.
    """
    found = []
    for name, weight in held:
        if name in pairs:
            a, b = pairs[name]
            leaf, update = name.rpartition(".")[2], scaling * (b.float() @ a.float())
            dim = int(leaf in SHARED_BY_INPUT)
            parts = (
                update.shape[dim] // weight.shape[dim]
            )  # of few key and value heads several ranks have the same
            update = update.chunk(parts, dim)[tp_rank * parts // tp_size]
            found.append({TARGETS[leaf]: movement(weight.cpu(), base[name], update)})
    return join(found)
