"""Quantized rollouts in vllm-ascend (docs/quantization.md): after a sync the linear weights are
rounded in place, or, for int8_w8a8, have int8 copies that vllm-ascend's own W8A8_DYNAMIC multiplies
with.
"""

from collections.abc import Iterator
from itertools import groupby
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from vllm.distributed import get_tp_group
from vllm_ascend.quantization.w8a8_dynamic import AscendW8A8DynamicLinearMethod
from vllm_ascend.utils import matmul_allreduce_enable

from mindspeed_qerl.common.errors import ConfigError
from mindspeed_qerl.lora.checkpoint import Tensors
from mindspeed_qerl.quantization.formats import FORMATS, int8_and_scale
from mindspeed_qerl.quantization.weights import is_quantized, squares

from .proof import held_weights


class Int8Linear:
    """vllm-ascend's W8A8_DYNAMIC as a layer's `quant_method`; the layer keeps the weight that is
    synced.

    Args:
        integers: of the layer's weight [out, in], as `int8_and_scale` has them. scale: float32
            [out, 1].
    """

    def __init__(self, integers: Tensor, scale: Tensor):
        self.copy = SimpleNamespace(
            weight=integers.to(torch.int8),
            weight_scale=scale.clone(),
            weight_offset=torch.zeros_like(scale),
        )
        AscendW8A8DynamicLinearMethod().process_weights_after_loading(self.copy)

    def apply(self, layer, x, bias=None):
        """Multiplies by the copy; vLLM calls it with the layer that has the synced weight."""
        return AscendW8A8DynamicLinearMethod.apply(self.copy, x, bias)

    def weight(self) -> Tensor:
        """Returns what is multiplied with, float32 [out, in]."""
        return self.copy.weight.t().float() * self.copy.weight_scale[:, None]


class QuantizedModel:
    """The linear weights of vllm-ascend's model, quantized between `quantize`, after a sync, and
    `free`, before its weights are offloaded. What a rank of a tensor parallel group holds is its
    part of the rounded whole tensor.

    Args:
        model: vLLM's. format: one of FORMATS.

    Attributes:
        squares: of the last `quantize`: (Hugging Face name, number of this rank's part of the
            tensor) -> `weights.squares`. Over all ranks a part that several hold has one key.
        methods: layer -> its own method, where an Int8Linear is in its place.

    Raises:
        ConfigError: vllm-ascend would multiply with other weights.
    """

    def __init__(self, model: nn.Module, format: str):
        self.model = model
        self.name = format
        self.format = FORMATS[format]
        self.group = get_tp_group()
        self.squares = {}
        self.methods = {}
        if matmul_allreduce_enable() and self.group.world_size > 1:  # ops/linear_op.py:286
            raise ConfigError(
                f"rollout_quantization.format = {format!r} with "
                "VLLM_ASCEND_ENABLE_MATMUL_ALLREDUCE: vllm-ascend would multiply o_proj and "
                "down_proj by weights that are not quantized. Unset it"
            )

    @torch.no_grad()
    def quantize(self) -> None:
        """Round what was synced; all ranks of a tensor parallel group at once."""
        self.free()
        sums = {}
        for parameter, parts in groupby(held_weights(self.model), attrgetter("parameter")):
            copies = []
            for held in parts:
                name = held.name
                weight = held.part
                if not is_quantized(name):
                    continue
                amax = self._amax(name, weight)
                if self.name == "int8_w8a8":
                    integers, scale = int8_and_scale(weight, *amax)
                    copies.append((integers, scale))
                    used = integers * scale
                else:
                    used = self.format.weight(weight, *amax).to(weight.dtype)
                part = self.group.rank_in_group * self._is_shared(name)
                sums[name, part] = squares(used.float() - weight.float(), weight)
                if not copies:
                    weight.copy_(used)
            if copies:
                layer = layer_of(self.model, parameter)
                self.methods[layer] = layer.quant_method
                set_method(layer, Int8Linear(*map(torch.cat, zip(*copies))))
        # one copy to the host; without any, all quantized weights are on other ranks
        pairs = torch.stack([*sums.values()]).tolist() if sums else []
        self.squares = dict(zip(sums, pairs))

    def free(self) -> None:
        """Leave the layers with their own methods, and no int8 copies; weights that were rounded
        stay so.
        """
        for layer, method in self.methods.items():
            set_method(layer, method)
        self.methods.clear()

    @torch.no_grad()
    def rounded(self, synced: Tensors) -> Tensors:
        """Returns what kernels must multiply with once `synced`, of `held_weights` before they are
        quantized, is there; on the CPU, in the dtype of `used`: this rank's part of the rounding of
        the whole tensor, put together from all ranks of its tensor parallel group; where it is not
        quantized, the tensor itself. All ranks of such a group at once.
        """
        rounded = {}
        for name, weight in used_weights(self.model):
            expected = synced[name].to(weight.device)
            dtype = weight.dtype
            if is_quantized(name):
                dim = int(_is_shared_by_input(name))
                is_shared = self._is_shared(name)
                if is_shared:
                    expected = self.group.all_gather(expected, dim)
                expected = self.format.weight(expected)
                if is_shared:
                    expected = expected.chunk(self.group.world_size, dim)[self.group.rank_in_group]
                if self.name == "int8_w8a8":
                    dtype = torch.float32
            rounded[name] = expected.to("cpu", dtype)
        return rounded

    def used(self) -> Tensors:
        """Returns what kernels multiply with now, copied to the CPU."""
        return {name: weight.to("cpu", copy=True) for name, weight in used_weights(self.model)}

    def _is_shared(self, name: str) -> bool:
        """Returns True if tensor parallel ranks have parts of it: experts are whole
        (layout/rules.py, infer_experts_are_whole).
        """
        return self.group.world_size > 1 and ".experts." not in name

    def _amax(self, name: str, weight: Tensor) -> tuple[Tensor, ...]:
        """Returns what the format has to know of the tensor that `weight` is a part of; nothing if
        it is whole.
        """
        if self.format.amax is None or not self._is_shared(name):
            return ()
        amax = self.format.amax(weight)
        if amax.dim() == 0 or _is_shared_by_input(name):
            dist.all_reduce(amax, dist.ReduceOp.MAX, group=self.group.device_group)
        return (amax,)


def used_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(name, part) of `held_weights`, but what kernels multiply with: of a layer with an int8 copy
    that one, in float32.
    """
    for parameter, parts in groupby(held_weights(model), attrgetter("parameter")):
        weights = {held.name: held.part for held in parts}
        layer = layer_of(model, parameter)
        method = getattr(getattr(layer, "custom_op", None) or layer, "quant_method", None)
        if isinstance(method, Int8Linear):
            used = method.weight().split([len(weight) for weight in weights.values()])
            yield from zip(weights, used, strict=True)
        else:
            yield from weights.items()


def layer_of(model: nn.Module, parameter: str) -> nn.Module:
    """The layer that has the parameter."""
    return model.get_submodule(parameter.rpartition(".")[0])


def _is_shared_by_input(name: str) -> bool:
    return name.endswith(("o_proj.weight", "down_proj.weight"))


def set_method(layer: nn.Module, method: Any) -> None:
    """Let a layer of vllm-ascend multiply by `method`."""
    layer.quant_method = method
    if layer.custom_op is not None:  # it has looked the method up (vllm_ascend/ops/linear_op.py:88)
        layer.custom_op.update_attrs()
