"""Merged weights that keep a small update: W + (alpha / r) B A in bfloat16, rounded up or down with
the probability of its distance.

Published weights lie on bfloat16's grid, and what LoRA learns in a step is far below half a spacing
of it: rounded to nearest, most of it vanishes (docs/results.md). Rounded with random bits every
weight gets its update in the mean, and one whose update is 0 keeps its bits. The bits belong to the
tensor's Hugging Face name, to row and to column: the same in every step, layout, evaluation and
export.

    bits[i, j] = bits 16 to 31 of row[i] * column[j]        row, column: hashed, odd, int32
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:  # vLLM's workers round, too, where pydantic and YAML may be missing
    from mindspeed_qerl.families.tensors import ParameterMapping

CHUNK = 1 << 18  # elements that a CPU rounds at a time, which its cache holds


@dataclass(frozen=True)
class Dither:
    """The random bits of a matrix, or of matrices that are stacked.

    Attributes:
        down: int32 [..., n], along the last dimension but one. across: int32 [..., m], along the
            last one.
    """

    down: Tensor
    across: Tensor

    def to(self, device: torch.device) -> "Dither":
        """Copies it to another device."""
        return Dither(self.down.to(device), self.across.to(device))

    def part(self, start: Sequence[int], shape: Sequence[int]) -> "Dither":
        """Returns that of a matrix's part [shape] whose first element is at `start`."""
        down = self.down.narrow(0, start[0], shape[0])
        return Dither(down, self.across.narrow(0, start[1], shape[1]))

    def rounded(self, exact: Tensor) -> Tensor:
        """Rounds float32 [..., n, m] to bfloat16, without bias.

        >>> exact = torch.full((64, 64), 1 + 2**-9)  # a quarter of the way from 1 to 1 + 2**-7
        >>> is_up = dither_of("model.layers.0.mlp.up_proj.weight", (64, 64)).rounded(exact) > 1
        >>> round(is_up.float().mean().item(), 1)
        0.3
        """
        # a float's bits count steps of its magnitude: 16 random ones carry into the upper half
        bits = self.down[..., :, None] * self.across[..., None, :]
        bits.bitwise_right_shift_(16).bitwise_and_(0xFFFF).add_(exact.view(torch.int32))
        return bits.bitwise_right_shift_(16).to(torch.int16).view(torch.bfloat16)


def rounded(exact: Tensor, dtype: torch.dtype, dither: Dither | None) -> Tensor:
    """Returns float32 `exact` in `dtype`: in bfloat16 by `dither`, without bias; else, and without
    one, rounded to nearest.
    """
    return dither.rounded(exact) if dither and dtype == torch.bfloat16 else exact.to(dtype)


def dither_of(name: str, shape: Sequence[int]) -> Dither:
    """The random bits of the Hugging Face tensor `name` [outputs, inputs]."""
    return Dither(_bits(shape[0], name), _bits(shape[1]))


def dither_of_part(
    mapping: "ParameterMapping", shape: Sequence[int], tp_rank: int, tp_size: int
) -> Dither:
    """The random bits of a rank's part [outputs, inputs] of a Megatron parameter."""
    from mindspeed_qerl.families.tensors import ROW

    outputs, inputs = shape
    if mapping.shared == ROW:
        inputs *= tp_size
    elif mapping.shared:
        outputs *= tp_size
    named_rows = zip(mapping.hf, mapping.split(torch.arange(outputs)), strict=True)
    down = mapping.merge([_bits(len(rows), name) for name, rows in named_rows])
    across = _bits(inputs)
    if mapping.shared == ROW:
        across = across.chunk(tp_size)[tp_rank]
    elif mapping.shared:
        down = mapping.shared.shard(down, tp_rank, tp_size)
    return Dither(down, across)


def set_dither(weight: Tensor, mapping: "ParameterMapping", tp_rank: int, tp_size: int) -> None:
    """Give a weight in bfloat16, a rank's part of a Megatron parameter, the random bits that it is
    rounded by, as its attribute `dither`.
    """
    dither = dither_of_part(mapping, weight.shape, tp_rank, tp_size)
    weight.dither = dither.to(weight.device)


def merged(weight: Tensor, b: Tensor, a: Tensor, scaling: float, dither: Dither | None) -> Tensor:
    """Returns weight + scaling * b @ a in the dtype of `weight` [n, m], computed in float32 and
    rounded once: by `dither`, which weights in bfloat16 have, else to nearest. b: [n, r], a: [r, m]
    """
    b = b.float()
    a = a.float()
    if dither is None:
        return (weight.float() + scaling * (b @ a)).to(weight.dtype)
    result = torch.empty_like(weight)
    rows = len(weight)
    if weight.device.type == "cpu":
        rows = max(CHUNK // weight.shape[1], 1)
    for first in range(0, len(weight), rows):
        chunk = slice(first, first + rows)
        exact = weight[chunk].float().addmm_(b[chunk], a, alpha=scaling)
        result[chunk] = Dither(dither.down[chunk], dither.across).rounded(exact)
    return result


def _bits(count: int, name: str = "") -> Tensor:
    """Hashes 0 to count - 1 into odd int32 [count], by MurmurHash3's finalizer (Appleby): one for
    each row of the Hugging Face tensor `name`; without a name, for each column of any tensor.
    """
    numbers = _mixed(_mixed(torch.arange(count)) ^ zlib.crc32(name.encode())) | 1
    return (numbers - ((numbers >> 31) << 32)).to(torch.int32)


def _mixed(numbers: Tensor) -> Tensor:
    """int64 of 32 bits to the same."""
    numbers = (numbers + 0x9E3779B9) & 0xFFFFFFFF
    numbers = ((numbers ^ (numbers >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
    numbers = ((numbers ^ (numbers >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
    return numbers ^ (numbers >> 16)
