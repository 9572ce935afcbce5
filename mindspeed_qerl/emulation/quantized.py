"""Operators of W8A8_DYNAMIC: to int8, half to even and saturated at -128 and 127, and products of
int8. Formulas as in operators.py.
"""

import torch
from torch import Tensor

from mindspeed_qerl.emulation.contract import HALF, require, require_dtype


def npu_dynamic_quant(
    input: Tensor,
    *,
    smooth_scales: Tensor | None = None,
    group_index: Tensor | None = None,
    dst_type: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Each row divided by its scale, max|row| / 127, and rounded to int8; a row of zeros, which the
    page leaves open, stays one.

    Contract: Ascend/op-plugin 7.2.0, docs/context/torch_npu-npu_dynamic_quant.md. Caller: VA
    quantization/w8a8_dynamic.py:82, ops/moe/moe_mlp.py:70.

    Args:
        input: (..., D) of two or more dimensions, float16 or bfloat16 (see
            contract.ONLY_DOCUMENTED_DTYPES).

    Returns:
        int8, like input; the scales, float32 (...).

    Raises:
        ValueError: another dtype or shape.
        NotImplementedError: smooth_scales, group_index, or a dst_type that is not int8.
    """
    name = "npu_dynamic_quant"
    left_out = smooth_scales is group_index is None
    if not left_out or dst_type not in (None, torch.int8):
        raise NotImplementedError(
            f"{name}: smooth_scales, group_index and dst_type {dst_type} are not emulated, int8 "
            "alone is"
        )
    require_dtype(name, HALF, input=input)
    require(name, input.dim() > 1, "input must have two dimensions or more", tuple(input.shape))
    wide = torch.promote_types(input.dtype, torch.float32)
    x = input.to(wide)
    scale = x.abs().amax(-1, keepdim=True) / 127
    return _int8(x / scale.masked_fill(scale == 0, 1)), scale.squeeze(-1).float()


def npu_quant_matmul(
    x1: Tensor,
    x2: Tensor,
    scale: Tensor,
    *,
    offset: Tensor | None = None,
    pertoken_scale: Tensor | None = None,
    bias: Tensor | None = None,
    output_dtype: torch.dtype | None = None,
    group_sizes: list[int] | None = None,
) -> Tensor:
    """x1 @ x2 in integers, times scale and, row by row, pertoken_scale; plus bias.

    Contract: Ascend/op-plugin, docs/zh/custom_APIs/torch_npu/torch_npu-npu_quant_matmul.md, table
    2, the lines of int8 with results in half precision. Caller: VA quantization/w8a8.py:134,
    w8a8_dynamic.py:91.

    Args:
        x1: int8 (m, k). x2: int8 (k, n), in FRACTAL_NZ too.
        scale: (n,) or (1,), float32; for a result in bfloat16 also bfloat16. pertoken_scale:
            float32 (m,). bias: (n,), float32 or bfloat16. output_dtype: torch.bfloat16 or
            torch.float16.

    Raises:
        ValueError: another dtype or shape.
        NotImplementedError: offset, group_sizes, no pertoken_scale, a scale of
            npu_trans_quant_param (int64), results of other dtypes.
    """
    name = "npu_quant_matmul"
    static = pertoken_scale is None or offset is not None or scale.dtype == torch.int64
    if static or group_sizes or output_dtype not in HALF:
        raise NotImplementedError(
            f"{name}: offset, group_sizes, a scale in int64, none for each token and a result in "
            f"{output_dtype} are not emulated; results in torch.float16 and torch.bfloat16 are"
        )
    bf16 = output_dtype == torch.bfloat16
    n = x2.shape[-1]
    require(
        name,
        x1.dtype == x2.dtype == torch.int8,
        "x1 and x2 must be int8",
        f"{x1.dtype} and {x2.dtype}",
    )
    require(
        name,
        x1.dim() == x2.dim() == 2 and x1.shape[1] == x2.shape[0],
        "x1 must be (m, k), x2 (k, n)",
        f"{tuple(x1.shape)} and {tuple(x2.shape)}",
    )
    given = (
        ("scale", scale, (torch.float32, *[torch.bfloat16] * bf16), ((n,), (1,))),
        ("pertoken_scale", pertoken_scale, (torch.float32,), (x1.shape[:1],)),
        ("bias", bias, (torch.float32, torch.bfloat16), ((n,),)),
    )
    for argument, x, dtypes, shapes in given:
        if x is not None:
            rule = " or ".join(map(str, dtypes)), " or ".join(str(tuple(shape)) for shape in shapes)
            require(
                name,
                x.dtype in dtypes and x.shape in shapes,
                f"{argument} must be {rule[0]} {rule[1]}",
                f"{x.dtype} {tuple(x.shape)}",
            )
    out = x1.double() @ x2.double()  # exact: sums far below 2^53
    out = out * scale.double() * pertoken_scale.double()[:, None]
    return (out if bias is None else out + bias.double()).float().to(output_dtype)


def _int8(x: Tensor) -> Tensor:
    return x.round().clamp(-128, 127).to(torch.int8)
