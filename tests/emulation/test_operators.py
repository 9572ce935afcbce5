"""The emulated operators against formulas written out in float64 numpy, and their gradients against
torch.autograd.

Tolerances: float64 results agree to 1e-10. bfloat16 keeps 8 bits, so one rounding moves a number by
at most 2^-8 of itself; the operators compute in float32 and round once (RMSNorm twice), and 1% is
added for float32's own error.
"""

from functools import partial

import numpy as np
import pytest
import torch
from torch.autograd import gradcheck

from mindspeed_qerl.emulation import operators
from mindspeed_qerl.emulation.attention import npu_fusion_attention
from tests.emulation.refusals import refusals

ONE_ROUNDING = dict(rtol=2**-8 * 1.01, atol=1e-6)
TWO_ROUNDINGS = dict(rtol=2**-7 * 1.01, atol=1e-6)
EXACT = dict(rtol=1e-10, atol=1e-12)


def normal(*shape, dtype=torch.float64, seed=0, grad=False):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return (
        torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_(grad)
    )


def wide(x):
    return x.detach().double().numpy()


# Normalisation


def rms_norm(x, gamma, epsilon):
    rms = np.sqrt((x**2).mean(-1, keepdims=True) + epsilon)
    return x / rms * gamma, 1 / rms


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, EXACT), (torch.bfloat16, TWO_ROUNDINGS)]
)
def test_rms_norm(dtype, tolerance):
    x, gamma = normal(3, 5, 16, dtype=dtype), normal(16, dtype=dtype)
    y, rstd = operators.npu_rms_norm(x, gamma, epsilon=0.1)
    expected, expected_rstd = rms_norm(wide(x), wide(gamma), 0.1)
    assert y.dtype == dtype and rstd.shape == (3, 5, 1)
    np.testing.assert_allclose(wide(y), expected, **tolerance)
    np.testing.assert_allclose(wide(rstd), expected_rstd, rtol=1e-6)


def test_the_norm_of_a_sum_is_the_norm_of_the_sum_that_is_returned():
    x1, x2, gamma = (
        normal(*shape, dtype=torch.bfloat16, seed=i)
        for i, shape in enumerate([(4, 16), (4, 16), (16,)])
    )
    y, rstd, x = operators.npu_add_rms_norm(x1, x2, gamma)
    np.testing.assert_allclose(wide(x), wide(x1) + wide(x2), **ONE_ROUNDING)
    np.testing.assert_allclose(wide(y), rms_norm(wide(x), wide(gamma), 1e-6)[0], **TWO_ROUNDINGS)
    assert rstd.shape == (4, 1)


# Activation and position


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, EXACT), (torch.bfloat16, ONE_ROUNDING)]
)
@pytest.mark.parametrize("dim", [-1, 0])
def test_swiglu(dtype, tolerance, dim):
    x = normal(40, 100, dtype=dtype)
    gate, up = np.split(wide(x), 2, dim)
    np.testing.assert_allclose(
        wide(operators.npu_swiglu(x, dim)), gate / (1 + np.exp(-gate)) * up, **tolerance
    )


def turned(x, angle, mode):
    """Rope as what it is: pairs of coordinates are complex numbers, multiplied by e^(i angle)."""
    half = x.shape[-1] // 2
    first, second = (
        (slice(half), slice(half, None))
        if mode == "half"
        else (slice(0, None, 2), slice(1, None, 2))
    )
    z = (x[..., first] + 1j * x[..., second]) * np.exp(1j * angle)
    y = np.empty_like(x)
    y[..., first], y[..., second] = z.real, z.imag
    return y


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, EXACT), (torch.float32, dict(rtol=1e-5, atol=1e-6))]
)
@pytest.mark.parametrize("mode", ["half", "interleave"])
def test_rotary(dtype, tolerance, mode):
    x, angle = normal(7, 2, 3, 8, dtype=dtype), wide(normal(7, 1, 1, 4))
    both = np.concatenate([angle, angle], -1) if mode == "half" else angle.repeat(2, -1)
    cos, sin = (torch.from_numpy(f(both)).to(dtype) for f in (np.cos, np.sin))
    expected = turned(wide(x), angle, mode)
    np.testing.assert_allclose(
        wide(operators.npu_rotary_mul(x, cos, sin, mode)), expected, **tolerance
    )
    number = ["half", "interleave"].index(mode)
    np.testing.assert_allclose(
        wide(operators.npu_rotary_position_embedding(x, cos, sin, number)), expected, **tolerance
    )


