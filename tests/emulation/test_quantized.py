"""Operators with an int8 result against numpy float64: the numbers before rounding may differ by
float32's own error, so the result may differ by one where they lie that close to a half.
"""

import numpy as np
import pytest
import torch

from mindspeed_qerl.emulation import quantized
from tests.emulation.refusals import refusals
from tests.emulation.test_operators import normal, wide


def check_int8(result, before_rounding):
    """Round half to even, saturated."""
    assert result.dtype == torch.int8
    wanted = np.clip(np.rint(before_rounding), -128, 127)
    sure = np.abs(before_rounding - np.floor(before_rounding) - 0.5) > 1e-4
    np.testing.assert_array_equal(result.numpy()[sure], wanted[sure])
    assert sure.mean() > 0.99


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_dynamic_quant(dtype):
    x = normal(3, 7, 64, dtype=dtype) * 5
    y, scale = quantized.npu_dynamic_quant(x)
    expected = np.abs(wide(x)).max(-1) / 127
    assert scale.dtype == torch.float32
    np.testing.assert_allclose(wide(scale), expected, rtol=1e-6)
    check_int8(y, wide(x) / expected[..., None])
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
    ("smooth_scales", dict(smooth_scales=normal(4))),
)


@pytest.mark.parametrize("bias", [None, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale_shape", [(5,), (1,)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_quant_matmul(bias, scale_shape, dtype):
    x1, x2 = (
        (60 * normal(*shape, seed=s)).round().clamp(-128, 127).to(torch.int8)
        for s, shape in enumerate(((7, 64), (64, 5)))
    )
    scale = normal(*scale_shape, seed=2).abs().float() / 100
    rows = normal(7, seed=3).abs().float()
    added = None if bias is None else (1000 * normal(5, seed=4)).to(bias)
    out = quantized.npu_quant_matmul(
        x1, x2, scale, pertoken_scale=rows, bias=added, output_dtype=dtype
    )
    product = x1.numpy().astype(np.int64) @ x2.numpy().astype(np.int64)
    expected = product * wide(scale) * wide(rows)[:, None] + (0 if bias is None else wide(added))
    assert out.dtype == dtype
    np.testing.assert_array_equal(wide(out), wide(torch.from_numpy(expected).float().to(dtype)))


test_quant_matmul_refuses = refusals(
    quantized.npu_quant_matmul,
    dict(
        x1=torch.ones(3, 4).to(torch.int8),
        x2=torch.ones(4, 5).to(torch.int8),
        scale=torch.ones(5),
        pertoken_scale=torch.ones(3),
        output_dtype=torch.bfloat16,
    ),
    ("offset", dict(offset=torch.ones(1))),
    ("group_sizes", dict(group_sizes=[0, 0, 32])),
    ("int64", dict(scale=torch.ones(5).long())),
    ("result in None", dict(output_dtype=None)),
    ("must be int8", dict(x1=torch.ones(3, 4))),
    (r"x1 must be \(m, k\)", dict(x1=torch.ones(3, 6).to(torch.int8))),
    ("each token", dict(pertoken_scale=None)),
    (r"scale must be .* \(5,\) or \(1,\)", dict(scale=torch.ones(4))),
    ("scale must be torch.float32", dict(scale=torch.ones(5).half())),
    (r"pertoken_scale must be torch.float32 \(3,\)", dict(pertoken_scale=torch.ones(5))),
    ("bias must be", dict(bias=torch.ones(5).half())),
)
