"""Operators with an int8 result against numpy float64: the numbers before rounding may differ by
float32's own error, so the result may differ by one where they lie that close to a half.
"""

import numpy as np
import pytest
import torch

from mindspeed_qerl.emulation import quantized
from tests.emulation.refusals import refusals
from tests.emulation.test_operators import EXACT, ONE_ROUNDING, normal, wide

# What scales and zero points of npu_add_rms_norm_quant are for each dtype.
SCALES = {
    torch.float64: (torch.float32, torch.int32),
    torch.float16: (torch.float32, torch.int32),
    torch.bfloat16: (torch.bfloat16, torch.bfloat16),
}


def check_int8(result, before_rounding):
    """Round half to even, saturated."""
    assert result.dtype == torch.int8
    wanted = np.clip(np.rint(before_rounding), -128, 127)
    sure = np.abs(before_rounding - np.floor(before_rounding) - 0.5) > 1e-4
    np.testing.assert_array_equal(result.numpy()[sure], wanted[sure])
    assert sure.mean() > 0.99


@pytest.mark.parametrize("dtype", SCALES)
@pytest.mark.parametrize("with_beta", [False, True])
@pytest.mark.parametrize("normed", [(16,), (4, 16)])
def test_add_rms_norm_quant(dtype, with_beta, normed):
    x1, x2 = (normal(7, 4, 16, dtype=dtype, seed=s) for s in range(2))
    gamma, beta = (
        normal(*normed, dtype=dtype, seed=2),
        normal(*normed, dtype=dtype, seed=3) if with_beta else None,
    )
    scales = (normal(*normed, seed=4).abs() / 20 + 0.01).to(SCALES[dtype][0])
    zero_points = (10 * normal(*normed, seed=5)).round().to(SCALES[dtype][1])
    y1, unwritten, x = quantized.npu_add_rms_norm_quant(
        x1, x2, gamma, scales, zero_points, beta, epsilon=0.1
    )
    total = wide(x1) + wide(x2)
    rms = np.sqrt((total**2).mean(tuple(range(-len(normed), 0)), keepdims=True) + 0.1)
    y = total / rms * wide(gamma) + (wide(beta) if with_beta else 0)
    check_int8(y1, y / wide(scales) + wide(zero_points))
    assert x.dtype == dtype and unwritten.shape == x1.shape and unwritten.dtype == torch.int8
    np.testing.assert_allclose(wide(x), total, **EXACT if dtype == torch.float64 else ONE_ROUNDING)


def test_add_rms_norm_quant_saturates():
    x, one = torch.tensor([[100.0, -100.0]]).half(), torch.ones(2)
    y1, _, _ = quantized.npu_add_rms_norm_quant(x, x, one.half(), one / 1000, None)
    assert y1.tolist() == [[127, -128]]


test_add_rms_norm_quant_refuses = refusals(
    quantized.npu_add_rms_norm_quant,
    dict(
        x1=normal(3, 16),
        x2=normal(3, 16),
        gamma=normal(16),
        scales1=normal(16).float(),
        zero_points1=torch.ones(16, dtype=torch.int32),
    ),
    ("scales2", dict(scales2=normal(16))),
    ("axis must be -1", dict(axis=0)),
    ("div_mode True", dict(div_mode=False)),
    ("x2 must have", dict(x2=normal(1, 16))),
    (r"scales1 must be torch.float32 \(16,\)", dict(scales1=normal(1).float())),
    ("scales1 must be torch.float32", dict(scales1=normal(16))),
    ("zero_points1 must be torch.int32", dict(zero_points1=normal(16))),
    ("gamma must be", dict(gamma=normal(8))),
    ("beta must be", dict(beta=normal(8))),
    ("one dtype", dict(beta=normal(16).half())),
)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("shape", "axis"),
    [
        ((6,), -1),
        ((6,), 1),
        ((1,), -1),
        ((1, 1, 6), 0),
        ((5,), -2),
        ((1, 5, 1), -2),
        ((1, 1, 1), -2),
    ],
)
@pytest.mark.parametrize("offset", [False, True])
def test_quantize(dtype, shape, axis, offset):
    x = normal(4, 5, 6, dtype=dtype) * 40
    scales = normal(*shape, dtype=dtype, seed=1)
    zero_points = (10 * normal(*shape, dtype=dtype, seed=2)).round() if offset else None
    y = quantized.npu_quantize(x, scales, zero_points, torch.qint8, axis, False)

    def along(values):
        flat = wide(values).reshape(-1)
        return flat[None, :, None] if axis == -2 else flat[None, None, :]

    check_int8(y, wide(x) * along(scales) + (along(zero_points) if offset else 0))


