"""NPU operators as plain torch functions: CANN's formulas, not its rounding.

Half precision inputs are computed in float32 and rounded once at the end, unless a docstring says
otherwise, because that is what CANN documents for its vector operators; the order of additions
inside a reduction is torch's. Every function is differentiable by autograd where the real operator
is. Names, argument order and defaults are torch_npu's (2.7.1), so that callers cannot tell. `RL`,
`LLM`, `MS` and `VA` in docstrings are MindSpeed-RL, MindSpeed-LLM, MindSpeed and vllm-ascend. Where
a contract was read: `op-plugin` is torch_npu's Ascend/op-plugin, branch 7.3.0 (torch_npu 2.7.1),
`ops-transformer` CANN's cann/ops-transformer at c29bc10 (November 2025, between CANN 8.3.RC1 and
8.5.0) or, with the year, a later state.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def _wide(x: Tensor) -> Tensor:
    """x in the dtype that the operator computes in: float32 for half precision, else its own."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def unwritten(like: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    """Memory that the real operator leaves as it was, on like's device: NaN, or the least integer,
    so that reading it is seen.

    >>> unwritten(torch.ones(1), 2), unwritten(torch.ones(1), 1, dtype=torch.int32)
    (tensor([nan, nan]), tensor([-2147483648], dtype=torch.int32))
    """
    dtype = dtype or like.dtype
    return like.new_full(
        shape, float("nan") if dtype.is_floating_point else torch.iinfo(dtype).min, dtype=dtype
    )


# Normalisation


def npu_rms_norm(x: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    """y = x * rstd * gamma with rstd = 1 / sqrt(mean(x^2) + epsilon) over the last dimensions,
    those of gamma.

    x * rstd is rounded to x's dtype before gamma multiplies it, as in HF, Megatron and vLLM.
    Caller: LLM core/models/common/rms_norm.py:49 (use_fused_rmsnorm), VA ops/layernorm.py:107.

    Returns:
        y, like x; rstd, float32 (float64 for float64 input), x's shape with dimensions of 1 for
        those of gamma.

    Raises:
        ValueError: gamma's shape is not the end of x's.
    """
    if not gamma.dim() or gamma.shape != x.shape[-gamma.dim() :]:
        raise ValueError(
            f"npu_rms_norm: gamma must have the shape of x's last dimensions {tuple(x.shape)}, not "
            f"{tuple(gamma.shape)}"
        )
    wide = _wide(x)
    rstd = torch.rsqrt(wide.square().mean(tuple(range(-gamma.dim(), 0)), keepdim=True) + epsilon)
    return ((wide * rstd).to(x.dtype) * gamma).to(x.dtype), rstd


def npu_add_rms_norm(
    x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6
) -> tuple[Tensor, Tensor, Tensor]:
    """x = x1 + x2, rounded to x1's dtype, then npu_rms_norm of it. Caller: VA ops/layernorm.py:66.

    Returns:
        y, rstd, x.
    """
    x = x1 + x2
    y, rstd = npu_rms_norm(x, gamma, epsilon)
    return y, rstd, x


# Activation and position


def npu_swiglu(x: Tensor, dim: int = -1) -> Tensor:
    """silu(a) * b with a, b the halves of x along dim. Caller: MS
    core/fusions/fused_bias_swiglu.py:5 (use_fused_swiglu).
    """
    a, b = _wide(x).chunk(2, dim)
    return (F.silu(a) * b).to(x.dtype)


def npu_rotary_mul(x: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half") -> Tensor:
    """x * r1 + rotate(x) * r2, r1 and r2 being cos and sin, broadcastable to x (..., D), D even.

    rotate of "half": (-x[D/2:], x[:D/2]); of "interleave": (-x1, x0, -x3, x2, ...).
    Caller: LLM core/models/common/embeddings/rotary_pos_embedding.py:213.

    Raises:
        NotImplementedError: another rotary_mode.
    """
    wide = _wide(x)
    if rotary_mode == "half":
        a, b = wide.chunk(2, -1)
        rotated = torch.cat((-b, a), -1)
    elif rotary_mode == "interleave":
        rotated = torch.stack((-wide[..., 1::2], wide[..., 0::2]), -1).flatten(-2)
    else:
        raise NotImplementedError(
            f"npu_rotary_mul: rotary_mode {rotary_mode!r} is not emulated, 'half' and 'interleave' "
            "are"
        )
    return (wide * r1 + rotated * r2).to(x.dtype)


def npu_rotary_position_embedding(x: Tensor, cos: Tensor, sin: Tensor, mode: int = 0) -> Tensor:
    """MindSpeed's own rope extension: mode 0 is npu_rotary_mul's "half", mode 1 its "interleave".

    Caller: LLM core/models/common/embeddings/rotary_pos_embedding.py:257
    (use_fused_rotary_pos_emb); its checks: MS ops/csrc/cann/npu_rotary_position_embedding.cpp:38.

    Raises:
        ValueError: x, cos or sin is not 4-dimensional, cos and sin differ in shape, or mode is
            neither 0 nor 1.
    """
    if (x.dim(), cos.dim(), sin.dim()) != (4, 4, 4) or cos.shape != sin.shape or mode not in (0, 1):
        raise ValueError(
            "npu_rotary_position_embedding wants 4-dimensional x, cos and sin, cos and sin of one "
            f"shape, and mode 0 or 1, not {tuple(x.shape)}, {tuple(cos.shape)}, "
            f"{tuple(sin.shape)}, mode {mode}"
        )
    return npu_rotary_mul(x, cos, sin, ("half", "interleave")[mode])


# Matrix multiplication of groups


def _group_bounds(group_list: Tensor | list[int], group_list_type: int) -> list[tuple[int, int]]:
    """First and last row + 1 of every group; group_list holds ends (type 0) or sizes (type 1)."""
    if group_list_type not in (0, 1):
        raise NotImplementedError(
            f"group_list_type {group_list_type} is not emulated: 0 (cumulative) and 1 (counts) are"
        )
    values = torch.as_tensor(group_list)
    ends = (values if group_list_type == 0 else values.cumsum(0)).tolist()
    bounds = list(zip([0, *ends], ends))
    if any(end < start for start, end in bounds):
        raise ValueError(
            f"a group of group_list {values.tolist()}, type {group_list_type}, has less than 0 rows"
        )
    return bounds


def _grouped_matmuls(
    x: Tensor, weight: Tensor | list[Tensor], group_list, group_type: int, group_list_type: int
) -> list[Tensor]:
    """The product of each group."""
    if group_type not in (0, 2):
        raise NotImplementedError(
            f"group_type {group_type} is not emulated: 0 (rows of x) and 2 (the summed dimension) "
            "are"
        )
    bounds = _group_bounds(group_list, group_list_type)
    rows = x.shape[0] if group_type == 0 else x.shape[1]
    if bounds[-1][1] > rows:
        raise ValueError(
            f"the groups end at row {bounds[-1][1]} of {rows}: group_list {group_list}, type "
            f"{group_list_type}"
        )
    if group_type == 0:
        return [x[start:end] @ w for (start, end), w in zip(bounds, weight, strict=True)]
    return [x[:, start:end] @ weight[start:end] for start, end in bounds]


def _grouped_matmul(
    x: Tensor, weight: Tensor | list[Tensor], group_list, group_type: int, group_list_type: int
) -> Tensor:
    """The products in one tensor."""
    products = _grouped_matmuls(x, weight, group_list, group_type, group_list_type)
    if group_type == 2:
        return torch.stack(products)
    rest = len(x) - sum(map(len, products))  # rows that belong to no group
    return torch.cat([*products, unwritten(products[0], rest, products[0].shape[-1])])


def npu_grouped_matmul(
    x: list[Tensor],
    weight: list[Tensor],
    *,
    bias=None,
    group_list: Tensor,
    split_item: int = 0,
    group_type: int | None = None,
    group_list_type: int = 0,
    act_type: int = 0,
    **unused,
) -> list[Tensor]:
    """One matrix product for each group of rows.

    group_type 0: x (T, K), weight (G, K, N) or G tensors (K, N), y[rows of g] = x[rows of g] @
    weight[g], (T, N). group_type 2: x (M, T), weight (T, N), y[g] = x[:, rows of g] @ weight[rows
    of g], (G, M, N). op-plugin docs/context/torch_npu-npu_grouped_matmul.md. It lets the groups end
    at T only; that they may end earlier and the rows after them are not written is from
    ops-transformer (2026) gmm/grouped_matmul/docs/ aclnnGroupedMatmulV5.md, and VA depends on it.
    So does it on one group with group_list_type 1, which op-plugin's page excludes and CANN's does
    not. Caller: VA ops/moe/moe_mlp.py:195,212, MS te/pytorch/module/grouped_linear.py:45, RL
    models/rollout/vllm_adapter/fused_moe.py:149.

    Args:
        group_list: int64 (G,), ends of the groups (group_list_type 0) or their sizes (1); a group
            may be empty.
        split_item: 2 or 3: one tensor, rows of no group unwritten.

    Raises:
        NotImplementedError: several x, a bias, an activation, a list as group_list or any other
            argument that is not None.
        ValueError: no group_type, group_list not int64 or not of G groups within T rows, another
            split_item.
    """
    given = sorted(
        name
        for name, value in {"bias": bias, "act_type": act_type or None, **unused}.items()
        if value is not None
    )
    if given or len(x) != 1 or not isinstance(group_list, Tensor):
        raise NotImplementedError(
            "npu_grouped_matmul is emulated for one x and a tensor group_list, without "
            f"{', '.join(given) or 'more of them'}"
        )
    if group_type is None or split_item not in (2, 3) or group_list.dtype != torch.int64:
        raise ValueError(
            "npu_grouped_matmul wants a group_type, a split_item of 2 or 3 and an int64 "
            f"group_list, not {group_type}, {split_item}, {group_list.dtype}"
        )
    arguments = (
        x[0],
        weight[0] if len(weight) == 1 else weight,
        group_list,
        group_type,
        group_list_type,
    )
    return [_grouped_matmul(*arguments)]


def npu_gmm(x, weight, bias, group_list, group_type=0, group_list_type=0) -> list[Tensor]:
    """The forward of MindSpeed's compiled extension grouped_matmul(_v2): lists of one tensor in and
    out, formulas as npu_grouped_matmul's.

    Caller: MS ops/gmm.py:33,35; source: MS ops/csrc/cann/gmm.cpp. Its backward is npu_gmm_backward,
    called by MindSpeed's own autograd function.
    """
    if bias or len(x) != 1 or len(weight) != 1:
        raise NotImplementedError("npu_gmm is emulated for one x and one weight, without bias")
    return [_grouped_matmul(x[0], weight[0], group_list, group_type, group_list_type)]


def npu_gmm_backward(
    grad, x, weight, group_list, group_list_type=0
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Gradients of npu_gmm (group_type 0): dx[g] = grad[g] @ weight[g]^T, dweight[g] = x[g]^T @
    grad[g].

    Caller: MS ops/gmm.py:92,95.

    Returns:
        [dx], [dweight], [] (there is no bias).
    """
    dx = _grouped_matmul(grad[0], weight[0].transpose(-1, -2), group_list, 0, group_list_type)
    dweight = _grouped_matmul(x[0].t(), grad[0], group_list, 2, group_list_type)
    return [dx], [dweight.reshape(weight[0].shape)], []


