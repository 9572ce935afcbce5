"""Number formats beside torchao, compressed-tensors and vLLM, and beside float64 formulas."""

import itertools
import math
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_qerl.layout.sizes import BLOCKS
from mindspeed_qerl.quantization.formats import FORMATS, quantize_fp8, to_e2m1, to_e4m3
from mindspeed_qerl.quantization.weights import QuantizedWeights
from mindspeed_qerl.recipe.features import ROLLOUT_FORMATS

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def tensors():
    """[256, 256] of every kind that a weight could be."""
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(256, 256, generator=generator)
    outliers = normal.clone()
    outliers.view(-1)[torch.randint(normal.numel(), (50,), generator=generator)] *= 1000
    sparse = normal * (torch.rand(normal.shape, generator=generator) < 0.02)
    return {
        "random": normal,
        "bfloat16": normal.bfloat16(),
        "constant": torch.full_like(normal, 0.3),
        "zero": torch.zeros_like(normal),
        "small": normal * 1e-6,
        "tiny": normal * 1e-30,
        "huge": normal * 1e30,
        "outliers": outliers,
        "sparse": sparse,
        "rising": normal * torch.logspace(-6, 6, 256),
        "halves": torch.randint(-24, 25, normal.shape, generator=generator) / 4,
    }


@pytest.fixture(params=tensors())
def x(request):
    """Each of `tensors`."""
    return tensors()[request.param]


def to_nearest(x, values):
    """Of the sorted `values`, in float64, the nearest to each of `x`; of two as near the one of
    even place.
    """
    above = np.clip(np.searchsorted(values, x), 1, len(values) - 1)
    low, high = values[above - 1], values[above]
    is_low = (x - low < high - x) | ((x - low == high - x) & ((above - 1) % 2 == 0))
    return np.where(x <= values[0], values[0], np.where(is_low, low, high))


def of_byte(exponent_bits, mantissa_bits, bias):
    """Every finite number >= 0 of a small float format, by IEEE's rule, in the order of their
    codes.
    """
    found = []
    for code in range(2 ** (exponent_bits + mantissa_bits)):
        exponent, mantissa = code >> mantissa_bits, (code % 2**mantissa_bits) / 2**mantissa_bits
        found.append(
            2.0 ** (1 - bias) * mantissa
            if exponent == 0
            else 2.0 ** (exponent - bias) * (1 + mantissa)
        )
    return np.array(found)


@pytest.mark.parametrize(
    "element, values", [(to_e2m1, of_byte(2, 1, 1)), (to_e4m3, of_byte(4, 3, 7)[:-1])]
)  # E4M3's last code is NaN
def test_elements_are_the_nearest_of_their_format(element, values):
    between = np.concatenate(
        [values, (values[:-1] + values[1:]) / 2, values + 1e-6, np.linspace(0, 500, 5000)]
    )
    x = np.float32(np.concatenate([between, -between]))
    expected = np.sign(x) * to_nearest(np.abs(x.astype(np.float64)), values)
    assert np.array_equal(element(torch.from_numpy(x)).numpy(), expected.astype(np.float32))
    if element is to_e2m1:
        assert values.tolist() == E2M1


def by_compressed_tensors(x, scale, **arguments):
    """Its scales are never 0; its range goes to -128, which amax / 127 does not reach."""
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize

    args = QuantizationArgs(num_bits=8, symmetric=True, **arguments)
    return fake_quantize(x, torch.where(scale == 0, 1.0, scale), torch.zeros_like(scale), args)


def test_int8_is_compressed_tensors(x):
    x = x.float()
    scale = x.abs().amax(1, keepdim=True) / 127
    expected = by_compressed_tensors(x, scale, type="int", strategy="channel")
    for quantize in (FORMATS["int8_w8a8"].weight, FORMATS["int8_w8a8"].activation):
        assert torch.equal(quantize(x), expected)


@pytest.mark.parametrize(
    "quantize, rows, strategy",
    [
        (FORMATS["fp8"].weight, 128, {"strategy": "block", "block_structure": [128, 128]}),
        (FORMATS["fp8"].activation, 1, {"strategy": "group", "group_size": 128}),
    ],
)
def test_fp8_is_compressed_tensors(x, quantize, rows, strategy):
    x = x.float()
    scale = x.reshape(256 // rows, rows, 2, 128).abs().amax((1, 3)) / 448
    expected = by_compressed_tensors(x, scale, type="float", **strategy)
    assert torch.equal(quantize(x), expected)


def test_blocks_of_fp8_at_the_edges_are_smaller():
    x = torch.randn(200, 300, generator=torch.Generator().manual_seed(1))
    expected = torch.empty_like(x)
    for top, left in itertools.product((0, 128), (0, 128, 256)):
        part = x[top : top + 128, left : left + 128]
        scale = part.abs().max() / 448
        expected[top : top + 128, left : left + 128] = (part / scale).to(
            torch.float8_e4m3fn
        ).float() * scale
    assert torch.equal(FORMATS["fp8"].weight(x), expected)
    assert torch.equal(quantize_fp8(x.view(2, 100, 300)), quantize_fp8(x).view(2, 100, 300))


@pytest.fixture(scope="module")
def torchao():
    """torchao's (MXTensor, ScaleCalculationMode)."""
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")
        patch.syspath_prepend(Path(sys.prefix, "oracles"))
        from torchao.prototype.mx_formats.config import ScaleCalculationMode
        from torchao.prototype.mx_formats.mx_tensor import MXTensor
    return MXTensor, ScaleCalculationMode


ELEMENTS = {"mxfp8": torch.float8_e4m3fn, "mxfp4": torch.float4_e2m1fn_x2}


@pytest.mark.parametrize("name", ["mxfp8", "mxfp4"])
def test_mx_is_torchaos_by_the_specifications_scale(torchao, name, x):
    mx, modes = torchao
    expected = mx.to_mx(x, ELEMENTS[name], 32, modes.FLOOR).dequantize(torch.float32)
    assert torch.equal(FORMATS[name].weight(x), expected)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.floats(
            width=32,
            allow_nan=False,
            allow_infinity=False,
            min_value=-(2.0**120),
            max_value=2.0**120,
        ),
        min_size=32,
        max_size=32,
    ),
    st.integers(-120, 0),
    st.sampled_from(["mxfp8", "mxfp4"]),
)
def test_mx_is_the_specification_in_float64(values, power, name):
    """OCP Microscaling 1.0, 6.3: X = 2^(floor(log2 amax) - emax), elements V / X; subnormals and
    scales at the edge of E8M0 included, where torchao stays above 2^-126.
    """
    x = np.float32(np.array(values) * 2.0**power).astype(np.float64)
    largest, codes = (8, of_byte(4, 3, 7)[:-1]) if name == "mxfp8" else (2, of_byte(2, 1, 1))
    amax = np.abs(x).max()
    scale = 2.0 ** np.clip(np.floor(np.log2(amax)) - largest, -127, 127) if amax else 1.0
    expected = np.sign(x) * to_nearest(np.abs(x) / scale, codes) * scale
    assert np.array_equal(
        FORMATS[name].weight(torch.tensor(x, dtype=torch.float32)).double().numpy(), expected
    )


