"""The operators around vllm-ascend's experts that do not communicate: rows sorted by expert and
brought back.

Abbreviations are those of operators.py. The experts themselves are its npu_grouped_matmul and
npu_swiglu, the routing its npu_moe_gating_top_k_softmax; mc2.py has the operators that communicate.
"""

import torch
from torch import Tensor

from mindspeed_qerl.emulation.operators import unwritten


def refuse(operator: str, **arguments: tuple) -> None:
    """Raise NotImplementedError for the first of `argument=(its value, the values that are
    emulated)` to differ.

    >>> refuse("npu_x", mode=(0, (0, 1)))
    >>> refuse("npu_x", mode=(2, (0, 1)))
    Traceback (most recent call last):
    NotImplementedError: npu_x: mode 2 is not emulated, only 0, 1
    """
    for name, (value, emulated) in arguments.items():
        if not any(
            value is one or (not isinstance(value, Tensor) and value == one) for one in emulated
        ):
            given = f"{tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
            raise NotImplementedError(
                f"{operator}: {name} {given} is not emulated, only {', '.join(map(repr, emulated))}"
            )


def check_dtype(operator: str, dtype: torch.dtype, **tensors: Tensor) -> None:
    """Raise ValueError for the first tensor of another dtype, which CANN refuses."""
    for name, tensor in tensors.items():
        if tensor.dtype != dtype:
            raise ValueError(f"{operator}: {name} is {tensor.dtype}, it must be {dtype}")


