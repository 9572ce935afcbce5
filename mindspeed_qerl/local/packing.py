"""Weights as vLLM's CPU kernels read them: packed copies, which have to follow when a weight
changes.

vLLM packs linear weights when they are loaded and empties `weight`; a later update would silently
change nothing. `keep_linear_weights` stops that before the engine is built. Expert weights are
packed in place.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu


class PackedLinear:
    """Describes what vLLM's CPU backend calls for a linear layer: oneDNN on a packed copy of its
    weight, made at the first call after `forget`. Where oneDNN has no product of the weight's dtype
    (bfloat16 on x86 without AVX-512) the copy is float32, and the result is rounded: several times
    faster than torch's own product, which vLLM falls back to.
    """

    packed: Any = None
    dtype: torch.dtype | None = None  # of the packed copy

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        from vllm import _custom_ops

        if self.packed is None:
            try:
                self.packed = _custom_ops.create_onednn_mm(weight.t(), 32)  # as vLLM's own dispatch
                self.dtype = weight.dtype
            except RuntimeError:
                self.packed = _custom_ops.create_onednn_mm(weight.t().float(), 32)
                self.dtype = torch.float32
        bias = None if bias is None else bias.to(self.dtype)
        return _custom_ops.onednn_mm(self.packed, x.to(self.dtype), bias).to(x.dtype)

    def forget(self) -> None:
        """The weight has changed."""
        self.packed = None


def keep_linear_weights() -> None:
    """Make vLLM's CPU linear layers a `PackedLinear` each, beside their weight. Call before the
    engine is built.
    """
    from vllm.model_executor.layers import utils

    @wraps(utils.dispatch_cpu_unquantized_gemm)
    def dispatch(layer, remove_weight):
        layer.cpu_linear = PackedLinear()

    utils.dispatch_cpu_unquantized_gemm = dispatch


def packed_linears(model: nn.Module) -> list[nn.Module]:
    """The layers of vLLM's model that have one."""
    return [
        layer
        for layer in model.modules()
        if isinstance(getattr(layer, "cpu_linear", None), PackedLinear)
    ]


class PackedExperts:
    """A layer's routed experts in vLLM: `w13_weight` [E, 2f, h] and `w2_weight` [E, h, f], whose
    elements vLLM's packing permutes within each expert.

    Args:
        name: of `module`, vLLM's RoutedExperts, in the model.
    """

    def __init__(self, name: str, module: nn.Module):
        self.name = name
        self.module = module
        self.kernel = module.quant_method.moe_kernel.fused_experts
        self._sources = {
            which: _permutation(getattr(module, which), self.kernel.isa)
            for which in ("w13_weight", "w2_weight")
        }

    def unpacked(self) -> dict[str, Tensor]:
        """Copies in memory order, row by row, by vLLM's parameter names."""
        copies = {}
        for which, source in self._sources.items():
            packed = getattr(self.module, which)
            copy = torch.empty_like(packed)
            copy.flatten(1)[:, source] = packed.flatten(1)
            copies[f"{self.name}.{which}"] = copy
        return copies

    def unpack(self) -> None:
        """In place, until `pack`."""
        for name, weight in self.unpacked().items():
            getattr(self.module, name.rpartition(".")[2]).copy_(weight)

    def pack(self) -> None:
        """As vLLM does it after loading."""
        self.kernel.process_weights_after_loading(self.module)


def _permutation(weight: Tensor, isa: str) -> Tensor:
    """For each element of a packed expert its number in memory order, int64. Found by packing
    element numbers, eight bits at a time: bfloat16 holds no more of an integer.
    """
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import cpu_prepack_moe_weight

    index = torch.arange(weight[0].numel())
    source = torch.zeros_like(index)
    for shift in (0, 8, 16, 24):
        digit = ((index >> shift) & 255).to(weight.dtype).reshape(1, *weight.shape[1:])
        source += cpu_prepack_moe_weight(digit, isa).flatten().long() << shift
    return source


def plain_experts(
    multiply: Callable[..., Tensor],
    weights: dict[str, Tensor],
    *,
    output: Tensor,
    hidden_states: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    **_: Any,
) -> None:
    """Computes what vLLM's fused CPU kernel does for SwiGLU experts, by torch's operators.

    multiply: (x [n, in], weight [out, in]) -> [n, out]. weights: of all experts, as
    `PackedExperts.unpacked` has them. output, hidden_states: [tokens, h]. topk_*: [tokens, k].
    """
    w13, w2 = weights.values()
    output.zero_()
    for expert in topk_ids.unique().tolist():
        rows, slots = (topk_ids == expert).nonzero(as_tuple=True)
        both = multiply(hidden_states[rows], w13[expert])
        gate, up = both.chunk(2, -1)
        y = multiply(silu(gate) * up, w2[expert])
        weighted = y * topk_weights[rows, slots].unsqueeze(1)
        output.index_add_(0, rows, weighted.to(output.dtype))
