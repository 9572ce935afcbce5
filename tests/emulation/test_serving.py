"""Positions in place, sampling and prefetching against complex numbers and loops in numpy float64.

Tolerances as in test_operators.py: one rounding.
"""

import numpy as np
import pytest
import torch

from mindspeed_qerl.emulation import serving
from tests.emulation.refusals import refusals
from tests.emulation.test_operators import EXACT, ONE_ROUNDING, normal, turned, wide

DTYPES = pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [
        (torch.float64, EXACT),
        (torch.float32, dict(rtol=1e-5, atol=1e-6)),
        (torch.bfloat16, ONE_ROUNDING),
        (torch.float16, dict(rtol=2**-11 * 1.01, atol=1e-6)),
    ],
)


@pytest.fixture(autouse=True)
def no_first_table(monkeypatch):
    monkeypatch.setattr(serving, "_first_rope_table", None)


def table(size, dtype=torch.float64, positions=50, seed=0):
    """Random numbers in the place of cosines and sines, so that rounding a table to dtype keeps it
    exact.
    """
    return normal(positions, size, dtype=dtype, seed=seed)


def turn(x, chosen, mode):
    """x (..., R) float64 by the numbers (..., R) that a table gives: (a + ib)(c + is) for pairs of
    columns.
    """
    cos, sin = np.split(chosen, 2, -1)
    z = cos + 1j * sin
    length, angle = np.abs(z), np.angle(z)
    scale = np.concatenate([length, length], -1) if mode == "half" else length.repeat(2, -1)
    return turned(x, angle, mode) * scale


# Positions by a table, in place


def rotary(dtype, neox, positions, size=32, head_size=None, heads=(6, 3)):
    """The operator's query and key, and what they must be."""
    cos_sin = table(size, dtype)
    inputs = [normal(positions.numel(), n * size, dtype=dtype, seed=n) for n in heads]
    expected = [
        turn(
            wide(x).reshape(len(x), -1, size),
            wide(cos_sin)[positions.flatten()][:, None],
            "half" if neox else "interleave",
        ).reshape(x.shape)
        for x in inputs
    ]
    assert (
        serving._npu_rotary_embedding(positions, *inputs, head_size or size, cos_sin, neox) is None
    )
    return list(zip(inputs, expected, strict=True))


@DTYPES
@pytest.mark.parametrize("neox", [True, False])
def test_rotary_in_place(dtype, tolerance, neox):
    for x, expected in rotary(dtype, neox, torch.tensor([[7, 0, 49], [7, 3, 20]])):
        np.testing.assert_allclose(wide(x), expected, **tolerance)


def test_rotary_holds_on_to_the_first_table():
    rotary(torch.float64, True, torch.arange(5))
    for x, expected in rotary(
        torch.float64, False, torch.arange(5)
    ):  # equal, though another tensor
        np.testing.assert_allclose(wide(x), expected, **EXACT)
    x = normal(5, 32)
    for other in (table(32, seed=1), table(32)[:49], table(32).float()):
        with pytest.raises(ValueError, match="a process of its own"):
            serving._npu_rotary_embedding(
                torch.arange(5), x.to(other.dtype), x.to(other.dtype), 32, other, True
            )


test_rotary_refuses = refusals(
    serving._npu_rotary_embedding,
    dict(
        positions=torch.arange(3),
        query=normal(3, 32),
        key=normal(3, 16),
        head_size=16,
        cos_sin_cache=table(16),
        is_neox_style=True,
    ),
    (r"\(1, 3, 2, 16\)", dict(query=normal(1, 3, 2, 16))),
    (r"query must be \(3, a multiple of 16\)", dict(query=normal(4, 32))),
    ("multiple of key's 48", dict(key=normal(3, 48))),
    ("head_size must be the width 16", dict(head_size=32, is_neox_style=False)),
    ("one dtype", dict(key=normal(3, 16).half())),
    ("float64 like query", dict(cos_sin_cache=table(16, torch.float32))),
    ("contiguous", dict(key=normal(16, 3).t())),
    (r"rows of a table of 50, not \[50\]", dict(positions=torch.tensor([0, 50, 3]))),
    ("integers", dict(positions=torch.tensor([0.0, 1.0, 3.0]))),
)


# Positions by cosines and sines, in place


@DTYPES
@pytest.mark.parametrize("mode", ["half", "interleave"])
def test_apply_rotary_in_place(dtype, tolerance, mode):
    query, key = normal(2, 5, 3, 128, dtype=dtype), normal(2, 5, 1, 128, dtype=dtype, seed=1)
    angle = wide(normal(*key.shape[:3], 64))
    both = np.concatenate([angle, angle], -1) if mode == "half" else angle.repeat(2, -1)
    cos, sin = (torch.from_numpy(f(both)) for f in (np.cos, np.sin))
    expected = [turned(wide(x), angle, mode) for x in (query, key)]
    if dtype != torch.float64:  # the angles of rounded cosines and sines
        cos, sin = cos.to(dtype), sin.to(dtype)
        one = np.concatenate(
            [wide(t)[..., :64] if mode == "half" else wide(t)[..., ::2] for t in (cos, sin)], -1
        )
        expected = [turn(wide(x), one, mode) for x in (query, key)]
    returned = serving.npu_apply_rotary_pos_emb(query, key, cos, sin, rotary_mode=mode)
    for x, result, wanted in zip((query, key), returned, expected, strict=True):
        assert result is x
        np.testing.assert_allclose(wide(x), wanted, **tolerance)