def test_rotary_refuses_what_the_extension_refuses():
    with pytest.raises(ValueError, match="4-dimensional"):
        operators.npu_rotary_position_embedding(normal(7, 3, 8), normal(7, 1, 8), normal(7, 1, 8))
    with pytest.raises(NotImplementedError, match="'quarter'"):
        operators.npu_rotary_mul(normal(1, 8), normal(1, 8), normal(1, 8), "quarter")


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (lambda x, g: operators.npu_rms_norm(x, g, 0.1)[0], [(2, 6), (6,)]),
        (lambda a, b, g: operators.npu_add_rms_norm(a, b, g, 0.1)[::2], [(2, 6), (2, 6), (6,)]),
        (operators.npu_swiglu, [(3, 8)]),
        (operators.npu_rotary_mul, [(3, 8), (3, 8), (3, 8)]),
        (lambda x, c, s: operators.npu_rotary_mul(x, c, s, "interleave"), [(3, 8), (3, 8), (3, 8)]),
    ],
)
def test_gradients(function, shapes):
    inputs = [normal(*shape, seed=i, grad=True) for i, shape in enumerate(shapes)]
    assert gradcheck(function, inputs)


# Attention

LAYOUTS = {
    "SBH": lambda x: x.transpose(2, 0, 1, 3).reshape(x.shape[2], x.shape[0], -1),
    "BSH": lambda x: x.transpose(0, 2, 1, 3).reshape(x.shape[0], x.shape[2], -1),
    "BSND": lambda x: x.transpose(0, 2, 1, 3),
    "BNSD": lambda x: x,
}
COMPRESSED = torch.ones(2048, 2048, dtype=torch.bool).triu(1)


def attention(q, k, v, scale, added=0.0):
    """(B, N, S, D) float64 arrays; added to the scores; equal groups of query heads share a key
    head. Returns also the logarithm of each query's sum.
    """
    groups = q.shape[1] // k.shape[1]
    scores = scale * q @ k.repeat(groups, 1).swapaxes(2, 3) + added
    logsumexp = np.logaddexp.reduce(scores, -1, keepdims=True)
    return np.exp(scores - logsumexp) @ v.repeat(groups, 1), logsumexp[..., 0]


def hiding(sees):
    return np.where(sees, 0.0, -np.inf)


def masks(s1, s2):
    """Name -> (arguments of the operator, which keys a query sees)."""
    full = np.random.default_rng(1).random((2, 1, s1, s2)) < 0.4
    full[..., 0] = False  # the first key is seen by everybody
    mask = torch.from_numpy(full)
    i, j = np.ogrid[:s1, :s2]
    last = i + s2 - s1
    band = dict(atten_mask=COMPRESSED, pre_tockens=2, next_tockens=1)
    causal = dict(atten_mask=COMPRESSED, pre_tockens=1)
    cut = dict(sparse_mode=0, atten_mask=mask, pre_tockens=65536, next_tockens=0)
    every = dict(sparse_mode=1, atten_mask=mask.to(torch.uint8), next_tockens=0)
    return {
        "none": ({}, True),
        "full, causal band": (cut, ~full & (j <= i)),
        "full, one for all": (dict(sparse_mode=0, atten_mask=mask[0, 0]), ~full[0, 0]),
        "all": (every, ~full),
        "left upper": (dict(causal, sparse_mode=2), j <= i),
        "right lower": (dict(causal, sparse_mode=3), j <= last),
        "band": (dict(band, sparse_mode=4), (last - 2 <= j) & (j <= last + 1)),
    }


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mask", masks(5, 7))
def test_attention_in_every_layout_with_every_mask(layout, mask):
    heads_and_lengths = [(4, 5), (2, 7), (2, 7)]  # two query heads share a key head
    q, k, v = (wide(normal(2, n, s, 8, seed=i)) for i, (n, s) in enumerate(heads_and_lengths))
    arguments, sees = masks(5, 7)[mask]
    expected, logsumexp = attention(q, k, v, 0.3, hiding(sees))
    tensors = [torch.from_numpy(np.ascontiguousarray(LAYOUTS[layout](x))) for x in (q, k, v)]
    out, maximum, total, *rest = npu_fusion_attention(*tensors, 4, layout, scale=0.3, **arguments)
    np.testing.assert_allclose(wide(out), LAYOUTS[layout](expected), **EXACT)
    np.testing.assert_allclose(
        wide(maximum + total.log()), np.repeat(logsumexp[..., None], 8, -1), rtol=1e-5, atol=1e-5
    )
    assert len(rest) == 4 and rest[1:] == [0, 0, 0]


