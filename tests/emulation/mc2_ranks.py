"""One rank of test_mc2.py: mc2_ranks.py FOLDER RANK WORLD_SIZE. Saves what it gave to the MC2
operators and what they returned, in FOLDER/RANK.
"""

import sys
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from mindspeed_qerl.emulation import mc2
from tests.emulation.mixture import expert_rows

EXPERTS, K, H, FFN = 8, 2, 6, 5
UNEQUAL = [3, 1, 4, 2]


def normal(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def inputs(case: str, rank: int, world: int) -> dict:
    """What a rank gives to the dispatch and, weights apart, to the combine."""
    bs = UNEQUAL[rank] if "unequal" in case else 4
    generator = torch.Generator().manual_seed(100 * world + rank)
    among = {"few experts": 3}.get(case, EXPERTS)
    chosen = [torch.randperm(among, generator=generator)[:K] for _ in range(bs)]
    given = dict(
        x=normal(bs, H, seed=rank),
        expert_ids=torch.stack(chosen).int(),
        moe_expert_num=EXPERTS,
        ep_world_size=world,
        ep_rank_id=rank,
        group_ep="process group" if case == "equal" else "backend",
    )
    if "unequal" in case:
        given["global_bs"] = max(UNEQUAL[:world]) * world
    if case == "bfloat16":
        given["x"] = given["x"].bfloat16()
    if case == "tokens masked":
        given["x_active_mask"] = torch.arange(bs) < [2, 0, 4, 1][rank]
    if case == "choices masked":
        given["x_active_mask"] = torch.rand(bs, K, generator=generator) < 0.5
    if case == "an expert twice":
        given["expert_ids"] = torch.randint(
            0, EXPERTS, (bs, K), generator=generator, dtype=torch.int32
        )
        given["expert_ids"][1] = given["expert_ids"][1, 0]
    if case in ("sums", "tokens masked"):
        given["expert_token_nums_type"] = 0
    if case == "as vllm-ascend":  # ops/moe/token_dispatcher.py:117-158 on A3
        given |= dict(
            expert_shard_type=0,
            shared_expert_rank_num=0,
            global_bs=0,
            expert_token_nums_type=0,
            scales=None,
            quant_mode=0,
            group_tp="backend",
            tp_world_size=1,
            tp_rank_id=0,
            x_active_mask=torch.arange(bs) < 3,
        )
    return given


CASES = ["equal", "unequal", "tokens masked", "choices masked", "few experts", "an expert twice", "bfloat16", "sums",
         "as vllm-ascend"]  # fmt: skip


def run(given: dict) -> dict:
    mine = slice(
        given["ep_rank_id"] * EXPERTS // given["ep_world_size"],
        (given["ep_rank_id"] + 1) * EXPERTS // given["ep_world_size"],
    )
    dtype, bs = given["x"].dtype, len(given["x"])
    w13, w2 = (
        normal(EXPERTS, H, 2 * FFN, seed=-1).to(dtype),
        normal(EXPERTS, FFN, H, seed=-2).to(dtype),
    )
    weights = normal(bs, K, seed=given["ep_rank_id"] + 50).float()
    dispatched = mc2.npu_moe_distribute_dispatch_v2(**given)
    rows, _, assist_info, nums, recv_counts, tp_recv_counts, expand_scales = dispatched
    kind = given.get("expert_token_nums_type", 1)
    results = expert_rows(rows, w13[mine], w2[mine], nums, kind)
    of_dispatch = {"x", "expert_token_nums_type", "scales", "quant_mode"}
    common = {name: value for name, value in given.items() if name not in of_dispatch}
    combined = mc2.npu_moe_distribute_combine_v2(
        expand_x=results,
        assist_info_for_combine=assist_info,
        ep_send_counts=recv_counts,
        expert_scales=weights,
        tp_send_counts=tp_recv_counts,
        expand_scales=expand_scales,
        **common,
    )
    return dict(
        dispatched=dispatched, results=results, combined=combined, w13=w13, w2=w2, weights=weights
    )


def product(rank: int, world: int) -> dict:
    """What a rank gives to the product of FlashComm1, and what comes back; in float64 and in
    bfloat16.
    """
    given = {
        dtype: dict(
            input=normal(2 * world, 7, seed=rank).to(dtype),
            x2=normal(7, 5, seed=9 + rank).to(dtype),
        )
        for dtype in (torch.float64, torch.bfloat16)
    }
    back = {
        dtype: mc2.npu_mm_reduce_scatter_base(
            **one, hcom="backend", world_size=world, comm_mode="aiv"
        )
        for dtype, one in given.items()
    }
    return {"given": given, "back": back}


def refusals(rank: int, world: int) -> dict[str, str]:
    """What the error of every rank begins with, as a pattern -> the error that this rank got."""
    known = inputs("equal", rank, world)
    ids, int32 = known["expert_ids"], torch.int32
    unequal = inputs("unequal", rank, world)
    wrong = {
        r"ValueError: .*outside \[0, 8\)": dict(
            expert_ids=torch.full_like(ids, EXPERTS * (rank == world - 1))
        ),
        "ValueError: .*moe_expert_num is": dict(moe_expert_num=7 * world + 1),
        "ValueError: .*global_bs is": dict(global_bs=3 * world),
        "ValueError: .*BS is 513": dict(
            x=torch.ones(513, H), expert_ids=torch.ones(513, K, dtype=int32)
        ),
        "ValueError: .*expert_ids is torch.int64": dict(expert_ids=ids.long()),
        "ValueError: .*True after False": dict(
            x_active_mask=torch.tensor([True, False, True, True])
        ),
        r"ValueError: .*x_active_mask is \(3,\)": dict(
            x_active_mask=torch.ones(3, dtype=torch.bool)
        ),
        "ValueError: .*'nobody'.*'process group'": dict(group_ep="nobody"),
        r"ValueError: .*and this is \d, not world size": dict(ep_rank_id=rank + 1),
        "NotImplementedError: .*quant_mode 2": dict(quant_mode=2),
        "ValueError: .*expert_token_nums_type is 2": dict(expert_token_nums_type=2),
        "no room": dict(
            x=torch.ones(4, H), expert_ids=torch.zeros(4, K, dtype=int32), moe_expert_num=world
        ),
        "ValueError: .*global_bs is 0": unequal | dict(global_bs=0),
        "ValueError: .*hides tokens": unequal
        | dict(x_active_mask=torch.arange(len(unequal["x"])) < 1),
    }
    calls = {
        words: partial(mc2.npu_moe_distribute_dispatch_v2, **known | change)
        for words, change in wrong.items()
    }
    rows, _, assist_info, _, recv_counts, *_ = mc2.npu_moe_distribute_dispatch_v2(**known)
    back = {name: value for name, value in known.items() if name != "x"} | dict(
        expand_x=rows,
        assist_info_for_combine=assist_info,
        ep_send_counts=recv_counts,
        expert_scales=torch.ones(4, K),
    )
    swapped = ids.flip(0) if rank else ids
    for words, change in {
        "ValueError: .*expand_x is": dict(expand_x=rows[1:]),
        "ValueError: .*expert_scales is": dict(expert_scales=torch.ones(4, K + 1)),
        "ValueError: .*torch.bfloat16": dict(expert_scales=torch.ones(4, K).bfloat16()),
        "ValueError: .*assist_info_for_combine is torch.int64": dict(
            assist_info_for_combine=assist_info.long()
        ),
        "ValueError: .*other expert_ids or another x_active_mask": dict(
            x_active_mask=torch.arange(4) < 3, expert_ids=swapped
        ),
    }.items():
        calls[words] = partial(mc2.npu_moe_distribute_combine_v2, **back | change)
    x, x2 = torch.ones(2 * world, 3), torch.ones(3, 2)
    plain = dict(input=x, x2=x2, hcom="backend", world_size=world)
    for words, change in {
        "ValueError: .*m a multiple of world_size": dict(input=torch.ones(2 * world + 1, 3)),
        r"ValueError: .*wants input \(m, k\)": dict(input=torch.ones(2 * world, 4)),
        "NotImplementedError: .*bias": dict(bias=torch.ones(2)),
        "ValueError: .*int8": dict(input=x.to(torch.int8), x2=x2.to(torch.int8)),
        "ValueError: .*one dtype": dict(x2=x2.half()),
        "ValueError: .*'backend' has": dict(world_size=world + 1),
    }.items():
        calls[words] = partial(mc2.npu_mm_reduce_scatter_base, **plain | change)

    errors = {}
    for words, call in calls.items():
        try:
            call()
            errors[words] = "none"
        except (ValueError, NotImplementedError) as error:
            errors[words] = f"{type(error).__name__}: {error}"
    return errors


if __name__ == "__main__":
    folder, rank, world = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=60),
    )
    group = dist.new_group()
    mc2.register_group("process group", dist.group.WORLD)
    mc2.register_group("backend", group._get_backend(torch.device("cpu")))
    found = {}
    with torch.inference_mode():  # as vLLM calls them
        for case in CASES:
            given = inputs(case, rank, world)
            found[case] = given | run(given)
        found["product"] = product(rank, world)
        found["refusals"] = refusals(rank, world)
    torch.save(found, f"{folder}/{rank}")
    dist.barrier()
    dist.destroy_process_group()
