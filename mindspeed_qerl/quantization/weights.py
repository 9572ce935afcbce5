"""The linear weights of a rollout model: what was synced, and what its kernels multiply with
instead.
"""

import re
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from .formats import FORMATS

# By Hugging Face's names the linear layers of attention, MLPs and experts. Norms, routers
# (mlp.gate), gates of shared experts, embeddings and the output layer are never quantized, as in
# vLLM's and QeRL's checkpoints.
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
WEIGHT_ERROR = "quantization/weight_error"


def is_quantized(name: str) -> bool:
    """Returns True if the tensor of this Hugging Face name is quantized: a linear weight.

    >>> is_quantized("model.layers.0.mlp.up_proj.weight"), is_quantized("model.norm.weight")
    (True, False)
    """
    return name.endswith(tuple(f".{linear}.weight" for linear in LINEARS))


def squares(error: Tensor, synced: Tensor) -> Tensor:
    """float32 [2]: the sums of squares of a tensor's error, and of the tensor."""
    return torch.stack([error.float().square().sum(), synced.float().square().sum()])


def weight_errors(squares: Iterable[tuple[str, tuple[float, float]]]) -> dict[str, float]:
    """Metrics: ||used - synced|| / ||synced|| of all tensors, and of each layer's.

    Args:
        squares: (Hugging Face name, `squares`) of tensors, or of their parts.

    >>> weight_errors([("model.layers.1.mlp.up_proj.weight", (1.0, 4.0))])
    {'quantization/weight_error': 0.5, 'quantization/weight_error/layer_1': 0.5}
    """
    sums: dict[str, tuple[float, float]] = {}
    for name, (error, whole) in squares:
        layer = re.sub(r".*\.layers\.(\d+)\..*", r"\1", name)
        for key in (WEIGHT_ERROR, f"{WEIGHT_ERROR}/layer_{layer}"):
            errors, wholes = sums.get(key, (0.0, 0.0))
            sums[key] = errors + error, wholes + whole
    return {key: (error / whole) ** 0.5 if whole else 0.0 for key, (error, whole) in sums.items()}


class QuantizedWeights:
    """The quantized tensors of a model, by their Hugging Face names, in the dtype that they have
    there.

    Args:
        format: one of FORMATS. base: the model's own tensors [out, in].

    Attributes:
        synced: as they were received, at first the base. used: what kernels multiply with.
    """

    def __init__(self, format: str, base: Mapping[str, Tensor]):
        self.format = FORMATS[format]
        self.synced = dict(base)
        self.used = {name: self.rounded(weight) for name, weight in base.items()}

    def rounded(self, weight: Tensor) -> Tensor:
        """Returns what kernels multiply with in the place of `weight`."""
        return self.format.weight(weight).to(weight.dtype)

    def receive(self, name: str, weight: Tensor) -> None:
        """Takes a merged weight of a sync, any float dtype, which is copied, and quantizes it."""
        weight = weight.to(self.synced[name].dtype, copy=True)
        self.synced[name] = weight
        self.used[name] = self.rounded(weight)

    def errors(self) -> dict[str, float]:
        """`weight_errors` of all of them."""
        return weight_errors(
            (name, squares(self.used[name].float() - synced.float(), synced).tolist())
            for name, synced in self.synced.items()
        )
