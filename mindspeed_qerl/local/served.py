"""The weights of vLLM's model: synced in place, packed anew for its kernels (packing.py), and read
back for the proof that a sync arrived.
"""

from collections import defaultdict
from collections.abc import Iterable

import numpy as np
import torch

from mindspeed_qerl.families.checkpoint import Checkpoint
from mindspeed_qerl.local.packing import PackedExperts, packed_linears
from mindspeed_qerl.local.quantized import QuantizedModel
from mindspeed_qerl.lora.held import held_parts, kernel_tensors, take_apart
from mindspeed_qerl.lora.proof import join, movement
from mindspeed_qerl.quantization.weights import is_quantized
from mindspeed_qerl.recipe.types import Quantization


class ServedWeights:
    """Those of one engine.

    Args:
        model: vLLM's.
        quantization: of the linear layers; None: they are what was synced.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        model_dir: str,
        quantization: Quantization | None,
    ):
        from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

        self.model, self.model_dir = model, model_dir
        self.experts = [
            PackedExperts(name, module)
            for name, module in model.named_modules()
            if isinstance(module, RoutedExperts)
        ]
        self.quantized: QuantizedModel | None = None
        if quantization:
            self.quantized = self.quantize(Checkpoint(model_dir), quantization)
            self._put(quantized=True)

    def quantize(self, checkpoint: Checkpoint, quantization: Quantization) -> QuantizedModel:
        """The linear layers as `quantization` rounds them. checkpoint: the base model's."""
        names: dict[str, list[str]] = defaultdict(list)
        for held in held_parts(self.model):
            if is_quantized(held.name):
                names[held.parameter].append(held.name)
        return QuantizedModel(self.model, names, checkpoint, quantization)

    @torch.no_grad()
    def start_sync(self) -> None:
        """Until `finish_sync` the expert weights are unpacked, in place, one layer at a time."""
        for experts in self.experts:
            experts.unpack()

    def load(self, *parts: dict[str, np.ndarray]) -> None:
        """HF-named tensors from several ranks, into the weights in place; those left out stay as
        they are.
        """
        for part in parts:
            self.load_tensors((name, torch.from_numpy(array)) for name, array in part.items())

    @torch.no_grad()
    def load_tensors(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        """The same of (name, tensor)."""
        self.model.load_weights(self.quantized.receive(named) if self.quantized else named)

    @torch.no_grad()
    def finish_sync(self) -> dict[str, float]:
        """Pack the weights again; returns the relative error that quantisation made of the linear
        weights, of all and by layer (empty: nothing is quantised).
        """
        self._pack(quantized=True)
        return self.quantized.weights.errors() if self.quantized else {}

    @torch.no_grad()
    def _put(self, quantized: bool) -> None:
        """Compute with the quantised weights, or with those that were synced."""
        self.start_sync()
        self._pack(quantized)

    def _pack(self, quantized: bool) -> None:
        if self.quantized:
            self.quantized.put(quantized)
        for layer in packed_linears(self.model):
            layer.cpu_linear.forget()
        for experts in self.experts:
            experts.pack()

    @torch.no_grad()
    def movement(
        self, *factors: dict[str, tuple[str, np.ndarray, np.ndarray]]
    ) -> dict[str, dict[str, float]]:
        """What each LoRA target did to the weights that this engine's kernels read, against (alpha
        / r) B A and the base weights on disk (lora/proof.py); of quantised weights to what was
        quantised, and whether they are that. factors: from each rank (`adapter_factors`).
        """
        tensors = dict(kernel_tensors(self.model))
        if self.quantized:
            tensors |= self.quantized.rounded()
        for experts in self.experts:
            tensors |= experts.unpacked()
        held = self._by_name(tensors)
        if self.quantized:
            adapters = self._by_name(self.quantized.adapters)
            for name, synced, used, adapter in self.quantized.weights:
                held[name] = synced + (held[name] - used) + (adapters.get(name, adapter) - adapter)
        checkpoint, moved = Checkpoint(self.model_dir), []
        whole: dict[str, tuple[str, np.ndarray, np.ndarray]] = {}
        for part in factors:
            whole |= part
        for name, (target, b, a) in sorted(whole.items()):
            update = torch.from_numpy(b) @ torch.from_numpy(a)
            moved.append({target: movement(held[name], checkpoint.read(name), update)})
        return join(moved)

    def _by_name(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """By Hugging Face names what is in tensors that have vLLM's."""
        return {held.name: held.part for held in take_apart(self.model, tensors.items())}
