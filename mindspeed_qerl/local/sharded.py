"""The adapters of the undivided model, of which each rank holds a part: merged weights for the
rollout engine, factors for the proof of the sync, tensors of a checkpoint.
"""

import math
from collections.abc import Iterable
from itertools import groupby

import numpy as np
import torch
from torch import nn

from mindspeed_qerl.families.tensors import ParameterMapping
from mindspeed_qerl.local.checkpoint import write_tensors
from mindspeed_qerl.local.place import Place
from mindspeed_qerl.lora.adapters import LoRALinear, lora_layers

# in checkpoints, of a factor and of AdamW's state of it, by torch's names
SUFFIXES = ("", ".exp_avg", ".exp_avg_sq")


class ShardedAdapters:
    """One rank's part of them. Data-parallel ranks hold the same; one of them hands it over. Every
    method is called on all ranks at once.

    Args:
        table: what the model's parameters are made of.
    """

    optimizer: torch.optim.Optimizer  # of the adapters

    def __init__(self, model: nn.Module, table: Iterable[ParameterMapping], place: Place):
        self.model, self.place = model, place
        self.table = {mapping.megatron: mapping for mapping in table}
        self.layers = [(self.table[f"{name}.weight"], layer) for name, layer in lora_layers(model)]
        # those that this rank hands over, together with its tensor parallel group
        self.owned = [pair for pair in self.layers if place.owns(pair[1].lora_A)]
        # merged weights travel a layer of the model at a time
        self.parts = [list(part) for _, part in groupby(self.owned, key=_layer_number)]

    def describe(self) -> dict[str, dict[str, int]]:
        """Per LoRA target the modules and parameters that this rank stands for."""
        counts: dict[str, dict[str, int]] = {}
        for mapping, layer in self.owned:
            if self._is_first(layer):
                count = counts.setdefault(_target(mapping), {"modules": 0, "parameters": 0})
                count["modules"] += 1
                count["parameters"] += sum(map(math.prod, _whole_shapes(layer)))
        return counts

    def sync_parts(self) -> int:
        """How many parts of this rank's merged weights a sync takes."""
        return len(self.parts)

    def _is_first(self, layer: LoRALinear) -> bool:
        """Whether this rank is the first of those that share the layer."""
        return layer.tp_size == 1 or self.place.tp_rank == 0

    def merged_weights(self, part: int) -> dict[str, np.ndarray]:
        """HF name -> W + (alpha / r) B A, float32, of one part of a sync."""
        merged = {}
        for mapping, layer in self.parts[part] if part < len(self.parts) else ():
            weight = self.place.whole(layer.merged_weight().float(), mapping.shared)
            if weight is not None:
                for name, tensor in zip(mapping.hf, mapping.split(weight)):
                    merged[name] = tensor.contiguous().cpu().numpy()
        return merged

    @torch.no_grad()
    def adapter_factors(self) -> dict[str, tuple[str, np.ndarray, np.ndarray]]:
        """HF name -> (target, (alpha / r) B [out, r], A [r, in]), float32: the proof of a sync uses
        them.
        """
        factors = {}
        for mapping, layer in self.owned:
            scaled = layer.scaling * layer.lora_B
            if whole := self.whole(mapping, layer, layer.lora_A, scaled):
                a = whole[0].cpu().numpy()
                for name, b in zip(mapping.hf, mapping.split(whole[1])):
                    factors[name] = (_target(mapping), b.contiguous().cpu().numpy(), a)
        return factors

    def whole(
        self, mapping: ParameterMapping, layer: LoRALinear, a: torch.Tensor, b: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """(A, B) whole, from this rank's parts of both, of their gradients or their moments; None
        where another rank hands them over.
        """
        shares_input = layer.row_parallel and layer.tp_size > 1
        a = self.place.whole(a, mapping.shared if shares_input else None)
        b = self.place.whole(b, None if shares_input else mapping.shared)
        return (a, b) if self._is_first(layer) else None

    @torch.no_grad()
    def save(self, folder: str) -> None:
        """Write whole factors, and the optimizer's moments of them, into a checkpoint's folder."""
        tensors = {}
        for mapping, layer in self.owned:
            states = zip(self._states(layer.lora_A), self._states(layer.lora_B))
            for suffix, (a, b) in zip(SUFFIXES, states):
                for side, tensor in zip("AB", self.whole(mapping, layer, a, b) or ()):
                    tensors[f"{layer.name}.lora_{side}{suffix}"] = tensor.detach()
        write_tensors(tensors, folder)

    @torch.no_grad()
    def restore(self, folder: str, updates: int) -> None:
        """Read what the ranks of any layout saved after `updates` steps of the optimizer."""
        from torch.distributed import checkpoint

        whole = {}
        for _, layer in self.layers:
            for side, shape in zip("AB", _whole_shapes(layer)):
                for suffix in SUFFIXES:
                    whole[f"{layer.name}.lora_{side}{suffix}"] = torch.empty(shape)
        checkpoint.load(whole, storage_reader=checkpoint.HuggingFaceStorageReader(folder))
        rank, size = self.place.tp_rank, self.place.tp_size
        for mapping, layer in self.layers:
            for side, factor in (("A", layer.lora_A), ("B", layer.lora_B)):
                self.optimizer.state[factor]["step"].fill_(updates)
                for suffix, tensor in zip(SUFFIXES, self._states(factor)):
                    value = whole[f"{layer.name}.lora_{side}{suffix}"]
                    if factor.tensor_model_parallel:
                        assert mapping.shared, "a parameter that tensor parallel ranks share"
                        value = mapping.shared.shard(value, rank, size)
                    tensor.copy_(value)

    def _states(self, factor: nn.Parameter) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What a checkpoint holds of a factor, in the order of SUFFIXES."""
        state = self.optimizer.state[factor]
        return factor, state["exp_avg"], state["exp_avg_sq"]


def _layer_number(pair: tuple[ParameterMapping, LoRALinear]) -> str:
    """3 of decoder.layers.3.self_attention.linear_qkv.weight."""
    return pair[0].megatron.split(".")[2]


def _target(mapping: ParameterMapping) -> str:
    """linear_qkv of decoder.layers.0.self_attention.linear_qkv.weight."""
    return mapping.megatron.split(".")[-2]


def _whole_shapes(layer: LoRALinear) -> tuple[tuple[int, int], tuple[int, int]]:
    """Of (A, B), undivided."""
    rank, base = len(layer.lora_A), layer.base_layer
    return (rank, base.input_size), (base.output_size, rank)
