"""Grouped matrix products, routing and permutation of operators.py against numpy in float64,
gradients against torch.autograd; tolerances as in test_operators.py.
"""

from functools import partial

import numpy as np
import pytest
import torch
from torch.autograd import gradcheck

from mindspeed_qerl.emulation import operators
from tests.emulation.refusals import refusals
from tests.emulation.test_operators import EXACT, ONE_ROUNDING, normal, wide

# Groups

COUNTS = [[2, 0, 3, 1], [0, 6, 0, 0], [0, 0, 0, 6], [6, 0, 0, 0], [1, 2, 2, 1]]


def group_lists(counts):
    """The same groups in every form that callers use: (group_list, group_list_type)."""
    ends = np.cumsum(counts).tolist()
    return [(ends, 0), (torch.tensor(ends), 0), (torch.tensor(counts), 1)]


@pytest.mark.parametrize("counts", COUNTS)
def test_grouped_matmul(counts):
    x, weight = normal(6, 3), normal(4, 3, 5)
    member = np.repeat(np.arange(4), counts)
    expected = np.stack([wide(x)[row] @ wide(weight)[group] for row, group in enumerate(member)])
    for group_list, kind in group_lists(counts):
        (y,) = operators.npu_gmm([x], [weight], [], group_list, 0, kind)
        np.testing.assert_allclose(wide(y), expected, **EXACT)
    for group_list, kind in group_lists(counts)[1:]:
        for weights in ([weight], list(weight)):  # one tensor for each group
            arguments = dict(group_list=group_list, group_type=0, group_list_type=kind)
            for split_item in (2, 3):
                (y,) = operators.npu_grouped_matmul(
                    [x], weights, split_item=split_item, **arguments
                )
                np.testing.assert_allclose(wide(y), expected, **EXACT)


