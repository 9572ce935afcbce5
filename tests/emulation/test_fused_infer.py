"""npu_fused_infer_attention_score against a dense masked softmax over each sequence, see
sequences.py.
"""

from functools import partial

import numpy as np
import pytest
import torch

from mindspeed_qerl.emulation.fused_infer import npu_fused_infer_attention_score
from tests.emulation.refusals import refusals
from tests.emulation.sequences import HEADS, KV_HEADS, SCALE, Paged, int32
from tests.emulation.test_operators import normal, wide

MASK = torch.ones(2048, 2048).triu(1).to(torch.int8)
CHUNKS = [3, 1, 130, 0, 5], [20, 17, 130, 4, 260]
DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])


def chunks(dtype=torch.float64, block_size=128, size=64):
    return Paged(*CHUNKS, block_size, dtype, sizes=(size, size), padding=0)


def fused(batch, **change):
    blocks, block_size = batch.key_cache.shape[:2]
    arguments = (
        dict(
            key=batch.key_cache.view(blocks, block_size, -1),
            value=batch.value_cache.view(blocks, block_size, -1),
            atten_mask=MASK,
            block_table=batch.table,
            input_layout="TND",
            block_size=block_size,
            sparse_mode=3,
            num_heads=HEADS,
            actual_seq_lengths=np.cumsum(batch.queries).tolist(),
            actual_seq_lengths_kv=batch.keys,
            num_key_value_heads=KV_HEADS,
            scale=SCALE,
        )
        | change
    )
    batch.out, lse = npu_fused_infer_attention_score(
        arguments.pop("query", batch.query), **arguments
    )
    return lse


@DTYPES
@pytest.mark.parametrize(("size", "block_size"), [(64, 128), (128, 256), (192, 512)])
def test_the_last_queries_of_each_sequence_see_what_is_before_them(dtype, size, block_size):
    batch = chunks(dtype, block_size, size)
    lse = fused(batch)
    assert batch.out.dtype == dtype and lse.shape == (0,)
    batch.check()


@DTYPES
def test_without_a_mask_every_query_sees_every_key(dtype):
    batch = chunks(dtype)
    fused(batch, sparse_mode=0, atten_mask=None, pre_tokens=1)
    batch.check(lambda queries, keys: 0.0)


def test_logarithm_of_the_sum():
    batch = chunks()
    lse = fused(batch, softmax_lse_flag=True)
    assert lse.shape == (139, HEADS, 1) and lse.dtype == torch.float32
    start = 0
    for count, (k, _) in zip(batch.queries, batch.sequences, strict=True):
        for i in range(count):
            for head in range(HEADS):
                seen = k[: len(k) - count + i + 1, head // 2]
                expected = np.log(np.exp(SCALE * seen @ wide(batch.query)[start + i, head]).sum())
                np.testing.assert_allclose(lse[start + i, head, 0], expected, rtol=1e-5, atol=1e-5)
        start += count


WRONG = MASK.clone()
WRONG[100, 101] = 0


test_it_refuses = refusals(
    partial(fused, chunks()),
    {},
    ("input_layout 'BSH'", dict(input_layout="BSH")),
    ("block_table None", dict(block_table=None)),
    ("sparse_mode 4", dict(sparse_mode=4)),
    ("pse_shift", dict(pse_shift=torch.zeros(1))),
    (r"actual_shared_prefix_len is not emulated, it was \[3\]", dict(actual_shared_prefix_len=[3])),
    ("key_antiquant_mode is not emulated, it was 1", dict(key_antiquant_mode=1)),
    (
        "without keys",
        dict(sparse_mode=0, atten_mask=None, actual_seq_lengths_kv=[20, 17, 0, 4, 260]),
    ),
    ("sparse_mode 0 takes no atten_mask", dict(sparse_mode=0)),
    (r"\(2048, 2048\), not \(260, 260\)", dict(atten_mask=MASK[:260, :260])),
    ("bool, int8 or uint8", dict(atten_mask=MASK.float())),
    (r"triu\(1\)", dict(atten_mask=WRONG)),
    ("one dtype", dict(query=normal(139, HEADS, 64).bfloat16())),
    ("at most 64 times", dict(num_key_value_heads=3)),
    ("num_heads 2", dict(num_heads=2)),
    ("64, 128 or 192, not 80", dict(query=normal(139, HEADS, 80))),
    ("multiple of 128, at most 512, not 64", dict(block_size=64)),
    ("value must have key's shape", dict(value=normal(3, 128, 128))),
    ("must end at T = 139", dict(actual_seq_lengths=[3, 4, 134, 134, 138])),
    ("must not fall", dict(actual_seq_lengths=[3, 4, 134, 133, 139])),
    ("as many", dict(actual_seq_lengths_kv=[20, 17, 130, 4])),
    ("must be given", dict(actual_seq_lengths_kv=None)),
    ("no more queries than keys", dict(actual_seq_lengths_kv=[20, 17, 129, 4, 260])),
    ("5 rows", dict(block_table=int32([[0, 1, 2]] * 6))),
    ("int32", dict(block_table=torch.zeros(5, 3, dtype=torch.int64))),
    ("2 columns of block_table hold 256", dict(block_table=int32([[0, 1]] * 5))),
    ("blocks of a cache", dict(block_table=int32([[0, 1, 99]] * 5))),
)
