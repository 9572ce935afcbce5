"""The adapters of the undivided model, of which each rank holds a part: merged weights for the
rollout engine, factors for the proof of the sync, tensors of a checkpoint.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import save
from torch import Tensor, nn

from mindspeed_qerl.families.tensors import ParameterMapping
from mindspeed_qerl.lora.adapters import LoRALinear, lora_layers

from .checkpoint import read_tensors
from .place import Place

MOMENTS = ("exp_avg", "exp_avg_sq")  # of AdamW, by torch's names
# by Hugging Face's name: the LoRA target, (alpha / r) B [out, r] and A [r, in], float32
AdapterFactors = dict[str, tuple[str, np.ndarray, np.ndarray]]
Trained = dict[str, Counter[str]]  # by LoRA target, how many "modules" and "parameters"


class ShardedAdapters:
    """One rank's part of them. Data-parallel ranks hold the same; one of them hands it over. Every
    method is called on all ranks at once.

    Args:
        table: what the model's parameters are made of. optimizer: AdamW, of the adapters.
    """

    def __init__(
        self,
        model: nn.Module,
        table: Iterable[ParameterMapping],
        place: Place,
        optimizer: torch.optim.Optimizer,
    ):
        self.place = place
        self.optimizer = optimizer
        self.table = {mapping.megatron: mapping for mapping in table}
        self.layers = [(self.table[f"{name}.weight"], layer) for name, layer in lora_layers(model)]
        # those that this rank hands over, together with its tensor parallel group
        self.owned = [pair for pair in self.layers if place.owns(pair[1].lora_A)]

    def describe(self) -> Trained:
        """Per LoRA target the modules and parameters that this rank stands for."""
        counts: Trained = defaultdict(Counter)
        for mapping, layer in self.owned:
            if self._is_first(layer):
                base = layer.base_layer
                parameters = len(layer.lora_A) * (base.input_size + base.output_size)
                counts[_target(mapping)].update(modules=1, parameters=parameters)
        return counts

    def _is_first(self, layer: LoRALinear) -> bool:
        """Returns True if this rank is the first of those that share the layer."""
        return layer.tp_size == 1 or self.place.tp_rank == 0

    def merged_weights(self, number: int) -> dict[str, np.ndarray]:
        """HF name -> W + (alpha / r) B A, float32, of layer `number` of this stage; nothing after
        its last one.
        """
        merged = {}
        place = f"decoder.layers.{number}."
        for mapping, layer in self.owned:
            if not mapping.megatron.startswith(place):
                continue
            weight = self.place.whole(layer.merged_weight().float(), mapping.shared)
            if weight is not None:
                for name, tensor in zip(mapping.hf, mapping.split(weight)):
                    merged[name] = tensor.contiguous().cpu().numpy()
        return merged

    @torch.no_grad()
    def factors(self) -> AdapterFactors:
        """Returns what the proof of a sync uses."""
        factors = {}
        for mapping, layer in self.owned:
            a = self.whole(mapping, layer, layer.lora_A, layer.lora_A)
            scaled = self.whole(mapping, layer, layer.lora_B, layer.scaling * layer.lora_B)
            if a is not None and scaled is not None:
                a = a.cpu().numpy()
                for name, b in zip(mapping.hf, mapping.split(scaled)):
                    factors[name] = (_target(mapping), b.contiguous().cpu().numpy(), a)
        return factors

    def whole(
        self, mapping: ParameterMapping, layer: LoRALinear, factor: nn.Parameter, part: Tensor
    ) -> Tensor | None:
        """A factor, its gradient or a moment of it from each rank's part; None where another rank
        hands it over.
        """
        whole = self.place.whole(part, mapping.shared if factor.tensor_model_parallel else None)
        return whole if self._is_first(layer) else None

    @torch.no_grad()
    def save(self, folder: Path) -> None:
        """Write whole factors, and the optimizer's moments of them, into a checkpoint's folder."""
        tensors = {}
        for mapping, layer in self.owned:
            for name, factor, part in self._states(layer):
                whole = self.whole(mapping, layer, factor, part)
                if whole is not None:
                    tensors[name] = whole.detach()
        if tensors:
            (folder / f"shard-{dist.get_rank():05d}.safetensors").write_bytes(save(tensors))

    @torch.no_grad()
    def restore(self, folder: str, updates: int) -> None:
        """Read what the ranks of any layout saved after `updates` steps of the optimizer."""
        whole = read_tensors(Path(folder))
        for state in self.optimizer.state.values():
            state["step"].fill_(updates)
        for mapping, layer in self.layers:
            for name, factor, part in self._states(layer):
                value = whole[name]
                if factor.tensor_model_parallel:
                    assert mapping.shared, "a parameter that tensor parallel ranks share"
                    value = mapping.shared.shard(value, self.place.tp_rank, self.place.tp_size)
                part.copy_(value)
        self.changed()

    def changed(self) -> None:
        """After an update, or what was read."""
        for _, layer in self.layers:
            layer.forget_merged()

    def _states(self, layer: LoRALinear) -> Iterator[tuple[str, nn.Parameter, Tensor]]:
        """Yields what a checkpoint holds of a layer, (name, factor, this rank's part): the factors,
        and AdamW's moments of them.
        """
        for side, factor in (("A", layer.lora_A), ("B", layer.lora_B)):
            name = f"{layer.name}.lora_{side}"
            yield name, factor, factor
            for moment in MOMENTS:
                yield f"{name}.{moment}", factor, self.optimizer.state[factor][moment]


def _target(mapping: ParameterMapping) -> str:
    """linear_qkv of decoder.layers.0.self_attention.linear_qkv.weight."""
    return mapping.megatron.split(".")[-2]