test_apply_rotary_refuses = refusals(
    serving.npu_apply_rotary_pos_emb,
    dict(
        query=normal(1, 5, 3, 128),
        key=normal(1, 5, 3, 128),
        cos=normal(1, 5, 1, 128),
        sin=normal(1, 5, 1, 128),
    ),
    ("quarter", dict(rotary_mode="quarter")),
    ("half, interleave or quarter, not 'neox'", dict(rotary_mode="neox")),
    ("head size of 128", dict.fromkeys("query key cos sin".split(), normal(1, 5, 1, 64))),
    ("4-D", dict(cos=normal(5, 1, 128))),
    ("dimension 2", dict(cos=normal(1, 1, 1, 128))),
    ("BNSD", dict(layout="BNSD")),
    ("one dtype", dict(sin=normal(1, 5, 1, 128).float())),
)


# Sampling


def kept(row, p, k):
    """The columns of a row that stay, one at a time."""
    order = sorted(range(len(row)), key=lambda column: row[column])  # Python's sort is stable
    if k is not None:
        order = [column for column in order if row[column] >= row[order[-k]]]
    if p is not None:
        weights = np.exp([row[column] - row[order[-1]] for column in order])
        total = np.cumsum(weights / weights.sum())
        order = [c for c, s in zip(order, total, strict=True) if s > 1 - p or c == order[-1]]
    return order


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("given", ["p", "k", "pk"])
def test_top_k_top_p(dtype, given):
    logits = normal(6, 40, dtype=dtype, seed=3) * 3
    before = logits.clone()
    p = torch.tensor([0.5, 0.93, 0.11, 1, 0.7, 0], dtype=dtype) if "p" in given else None
    k = torch.tensor([40, 5, 3, 40, 1, 17], dtype=torch.int32) if "k" in given else None
    out = serving.npu_top_k_top_p(logits, p, k)
    assert torch.equal(logits, before) and out.dtype == dtype
    for b in range(6):
        stays = kept(
            wide(logits)[b], None if p is None else float(p[b]), None if k is None else int(k[b])
        )
        expected = np.full(40, -np.inf)
        expected[stays] = wide(logits)[b, stays]
        np.testing.assert_array_equal(wide(out)[b], expected)


def test_top_k_keeps_all_that_equal_the_smallest_one_kept():
    logits = torch.tensor([[1.0, 2.0, 2.0, 3.0, 0.0]])
    out = serving.npu_top_k_top_p(logits, None, torch.tensor([2], dtype=torch.int32))
    assert out.tolist() == [[-np.inf, 2, 2, 3, -np.inf]]


def test_top_p_drops_the_first_of_equals():
    out = serving.npu_top_k_top_p(torch.zeros(1, 4), torch.tensor([0.5]))
    assert out.tolist() == [[-np.inf, -np.inf, 0, 0]]


test_top_k_top_p_refuses = refusals(
    serving.npu_top_k_top_p,
    dict(
        logits=torch.zeros(2, 5),
        p=torch.tensor([0.5, 0.5]),
        k=torch.tensor([1, 5], dtype=torch.int32),
    ),
    ("p or k must be given", dict(p=None, k=None)),
    ("from 1 to 5, not", dict(k=torch.tensor([1, 6], dtype=torch.int32))),
    ("2 numbers", dict(k=torch.tensor([1], dtype=torch.int32))),
    ("k must be int32", dict(k=torch.tensor([1, 2]))),
    ("from 0 to 1, not", dict(p=torch.tensor([0.5, 1.5]))),
    ("one dtype", dict(p=torch.tensor([0.5, 0.5]).half())),
    ("2-D", dict(logits=torch.zeros(5))),
    (
        "from 1 to 1024, not",
        dict(logits=torch.zeros(2, 2000), k=torch.tensor([1, 1025], dtype=torch.int32)),
    ),
)


# Prefetching, dtypes


def test_prefetch_changes_nothing_and_refuses_what_is_no_part_of_the_weight():
    weight = normal(2, 3)
    before = weight.clone()
    assert serving.npu_prefetch(weight, None, 10**9, 47) is None and torch.equal(weight, before)
    for match, size, offset in [
        ("max_size must be positive, not 0", 0, 0),
        ("48 bytes of the weight, not 48", 8, 48),
        ("not -1", 8, -1),
    ]:
        with pytest.raises(ValueError, match=match):
            serving.npu_prefetch(weight, None, size, offset)