def test_nvfp4_is_vllms(x):
    from vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils import (
        ref_nvfp4_quant_dequant,
    )

    x = x.float()
    unit = 448.0 * 6.0 / x.abs().max().clamp_min(1e-8)
    assert torch.equal(FORMATS["nvfp4"].weight(x), ref_nvfp4_quant_dequant(x, unit, 16))


@pytest.mark.parametrize("name", ["int8_w8a8", "nvfp4", "mxfp4"])
@pytest.mark.parametrize("dim", [0, 1])
def test_parts_that_know_the_largest_elements_of_the_whole_are_parts_of_the_whole(name, dim, x):
    of_format = FORMATS[name]
    parts = x.chunk(4, dim)
    known = [()] * 4
    if of_format.amax:
        amax = [of_format.amax(part) for part in parts]
        rows_are_whole = amax[0].dim() and dim == 0
        known = [(each if rows_are_whole else torch.stack(amax).amax(0),) for each in amax]
    found = [of_format.weight(part, *each) for part, each in zip(parts, known, strict=True)]
    assert torch.equal(torch.cat(found, dim), of_format.weight(x))


SHARED = {  # rows and columns of the tile that has one scale
    "int8_w8a8": (1, 256),
    "fp8": (128, 128),
    "mxfp8": (1, 32),
    "mxfp4": (1, 32),
    "nvfp4": (256, 256),
}


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", FORMATS)
def test_what_is_no_number_makes_none_of_all_that_share_its_scale(torchao, name, wrong):
    x, (rows, columns) = tensors()["random"], SHARED[name]
    top, left = 130 // rows * rows, 70 // columns * columns
    tile = slice(top, top + rows), slice(left, left + columns)
    expected = FORMATS[name].weight(x)
    expected[tile] = math.nan
    x[130, 70] = wrong
    found = FORMATS[name].weight(x)
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.nan_to_num(), expected.nan_to_num())
    if name in ELEMENTS and math.isnan(wrong):
        mx, modes = torchao
        theirs = mx.to_mx(x, ELEMENTS[name], 32, modes.FLOOR).dequantize(torch.float32)
        assert torch.equal(found.isnan(), theirs.isnan())
    if activation := FORMATS[name].activation:
        wide = 128 if name == "fp8" else columns
        left = 70 // wide * wide
        assert activation(x).isnan().nonzero()[:, 0].unique().tolist() == [130]
        assert activation(x)[130].isnan().nonzero().flatten().tolist() == [
            *range(left, left + wide)
        ]


def test_a_config_knows_every_format():
    assert ROLLOUT_FORMATS == ("none", *FORMATS)
    for name in FORMATS.keys() - BLOCKS.keys():
        assert FORMATS[name].weight(torch.ones(3, 7)).shape == (3, 7)  # any width


@pytest.mark.parametrize("name, block", BLOCKS.items())
def test_rows_that_blocks_do_not_fill_are_refused(name, block):
    with pytest.raises(
        ValueError, match=f"blocks of {block} along the inputs do not fill rows of {block + 8}"
    ):
        FORMATS[name].weight(torch.zeros(4, block + 8))


def test_the_error_of_the_weights_by_layer_in_float64():
    generator = torch.Generator().manual_seed(5)
    base, synced = (
        {
            f"model.layers.{layer}.mlp.{part}_proj.weight": torch.randn(64, 64, generator=generator)
            for layer in (2, 10)
            for part in ("up", "down")
        }
        for _ in range(2)
    )
    weights = QuantizedWeights("nvfp4", base)
    for name, weight in synced.items():
        weights.receive(name, weight)
    squares = {}
    for name, weight in synced.items():
        rounded = FORMATS["nvfp4"].weight(weight)
        error = (rounded.double() - weight.double()).square().sum().item()
        for key in ("", f"/layer_{name.split('.')[2]}"):
            before = squares.get(key, (0.0, 0.0))
            squares[key] = before[0] + error, before[1] + weight.double().square().sum().item()
    expected = {
        f"quantization/weight_error{key}": (error / whole) ** 0.5
        for key, (error, whole) in squares.items()
    }
    assert weights.errors() == pytest.approx(expected, rel=1e-4)