def test_quantize_rounds_half_to_even():
    halves = torch.tensor([[-1.5, -0.5, 0.5, 1.5, 2.5]])
    assert quantized.npu_quantize(halves, torch.ones(1), None, torch.int8, -1, False).tolist() == [
        [-2, 0, 0, 2, 2]
    ]


test_quantize_refuses = refusals(
    quantized.npu_quantize,
    dict(
        self=normal(5, 6),
        scales=normal(1),
        zero_points=None,
        dtype=torch.qint8,
        axis=-1,
        div_mode=False,
    ),
    ("div_mode True", dict(div_mode=True)),
    ("quint4x2", dict(dtype=torch.quint4x2)),
    ("at least -2", dict(axis=-3)),
    ("6 values or one, along axis -1", dict(scales=normal(5))),
    ("along axis -1", dict(scales=normal(6, 1))),
    ("dtype and shape of scales", dict(zero_points=normal(6))),
    ("dtype and shape of scales", dict(zero_points=normal(1).bfloat16())),
    ("self must be float32 or", dict(self=torch.ones(5, 6).int())),
)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("smooth", [False, True])
def test_dynamic_quant(dtype, smooth):
    x = normal(3, 7, 64, dtype=dtype) * 5
    factors = normal(64, dtype=dtype, seed=1) if smooth else None
    y, scale = quantized.npu_dynamic_quant(x, smooth_scales=factors)
    rows = wide(x) * (wide(factors) if smooth else 1)
    expected = np.abs(rows).max(-1) / 127
    assert scale.dtype == torch.float32
    np.testing.assert_allclose(wide(scale), expected, rtol=1e-6)
    check_int8(y, rows / expected[..., None])
    assert y.abs().max() == 127


def test_dynamic_quant_of_zeros():
    y, scale = quantized.npu_dynamic_quant(torch.zeros(2, 4).half())
    assert not y.any() and not scale.any()


test_dynamic_quant_refuses = refusals(
    quantized.npu_dynamic_quant,
    dict(input=normal(3, 4)),
    ("group_index", dict(group_index=torch.ones(1).int())),
    ("quint4x2", dict(dst_type=torch.quint4x2)),
    ("two dimensions", dict(input=normal(4))),
    (r"\(4,\)", dict(smooth_scales=normal(5))),
    ("one dtype", dict(smooth_scales=normal(4).half())),
)


@pytest.mark.parametrize("pertoken", [False, True])
@pytest.mark.parametrize("bias", [None, torch.int32, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale_shape", [(5,), (1,)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_quant_matmul(pertoken, bias, scale_shape, dtype):
    if dtype == torch.float16 and not pertoken:
        pytest.skip("refused")
    x1, x2 = (
        (60 * normal(*shape, seed=s)).round().clamp(-128, 127).to(torch.int8)
        for s, shape in enumerate(((7, 64), (64, 5)))
    )
    scale = normal(*scale_shape, seed=2).abs().float() / 100
    rows = normal(7, seed=3).abs().float() if pertoken else None
    added = None if bias is None else (1000 * normal(5, seed=4)).to(bias)
    out = quantized.npu_quant_matmul(
        x1, x2, scale, pertoken_scale=rows, bias=added, output_dtype=dtype
    )
    product = x1.numpy().astype(np.int64) @ x2.numpy().astype(np.int64)
    if bias == torch.int32:
        product = product + added.numpy()
    expected = product * wide(scale) * (wide(rows)[:, None] if pertoken else 1)
    if bias in (torch.float32, torch.bfloat16):
        expected = expected + wide(added)
    assert out.dtype == dtype
    np.testing.assert_array_equal(wide(out), wide(torch.from_numpy(expected).float().to(dtype)))


test_quant_matmul_refuses = refusals(
    quantized.npu_quant_matmul,
    dict(
        x1=torch.ones(3, 4).to(torch.int8),
        x2=torch.ones(4, 5).to(torch.int8),
        scale=torch.ones(5),
        output_dtype=torch.bfloat16,
    ),
    ("offset", dict(offset=torch.ones(1))),
    ("group_sizes", dict(group_sizes=[0, 0, 32])),
    ("int64", dict(scale=torch.ones(5).long())),
    ("result in None", dict(output_dtype=None)),
    ("must be int8", dict(x1=torch.ones(3, 4))),
    (r"x1 must be \(m, k\)", dict(x1=torch.ones(3, 6).to(torch.int8))),
    ("float16 needs", dict(output_dtype=torch.float16)),
    (r"scale must be .* \(5,\) or \(1,\)", dict(scale=torch.ones(4))),
    ("scale must be torch.float32", dict(scale=torch.ones(5).half())),
    (r"pertoken_scale must be torch.float32 \(3,\)", dict(pertoken_scale=torch.ones(5))),
    ("bias must be", dict(bias=torch.ones(5).half())),
)
