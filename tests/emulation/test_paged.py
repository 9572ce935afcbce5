"""Writing into a paged cache, and attention over it, against sequences.py."""

from functools import partial

import numpy as np
import pytest
import torch

from mindspeed_qerl.emulation import paged
from tests.emulation.refusals import refusals
from tests.emulation.sequences import HEADS, KV_HEADS, SCALE, TOLERANCES, Paged, int32
from tests.emulation.test_operators import normal, wide

EVERY_DTYPE = pytest.mark.parametrize("dtype", TOLERANCES)


# Writing into the cache


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16, torch.int8])
def test_every_token_lands_in_its_slot_and_nothing_else_changes(dtype):
    key, value = (10 * normal(6, 2, size, seed=size) for size in (8, 4))
    key, value = key.to(dtype), value.to(dtype)
    caches = [(10 * normal(5, 16, 2, size)).to(dtype) for size in (8, 4)]
    slots = [79, -1, 0, 33, -1, 16]
    expected = [cache.clone() for cache in caches]
    for token, slot in enumerate(slots):
        if slot >= 0:
            expected[0][slot // 16, slot % 16] = key[token]
            expected[1][slot // 16, slot % 16] = value[token]
    assert (
        paged._npu_reshape_and_cache(key, value, *caches, int32([*slots, 1, 2])) is None
    )  # two slots too many
    for cache, wanted in zip(caches, expected, strict=True):
        assert torch.equal(cache, wanted)


test_the_cache_refuses = refusals(
    paged._npu_reshape_and_cache,
    dict(
        key=normal(3, 2, 8),
        value=normal(3, 2, 8),
        key_cache=normal(4, 16, 2, 8),
        value_cache=normal(4, 16, 2, 8),
        slot_indices=int32([1, 2, 3]),
    ),
    (r"within 4 blocks \* 16, not \[64\]", dict(slot_indices=int32([64, 1, 2]))),
    (r"one token, not \[7\]", dict(slot_indices=int32([7, 1, 7]))),
    ("for each of 3 tokens, not 2", dict(slot_indices=int32([1, 2]))),
    ("int32", dict(slot_indices=torch.tensor([1, 2, 3]))),
    ("one dtype", dict(key=normal(3, 2, 8).float())),
    ("as many tokens", dict(value=normal(4, 2, 8))),
    ("key_cache must have shape", dict(key=normal(3, 1, 8))),
    ("contiguous", dict(key_cache=normal(4, 2, 16, 8).transpose(1, 2))),
    (
        "float16 or bfloat16 or int8, not int32",
        dict.fromkeys(["key", "value"], torch.ones(3, 2, 8).int())
        | dict.fromkeys(["key_cache", "value_cache"], torch.ones(4, 16, 2, 8).int()),
    ),
)


# Decoding


def decode(batch, **change):
    arguments = dict(
        query=batch.query,
        key_cache=batch.key_cache,
        value_cache=batch.value_cache,
        num_kv_heads=KV_HEADS,
        num_heads=HEADS,
        scale_value=SCALE,
        block_table=batch.table,
        context_lens=int32(batch.keys),
        out=batch.out,
    )
    return paged._npu_paged_attention(**arguments | change)


@EVERY_DTYPE
@pytest.mark.parametrize("block_size", [16, 128])
def test_decoding_a_token_of_each_sequence(dtype, block_size):
    batch = Paged([1] * 5, [1, 16, 17, 40, 200], block_size, dtype, sizes=(16, 32))
    assert decode(batch, workspace=torch.empty(3)) is None
    batch.check()


@pytest.mark.parametrize(
    ("key_size", "value_size", "block_size", "fits"),
    [
        (128, 128, 128, True),
        (128, 128, 144, False),
        (256, 256, 80, False),
        (192, 128, 512, True),
        (576, 512, 128, True),
        (576, 512, 144, False),
        (577, 512, 16, False),
    ],
)
def test_decoding_refuses_blocks_that_are_too_large(key_size, value_size, block_size, fits):
    batch = Paged([1], [3], block_size, sizes=(key_size, value_size))
    if fits:
        decode(batch)
        batch.check()
    else:
        with pytest.raises(ValueError, match=f"block_size {block_size}"):
            decode(batch)


test_decoding_refuses = refusals(
    partial(decode, Paged([1, 1], [5, 20], 16)),
    {},
    ("at least 1", dict(context_lens=int32([5, 0]))),
    ("context_lens must be int32", dict(context_lens=torch.tensor([5, 20]))),
    ("a row for each of 2", dict(block_table=int32([[0, 1, 2]]))),
    (
        "2 columns of block_table hold 32",
        dict(context_lens=int32([5, 33]), block_table=int32([[0, 1], [2, 3]])),
    ),
    (r"blocks of a cache of 6, not \[0, -1\]", dict(block_table=int32([[1, 0], [0, -1]]))),
    ("no more tokens than the 1", dict(query=normal(1, 4, 16), out=normal(1, 4, 16))),
    ("num_heads 4", dict(query=normal(4, 2, 16))),
    ("one dtype", dict(query=normal(4, 4, 16).half())),
    ("out must have shape", dict(out=normal(2, 4, 16))),
)


# Prefill in chunks, mixed with decoding


def in_chunks(batch, mask, **change):
    arguments = dict(
        query=batch.query,
        key_cache=batch.key_cache,
        value_cache=batch.value_cache,
        block_table=batch.table,
        context_lens=int32(batch.keys),
        mask=mask,
        seq_len=int32(batch.queries),
        num_kv_heads=KV_HEADS,
        num_heads=HEADS,
        scale_value=SCALE,
        out=batch.out,
    )
    return paged._npu_paged_attention_splitfuse(**arguments | change)


CHUNKS = [3, 1, 20, 5], [20, 17, 20, 134]


def rows_of(hidden):
    """The causal mask of all rows of CHUNKS, one below the other, with a column too many."""
    mask = np.full((sum(CHUNKS[0]), max(CHUNKS[1]) + 1), hidden)
    start = 0
    for queries, keys in zip(*CHUNKS, strict=True):
        for i in range(queries):
            mask[start + i, : keys - queries + i + 1] = 0
        start += queries
    return torch.from_numpy(mask)


@EVERY_DTYPE
def test_chunks_with_the_causal_mask(dtype):
    batch = Paged(*CHUNKS, 16, dtype)
    assert in_chunks(batch, rows_of(-10000.0).to(dtype)) is None
    batch.check()
    if dtype == torch.float16:
        in_chunks(batch, rows_of(-np.inf).to(dtype))
        batch.check()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_chunks_add_every_row_of_the_mask_as_it_is(dtype):
    batch = Paged(*CHUNKS, 16, dtype)
    mask = normal(40, 140, dtype=dtype)
    in_chunks(batch, mask)
    starts = np.cumsum([0, *CHUNKS[0]])
    batch.check(
        [
            wide(mask)[start : start + queries, :keys]
            for start, queries, keys in zip(starts, *CHUNKS)
        ]
    )


test_chunks_refuse = refusals(
    partial(in_chunks, Paged(*CHUNKS, 16)),
    dict(mask=rows_of(-1e4)),
    ("29 rows and 134 columns", dict(mask=normal(20, 134))),
    ("one dtype", dict(mask=normal(29, 134).half())),
    ("from 1 to context_lens", dict(seq_len=int32([3, 0, 20, 5]))),
    ("from 1 to context_lens", dict(seq_len=int32([3, 1, 20]))),
    ("int32", dict(seq_len=torch.tensor(CHUNKS[0]))),
    ("head size of key_cache", dict(value_cache=normal(18, 16, 2, 32))),
    ("no more tokens than the 20", dict(query=normal(20, 4, 16), out=normal(20, 4, 16))),
    ("blocks of a cache", dict(block_table=int32([[99] * 9] * 4))),
)
