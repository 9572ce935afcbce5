"""MC2: the operators that send rows to the ranks of their experts and bring the results back, and a
product that is summed and shared out over ranks, on gloo.

They are told their process group by its HCCL name; `register_group` says which group a name means.
Abbreviations are those of operators.py. Of the documented limits those are checked that a model for
tests can keep; left out are

| limit | why |
|---|---|
| H: 1024 to 8192 on A3; up to 7168, a multiple of 32, on A2 | a model for tests is smaller |
| at least 2 ranks, on A2 16 in CANN 8.3.RC1 and 8.5.0 | so is the number of processes |
| x of bfloat16 or float16 | float32 tells an error from a rounding |
| A2: BS <= 256, E <= 512, at most 24 experts of a rank | the operators do not know which device is emulated |
| HCCL_BUFFSIZE holds the windows of all ranks | a property of the group; tests are far from its 200 MB |
| a token's K experts differ | VA's profile run draws them with repetition (ops/common_fused_moe.py:135) |
| k from 256 in a product | a model for tests is smaller |
| group_tp is not group_ep on A3 | VA passes one name for both (ops/moe/token_dispatcher.py:144) |
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from mindspeed_qerl.emulation.contract import HALF, require_dtype
from mindspeed_qerl.emulation.experts import check_dtype, refuse
from mindspeed_qerl.emulation.operators import unwritten

MAX_BS = 512
MAX_K = 16
MAX_EXPERTS = 1024
INFO = 128  # numbers in assist_info_for_combine for each row

_groups = {}


def register_group(name: str, group) -> None:
    """From now on `name` means `group`, a torch.distributed.ProcessGroup or a backend of one, such
    as ProcessGroupGloo.
    """
    _groups[name] = group


def npu_moe_distribute_dispatch_v2(
    x: Tensor,
    expert_ids: Tensor,
    group_ep: str,
    ep_world_size: int,
    ep_rank_id: int,
    moe_expert_num: int,
    *,
    scales=None,
    x_active_mask: Tensor | None = None,
    expert_scales=None,
    elastic_info=None,
    performance_info=None,
    group_tp: str = "",
    tp_world_size: int = 0,
    tp_rank_id: int = 0,
    expert_shard_type: int = 0,
    shared_expert_num: int = 1,
    shared_expert_rank_num: int = 0,
    quant_mode: int = 0,
    global_bs: int = 0,
    expert_token_nums_type: int = 1,
    comm_alg: str = "",
    zero_expert_num: int = 0,
    copy_expert_num: int = 0,
    const_expert_num: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Send each token's row to the ranks of its K experts. Every rank of the group has to call it.

    op-plugin docs/context/torch_npu-npu_moe_distribute_dispatch_v2.md; shapes, and that the outputs
    which the page calls None are allocated:
    op_plugin/ops/opapi/MoeDistributeDispatchV2KernelOpApi.cpp; the order of the rows:
    ops-transformer mc2/moe_distribute_dispatch_v2/op_kernel/moe_distribute_dispatch_v2.h. Rank r
    has the experts from r * L on, L = moe_expert_num / ep_world_size. Caller: VA
    ops/moe/token_dispatcher.py:189.

    Args:
        x: (BS, H), BS in [1, 512]. expert_ids: int32 (BS, K), K <= 16, in [0, moe_expert_num) where
            active.
        x_active_mask: bool (BS,), False for the last tokens only, or (BS, K): what is sent.
        global_bs: the largest BS of a rank * ep_world_size; 0 if BS is the same on all.
        expert_token_nums_type: 0: sums, 1: counts.
        group_tp, tp_rank_id: unused without tensor parallelism.

    Returns:
        expand_x: (A, H), A = global_bs * min(L, K): the rows, by expert, then by rank, then by
            token; the rest unwritten.
        dynamic_scales: float32 (A,), unwritten.
        assist_info_for_combine: int32 (max(BS * K, A * 128),), for the combine only; documented to
            differ with version and device. Here: 128 numbers for each row, the first three its
            rank, token and place in K.
        expert_token_nums: int64 (L,), rows of each expert.
        ep_recv_counts: int32 (ep_world_size * L,), rows of each expert from each rank, summed up.
        tp_recv_counts: int32 (tp_world_size,), unwritten.
        expand_scales: float32 (A,), unwritten.

    Raises:
        NotImplementedError: quantization, expert_scales (communication in steps on A2), experts of
            other kinds, tensor parallelism, comm_alg.
        ValueError: shapes, dtypes or limits that CANN refuses; ranks that disagree on what they
            must have in common; unequal BS without global_bs or with a mask that hides something,
            or more rows than A, which a box does not notice.
    """
    operator = "npu_moe_distribute_dispatch_v2"
    refuse(
        operator,
        scales=(scales, (None,)),
        expert_scales=(expert_scales, (None,)),
        quant_mode=(quant_mode, (0,)),
        comm_alg=(comm_alg, ("",)),
    )
    _refuse_kinds(
        operator,
        elastic_info,
        performance_info,
        tp_world_size,
        expert_shard_type,
        shared_expert_num,
        shared_expert_rank_num,
        zero_expert_num,
        copy_expert_num,
        const_expert_num,
    )
    if expert_token_nums_type not in (0, 1):
        raise ValueError(
            f"{operator}: expert_token_nums_type is {expert_token_nums_type}, it must be 0 or 1"
        )
    group = _group(operator, group_ep, ep_world_size, ep_rank_id)
    active = _active(operator, x, expert_ids, x_active_mask)
    capacity = _capacity(operator, group, expert_ids, active, moe_expert_num, global_bs)

    token, choice = active.nonzero(as_tuple=True)
    by_expert = expert_ids[token, choice].argsort(stable=True)
    token = token[by_expert]
    choice = choice[by_expert]
    experts = expert_ids[token, choice].long()
    local = moe_expert_num // ep_world_size
    sent = torch.bincount(experts // local, minlength=ep_world_size)
    received = _swap(group, sent, torch.ones_like(sent), torch.ones_like(sent))
    source = torch.full_like(token, ep_rank_id)
    info = _swap(group, torch.stack((experts % local, source, token, choice), 1), sent, received)
    rows = _swap(group, x[token], sent, received)

    order = info[:, 0].argsort(stable=True)  # what comes is sorted by rank
    info = info[order]
    count, bs, k = len(info), *expert_ids.shape
    if count > capacity:
        raise ValueError(
            f"{operator}: {count} rows came for expand_x of {capacity}: some tokens have an expert "
            "twice"
        )
    by_expert_and_rank = torch.bincount(
        info[:, 0] * ep_world_size + info[:, 1], minlength=local * ep_world_size
    )
    nums = by_expert_and_rank.view(local, -1).sum(1)

    expand_x = unwritten(x, capacity, x.shape[1])
    expand_x[:count] = rows[order]
    assist_info = unwritten(expert_ids, max(bs * k, capacity * INFO))
    assist_info[: count * INFO].view(count, INFO)[:, :3] = info[:, 1:].int()
    dynamic_scales, expand_scales = (unwritten(x, capacity, dtype=torch.float32) for _ in range(2))
    return (
        expand_x,
        dynamic_scales,
        assist_info,
        nums if expert_token_nums_type else nums.cumsum(0),
        by_expert_and_rank.cumsum(0).int(),
        unwritten(expert_ids, tp_world_size),
        expand_scales,
    )


def npu_moe_distribute_combine_v2(
    expand_x: Tensor,
    expert_ids: Tensor,
    assist_info_for_combine: Tensor,
    ep_send_counts: Tensor,
    expert_scales: Tensor,
    group_ep: str,
    ep_world_size: int,
    ep_rank_id: int,
    moe_expert_num: int,
    *,
    tp_send_counts=None,
    x_active_mask: Tensor | None = None,
    expand_scales=None,
    shared_expert_x=None,
    elastic_info=None,
    ori_x=None,
    const_expert_alpha_1=None,
    const_expert_alpha_2=None,
    const_expert_v=None,
    performance_info=None,
    group_tp: str = "",
    tp_world_size: int = 0,
    tp_rank_id: int = 0,
    expert_shard_type: int = 0,
    shared_expert_num: int = 1,
    shared_expert_rank_num: int = 0,
    global_bs: int = 0,
    comm_quant_mode: int = 0,
    comm_alg: str = "",
    zero_expert_num: int = 0,
    copy_expert_num: int = 0,
    const_expert_num: int = 0,
) -> Tensor:
    """Send the rows back and add up each token's, weighted. Every rank of the group has to call it.

    op-plugin docs/context/torch_npu-npu_moe_distribute_combine_v2.md. Computed in float32, in the
    order of K, rounded once; tokens that are not active are not written: ops-transformer
    mc2/moe_distribute_combine_v2/op_kernel/moe_distribute_combine_v2.h. Caller: VA
    ops/moe/token_dispatcher.py:277.

    Args:
        expand_x: (A, H), a result for each row of the dispatch's expand_x; those after its rows are
            not read.
        expert_ids, x_active_mask, global_bs: as given to the dispatch.
        assist_info_for_combine, ep_send_counts: what it returned as assist_info_for_combine and
            ep_recv_counts.
        expert_scales: float32 (BS, K), the weights.
        tp_send_counts, expand_scales: unused; what it returned as tp_recv_counts and expand_scales.

    Returns:
        (BS, H), expand_x's dtype.

    Raises:
        NotImplementedError: shared_expert_x, quantized communication, and what the dispatch does
            not know.
        ValueError: as the dispatch, or arguments that are not of one dispatch, for which a box
            waits for ever.
    """
    operator = "npu_moe_distribute_combine_v2"
    refuse(
        operator,
        shared_expert_x=(shared_expert_x, (None,)),
        comm_quant_mode=(comm_quant_mode, (0,)),
        comm_alg=(comm_alg, ("",)),
    )
    _refuse_kinds(
        operator,
        elastic_info,
        performance_info,
        tp_world_size,
        expert_shard_type,
        shared_expert_num,
        shared_expert_rank_num,
        zero_expert_num,
        copy_expert_num,
        const_expert_num,
    )
    check_dtype(
        operator,
        torch.int32,
        assist_info_for_combine=assist_info_for_combine,
        ep_send_counts=ep_send_counts,
    )
    check_dtype(operator, torch.float32, expert_scales=expert_scales)
    group = _group(operator, group_ep, ep_world_size, ep_rank_id)
    active = _active(operator, None, expert_ids, x_active_mask)
    capacity = _capacity(operator, group, expert_ids, active, moe_expert_num, global_bs)
    (bs, k) = expert_ids.shape
    local = moe_expert_num // ep_world_size
    shapes = {
        "expand_x": (expand_x.shape[:1], (capacity,)),
        "expert_scales": (expert_scales.shape, (bs, k)),
        "ep_send_counts": (ep_send_counts.shape, (ep_world_size * local,)),
        "assist_info_for_combine": (assist_info_for_combine.shape, (max(bs * k, capacity * INFO),)),
    }
    for name, (shape, expected) in shapes.items():
        if tuple(shape) != expected:
            raise ValueError(f"{operator}: {name} is {tuple(shape)}, it must be {expected}")

    count = int(ep_send_counts[-1])
    info = assist_info_for_combine[: count * INFO].view(count, INFO)[:, :3].long()
    order = info[:, 0].argsort(stable=True)
    sent = torch.bincount(info[:, 0], minlength=ep_world_size)
    received = _swap(group, sent, torch.ones_like(sent), torch.ones_like(sent))
    token, choice = _swap(group, info[order, 1:], sent, received).unbind(1)
    results = _swap(group, expand_x[:count][order], sent, received)

    answered = torch.zeros(bs, k, dtype=torch.int64).index_put(
        (token, choice), torch.ones_like(token), accumulate=True
    )
    if not torch.equal(answered, active.long()):
        raise ValueError(
            f"{operator}: {len(token)} results came for {int(active.sum())} active choices: the "
            "dispatch was called with other expert_ids or another x_active_mask"
        )
    wide = torch.promote_types(expand_x.dtype, torch.float32)
    by_choice = torch.zeros(bs, k, expand_x.shape[1], dtype=wide)
    by_choice[token, choice] = results.to(wide) * expert_scales[token, choice, None].to(wide)
    total = by_choice[:, 0].clone()
    for place in range(1, k):
        total += by_choice[:, place]
    out = unwritten(expand_x, bs, expand_x.shape[1])
    written = active.any(1)
    out[written] = total[written].to(expand_x.dtype)
    return out


def npu_mm_reduce_scatter_base(
    input: Tensor,
    x2: Tensor,
    hcom: str,
    world_size: int,
    *,
    reduce_op: str = "sum",
    bias: Tensor | None = None,
    x1_scale=None,
    x2_scale=None,
    comm_turn: int = 0,
    output_dtype=None,
    comm_mode: str | None = None,
) -> Tensor:
    """input @ x2, summed over the ranks in float32 and rounded once: this rank's m / world_size
    rows of it. Every rank of the group has to call it.

    op-plugin docs/zh/custom_APIs/torch_npu/torch_npu-npu_mm_reduce_scatter_base.md. Caller: VA
    ops/linear_op.py:414.

    Args:
        input: (m, k), m a multiple of world_size. x2: (k, n), in FRACTAL_NZ too where comm_mode is
            "aiv".
        comm_mode: None, "ai_cpu" or "aiv".

    Raises:
        NotImplementedError: int8, scales, another reduction, a bias, which the page has no support
            for, comm_turn.
        ValueError: shapes, dtypes or a group that CANN refuses.
    """
    operator = "npu_mm_reduce_scatter_base"
    refuse(
        operator,
        x1_scale=(x1_scale, (None,)),
        x2_scale=(x2_scale, (None,)),
        output_dtype=(output_dtype, (None,)),
        reduce_op=(reduce_op, ("sum",)),
        bias=(bias, (None,)),
        comm_turn=(comm_turn, (0,)),
        comm_mode=(comm_mode, (None, "ai_cpu", "aiv")),
    )
    require_dtype(operator, HALF, input=input, x2=x2)
    group = _group(operator, hcom, world_size)
    if (
        input.dim() != 2
        or x2.dim() != 2
        or input.shape[1] != x2.shape[0]
        or len(input) % world_size
    ):
        raise ValueError(
            f"{operator} wants input (m, k), m a multiple of world_size {world_size}, and x2 (k, "
            f"n), not {tuple(input.shape)} and {tuple(x2.shape)}"
        )
    wide = torch.promote_types(input.dtype, torch.float32)
    total = input.to(wide) @ x2.to(wide)
    _wait_for(group.allreduce, [total])
    return total.chunk(world_size)[group.rank()].to(input.dtype)


def _refuse_kinds(
    operator: str,
    elastic_info,
    performance_info,
    tp_world_size: int,
    expert_shard_type: int,
    shared_expert_num: int,
    shared_expert_rank_num: int,
    zero_expert_num: int,
    copy_expert_num: int,
    const_expert_num: int,
) -> None:
    refuse(
        operator,
        elastic_info=(elastic_info, (None,)),
        performance_info=(performance_info, (None,)),
        tp_world_size=(tp_world_size, (0, 1)),
        expert_shard_type=(expert_shard_type, (0,)),
        shared_expert_num=(shared_expert_num, (0, 1)),
        shared_expert_rank_num=(shared_expert_rank_num, (0,)),
        zero_expert_num=(zero_expert_num, (0,)),
        copy_expert_num=(copy_expert_num, (0,)),
        const_expert_num=(const_expert_num, (0,)),
    )


def _group(operator: str, name: str, world_size: int, rank: int | None = None):
    if name not in _groups:
        raise ValueError(
            f"{operator}: no process group is registered as {name!r} (mc2.register_group), known "
            f"are {', '.join(map(repr, _groups)) or 'none'}"
        )
    group = _groups[name]
    if group.size() != world_size or rank not in (None, group.rank()):
        raise ValueError(
            f"{operator}: {name!r} has {group.size()} ranks and this is {group.rank()}, not world "
            f"size {world_size} and rank {rank}"
        )
    return group


def _active(operator: str, x: Tensor | None, expert_ids: Tensor, mask: Tensor | None) -> Tensor:
    """bool (BS, K): what is sent."""
    check_dtype(operator, torch.int32, expert_ids=expert_ids)
    if expert_ids.dim() != 2 or (x is not None and (x.dim() != 2 or len(x) != len(expert_ids))):
        raise ValueError(
            f"{operator} wants x (BS, H) and expert_ids (BS, K), not "
            f"{None if x is None else tuple(x.shape)} and {tuple(expert_ids.shape)}"
        )
    bs, k = expert_ids.shape
    if not 0 < bs <= MAX_BS or not 0 < k <= MAX_K:
        raise ValueError(
            f"{operator}: BS is {bs} and K {k}, they must be in [1, {MAX_BS}] and [1, {MAX_K}]"
        )
    if mask is None:
        return torch.ones(bs, k, dtype=torch.bool)
    check_dtype(operator, torch.bool, x_active_mask=mask)
    if mask.shape not in ((bs,), (bs, k)):
        raise ValueError(
            f"{operator}: x_active_mask is {tuple(mask.shape)}, it must be {(bs,)} or {(bs, k)}"
        )
    if mask.dim() == 2:
        return mask
    if (mask[1:] & ~mask[:-1]).any():
        raise ValueError(f"{operator}: x_active_mask has True after False")
    return mask[:, None].expand(bs, k)


def _capacity(
    operator: str, group, expert_ids: Tensor, active: Tensor, moe_expert_num: int, global_bs: int
) -> int:
    """A, after every rank has told every other what they must agree on."""
    (bs, k) = expert_ids.shape
    world = group.size()
    known = ((expert_ids >= 0) & (expert_ids < moe_expert_num) | ~active).all()
    mine = torch.tensor([bs, int(active.all()), int(known), k, moe_expert_num, global_bs])
    told = [torch.empty_like(mine) for _ in range(world)]
    _wait_for(group.allgather, [told], [mine])
    all_bs, all_active, all_known, *common = torch.stack(told).unbind(1)
    if any((column != column[0]).any() for column in common):
        raise ValueError(
            f"{operator}: the ranks were given K, moe_expert_num, global_bs "
            f"{torch.stack(common, 1).tolist()}, they must agree"
        )
    if not 0 < moe_expert_num <= MAX_EXPERTS or moe_expert_num % world:
        raise ValueError(
            f"{operator}: moe_expert_num is {moe_expert_num}, it must be in [1, {MAX_EXPERTS}] and "
            f"a multiple of ep_world_size {world}"
        )
    if not all_known.all():
        raise ValueError(
            f"{operator}: expert_ids has an active expert outside [0, {moe_expert_num})"
        )
    largest = int(all_bs.max())
    equal = bool((all_bs == largest).all())
    if global_bs not in ((0, largest * world) if equal else (largest * world,)):
        raise ValueError(
            f"{operator}: global_bs is {global_bs} for BS {all_bs.tolist()}, it must be the "
            f"largest * {world}, or 0 if they are equal"
        )
    if not equal and not all_active.all():
        raise ValueError(
            f"{operator}: x_active_mask hides tokens and BS differs, {all_bs.tolist()}"
        )
    return largest * world * min(moe_expert_num // world, k)


def _swap(group, rows: Tensor, sent: Tensor, received: Tensor) -> Tensor:
    """The rows that the ranks send this one, by rank: sent[r] rows go to rank r, received[r] come
    from it.
    """
    out = rows.new_empty(int(received.sum()), *rows.shape[1:])
    _wait_for(group.alltoall_base, out, rows.contiguous(), received.tolist(), sent.tolist())
    return out


def _wait_for(collective: Callable, *arguments) -> None:
    """Outside the conversions of formats.py: gloo's own threads have no Python to run them in."""
    with _disable_current_modes():
        collective(*arguments).wait()
