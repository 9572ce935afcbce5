"""NPU operators as plain torch functions: CANN's formulas, not its rounding.

Half precision inputs are computed in float32 and rounded once at the end, unless a docstring says otherwise, because
that is what CANN documents for its vector operators; the order of additions inside a reduction is torch's. Every
function is differentiable by autograd where the real operator is. Names, argument order and defaults are torch_npu's
(2.7.1), so that callers cannot tell. `RL`, `LLM`, `MS` and `VA` in docstrings are MindSpeed-RL, MindSpeed-LLM,
MindSpeed and vllm-ascend.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def _wide(x: Tensor) -> Tensor:
    """x in the dtype that the operator computes in: float32 for half precision, else its own."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


# Normalisation


def npu_rms_norm(x: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    """y = x * rstd * gamma with rstd = 1 / sqrt(mean(x^2) + epsilon) over the last dimension.

    x * rstd is rounded to x's dtype before gamma multiplies it, as in HF, Megatron and vLLM.
    Caller: LLM core/models/common/rms_norm.py:49 (use_fused_rmsnorm), VA ops/layernorm.py:107.

    Returns:
        y, like x; rstd, float32 (float64 for float64 input), x's shape with a last dimension of 1.
    """
    wide = _wide(x)
    rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return ((wide * rstd).to(x.dtype) * gamma).to(x.dtype), rstd


def npu_add_rms_norm(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor, Tensor]:
    """x = x1 + x2, rounded to x1's dtype, then npu_rms_norm of it. Caller: VA ops/layernorm.py:66.

    Returns:
        y, rstd, x.
    """
    x = x1 + x2
    y, rstd = npu_rms_norm(x, gamma, epsilon)
    return y, rstd, x


# Activation and position


def npu_swiglu(x: Tensor, dim: int = -1) -> Tensor:
    """silu(a) * b with a, b the halves of x along dim. Caller: MS core/fusions/fused_bias_swiglu.py:5
    (use_fused_swiglu)."""
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
            f"npu_rotary_mul: rotary_mode {rotary_mode!r} is not emulated, 'half' and 'interleave' are")
    return (wide * r1 + rotated * r2).to(x.dtype)


def npu_rotary_position_embedding(x: Tensor, cos: Tensor, sin: Tensor, mode: int = 0) -> Tensor:
    """MindSpeed's own rope extension: mode 0 is npu_rotary_mul's "half", mode 1 its "interleave".

    Caller: LLM core/models/common/embeddings/rotary_pos_embedding.py:257 (use_fused_rotary_pos_emb);
    its checks: MS ops/csrc/cann/npu_rotary_position_embedding.cpp:38.

    Raises:
        ValueError: x, cos or sin is not 4-dimensional, cos and sin differ in shape, or mode is neither 0 nor 1.
    """
    if (x.dim(), cos.dim(), sin.dim()) != (4, 4, 4) or cos.shape != sin.shape or mode not in (0, 1):
        raise ValueError(
            "npu_rotary_position_embedding wants 4-dimensional x, cos and sin, cos and sin of one shape, and mode 0 "
            f"or 1, not {tuple(x.shape)}, {tuple(cos.shape)}, {tuple(sin.shape)}, mode {mode}"
        )
    return npu_rotary_mul(x, cos, sin, ("half", "interleave")[mode])


# Matrix multiplication of groups


def _group_bounds(group_list: Tensor | list[int], group_list_type: int) -> list[tuple[int, int]]:
    """First and last row + 1 of every group; group_list holds ends (type 0) or sizes (type 1)."""
    if group_list_type not in (0, 1):
        raise NotImplementedError(
            f"group_list_type {group_list_type} is not emulated: 0 (cumulative) and 1 (counts) are")
    values = torch.as_tensor(group_list)
    ends = (values if group_list_type == 0 else values.cumsum(0)).tolist()
    return list(zip([0, *ends], ends))