@pytest.mark.parametrize(
    ("arguments", "sees"),
    [
        ({}, lambda i, j, last: True),
        (dict(sparse_mode=2), lambda i, j, last: j <= i),
        (dict(sparse_mode=3), lambda i, j, last: j <= i + last),
        (dict(sparse_mode=4, pre_tockens=65536, next_tockens=0), lambda i, j, last: j <= i + last),
    ],
)
def test_attention_over_sequences_one_after_the_other(arguments, sees):
    q_ends, k_ends = [0, 3, 4, 4, 9], [0, 3, 6, 6, 11]  # two sequences are empty
    q, k, v = normal(9, 4, 8), normal(11, 2, 8, seed=1), normal(11, 2, 8, seed=2)
    mask = {"atten_mask": COMPRESSED} if arguments else {}
    out, maximum, *_ = npu_fusion_attention(
        q,
        k,
        v,
        4,
        "TND",
        scale=0.3,
        actual_seq_qlen=q_ends,
        actual_seq_kvlen=torch.tensor(k_ends),
        **arguments,
        **mask,
    )
    assert maximum.shape == (9, 4, 8)
    for (a, b), (c, d) in [((0, 3), (0, 3)), ((3, 4), (3, 6)), ((4, 9), (6, 11))]:
        one = [wide(x).transpose(1, 0, 2)[None] for x in (q[a:b], k[c:d], v[c:d])]
        i, j = np.ogrid[: b - a, : d - c]
        expected, _ = attention(*one, 0.3, hiding(sees(i, j, (d - c) - (b - a))))
        np.testing.assert_allclose(wide(out[a:b]), expected[0].transpose(1, 0, 2), **EXACT)


def test_attention_gradients_with_shared_heads_and_sequences():
    def packed(q, k, v):
        return npu_fusion_attention(
            q,
            k,
            v,
            2,
            "TND",
            sparse_mode=4,
            next_tockens=0,
            atten_mask=COMPRESSED,
            actual_seq_qlen=[1, 4],
            actual_seq_kvlen=[1, 4],
        )[0]

    assert gradcheck(
        packed,
        [
            normal(4, 2, 3, grad=True),
            normal(4, 1, 3, seed=1, grad=True),
            normal(4, 1, 3, seed=2, grad=True),
        ],
    )


test_attention_refuses = refusals(
    partial(npu_fusion_attention, *[normal(1, 1, 4, 8)] * 3, 1, "BNSD"),
    {},
    ("keep_prob", dict(keep_prob=0.9)),
    ("pse", dict(pse=torch.ones(1))),
    ("sparse_mode 5", dict(sparse_mode=5)),
    ("compressed", dict(sparse_mode=2, atten_mask=torch.ones(4, 4))),
    ("full", dict(sparse_mode=1)),
)


def test_attention_refuses_sequences_that_do_not_fill_the_batch():
    x = normal(4, 1, 8)
    with pytest.raises(ValueError, match="T = 4"):
        npu_fusion_attention(x, x, x, 1, "TND", actual_seq_qlen=[1, 3], actual_seq_kvlen=[1, 3])
    with pytest.raises(NotImplementedError, match="TNSD"):
        npu_fusion_attention(x, x, x, 1, "TNSD")
