"""Rows sorted by expert and brought back, one token and one expert at a time, and the mixtures that
vllm-ascend makes of them (ops/moe/token_dispatcher.py, moe_mlp.py) against the same mixture
computed densely, in float64.

bfloat16 is rounded once: 2^-8 of the result at most, 1% added for float32's own error.
"""

import numpy as np
import pytest
import torch
from torch.autograd import gradcheck

from mindspeed_qerl.emulation import experts
from tests.emulation.refusals import refusals
from tests.emulation.test_operators import EXACT, ONE_ROUNDING, normal, wide

TOKENS, K, EXPERTS, H, FFN = 9, 3, 8, 6, 5
ALL = [0, EXPERTS]


def routing(seed, without=()):
    """int32 (TOKENS, K), every token's experts different, none of `without` chosen."""
    rng = np.random.default_rng(seed)
    chosen = [
        rng.permutation([e for e in range(EXPERTS) if e not in without])[:K] for _ in range(TOKENS)
    ]
    return torch.tensor(np.array(chosen), dtype=torch.int32)


def rows_by_expert(expert_idx, first, last):
    """(token, place in K) of every row that goes to an expert in the range, by expert, then by
    token.
    """
    ids = expert_idx.tolist()
    return [
        (t, k)
        for e in range(first, last)
        for t, row in enumerate(ids)
        for k, chosen in enumerate(row)
        if chosen == e
    ]


# npu_moe_init_routing_v2

RANGES = [(ALL, ()), ([0, 4], ()), ([4, 8], (5,)), ([2, 5], (2, 4)), ([6, 8], (6, 7)), ([7, 8], ())]


def init_routing(x, expert_idx, active_expert_range, **arguments):
    defaults = dict(
        active_num=expert_idx.numel(),
        expert_num=EXPERTS,
        expert_tokens_num_type=1,
        expert_tokens_num_flag=True,
        quant_mode=-1,
    )
    return experts.npu_moe_init_routing_v2(
        x, expert_idx, active_expert_range=active_expert_range, **defaults | arguments
    )


@pytest.mark.parametrize(("active", "without"), RANGES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_routing_copies_a_row_for_each_active_expert(active, without, dtype):
    x, expert_idx = normal(TOKENS, H, dtype=dtype), routing(1, without)
    order = rows_by_expert(expert_idx, *active)
    rows, row_idx, counts, _ = init_routing(x, expert_idx, active)
    assert rows.shape == (TOKENS * K, H) and row_idx.shape == (TOKENS * K,)
    assert (rows.dtype, row_idx.dtype, counts.dtype) == (dtype, torch.int32, torch.int64)
    for i, (t, k) in enumerate(order):
        assert torch.equal(rows[i], x[t]) and row_idx[t * K + k] == i
    assert rows[len(order) :].isnan().all()
    assert (row_idx == -1).sum() == TOKENS * K - len(order)
    assert counts.tolist() == [int((expert_idx == e).sum()) for e in range(*active)]
    assert torch.equal(init_routing(x, expert_idx, active, active_num=-1)[1], row_idx)


test_routing_refuses = refusals(
    init_routing,
    dict(x=normal(TOKENS, H), expert_idx=routing(0), active_expert_range=ALL),
    ("drop_pad_mode 1", dict(drop_pad_mode=1, expert_capacity=2)),
    ("expert_tokens_num_type 0", dict(expert_tokens_num_type=0)),
    ("expert_tokens_num_flag False", dict(expert_tokens_num_flag=False)),
    ("quant_mode 1", dict(quant_mode=1)),
    ("row_idx_type 2", dict(row_idx_type=2)),
    ("offset", dict(offset=torch.ones(1))),
    ("active_num is 5", dict(active_num=5)),
    (r"\[4, 9\]", dict(active_expert_range=[4, 9])),
    ("scale", dict(scale=torch.ones(2))),
    ("int64", dict(expert_idx=routing(0).long())),
    ("outside", dict(expert_num=4, active_expert_range=[0, 4])),
    ("equally many", dict(expert_idx=routing(0)[1:])),
)


# npu_moe_token_permute, npu_moe_token_unpermute


@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("num_out_tokens", "kept"), [(None, 27), (0, 27), (27, 27), (40, 27), (10, 10), (-3, 24)]
)
def test_permuting_sorts_by_expert(kind, num_out_tokens, kept):
    tokens, expert_idx = normal(TOKENS, H), routing(3, without=(0, 4))
    order = rows_by_expert(expert_idx, *ALL)
    rows, where = experts.npu_moe_token_permute(tokens, expert_idx.to(kind), num_out_tokens)
    assert torch.equal(rows, torch.stack([tokens[t] for t, _ in order[:kept]]))
    assert where.dtype == torch.int32
    assert where.tolist() == [order.index((t, k)) for t in range(TOKENS) for k in range(K)]
    rows, where = experts.npu_moe_token_permute(tokens, expert_idx[:, 0])
    assert torch.equal(rows[where.long()], tokens) and where.unique().numel() == TOKENS
    none = experts.npu_moe_token_permute(tokens[:0], expert_idx[:0])
    assert [part.shape for part in none] == [(0, H), (0,)]


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, EXACT), (torch.bfloat16, ONE_ROUNDING)]
)
@pytest.mark.parametrize("probs_dtype", [torch.float64, torch.bfloat16])
def test_unpermuting_adds_up_the_rows_of_a_token(dtype, tolerance, probs_dtype):
    rows = normal(TOKENS * K, H, dtype=dtype)
    probs = normal(TOKENS, K, seed=1, dtype=torch.bfloat16).to(
        probs_dtype
    )  # the same numbers in both
    where = torch.from_numpy(np.random.default_rng(4).permutation(TOKENS * K)).int()
    out = experts.npu_moe_token_unpermute(rows, where, probs, restore_shape=torch.Size([1]))
    expected = [
        sum(wide(probs)[t, k] * wide(rows)[where[t * K + k]] for k in range(K))
        for t in range(TOKENS)
    ]
    assert out.dtype == dtype
    np.testing.assert_allclose(wide(out), expected, **tolerance)
    out = experts.npu_moe_token_unpermute(rows, where)
    assert torch.equal(out, rows[where.long()])