@pytest.mark.parametrize("counts", COUNTS)
def test_grouped_matmul_over_the_summed_dimension(counts):
    x, weight = normal(3, 6), normal(6, 5)
    member = np.repeat(np.arange(4), counts)
    expected = np.stack([(wide(x) * (member == group)) @ wide(weight) for group in range(4)])
    for group_list, kind in group_lists(counts):
        (y,) = operators.npu_gmm([x], [weight], [], group_list, 2, kind)
        np.testing.assert_allclose(wide(y), expected, **EXACT)
    for group_list, kind in group_lists(counts)[1:]:
        (y,) = operators.npu_grouped_matmul(
            [x], [weight], group_list=group_list, split_item=3, group_type=2, group_list_type=kind
        )
        np.testing.assert_allclose(wide(y), expected, **EXACT)


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("transposed", [False, True])
def test_gradient_of_grouped_matmul_is_that_of_a_dense_formulation(counts, transposed):
    x, weight, direction = normal(6, 3, grad=True), normal(4, 3, 5, grad=True), normal(6, 5)
    one_hot = torch.eye(4, dtype=torch.float64)[torch.repeat_interleave(torch.tensor(counts))]
    dense = torch.einsum("te,tk,ekn->tn", one_hot, x, weight)
    expected = torch.autograd.grad(dense, [x, weight], direction)
    stored = (
        weight.detach().transpose(1, 2).contiguous().transpose(1, 2)
        if transposed
        else weight.detach()
    )
    for group_list, kind in group_lists(counts):
        (dx,), (dweight,), dbias = operators.npu_gmm_backward(
            [direction], [x.detach()], [stored], group_list, kind
        )
        torch.testing.assert_close(dx, expected[0], rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(dweight, expected[1], rtol=1e-10, atol=1e-12)
        assert dbias == []
        (dx,), _, _ = operators.npu_gmm_backward_fusion([direction], [stored], group_list, kind)
        torch.testing.assert_close(dx, expected[0], rtol=1e-10, atol=1e-12)


def test_gradients_are_added_in_float32():
    x, dy = normal(6, 3, dtype=torch.bfloat16), normal(6, 5, dtype=torch.bfloat16)
    grad = normal(4, 3, 5, dtype=torch.float32)
    before = wide(grad)
    operators.npu_groupmatmul_add_fp32(x, dy, torch.tensor([2, 2, 5, 6]), grad)
    member = np.array([0, 0, 2, 2, 2, 3])
    added = np.stack([(wide(x).T * (member == group)) @ wide(dy) for group in range(4)])
    np.testing.assert_allclose(wide(grad), before + added, rtol=1e-5, atol=1e-6)
    grad = normal(5, 3, dtype=torch.float32)
    before = wide(grad)
    operators.npu_matmul_add_fp32(dy, x, grad)
    np.testing.assert_allclose(wide(grad), before + wide(dy).T @ wide(x), rtol=1e-5, atol=1e-6)


def test_rows_of_no_group_are_neither_read_nor_written():
    x, weight = normal(6, 3), normal(2, 3, 5)
    x[4:] = float("nan")
    (y,) = operators.npu_grouped_matmul(
        [x], [weight], group_list=torch.tensor([3, 4]), split_item=2, group_type=0
    )
    np.testing.assert_allclose(
        wide(y[:4]), [wide(x)[i] @ wide(weight)[int(i > 2)] for i in range(4)], **EXACT
    )
    assert y.shape == (6, 5) and y[4:].isnan().all()


test_grouped_matmul_refuses = refusals(
    partial(operators.npu_grouped_matmul, [normal(6, 3)], [normal(2, 3, 5)]),
    dict(group_list=torch.tensor([3, 6]), split_item=2, group_type=0),
    ("bias", dict(bias=[torch.ones(5)])),
    ("act_type", dict(act_type=5)),
    ("tensor group_list", dict(group_list=[3, 6])),
    ("group_type 1", dict(group_type=1)),
    ("group_list_type 2", dict(group_list_type=2)),
    ("group_type", dict(group_type=None)),
    ("int32", dict(group_list=torch.tensor([3, 6], dtype=torch.int32))),
    ("split_item", dict(split_item=4)),
    ("row 7 of 6", dict(group_list=torch.tensor([3, 7]))),
    ("less than 0", dict(group_list=torch.tensor([4, 3]))),
)


def test_gradients_of_products_and_of_probabilities():
    def products(x, weight):
        out = operators.npu_grouped_matmul(
            [x], [weight], group_list=torch.tensor([2, 2, 5]), split_item=2, group_type=0
        )
        return out[0][:5]  # the sixth row belongs to no group

    assert gradcheck(products, [normal(6, 3, grad=True), normal(3, 3, 4, seed=1, grad=True)])
    assert gradcheck(
        lambda x: operators.npu_moe_gating_top_k_softmax(x, None, 2)[0], [normal(3, 5, grad=True)]
    )


# Mixture of experts


def test_gating_takes_the_largest_probabilities():
    logits = normal(50, 8, dtype=torch.bfloat16)
    weights, experts, rows = operators.npu_moe_gating_top_k_softmax(logits, None, 3)
    probabilities = np.exp(wide(logits)) / np.exp(wide(logits)).sum(-1, keepdims=True)
    np.testing.assert_allclose(wide(weights), np.sort(probabilities, -1)[:, :-4:-1], **ONE_ROUNDING)
    np.testing.assert_allclose(
        np.take_along_axis(probabilities, experts.long().numpy(), -1), wide(weights), **ONE_ROUNDING
    )
    assert (weights.dtype, experts.dtype, rows.dtype) == (torch.bfloat16, torch.int32, torch.int32)
    assert rows[:2].tolist() == [[0, 50, 100], [1, 51, 101]]


def test_gating_takes_the_first_of_equal_probabilities():
    logits = torch.tensor([[0.0, 1.0, 1.0, 0.0], [2.0, 2.0, 2.0, 2.0], [0.0, 0.0, 0.0, 3.0]])
    _, experts, _ = operators.npu_moe_gating_top_k_softmax(logits, None, 3)
    assert experts.tolist() == [[1, 2, 0], [0, 1, 2], [3, 0, 1]]


test_gating_refuses = refusals(
    operators.npu_moe_gating_top_k_softmax,
    dict(x=normal(3, 4)),
    ("k is 5", dict(k=5)),
    ("finished", dict(finished=torch.ones(3, dtype=torch.bool))),
    (r"\(3, 1, 4\)", dict(x=normal(3, 1, 4))),
)


ROUTES = [[0, 2], [2, 1], [0, 1], [2, 0], [2, 1]]  # the experts of five tokens; expert 3 gets none


def routing():
    routing_map = torch.zeros(5, 4, dtype=torch.bool)
    for token, experts in enumerate(ROUTES):
        routing_map[token, experts] = True
    order = [
        (token, expert) for expert in range(4) for token in range(5) if routing_map[token, expert]
    ]
    return routing_map, order


def permute(tokens, routing_map, **arguments):
    return operators.npu_moe_token_permute_with_routing_map(
        tokens, routing_map, **arguments, num_out_tokens=int(routing_map.sum())
    )


def test_permuting_gives_each_expert_its_tokens():
    tokens, probs = normal(5, 3), normal(5, 4)
    routing_map, order = routing()
    permuted, permuted_probs, rows = permute(tokens, routing_map, probs=probs)
    assert torch.equal(permuted, torch.stack([tokens[token] for token, _ in order]))
    assert torch.equal(
        permuted_probs, torch.stack([probs[token, expert] for token, expert in order])
    )
    assert rows.dtype == torch.int32
    assert rows.tolist() == [
        order.index((token, expert)) for token in range(5) for expert in sorted(ROUTES[token])
    ]
    assert permute(tokens, routing_map)[1] is None


def test_permuting_refuses_tokens_with_different_numbers_of_experts():
    routing_map, _ = routing()
    with pytest.raises(ValueError, match="num_out_tokens is 5"):
        operators.npu_moe_token_permute_with_routing_map(normal(5, 3), routing_map)
    routing_map[0] = True
    with pytest.raises(ValueError, match=r"\[2, 4\] experts"):
        permute(normal(5, 3), routing_map)


@pytest.mark.parametrize("with_probs", [True, False])
def test_unpermuting_sums_over_the_experts_of_a_token(with_probs):
    rows, probs = normal(10, 3), normal(5, 4) if with_probs else None
    routing_map, order = routing()
    _, _, index = permute(normal(5, 3), routing_map)
    out, *_ = operators._npu_moe_token_unpermute_with_routing_map(
        rows, index, (5, 3), probs=probs, routing_map=routing_map
    )
    expected = np.zeros((5, 3))
    for row, (token, expert) in enumerate(order):
        expected[token] += wide(rows)[row] * (wide(probs)[token, expert] if with_probs else 1)
    np.testing.assert_allclose(wide(out), expected, rtol=1e-6, atol=1e-6)


def test_gradients_of_permuting_are_those_of_autograd():
    tokens, probs, routing_map = normal(5, 3, grad=True), normal(5, 4, grad=True), routing()[0]
    permuted, permuted_probs, index = permute(tokens, routing_map, probs=probs)
    directions = normal(10, 3, seed=1), normal(10)
    expected = torch.autograd.grad([permuted, permuted_probs], [tokens, probs], directions)
    got = operators.npu_moe_token_permute_with_routing_map_grad(
        *directions, index, routing_map, 4, 5
    )
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("with_probs", [True, False])
def test_gradients_of_unpermuting_are_those_of_autograd(with_probs):
    rows, probs, routing_map = (
        normal(10, 3, grad=True),
        normal(5, 4, grad=True) if with_probs else None,
        routing()[0],
    )
    _, _, index = permute(normal(5, 3), routing_map)
    out, index, token_id, _ = operators._npu_moe_token_unpermute_with_routing_map(
        rows, index, (5, 3), probs=probs, routing_map=routing_map
    )
    direction = normal(5, 3)
    inputs = [rows, probs] if with_probs else [rows]
    expected = torch.autograd.grad(out, inputs, direction)
    got = operators.npu_moe_token_unpermute_with_routing_map_grad(
        direction,
        index,
        token_id,
        routing_map=routing_map,
        permuted_tokens=rows.detach(),
        probs=None if probs is None else probs.detach(),
    )
    for ours, theirs in zip(got, expected):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