def npu_gmm_backward_fusion(
    grad, weight, group_list, group_list_type=0
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """dx of npu_gmm_backward alone; npu_groupmatmul_add_fp32 adds the weight's gradient in place.
    Caller: MS ops/gmm.py:58,63.
    """
    return (
        [_grouped_matmul(grad[0], weight[0].transpose(-1, -2), group_list, 0, group_list_type)],
        [],
        [],
    )


def npu_groupmatmul_add_fp32(x: Tensor, dy: Tensor, group_list: Tensor, grad: Tensor) -> None:
    """grad[g] += x[g]^T @ dy[g] in place, in float32; group_list is cumulative. Caller: MS
    ops/npu_groupmatmul_add.py:14.
    """
    product = _grouped_matmul(x.float().t(), dy.float(), group_list, 2, 0)
    grad.add_(product.reshape(grad.shape))


def npu_matmul_add_fp32(dy: Tensor, x: Tensor, grad: Tensor) -> None:
    """grad += dy^T @ x in place, summed in float32. Caller: MS ops/npu_matmul_add.py:24 (gradient
    accumulation fusion).
    """
    grad.add_((dy.float().t() @ x.float()).reshape(grad.shape))


def _npu_matmul_add_fp32(x: Tensor, weight: Tensor, c: Tensor) -> None:
    """c += x^T @ weight in place, x (T, K) and weight (T, N) of half precision, c (K, N) float32
    (op-plugin op_plugin/ops/atb/LinearAtb.cpp:23, test/test_custom_ops/test_atb_linear.py). Caller:
    VA worker_v1.py:335.
    """
    npu_matmul_add_fp32(x, weight, c)


# Mixture of experts


def npu_moe_gating_top_k_softmax(
    x: Tensor, finished: Tensor | None = None, k: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """The k largest softmax probabilities of router logits x (T, E), the first of equal ones.

    op-plugin docs/context/torch_npu-npu_moe_gating_top_k_softmax.md; equal ones:
    test/test_custom_ops/test_npu_moe_gating_top_k_softmax.py (a stable sort). Caller: VA
    ops/moe/experts_selector.py:199.

    Returns:
        probabilities (T, k), rounded to x's dtype; experts (T, k), int32; row_idx (T, k), int32:
        column-major numbering.

    Raises:
        NotImplementedError: finished, x of three dimensions.
        ValueError: k that is not in [0, E].
    """
    if x.dim() != 2 or finished is not None:
        raise NotImplementedError(
            "npu_moe_gating_top_k_softmax is emulated for x (T, E) without finished, not "
            f"{tuple(x.shape)}"
        )
    if not 0 <= k <= x.shape[1]:
        raise ValueError(f"npu_moe_gating_top_k_softmax: k is {k}, it must be in [0, {x.shape[1]}]")
    weights, experts = _wide(x).softmax(-1).sort(dim=-1, descending=True, stable=True)
    weights = weights[:, :k]
    experts = experts[:, :k]
    rows = torch.arange(x.shape[0] * k, dtype=torch.int32).view(k, -1).t()
    return weights.to(x.dtype), experts.int(), rows.contiguous()


def npu_moe_token_permute_with_routing_map(
    tokens: Tensor,
    routing_map: Tensor,
    *,
    probs: Tensor | None = None,
    num_out_tokens: int | None = None,
    drop_and_pad: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Each token once for every expert that it goes to, ordered by expert, then by token.

    op-plugin test/test_custom_ops/test_npu_moe_token_permute_with_routing_map.py and
    op_plugin/ops/opapi/MoeTokenPermuteWithRoutingMapOpApi.cpp; there is no page. Caller: MS
    te/pytorch/permutation.py:24 (moe_permute_fusion), as Megatron's unfused permute in
    moe_utils.py.

    Args:
        tokens: (T, H). routing_map: (T, E), True where a token goes to an expert. probs: (T, E).
        num_out_tokens: T * K, K being the experts of a token, the same for every token; None means
            T.

    Returns:
        (T * K, H); the probabilities (T * K,) or None; int32 (T * K,): the row of each token's
        first, second, ... expert, token by token.

    Raises:
        NotImplementedError: drop_and_pad.
        ValueError: a token has other than num_out_tokens / T experts.
    """
    _refuse_drop_and_pad(drop_and_pad)
    wanted = len(tokens) if num_out_tokens is None else int(num_out_tokens)
    chosen = routing_map.bool().sum(1)
    if wanted != chosen.sum() or (len(chosen) and (chosen != chosen[0]).any()):
        raise ValueError(
            f"npu_moe_token_permute_with_routing_map: num_out_tokens is {wanted}, the tokens have "
            f"{sorted(set(chosen.tolist()))} experts: CANN takes num_out_tokens / T of each"
        )
    experts, rows = routing_map.bool().t().nonzero(as_tuple=True)
    return (
        tokens[rows],
        None if probs is None else probs[rows, experts],
        rows.argsort(stable=True).int(),
    )


def npu_moe_token_permute_with_routing_map_grad(
    grad: Tensor,
    probs_grad: Tensor | None,
    sorted_indices: Tensor,
    routing_map: Tensor,
    num_experts: int,
    num_tokens: int,
    drop_and_pad: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Gradients of npu_moe_token_permute_with_routing_map for tokens and probs. Caller: MS
    te/pytorch/permutation.py:53.
    """
    _refuse_drop_and_pad(drop_and_pad)
    tokens_grad = _sum_by_token(grad, sorted_indices, num_tokens)
    if probs_grad is None or probs_grad.numel() == 0:
        return tokens_grad, None
    by_expert = torch.zeros(num_experts, num_tokens, dtype=probs_grad.dtype)
    return tokens_grad, by_expert.masked_scatter(routing_map.bool().t(), probs_grad).t()


def _npu_moe_token_unpermute_with_routing_map(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    restore_shape,
    *,
    probs: Tensor | None = None,
    routing_map: Tensor | None = None,
    drop_and_pad: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The sum of each token's permuted rows, weighted by probs (T, E) if given. op-plugin
    test/test_custom_ops/test_npu_moe_token_unpermute_with_routing_map.py. Caller: MS
    te/pytorch/permutation.py:85.

    Returns:
        restore_shape (T, H); sorted_indices twice, for the gradient; the permuted probabilities or
        None.
    """
    _refuse_drop_and_pad(drop_and_pad)
    weights = None if probs is None else probs.t()[routing_map.bool().t()]
    rows = (
        permuted_tokens if weights is None else permuted_tokens.float() * weights.float()[:, None]
    )
    return (
        _sum_by_token(rows, sorted_indices, restore_shape[0]).to(permuted_tokens.dtype),
        sorted_indices,
        sorted_indices,
        weights,
    )


def npu_moe_token_unpermute_with_routing_map_grad(
    grad: Tensor,
    out_index: Tensor,
    permuted_token_id: Tensor,
    *,
    routing_map: Tensor | None = None,
    permuted_tokens: Tensor | None = None,
    probs: Tensor | None = None,
    drop_and_pad: bool = False,
    restore_shape=None,
) -> tuple[Tensor, Tensor | None]:
    """Its gradients for permuted_tokens and probs. Caller: MS te/pytorch/permutation.py:120,134."""
    _refuse_drop_and_pad(drop_and_pad)
    of_row = out_index.argsort() // max(
        1, len(out_index) // max(1, len(grad))
    )  # the token of each row
    rows_grad = grad[of_row]
    if probs is None:
        return rows_grad, None
    weights = probs.t()[routing_map.bool().t()]
    weights_grad = (rows_grad.float() * permuted_tokens.float()).sum(-1).to(probs.dtype)
    by_expert = torch.zeros(probs.shape[::-1], dtype=probs.dtype)
    probs_grad = by_expert.masked_scatter(routing_map.bool().t(), weights_grad).t()
    return (rows_grad.float() * weights.float()[:, None]).to(grad.dtype), probs_grad


def _sum_by_token(rows: Tensor, sorted_indices: Tensor, num_tokens: int) -> Tensor:
    """(T, H): the sum, in float32, of the rows that sorted_indices gives each token."""
    per_token = len(sorted_indices) // max(1, num_tokens)
    by_token = _wide(rows)[sorted_indices.long()].view(num_tokens, per_token, rows.shape[1])
    return by_token.sum(1).to(rows.dtype)


def _refuse_drop_and_pad(drop_and_pad: bool) -> None:
    if drop_and_pad:
        raise NotImplementedError(
            "permutation with drop_and_pad (moe_pad_expert_input_to_capacity) is not emulated"
        )