def npu_moe_init_routing_v2(
    x: Tensor,
    expert_idx: Tensor,
    *,
    scale: Tensor | None = None,
    offset: Tensor | None = None,
    active_num: int = -1,
    expert_capacity: int = -1,
    expert_num: int = -1,
    drop_pad_mode: int = 0,
    expert_tokens_num_type: int = 0,
    expert_tokens_num_flag: bool = False,
    quant_mode: int = 0,
    active_expert_range=(),
    row_idx_type: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A copy of a token's row for each of its K experts in active_expert_range, sorted by expert,
    then as they came.

    op-plugin docs/context/torch_npu-npu_moe_init_routing_v2.md and its defaults, quant_mode among
    them, which the page says is not supported. Two things that it does not say: in ops-transformer
    moe/moe_init_routing_v3/op_kernel/moe_v3_gather_out.h the rows after the A active ones are not
    written, and active_num -1 is taken (op_host/moe_init_routing_v3_tiling.cpp:324). Caller: VA
    ops/moe/token_dispatcher.py:367.

    Left out: for 128 experts, all active, and H of 2048 torch_npu 2.7.1 calls aclnnMoeInitRoutingV2
    and the third and fourth result are int32
    (op_plugin/ops/opapi/MoeInitRoutingV2KernelNpuOpApi.cpp:67-97); the caller converts.

    Args:
        x: (T, H). expert_idx: int32 (T, K), in [0, expert_num).
        active_num: T * K or -1; expert_capacity is not used.
        active_expert_range: the first expert and the last + 1.

    Returns:
        (T * K, H): A rows, the rest unwritten;
        int32 (T * K,): for each of a token's experts, token by token, its row, -1 outside the range;
        int64 (experts in the range,): rows of each;
        float32 (T * K,): unwritten.

    Raises:
        NotImplementedError: quantization, scale, drop_pad_mode 1, expert_tokens_num_type 0 (a sum)
            or 2 (pairs), no expert_tokens_num_flag, row_idx_type 1 (places of rows).
        ValueError: another active_num, a range or an expert outside [0, expert_num), shapes or
            dtypes that differ.
    """
    operator = "npu_moe_init_routing_v2"
    refuse(
        operator,
        scale=(scale, (None,)),
        offset=(offset, (None,)),
        drop_pad_mode=(drop_pad_mode, (0,)),
        expert_tokens_num_type=(expert_tokens_num_type, (1,)),
        expert_tokens_num_flag=(expert_tokens_num_flag, (True,)),
        quant_mode=(quant_mode, (-1,)),
        row_idx_type=(row_idx_type, (0,)),
    )
    check_dtype(operator, torch.int32, expert_idx=expert_idx)
    if x.dim() != 2 or expert_idx.dim() != 2 or len(x) != len(expert_idx):
        raise ValueError(
            f"{operator}: x {tuple(x.shape)} and expert_idx {tuple(expert_idx.shape)} must be "
            "matrices of equally many rows"
        )
    total = expert_idx.numel()
    k = expert_idx.shape[1]
    if active_num not in (-1, total):
        raise ValueError(
            f"{operator}: active_num is {active_num}, it must be {total} (rows of x * K) or -1"
        )
    if (
        len(active_expert_range) != 2
        or not 0 <= active_expert_range[0] < active_expert_range[1] <= expert_num
    ):
        raise ValueError(
            f"{operator}: active_expert_range is {list(active_expert_range)}, it must be a first "
            f"expert and a last + 1 within [0, {expert_num}]"
        )

    experts = expert_idx.flatten().long()
    if ((experts < 0) | (experts >= expert_num)).any():
        raise ValueError(f"{operator}: expert_idx has an expert outside [0, {expert_num})")
    first, last = active_expert_range
    active = (experts >= first) & (experts < last)
    place = experts.masked_fill(~active, expert_num).argsort(stable=True)[: active.sum()]

    expanded_x = unwritten(x, total, x.shape[1])
    expanded_scale = unwritten(x, total, dtype=torch.float32)
    expanded_x[: len(place)] = x[place // k]
    row_idx = torch.full_like(expert_idx, -1).flatten()
    row_idx[place] = torch.arange(len(place), dtype=torch.int32)
    counts = torch.bincount(experts[active] - first, minlength=last - first)
    return expanded_x, row_idx, counts, expanded_scale


def npu_moe_token_permute(
    tokens: Tensor, indices: Tensor, num_out_tokens: int | None = None, padded_mode: bool = False
) -> tuple[Tensor, Tensor]:
    """A copy of a token's row for each of its K experts, sorted by expert, then as they came.

    op-plugin has no page; op_plugin/config/op_plugin_functions.yaml,
    op_plugin/utils/KernelNpuOutputSize.cpp:2084 and
    test/test_custom_ops/test_npu_moe_token_permute_and_unpermute.py, and ops-transformer (2026)
    moe/moe_token_permute/docs/aclnnMoeTokenPermute.md. Caller: VA
    ops/moe/token_dispatcher.py:605,697.

    Args:
        tokens: (T, H). indices: int32 or int64, (T, K) or (T,).
        num_out_tokens: how many of the sorted rows are returned, if negative how many are not;
            None, 0: all.

    Returns:
        the sorted rows; int32 (T * K,): for each of a token's experts, token by token, its row.

    Raises:
        NotImplementedError: padded_mode.
        ValueError: shapes or dtypes that differ.
    """
    refuse("npu_moe_token_permute", padded_mode=(padded_mode, (False,)))
    if (
        tokens.dim() != 2
        or indices.dim() not in (1, 2)
        or len(tokens) != len(indices)
        or indices.dtype not in (torch.int32, torch.int64)
    ):
        raise ValueError(
            "npu_moe_token_permute wants tokens (T, H) and int32 or int64 indices (T, K) or (T,), "
            f"not {tuple(tokens.shape)} and {indices.dtype} {tuple(indices.shape)}"
        )
    k = indices.shape[1] if indices.dim() == 2 else 1
    place = indices.flatten().argsort(stable=True)
    kept = place[: num_out_tokens or None]
    return tokens[kept // k], place.argsort().int()


def npu_moe_token_unpermute(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    probs: Tensor | None = None,
    padded_mode: bool = False,
    restore_shape=None,
) -> Tensor:
    """For each token the sum of its K rows, weighted by probs if given; computed in float32,
    rounded once.

    op-plugin has no page; its sources are npu_moe_token_permute's, and ops-transformer (2026)
    moe/moe_token_unpermute/docs/aclnnMoeTokenUnpermute.md, which wants the indices to differ. What
    is not written there and VA depends on is from the kernel, the same in CANN 8.1.RC1 and
    ops-transformer (moe/moe_token_unpermute/op_kernel/moe_token_unpermute.h): an index may occur
    twice; a row is not read where its weight is 0, NaN or not, or its index is not below the number
    of rows. Caller: VA ops/moe/token_dispatcher.py:390,705,712.

    Args:
        permuted_tokens: (rows, H). sorted_indices: int32 (T * K,), the row of each of a token's
            experts, token by token. probs: (T, K), floating; None means K = 1 and no weights.
            restore_shape is for padded_mode.

    Returns:
        (T, H), permuted_tokens' dtype.

    Raises:
        NotImplementedError: padded_mode.
        ValueError: a negative index with a weight, where a box reads outside the tensor; shapes or
            dtypes that differ.
    """
    operator = "npu_moe_token_unpermute"
    refuse(operator, padded_mode=(padded_mode, (False,)))
    check_dtype(operator, torch.int32, sorted_indices=sorted_indices)
    shapes = {
        "permuted_tokens": permuted_tokens.dim() == 2,
        "sorted_indices": sorted_indices.dim() == 1,
        "probs": probs is None or (probs.dim() == 2 and probs.numel() == sorted_indices.numel()),
    }
    if not all(shapes.values()):
        wrong = ", ".join(name for name, right in shapes.items() if not right)
        raise ValueError(
            f"{operator} wants (rows, H), (T * K,), (T, K), not {tuple(permuted_tokens.shape)}, "
            f"{tuple(sorted_indices.shape)}, {None if probs is None else tuple(probs.shape)}: "
            f"{wrong}"
        )
    index = sorted_indices.long()
    read = index < len(permuted_tokens)
    if probs is not None:
        read = read & (probs.flatten() != 0)
    if (index[read] < 0).any():
        raise ValueError(
            f"{operator}: sorted_indices has {index[read].min().item()}, it must not be negative"
        )
    wide = torch.promote_types(permuted_tokens.dtype, torch.float32)
    rows = torch.zeros(
        len(index), permuted_tokens.shape[1], dtype=wide, device=permuted_tokens.device
    )
    rows = rows.masked_scatter(read[:, None], permuted_tokens[index[read]].to(wide))
    if probs is not None:
        rows = (rows.view(*probs.shape, rows.shape[1]) * probs.to(wide)[..., None]).sum(1)
    return rows.to(permuted_tokens.dtype)
