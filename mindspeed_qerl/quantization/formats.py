"""Number formats of quantized rollouts as pure functions: what a tensor is after it was quantized
and read back.

| format      | weights [out, in]: block, scale             | element | activations [..., in] |
|-------------|---------------------------------------------|---------|-----------------------|
| `int8_w8a8` | a row; float32, amax / 127                  | int8    | a token, the same     |
| `fp8`       | 128 x 128; float32, amax / 448              | E4M3    | 128 of a token        |
| `mxfp8`     | 32 of a row; E8M0, 2^(floor(log2 amax) - 8) | E4M3    | 32 of a token         |
| `mxfp4`     | 32 of a row; E8M0, 2^(floor(log2 amax) - 2) | E2M1    | as they are           |
| `nvfp4`     | 16 of a row; E4M3, global amax / 6          | E2M1    | as they are           |

nvfp4's global is a float32 beside the blocks: 448 * 6 / amax of the whole tensor.
int8_w8a8 is vllm-ascend's W8A8_DYNAMIC (quantization/w8a8_dynamic.py), fp8 DeepSeek-V3's blocks
(arXiv 2412.19437), the MX formats are OCP Microscaling 1.0 (section 6.3), and nvfp4 is NVIDIA's,
weights only, as QeRL has it (arXiv 2510.11696). Elements are rounded to nearest, ties to even, and
saturate. A NaN makes all that share its scale NaN, as in OCP MX (a scale that is NaN), torchao and
vLLM; so does an infinity, which those two keep among zeros in the MX formats. tests/quantization
compares with torchao, compressed-tensors and vLLM; where the largest element of a block would
saturate, above 1.75 times a power of two, vLLM's MXFP8 and compressed-tensors' MXFP4 double the
scale instead.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

E4M3_MAX = 448.0
E2M1_MAX = 6.0
INT8_MAX = 127.0
# floor(log2) of the largest element, by which OCP MX lowers a block's exponent
E4M3_EXPONENT = 8
E2M1_EXPONENT = 2
E8M0_RANGE = (2.0**-127, 2.0**127)  # of scales, which have no sign and no mantissa


def to_e4m3(x: Tensor) -> Tensor:
    """The nearest number of E4M3 (a sign, 4 bits of exponent, 3 of mantissa) to float32, at most
    448; in arithmetic that every device has (a 910C has no dtype for it).

    >>> to_e4m3(torch.tensor([1.0625, 1.1, 1000.0]))
    tensor([  1.0000,   1.1250, 448.0000])
    """
    return _nearest(x, E4M3_MAX, least=2.0**-6, steps=8)


def to_e2m1(x: Tensor) -> Tensor:
    """The nearest number of E2M1: 0, 0.5, 1, 1.5, 2, 3, 4 or 6, with a sign.

    >>> to_e2m1(torch.tensor([0.25, 0.75, 2.5, 3.5, 5.0, -7.0]))
    tensor([ 0.,  1.,  2.,  4.,  4., -6.])
    """
    return _nearest(x, E2M1_MAX, least=1.0, steps=2)


def _nearest(x: Tensor, largest: float, least: float, steps: int) -> Tensor:
    """The nearest number, of two as near the one of even code, of a format that has `steps` from a
    power of two to the next; below `least` they are subnormal.
    """
    x = x.clamp(-largest, largest)
    step = _power_of_two(x).clamp_min(least) / steps
    return (x / step).round() * step


def quantize_int8(x: Tensor, amax: Tensor | None = None) -> Tensor:
    """Each row (the last dimension) in int8 with a scale of its own; float32 of x's shape.

    amax: of the whole rows, float32 [..., 1], where x has only a part of each.

    >>> quantize_int8(torch.tensor([[127.0, 1.4], [0.0, 0.0]]))
    tensor([[127.,   1.],
            [  0.,   0.]])
    """
    integers, scale = int8_and_scale(x, amax)
    return integers * scale


def int8_and_scale(x: Tensor, amax: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The whole numbers of `quantize_int8`, from -127 to 127 in float32, and the scales [..., 1].

    >>> int8_and_scale(torch.tensor([[254.0, 3.0]]))
    (tensor([[127.,   2.]]), tensor([[2.]]))
    """
    scale = (_amax(x) if amax is None else amax) / INT8_MAX
    return _divide(x.float(), scale).round().clamp(-INT8_MAX, INT8_MAX), scale