def test_unpermuting_reads_no_row_without_weight_and_none_that_is_not_there():
    rows, where = normal(4, H), torch.tensor([0, 1, 3, -1, 7, 2], dtype=torch.int32)
    rows[1] = float("nan")
    probs = torch.tensor([[2.0, 0.0], [3.0, 0.0], [5.0, 7.0]], dtype=torch.float64)
    out = experts.npu_moe_token_unpermute(rows, where, probs)
    np.testing.assert_allclose(
        wide(out), [2 * wide(rows)[0], 3 * wide(rows)[3], 7 * wide(rows)[2]], **EXACT
    )
    probs[0, 1] = 1e-30
    assert experts.npu_moe_token_unpermute(rows, where, probs)[0].isnan().all()
    probs[1, 1] = 1.0
    with pytest.raises(ValueError, match="-1"):
        experts.npu_moe_token_unpermute(rows, where, probs)


PLACES = torch.arange(TOKENS, dtype=torch.int32)
test_permuting_refuses = refusals(
    experts.npu_moe_token_permute,
    dict(tokens=normal(TOKENS, H), indices=routing(0)),
    ("padded_mode", dict(padded_mode=True)),
    ("int16", dict(indices=routing(0).short())),
    ("tokens", dict(tokens=normal(1, H))),
)
test_unpermuting_refuses = refusals(
    experts.npu_moe_token_unpermute,
    dict(permuted_tokens=normal(TOKENS, H), sorted_indices=PLACES),
    ("padded_mode", dict(padded_mode=True)),
    ("int64", dict(sorted_indices=PLACES.long())),
    (": probs", dict(probs=torch.ones(TOKENS, 2))),
    (": sorted_indices", dict(sorted_indices=PLACES[None])),
)


def test_gradients():
    expert_idx = routing(5)
    where = experts.npu_moe_token_permute(normal(TOKENS, H), expert_idx)[1]
    assert gradcheck(
        lambda x: experts.npu_moe_token_permute(x, expert_idx)[0], [normal(TOKENS, H, grad=True)]
    )
    assert gradcheck(
        lambda x, p: experts.npu_moe_token_unpermute(x, where, p),
        [normal(TOKENS * K, H, grad=True), normal(TOKENS, K, grad=True)],
    )


# The mixtures of vllm-ascend
