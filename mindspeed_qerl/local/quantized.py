"""Quantized rollouts in vLLM: rounded weights in the place of the synced ones, and layers that
round what they are given (docs/quantization.md).
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.nn.functional import linear

from mindspeed_qerl.families.checkpoint import Checkpoint
from mindspeed_qerl.lora.held import Named, held_parts
from mindspeed_qerl.quantization.weights import QuantizedWeights, is_quantized
from mindspeed_qerl.recipe.types import Quantization


class QuantizedLayers:
    """The linear layers of vLLM's model that are quantized, and whether they are now (`is_on`).

    Args:
        model: vLLM's. checkpoint: the base model's.

    Attributes:
        weights: by Hugging Face names.
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
        self.weights = QuantizedWeights(quantization.format, dict(sorted(base.items())))
        self.activation = self.weights.format.activation
        self._rounding = quantized if self.activation else set()
        for parameter in self._rounding:
            layer, _, which = parameter.rpartition(".")
            if which == "weight":
                model.get_submodule(layer).cpu_linear = self.linear

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """A linear layer on x [..., in], or that of one expert."""
        if self.is_on and self.activation:
            x = self.activation(x).to(x.dtype)
        return linear(x, weight, bias)

    def rounded(self) -> dict[str, Tensor]:
        """By vLLM's names, the weights of layers that round what they are given."""
        return {name: self.model.get_parameter(name) for name in self._rounding}

    def receive(self, named: Iterable[Named]) -> Iterator[Named]:
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
        weights = self.weights.used if quantized else self.weights.synced
        self.model.load_weights(weights.items())
        self.is_on = quantized