def _grouped_matmul(x: Tensor, weight: Tensor | list[Tensor], group_list, group_type: int,
                    group_list_type: int) -> Tensor:
    if group_type not in (0, 2):
        raise NotImplementedError(
            f"group_type {group_type} is not emulated: 0 (rows of x) and 2 (the summed dimension) are")
    bounds = _group_bounds(group_list, group_list_type)
    rows = x.shape[0] if group_type == 0 else x.shape[1]
    if bounds[-1][1] > rows:
        raise ValueError(
            f"the groups end at row {bounds[-1][1]} of {rows}: group_list {group_list}, type {group_list_type}")
    if group_type == 0:
        parts = [x[start:end] @ w for (start, end), w in zip(bounds, weight, strict=True)]
        rest = x.new_zeros(rows - bounds[-1][1], parts[0].shape[-1])  # rows that belong to no group
        return torch.cat([*parts, rest])
    return torch.stack([x[:, start:end] @ weight[start:end] for start, end in bounds])


def npu_grouped_matmul(
    x: list[Tensor],
    weight: list[Tensor],
    *,
    bias=None,
    group_list: Tensor | list[int],
    split_item: int = 0,
    group_type: int = 0,
    group_list_type: int = 0,
    **unused,
) -> list[Tensor]:
    """One matrix product for each group of rows.

    group_type 0: x (T, K), weight (G, K, N) or G tensors (K, N), y[rows of g] = x[rows of g] @ weight[g], (T, N).
    group_type 2: x (M, T), weight (T, N), y[g] = x[:, rows of g] @ weight[rows of g], (G, M, N).
    Caller: RL models/rollout/vllm_adapter/fused_moe.py:149, VA ops/moe/moe_mlp.py, MS
    te/pytorch/module/grouped_linear.py:45.

    Args:
        group_list: ends of the groups (group_list_type 0) or their sizes (1); a group may be empty.

    Raises:
        NotImplementedError: several x, a bias or any other argument that is not None.
    """
    given = sorted(name for name, value in {"bias": bias, **unused}.items() if value is not None)
    if given or len(x) != 1:
        raise NotImplementedError(
            f"npu_grouped_matmul is emulated for one x, without {', '.join(given) or 'more of them'}")
    return [_grouped_matmul(x[0], weight[0] if len(weight) == 1 else weight, group_list, group_type, group_list_type)]


def npu_gmm(x, weight, bias, group_list, group_type=0, group_list_type=0) -> list[Tensor]:
    """The forward of MindSpeed's compiled extension grouped_matmul(_v2): lists of one tensor in and out, see
    npu_grouped_matmul.

    Caller: MS ops/gmm.py:33,35; source: MS ops/csrc/cann/gmm.cpp. Its backward is npu_gmm_backward, called by
    MindSpeed's own autograd function.
    """
    return npu_grouped_matmul(
        x, weight, bias=bias or None, group_list=group_list, group_type=group_type, group_list_type=group_list_type
    )


def npu_gmm_backward(grad, x, weight, group_list, group_list_type=0) -> tuple[list[Tensor], list[Tensor],
                     list[Tensor]]:
    """Gradients of npu_gmm (group_type 0): dx[g] = grad[g] @ weight[g]^T, dweight[g] = x[g]^T @ grad[g].

    Caller: MS ops/gmm.py:92,95.

    Returns:
        [dx], [dweight], [] (there is no bias).
    """
    dx = _grouped_matmul(grad[0], weight[0].transpose(-1, -2), group_list, 0, group_list_type)
    dweight = _grouped_matmul(x[0].t(), grad[0], group_list, 2, group_list_type)
    return [dx], [dweight.reshape(weight[0].shape)], []


def npu_gmm_backward_fusion(grad, weight, group_list, group_list_type=0) -> tuple[list[Tensor], list[Tensor],
                            list[Tensor]]:
    """dx of npu_gmm_backward alone; npu_groupmatmul_add_fp32 adds the weight's gradient in place. Caller: MS
    ops/gmm.py:58,63."""
    return [_grouped_matmul(grad[0], weight[0].transpose(-1, -2), group_list, 0, group_list_type)], [], []


