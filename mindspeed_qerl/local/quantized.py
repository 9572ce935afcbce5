"""Quantized rollouts in vLLM: rounded weights in the place of the synced ones, and layers that
round what they are given (docs/quantization.md).
"""

from collections.abc import Iterable, Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import linear

from mindspeed_qerl.families.checkpoint import Checkpoint
from mindspeed_qerl.lora.held import held_parts
from mindspeed_qerl.quantization.weights import QuantizedWeights, is_quantized
from mindspeed_qerl.recipe.types import Quantization


class QuantizedLayers:
    """The linear layers of vLLM's model that are quantized, and whether they are now (`is_on`).

    Args:
        model: vLLM's. checkpoint: the base model's.

    Attributes:
        weights: by Hugging Face names. adapters: those of `weights`, as the layers have them: by
            vLLM's parameter names, unpacked.
    """

    def __init__(self, model: torch.nn.Module, checkpoint: Checkpoint, quantization: Quantization):
        self.model = model
        self.is_on = False
        base = {}
        quantized = set()  # by vLLM's names
        for held in held_parts(model):
            if is_quantized(held.name):
                dtype = model.get_parameter(held.parameter).dtype  # the files may have another
                base[held.name] = checkpoint.read(held.name).to(dtype)
                quantized.add(held.parameter)
        beside = quantization.lora == "beside"
        self.weights = QuantizedWeights(quantization.format, beside, dict(sorted(base.items())))
        self.activation = self.weights.format.activation
        self.adapters: dict[str, Tensor] = {}
        self._rounding = quantized if self.activation else set()
        for parameter in self._rounding:
            layer, _, which = parameter.rpartition(".")
            if which == "weight":
                model.get_submodule(layer).cpu_linear = partial(self.linear, parameter)

    def linear(
        self,
        parameter: str,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        expert: int | None = None,
    ) -> Tensor:
        """The layer of vLLM's `parameter` on x [..., in]; of one `expert` of those that are stacked
        there.
        """
        if not self.is_on or not self.activation:
            return linear(x, weight, bias)
        y = linear(self.activation(x).to(x.dtype), weight, bias)
        adapter = self.adapters.get(parameter)
        if adapter is None:
            return y
        return y + linear(x, adapter if expert is None else adapter[expert])

    def rounded(self) -> dict[str, Tensor]:
        """By vLLM's names, the weights of layers that round what they are given."""
        return {name: self.model.get_parameter(name) for name in self._rounding}

    def receive(self, named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Keep those of a sync that are quantized, for `put`; yields the others."""
        for name, tensor in named:
            if name in self.weights.synced:
                self.weights.receive(name, tensor)
            else:
                yield name, tensor

    def put(self, quantized: bool) -> None:
        """Load the quantized weights into the model, or those that were synced; experts must be
        unpacked.
        """
        if self.weights.adapters and quantized:
            # vLLM's own loader puts each where the kernel has its weight
            parameters = self.rounded()
            for parameter in parameters.values():
                parameter.zero_()
            self.model.load_weights(self.weights.adapters.items())
            self.adapters = {name: tensor.clone() for name, tensor in parameters.items()}
        weights = self.weights.used if quantized else self.weights.synced
        self.model.load_weights(weights.items())
        self.is_on = quantized
