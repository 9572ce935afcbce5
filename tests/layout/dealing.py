"""The layout rules once more, stated as what would happen: ranks are put in their groups one by
one, and heads, columns, experts, layers, prompts and answers are dealt to them. Shares no code with
mindspeed_qerl.layout.rules, and no arithmetic: something is left over or not.
"""

from functools import cache

from mindspeed_qerl.families import NAMED_SHAPES, ModelShape
from mindspeed_qerl.layout.plan import Plan

QWEN3, QWEN15, DENSE = (
    NAMED_SHAPES[name] for name in ("qwen3_30b_a3b", "qwen15_moe_a2_7b", "qwen25_7b")
)


@cache
def deals_evenly(cards: int, hands: int) -> bool:
    """Does everybody get as many, when cards are dealt round the table?"""
    return len({len(range(cards)[seat::hands]) for seat in range(hands)}) == 1


@cache
def blocks(ranks: tuple[int, ...], size: int) -> tuple[tuple[int, ...], ...] | None:
    """The ranks in groups of neighbours; None if the last group is not full."""
    groups, rest = [], list(ranks)
    while rest:
        if len(rest) < size:
            return None
        groups.append(tuple(rest[:size]))
        del rest[:size]
    return tuple(groups)


def all_inside(inner: tuple[tuple[int, ...], ...], outer: tuple[tuple[int, ...], ...]) -> bool:
    """Does each inner group lie in one outer group?"""
    return all(any(set(group) <= set(whole) for whole in outer) for group in inner)


def can_run(plan: Plan) -> bool:
    """Does every group fill up, does everything deal evenly, and has every vLLM rank its own
    experts after a sync?
    """
    it, shape = plan.layout, plan.shape
    world = tuple(range(it.world))
    stages = _stages(world, it.pp)
    return bool(
        len(world) > 1  # upstream on an emulated NPU: "vllm dp groups is None"
        and stages
        and _trains(plan, stages)
        and _generates(plan, world, stages)
        and blocks(world, min(it.ranks_per_node, it.world)) is not None
        and (not shape.moe or _experts_arrive(plan, world, stages))
        and _deals_batches(plan, stages, world)
    )


def _stages(world: tuple[int, ...], pp: int) -> list[tuple[int, ...]]:
    """Each pipeline stage's ranks, neighbours (Megatron's order tp-cp-ep-dp-pp); [] if they do not
    come out even.
    """
    size = len(world[::pp])
    groups = blocks(world, size)
    return list(groups) if groups and len(groups) == pp else []


def _trains(plan: Plan, stages: list[tuple[int, ...]]) -> bool:
    it, shape = plan.layout, plan.shape
    if any(
        blocks(stage, it.tp) is None or blocks(stage, it.tp * it.ep) is None for stage in stages
    ):
        return False
    return (
        _deals_tensors(shape, it.tp)
        and deals_evenly(shape.num_hidden_layers, it.pp)
        and (shape.moe or it.ep == 1)
    )


def _deals_tensors(shape: ModelShape, ranks: int) -> bool:
    """Does each of `ranks` get as many heads, columns and rows?"""
    things = (
        shape.num_attention_heads,
        shape.num_key_value_heads,
        shape.intermediate_size,
        shape.shared_expert_intermediate_size,
        -(-shape.vocab_size // 64) * 64,
    )
    return all(deals_evenly(number, ranks) for number in things)


def _generates(plan: Plan, world: tuple[int, ...], stages: list[tuple[int, ...]]) -> bool:
    it, shape = plan.layout, plan.shape
    engines, shards = blocks(world, it.infer_tp * it.infer_ep), blocks(world, it.infer_tp)
    if engines is None or shards is None:
        return False
    if shape.shared_expert_intermediate_size and any(len(shard) > 1 for shard in shards):
        # on a 910C the ranks' parts of it stay apart: tests/upstream/test_vllm_ascend.py sees it
        return False
    if not _deals_tensors(shape, it.infer_tp):
        return False
    trained = tuple(group for stage in stages for group in blocks(stage, it.tp))
    # A vLLM TP group is gathered from training groups inside it, or cut out of one; the larger must
    # lie in one stage.
    if it.infer_tp > it.tp:
        return all_inside(trained, shards) and all_inside(shards, tuple(stages))
    return all_inside(shards, trained)


def _experts_arrive(plan: Plan, world: tuple[int, ...], stages: list[tuple[int, ...]]) -> bool:
    """Walk the sync: each rank cuts its experts into as many parts as there are training groups in
    a vLLM group, keeps the part of its own group, and passes it to the rank whose turn it is
    (vllm_weight_container.py:490-590). Every rank of a vLLM group must end with its own.
    """
    it, experts = plan.layout, plan.shape.num_experts
    engine, group = it.infer_tp * it.infer_ep, it.tp * it.ep
    if (
        engine == 1
        or not deals_evenly(experts, group)
        or not deals_evenly(experts, engine)
        or not deals_evenly(engine, group)
    ):
        return False
    held = {}
    for stage in stages:
        for members in blocks(stage, group):
            for seat, rank in enumerate(members):
                held[rank] = [
                    expert
                    for expert in range(experts)
                    if expert in range(experts)[_slice(seat, experts, group)]
                ]
    parts = len(range(0, engine, group))
    kept = {
        rank: held[rank][_slice(rank // group % parts, len(held[rank]), parts)] for rank in world
    }
    for members in blocks(world, engine):
        senders = [members[turn * group + seat] for seat in range(group) for turn in range(parts)]
        for seat, sender in enumerate(senders):
            if kept[sender] != list(range(experts))[_slice(seat, experts, engine)]:
                return False
    return True


def _slice(seat: int, cards: int, hands: int) -> slice:
    share = len(range(cards)[::hands])
    return slice(seat * share, (seat + 1) * share)


def _deals_batches(plan: Plan, stages: list[tuple[int, ...]], world: tuple[int, ...]) -> bool:
    it, batch = plan.layout, plan.batch
    trainers, engines = len(blocks(stages[0], it.tp)), len(blocks(world, it.infer_tp))
    nodes = len(blocks(world, min(it.ranks_per_node, it.world)))
    prompts = range(batch.global_batch_size)
    if not all(deals_evenly(len(prompts), hands) for hands in (trainers, engines, nodes)):
        return False
    answers = [
        (prompt, sample)
        for prompt in prompts[: len(prompts[::trainers])]
        for sample in range(batch.samples_per_prompt)
    ]  # of one rank
    updates = [
        (prompt, sample)
        for prompt in range(batch.mini_batch_size)
        for sample in range(batch.samples_per_prompt)
    ]
    if not deals_evenly(len(updates), trainers):
        return False
    one_update = min(len(updates[::trainers]), len(answers))
    pieces = [answers[start : start + one_update] for start in range(0, len(answers), one_update)]
    micro = [
        piece[start : start + batch.micro_batch_size]
        for piece in pieces
        for start in range(0, len(piece), batch.micro_batch_size)
    ]
    return len({len(piece) for piece in pieces}) == 1 and all(
        len(part) == batch.micro_batch_size for part in micro
    )