def quantize_fp8(x: Tensor, rows: int = 1) -> Tensor:
    """Blocks of `rows` x 128 in E4M3, those at the edges smaller, with float32 scales;
    float32 of x's shape [..., rows, columns].

    >>> quantize_fp8(torch.tensor([[448.0, 1.1]]))
    tensor([[448.0000,   1.1250]])
    """
    height, width = x.shape[-2:]
    padded = torch.nn.functional.pad(x.float(), (0, -width % 128, 0, -height % rows))
    blocks = padded.unflatten(-1, (-1, 128)).unflatten(
        -3, (-1, rows)
    )  # [..., row, of rows, column, of columns]
    scale = blocks.abs().amax((-3, -1), keepdim=True) / E4M3_MAX
    whole = (to_e4m3(_divide(blocks, scale)) * scale).flatten(-2).flatten(-3, -2)
    return whole[..., :height, :width].contiguous()


def quantize_mx(x: Tensor, element: Callable[[Tensor], Tensor], exponent: int) -> Tensor:
    """Blocks of 32 along the last dimension with a power of two as their scale (OCP MX 1.0);
    float32, x's shape.

    Args:
        element: `to_e4m3` or `to_e2m1`. exponent: of its largest number, E4M3_EXPONENT or
            E2M1_EXPONENT.

    Raises:
        ValueError: the last dimension is no multiple of 32.

    >>> quantize_mx(torch.tensor([6.0, 0.3, -7.9] + 29 * [0.0]), to_e2m1, E2M1_EXPONENT)[:3]
    tensor([ 6.0000,  0.5000, -6.0000])
    """
    blocks = _blocks(x, 32)
    power = _power_of_two(_amax(blocks))  # infinite where a number is none
    scale = torch.where(power.isfinite(), power * 2.0**-exponent, torch.nan).clamp(*E8M0_RANGE)
    return (element(_divide(blocks, scale)) * scale).flatten(-2)


def quantize_nvfp4(x: Tensor, amax: Tensor | None = None) -> Tensor:
    """Blocks of 16 along the last dimension in E2M1, with scales in E4M3 and one float32 for the
    tensor; float32.

    amax: of the whole tensor, float32 [], where x is a part of it.

    Raises:
        ValueError: the last dimension is no multiple of 16.

    >>> quantize_nvfp4(torch.tensor([6.0, 1.2] + 14 * [0.0]))[:2]
    tensor([6., 1.])
    """
    blocks = _blocks(x, 16)
    # In the order of vLLM's nvfp4_emulation_utils.py, whose bits these are; so is the least amax
    # (online/nvfp4.py).
    unit = E4M3_MAX * E2M1_MAX / (_amax_of_tensor(x) if amax is None else amax).clamp_min(1e-8)
    scale = to_e4m3(unit * (_amax(blocks) * (1 / E2M1_MAX)))
    return (to_e2m1(blocks * _divide(1.0, scale * _divide(1.0, unit))) * (scale / unit)).flatten(-2)


class Format(NamedTuple):
    """Describes what a format does to a weight [out, in] and to activations [..., in] (None:
    nothing), each to float32 of the same shape; ValueError where blocks do not fill the inputs
    (layout/sizes.py refuses that before a run).

    `weight` takes a second argument where the tensor is a part of a larger one: the largest of what
    `amax` is of its parts. amax: float32 [], of a tensor, or [out, 1], of its rows; None where
    blocks have scales of their own alone.
    """

    weight: Callable[..., Tensor]
    activation: Callable[[Tensor], Tensor] | None
    amax: Callable[[Tensor], Tensor] | None = None


def _amax(x: Tensor) -> Tensor:
    """[..., n] -> float32 [..., 1]."""
    return x.abs().amax(-1, keepdim=True).float()


def _amax_of_tensor(x: Tensor) -> Tensor:
    """float32 []."""
    return x.abs().amax().float()


_mxfp8 = partial(quantize_mx, element=to_e4m3, exponent=E4M3_EXPONENT)
FORMATS = {
    "int8_w8a8": Format(quantize_int8, quantize_int8, _amax),
    "fp8": Format(partial(quantize_fp8, rows=128), quantize_fp8),
    "mxfp8": Format(_mxfp8, _mxfp8),
    "mxfp4": Format(partial(quantize_mx, element=to_e2m1, exponent=E2M1_EXPONENT), None),
    "nvfp4": Format(quantize_nvfp4, None, _amax_of_tensor),
}


def _power_of_two(x: Tensor) -> Tensor:
    """The largest power of two that is not above |x|, by the exponent's bits of float32; 0 below
    2^-126.
    """
    return (x.view(torch.int32) & 0x7F800000).view(torch.float32)


def _divide(x: Tensor | float, scale: Tensor) -> Tensor:
    """x / scale, and 0 where the scale is 0: there x is 0, or too small for any scale."""
    return torch.where(scale > 0, x / scale, 0.0)


def _blocks(x: Tensor, size: int) -> Tensor:
    """[..., n] -> float32 [..., n / size, size]."""
    if x.shape[-1] % size:
        raise ValueError(f"blocks of {size} along the inputs do not fill rows of {x.shape[-1]}")
    return x.float().unflatten(-1, (-1, size))
