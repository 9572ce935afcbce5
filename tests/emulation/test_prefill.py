"""Attention of prefill, without a cache and over found blocks of it, against sequences.py."""

import numpy as np
import pytest
import torch

from mindspeed_qerl.emulation import paged
from tests.emulation.refusals import refusals
from tests.emulation.sequences import (
    HEADS,
    KV_HEADS,
    SCALE,
    TOLERANCES,
    Paged,
    attention,
    causal,
    int32,
)
from tests.emulation.test_operators import normal, wide

EVERY_DTYPE = pytest.mark.parametrize("dtype", TOLERANCES)
HIDDEN = {
    torch.float16: -torch.inf
}  # what a mask of _npu_flash_attention holds; 1 in any other dtype


# Prefill without a cache

LENGTHS = [5, 0, 1, 7]


def prefill(dtype, mask, lengths=LENGTHS, sizes=(16, 24)):
    """The output, and what each sequence's rows must be for what its mask adds: expected(list of
    arrays).
    """
    tokens = sum(lengths) + 2
    q, k = (
        normal(tokens, HEADS, sizes[0], dtype=dtype),
        normal(tokens, KV_HEADS, sizes[0], dtype=dtype, seed=1),
    )
    v = normal(tokens, KV_HEADS, sizes[1], dtype=dtype, seed=2)
    out = torch.full((tokens, HEADS, sizes[1]), 5.0, dtype=dtype)
    assert (
        paged._npu_flash_attention(q, k, v, mask, int32(lengths), SCALE, HEADS, KV_HEADS, out)
        is None
    )

    def expected(added):
        rows, start = np.full(out.shape, 5.0), 0
        for one, length in zip(added, lengths, strict=True):
            part = slice(start, start + length)
            if length:
                rows[part] = attention(*(wide(x[part]) for x in (q, k, v)), one)
            start += length
        return rows

    return wide(out), expected


@EVERY_DTYPE
def test_prefill_with_a_causal_mask(dtype):
    mask = torch.zeros(9, 8, dtype=dtype).masked_fill(
        torch.ones(9, 8).triu(1).bool(), HIDDEN.get(dtype, 1)
    )
    out, expected = prefill(dtype, mask)
    np.testing.assert_allclose(out, expected([causal(n, n) for n in LENGTHS]), **TOLERANCES[dtype])


@pytest.mark.parametrize(
    ("dtype", "unit"), [(torch.float16, 1), (torch.float32, -3e38), (torch.float64, -3e38)]
)
def test_prefill_adds_a_mask_as_it_is_or_times_a_large_number(dtype, unit):
    added = normal(len(LENGTHS), 8, 8, dtype=torch.float16).double()
    mask = (added / unit).to(dtype)
    out, expected = prefill(dtype, mask)
    # float32 keeps only some bits of numbers this small
    tolerance = dict(rtol=1e-4, atol=1e-5) if dtype == torch.float32 else TOLERANCES[dtype]
    np.testing.assert_allclose(
        out, expected([wide(added)[s, :n, :n] for s, n in enumerate(LENGTHS)]), **tolerance
    )


test_prefill_refuses = refusals(
    paged._npu_flash_attention,
    dict(
        query=normal(6, 4, 16),
        key=normal(6, 2, 16),
        value=normal(6, 2, 16),
        mask=normal(3, 3),
        seq_len=int32([3, 2]),
        scale_value=SCALE,
        num_heads=4,
        num_kv_heads=2,
        out=normal(6, 4, 16),
    ),
    (r"\(2, 2\)", dict(seq_len=int32([[3, 2], [3, 2]]))),
    ("seq_len must be int32", dict(seq_len=torch.tensor([3, 2]))),
    ("fit into 6 tokens", dict(seq_len=int32([3, 4]))),
    ("at least 3", dict(mask=normal(2, 9))),
    ("one dtype", dict(mask=normal(3, 3).bfloat16())),
    ("num_heads 4, D", dict(query=normal(6, 3, 16))),
    ("multiple of num_kv_heads", dict(num_kv_heads=3)),
    ("head size 16", dict(key=normal(6, 2, 8))),
    ("as many tokens", dict(key=normal(5, 2, 16))),
    ("at most 576", dict(value=normal(6, 2, 577))),
    ("out must have shape", dict(out=normal(6, 4, 8))),
)


# Prefill over whole blocks that were found in the cache


def over_found_blocks(batch, mask):
    return paged._npu_flash_attention_qlens(
        batch.query,
        batch.key_cache,
        batch.value_cache,
        batch.table,
        mask,
        int32(batch.queries),
        int32(batch.keys),
        KV_HEADS,
        HEADS,
        SCALE,
        batch.out,
    )


@EVERY_DTYPE
def test_prefill_over_found_blocks(dtype):
    batch = Paged([130, 5, 0, 1, 128], [258, 5, 0, 257, 256], 128, dtype)
    mask = torch.zeros(128, 128, dtype=dtype).masked_fill(
        torch.ones(128, 128).triu(1).bool(), HIDDEN.get(dtype, 1)
    )
    assert over_found_blocks(batch, mask) is None
    batch.check()


def test_prefill_over_found_blocks_uses_the_mask_on_the_diagonal_blocks():
    batch = Paged([130, 5, 1], [258, 5, 257], 128, torch.float16)
    mask = normal(128, 128, dtype=torch.float16)
    over_found_blocks(batch, mask)
    added = []
    for queries, keys in zip(batch.queries, batch.keys, strict=True):
        one = np.zeros((queries, keys))
        for i in range(queries):
            first = i // 128 * 128 + keys - queries  # where this query's diagonal block begins
            for j in range(first, keys):
                one[i, j] = wide(mask)[i % 128, j - first] if j < first + 128 else -np.inf
        added.append(one)
    batch.check(added)


test_prefill_over_found_blocks_refuses = refusals(
    paged._npu_flash_attention_qlens,
    dict(
        query=normal(6, 4, 16),
        key_cache=normal(4, 128, 2, 16),
        value_cache=normal(4, 128, 2, 16),
        block_table=int32([[0, 1], [2, 3]]),
        mask=normal(128, 128),
        seq_len=int32([2, 3]),
        context_lens=int32([130, 131]),
        num_kv_heads=2,
        num_heads=4,
        scale_value=SCALE,
        out=normal(6, 4, 16),
    ),
    (r"multiples of 128, not negative, not \[128, 1\]", dict(context_lens=int32([130, 4]))),
    (
        r"not negative, not \[-128, 128\]",
        dict(seq_len=int32([130, 3]), context_lens=int32([2, 131])),
    ),
    (r"mask must be \(128, 128\)", dict(mask=normal(256, 256))),
    (
        "block_size must be 128",
        dict(key_cache=normal(4, 64, 2, 16), value_cache=normal(4, 64, 2, 16)),
    ),
    ("multiples of 16", dict(query=normal(6, 4, 8), key_cache=normal(4, 128, 2, 8))),
    ("at most 128", dict(query=normal(6, 4, 144), key_cache=normal(4, 128, 2, 144))),
    ("as many sequences", dict(block_table=int32([[0, 1]]))),
    ("blocks of a cache of 4", dict(block_table=int32([[0, 4], [2, 3]]))),
    ("1 columns of block_table hold 128", dict(block_table=int32([[0], [2]]))),
    ("no more tokens than the 6", dict(seq_len=int32([4, 3]), context_lens=int32([132, 131]))),
)
