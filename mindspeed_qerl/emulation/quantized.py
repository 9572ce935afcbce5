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
        smooth_scales: (D,), in input's dtype; multiplied with each row first.

    Returns:
        int8, like input; the scales, float32 (...).

    Raises:
        ValueError: another dtype or shape.
        NotImplementedError: group_index, or a dst_type that is not int8.
    """
    name = "npu_dynamic_quant"
    if group_index is not None or dst_type not in (None, torch.int8):
        raise NotImplementedError(
            f"{name}: group_index and dst_type {dst_type} are not emulated, int8 alone is"
        )
    smooth = {} if smooth_scales is None else {"smooth_scales": smooth_scales}
    require_dtype(name, HALF, input=input, **smooth)
    require(name, input.dim() > 1, "input must have two dimensions or more", tuple(input.shape))
    for x in smooth.values():
        require(
            name,
            x.shape == input.shape[-1:],
            f"smooth_scales must be ({input.shape[-1]},)",
            tuple(x.shape),
        )
    wide = torch.promote_types(input.dtype, torch.float32)
    x = input.to(wide)
    if smooth_scales is not None:
        x = x * smooth_scales.to(wide)
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
    """x1 @ x2 in integers, plus bias if it is one, times scale and, row by row, pertoken_scale;
    plus a float bias.

    Contract: Ascend/op-plugin, docs/zh/custom_APIs/torch_npu/torch_npu-npu_quant_matmul.md, table
    2, the lines of int8 with results in half precision. Caller: VA quantization/w8a8.py:134,
    w8a8_dynamic.py:91.

    Args:
        x1: int8 (m, k). x2: int8 (k, n), in FRACTAL_NZ too.
        scale: (n,) or (1,), float32; for a result in bfloat16 also bfloat16. pertoken_scale:
            float32 (m,).
        bias: (n,), int32; float32 or bfloat16 for a result in bfloat16 or with pertoken_scale.
        output_dtype: torch.bfloat16, or torch.float16, which needs pertoken_scale.

    Raises:
        ValueError: another dtype or shape.
        NotImplementedError: offset, group_sizes, a scale of npu_trans_quant_param (int64), results
            of other dtypes.
    """
    name = "npu_quant_matmul"
    if offset is not None or group_sizes or scale.dtype == torch.int64 or output_dtype not in HALF:
        raise NotImplementedError(
            f"{name}: offset, group_sizes, a scale in int64 and a result in {output_dtype} are "
            "not emulated; results in torch.float16 and torch.bfloat16 are"
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
    require(
        name,
        bf16 or pertoken_scale is not None,
        "float16 needs pertoken_scale or a scale in int64",
        "neither",
    )
    given = (
        ("scale", scale, (torch.float32, *[torch.bfloat16] * bf16), ((n,), (1,))),
        ("pertoken_scale", pertoken_scale, (torch.float32,), (x1.shape[:1],)),
        ("bias", bias, (torch.int32, torch.float32, torch.bfloat16), ((n,),)),
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
    integers = bias is not None and bias.dtype == torch.int32
    out = (out + bias if integers else out) * scale.double()
    if pertoken_scale is not None:
        out = out * pertoken_scale.double()[:, None]
    return (out if bias is None or integers else out + bias.double()).float().to(output_dtype)


def _int8(x: Tensor) -> Tensor:
    return x.round().clamp(-128, 127).to(torch.int8)