def npu_groupmatmul_add_fp32(x: Tensor, dy: Tensor, group_list: Tensor, grad: Tensor) -> None:
    """grad[g] += x[g]^T @ dy[g] in place, in float32; group_list is cumulative. Caller: MS
    ops/npu_groupmatmul_add.py:14."""
    product = _grouped_matmul(x.float().t(), dy.float(), group_list, 2, 0)
    grad.add_(product.reshape(grad.shape))


def npu_matmul_add_fp32(dy: Tensor, x: Tensor, grad: Tensor) -> None:
    """grad += dy^T @ x in place, summed in float32. Caller: MS ops/npu_matmul_add.py:24 (gradient accumulation
    fusion)."""
    grad.add_((dy.float().t() @ x.float()).reshape(grad.shape))


# Mixture of experts


def npu_moe_gating_top_k_softmax(x: Tensor, finished=None, k: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """The k largest softmax probabilities of router logits x (T, E). Caller: VA ops/moe/experts_selector.py.

    Returns:
        probabilities (T, k), rounded to x's dtype; experts (T, k), int32; row_idx (T, k), int32: column-major
        numbering.
    """
    if finished is not None:
        raise NotImplementedError("npu_moe_gating_top_k_softmax is emulated for finished=None")
    weights, experts = _wide(x).softmax(-1).topk(k, -1)
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

    Caller: MS te/pytorch/permutation.py:24 (moe_permute_fusion), as Megatron's unfused permute in moe_utils.py.

    Args:
        tokens: (T, H). routing_map: (T, E), True where a token goes to an expert. probs: (T, E).

    Returns:
        (T', H); the probabilities (T',) or None; for each of the T' rows its token, int64. On an NPU the third has
        another
        meaning: it is only for the functions below.

    Raises:
        NotImplementedError: drop_and_pad.
    """
    _refuse_drop_and_pad(drop_and_pad)
    experts, rows = routing_map.bool().t().nonzero(as_tuple=True)
    return tokens[rows], None if probs is None else probs[rows, experts], rows


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
    te/pytorch/permutation.py:53."""
    _refuse_drop_and_pad(drop_and_pad)
    tokens_grad = _sum_rows(grad, sorted_indices, num_tokens)
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
    """The sum of each token's permuted rows, weighted by probs (T, E) if given. Caller: MS
    te/pytorch/permutation.py:85.

    Returns:
        restore_shape (T, H); sorted_indices twice, for the gradient; the permuted probabilities or None.
    """
    _refuse_drop_and_pad(drop_and_pad)
    weights = None if probs is None else probs.t()[routing_map.bool().t()]
    rows = permuted_tokens if weights is None else permuted_tokens.float() * weights.float()[:, None]
    return _sum_rows(rows, sorted_indices,
                     restore_shape[0]).to(permuted_tokens.dtype), sorted_indices, sorted_indices, weights


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
    rows_grad = grad[out_index]
    if probs is None:
        return rows_grad, None
    weights = probs.t()[routing_map.bool().t()]
    weights_grad = (rows_grad.float() * permuted_tokens.float()).sum(-1).to(probs.dtype)
    by_expert = torch.zeros(probs.shape[::-1], dtype=probs.dtype)
    probs_grad = by_expert.masked_scatter(routing_map.bool().t(), weights_grad).t()
    return (rows_grad.float() * weights.float()[:, None]).to(grad.dtype), probs_grad


def _sum_rows(rows: Tensor, index: Tensor, count: int) -> Tensor:
    """out[index[i]] += rows[i], (count, H), summed in float32."""
    return torch.zeros(count, rows.shape[1], dtype=_wide(rows).dtype).index_add(0, index, _wide(rows)).to(rows.dtype)


def _refuse_drop_and_pad(drop_and_pad: bool) -> None:
    if drop_and_pad:
        raise NotImplementedError("permutation with drop_and_pad (moe_pad_expert_input_to_capacity) is not emulated")
