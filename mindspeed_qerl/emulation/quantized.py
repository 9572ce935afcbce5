"""Operators of W8A8 models: to int8, half to even and saturated at -128 and 127, and products of
int8. Formulas as in operators.py.
"""

import torch
from torch import Tensor

from mindspeed_qerl.emulation.contract import HALF, require, require_dtype


def npu_add_rms_norm_quant(
    x1: Tensor,
    x2: Tensor,
    gamma: Tensor,
    scales1: Tensor,
    zero_points1: Tensor | None,
    beta: Tensor | None = None,
    scales2: Tensor | None = None,
    zero_points2: Tensor | None = None,
    *,
    axis: int = -1,
    epsilon: float = 1e-6,
    div_mode: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """x = x1 + x2; y = x * rstd * gamma (+ beta), rstd = 1 / sqrt(mean(x^2) + epsilon) over the
    dimensions of gamma; y1 = y / scales1 + zero_points1, rounded to int8. y is float32 and not
    rounded before, nor is x within y.

    Contract: Ascend/op-plugin, docs/zh/custom_APIs/torch_npu/torch_npu-npu_add_rms_norm_quant.md
    and op_plugin/ops/opapi/AddRmsNormQuantKernelOpApi.cpp (7.2.0), which refuses what the page has
    a second scale, another axis and div_mode for; hicann/ops-nn 8.5.0,
    norm/add_rms_norm_quant/op_kernel. Caller: VA ops/layernorm.py:42,51.

    Args:
        x1, x2: float16 or bfloat16 (see contract.ONLY_DOCUMENTED_DTYPES).
        gamma, beta: the last dimensions of x1, in its dtype.
        scales1, zero_points1: like gamma; bfloat16 for bfloat16, float32 and int32 for float16 (and
            the extension).

    Returns:
        y1, int8; a tensor like y1, which torch_npu leaves unwritten, here 0; x, rounded to x1's
        dtype.

    Raises:
        ValueError: another dtype or shape; what torch_npu refuses.
    """
    name = "npu_add_rms_norm_quant"
    require(
        name,
        scales2 is None and zero_points2 is None,
        "scales2 and zero_points2 must be None",
        "given",
    )
    require(
        name, axis == -1 and div_mode, "axis must be -1 and div_mode True", f"{axis} and {div_mode}"
    )
    require_dtype(name, HALF, x1=x1, x2=x2, gamma=gamma, **({} if beta is None else {"beta": beta}))
    require(
        name, x1.shape == x2.shape, f"x2 must have x1's shape {tuple(x1.shape)}", tuple(x2.shape)
    )
    normed = x1.shape[x1.dim() - gamma.dim() :]
    half = x1.dtype == torch.bfloat16
    for argument, x, dtype in (
        ("gamma", gamma, gamma.dtype),
        ("beta", beta, gamma.dtype),
        ("scales1", scales1, torch.bfloat16 if half else torch.float32),
        ("zero_points1", zero_points1, torch.bfloat16 if half else torch.int32),
    ):
        if x is not None:
            require(
                name,
                x.shape == normed and x.dtype == dtype,
                f"{argument} must be {dtype} {tuple(normed)}",
                f"{x.dtype} {tuple(x.shape)}",
            )
    wide = torch.promote_types(x1.dtype, torch.float32)
    x = x1.to(wide) + x2.to(wide)
    rstd = torch.rsqrt(x.square().mean(tuple(range(-gamma.dim(), 0)), keepdim=True) + epsilon)
    y = x * rstd * gamma.to(wide) + (0 if beta is None else beta.to(wide))
    y1 = _int8(y / scales1.to(wide) + (0 if zero_points1 is None else zero_points1.to(wide)))
    return y1, torch.zeros_like(y1), x.to(x1.dtype)


def npu_quantize(
    self: Tensor,
    scales: Tensor,
    zero_points: Tensor | None,
    dtype: torch.dtype,
    axis: int = 1,
    div_mode: bool = True,
) -> Tensor:
    """self * scales + zero_points, rounded to int8 (div_mode False).

    Contract: Ascend/op-plugin 7.2.0, docs/context/torch_npu-npu_quantize.md and
    op_plugin/ops/opapi/QuantizeKernelNpuOpApi.cpp; hicann/ops-nn 8.5.0,
    quant/ascend_quant_v2/docs/aclnnAscendQuantV3.md. Caller: VA quantization/w8a8.py:35.

    Args:
        self: (..., D), float32, float16 or bfloat16.
        scales: (D,) or (1,), or of self's number of dimensions, all but the axis 1; in one of the
            same dtypes.
        zero_points: like scales, or None.
        dtype: torch.qint8 or torch.int8.
        axis: -2 is the second to last dimension, whatever is above it the last one.

    Raises:
        ValueError: another dtype or shape, or an axis below -2.
        NotImplementedError: div_mode True, whose rounding the page leaves open; torch.quint4x2.
    """
    name = "npu_quantize"
    if div_mode or dtype not in (torch.qint8, torch.int8):
        raise NotImplementedError(
            f"{name}: div_mode {div_mode} to {dtype} is not emulated, False to torch.qint8 is"
        )
    require_dtype(name, (torch.float32, *HALF), self=self)
    require_dtype(name, (torch.float32, *HALF), scales=scales)
    require(name, axis >= -2, "axis must be at least -2", axis)
    axis = min(axis, -1)
    across = [1] * self.dim()
    across[axis] = self.shape[axis]
    for argument, x in (("scales", scales), ("zero_points", zero_points)):
        if x is not None:
            fits = x.numel() in (1, self.shape[axis]) and (
                x.dim() == 1 or list(x.shape) in (across, [1] * self.dim())
            )
            require(
                name,
                fits,
                f"{argument} must have {self.shape[axis]} values or one, along axis {axis}",
                tuple(x.shape),
            )
    require(
        name,
        zero_points is None
        or (zero_points.dtype, zero_points.shape) == (scales.dtype, scales.shape),
        "zero_points must have the dtype and shape of scales",
        None if zero_points is None else zero_points.dtype,
    )
    wide = torch.promote_types(self.dtype, torch.float32)
    scales, zero_points = (
        x
        if x is None
        else x.to(wide).view([-1 if n == self.dim() + axis else 1 for n in range(self.dim())])
        for x in (scales, zero_points)
    )
    return _int8(self.to(wide) * scales + (0 if zero_points is None else zero_points))


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
