"""Which layouts exist for a model on a number of ranks, which to take, and what is near a layout
that does not exist.

Candidates are every division of the ranks by TP, PP, EP and infer TP, EP (CP 1: no config here
needs it); `rules` decides which exist.
"""

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import replace
from functools import cache, partial
from math import lcm, log, log2

from mindspeed_qerl.families import ModelShape
from mindspeed_qerl.layout.memory import Memory, estimate
from mindspeed_qerl.layout.parts import GB, Settings
from mindspeed_qerl.layout.plan import Plan
from mindspeed_qerl.layout.rules import ROLLOUT, TRAINING, broken
from mindspeed_qerl.layout.time import (
    DEFAULT,
    Terms,
    groups,
    idle_share,
    iteration,
    layer_collectives,
    total,
)
from mindspeed_qerl.recipe.types import Batch, Layout

# as this project's configs have it: rows of whole answers, of so many tokens
ROW = 4096
PACKED = Batch(
    use_remove_padding=True,
    use_dynamic_bsz=True,
    update_max_packing_token_size=ROW,
    actor_max_packing_token_size=ROW,
    ref_max_packing_token_size=ROW,
    reset_attention_mask=True,
    no_pad_to_seq_lengths=True,
)
CHANGEABLE = ("tp", "pp", "cp", "ep", "infer_tp", "infer_ep")
UTILIZATIONS = (0.6, 0.7, 0.8, 0.9)
TIGHT = 0.9  # of a rank's memory: what never met an NPU is not good to the last tenth


def new_plan(
    shape: ModelShape,
    layout: Layout,
    batch: Batch | None = None,
    lora: bool = True,
    prompts: int = 64,
) -> Plan:
    """A plan with the switches that the layout asks for (sequence parallelism with TP, whole
    experts, vLLM's expert parallelism), without a reference; unless a batch is given, PACKED with
    the global batch nearest to `prompts` that divides.
    """
    layout = replace(
        layout,
        sequence_parallel=layout.tp > 1,
        tp_extend_ep=shape.moe,
        enable_expert_parallel=shape.moe,
    )
    given = batch or replace(PACKED, global_batch_size=prompts, mini_batch_size=prompts)
    plan = Plan(shape, layout, given, lora, share_backbone=lora, has_reference=False)
    return plan if batch else fit_batch(plan)


def fit_batch(plan: Plan) -> Plan:
    """The plan if it is legal, else with the nearest global batch that its layout can divide; a
    mini-batch that was smaller stays a fraction that divides; sizes of dispatch that no longer
    divide are left to upstream.
    """
    if not broken(plan):
        return plan
    layout = plan.layout
    batch = plan.batch
    step = lcm(plan.dp, max(layout.infer_dp, 1), layout.nodes)
    prompts = batch.global_batch_size // step * step
    if not prompts or 2 * (batch.global_batch_size - prompts) > step:
        prompts += step
    fractions = [step * divisor for divisor in _divisors(prompts // step)]
    mini = min(fractions, key=lambda size: (abs(size - batch.mini_batch_size), size))
    batch = replace(batch, global_batch_size=prompts, mini_batch_size=mini)
    fitted = replace(plan, batch=batch)
    if not broken(fitted):
        return fitted
    return replace(plan, batch=replace(batch, dispatch={}, micro_batch_size=1))


def with_memory(plan: Plan, settings: Settings | None = None, memory_gb: float = 64.0) -> Memory:
    """The plan's memory; without given settings with those of this project's configs (everything
    offloaded, all layers recomputed, a larger HCCL buffer where experts are dispatched) on ranks of
    `memory_gb` 10^9 bytes, at the least gpu_memory_utilization whose KV cache holds all answers at
    once, or the highest.
    """
    if settings:
        return estimate(plan, settings)
    buffer = 640 if plan.shape.moe else 256
    for utilization in UTILIZATIONS:
        memory = estimate(plan, Settings(memory_gb, utilization, hccl_buffer_mib=buffer))
        if memory.answers_at_once >= memory.answers_needed:
            break
    return memory


@cache
def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _candidates(
    shape: ModelShape, world: int, ranks_per_node: int, lora: bool = True
) -> Iterator[Plan]:
    """Plans whose TP x PP x EP groups fill the ranks, with vLLM's TP and EP as training's."""
    for tp in _divisors(world):
        for pp in _divisors(world // tp):
            for ep in _divisors(world // tp // pp) if shape.moe else (1,):
                layout = Layout(
                    world, tp, pp, ep=ep, infer_tp=tp, infer_ep=ep, ranks_per_node=ranks_per_node
                )
                yield new_plan(shape, layout, PACKED, lora)


def training_layouts(
    shape: ModelShape, world: int, ranks_per_node: int, lora: bool = True
) -> Iterator[Plan]:
    """Plans whose training side is legal; the rollout's is still the same."""
    for plan in _candidates(shape, world, ranks_per_node, lora):
        if not broken(plan, TRAINING):
            yield plan


def legal_rollouts(plan: Plan) -> Iterator[Plan]:
    """The plan with each legal rollout side and the nearest batch that it divides."""
    world = plan.layout.world
    for infer_tp in _divisors(world):
        for infer_ep in _divisors(world // infer_tp) if plan.shape.moe else (1,):
            layout = replace(plan.layout, infer_tp=infer_tp, infer_ep=infer_ep)
            candidate = replace(plan, layout=layout)
            if broken(candidate, ROLLOUT):
                continue
            fitted = fit_batch(candidate)
            if not broken(fitted):
                yield fitted


def legal_layouts(
    shape: ModelShape,
    world: int,
    ranks_per_node: int = 16,
    memory_gb: float = 64.0,
    terms: Terms = DEFAULT,
    prompts: int = 64,
) -> list[Memory]:
    """Every legal training layout with the global batch nearest to `prompts` that it can divide,
    its best inference layout and the gpu_memory_utilization that it needs on ranks of `memory_gb`;
    the best first by `order`.
    """
    best = []
    batch = replace(PACKED, global_batch_size=prompts, mini_batch_size=prompts)
    for training in training_layouts(shape, world, ranks_per_node):
        plans = legal_rollouts(replace(training, batch=batch))
        memories = [with_memory(plan, memory_gb=memory_gb) for plan in plans]
        if memories:
            best.append(min(memories, key=partial(order, terms=terms)))
    return sorted(best, key=partial(order, terms=terms))


# ---- ranking ----


def across_nodes(plan: Plan) -> list[str]:
    """Groups of a legal plan that send data in every layer and do not lie inside one node."""
    names = []
    for side in groups(plan).values():
        names += [
            f"{name} over {size}" for name, size in side.items() if plan.layout.node_width % size
        ]
    return names


def order(memory: Memory, terms: Terms = DEFAULT) -> tuple:
    """Orders plans: what fits into memory comes first, or is least over; then groups inside a node,
    and what has room to spare; the fastest in steps of 10 %, in the middle of a launch's range; no
    pipeline; fewest collectives; and least memory.
    """
    plan = memory.plan
    time = sum(total(iteration(memory, terms), terms)) / 2
    return (
        memory.excess,
        len(across_nodes(plan)),
        is_tight(memory),
        int(log(time, 1.1)),
        plan.layout.pp,
        layer_collectives(plan),
        plan.layout.infer_tp,
        memory.settings.gpu_memory_utilization,
        memory.peak,
    )


def is_tight(memory: Memory) -> bool:
    """It fits, with less to spare than an estimate should have."""
    return memory.fits and memory.peak > TIGHT * memory.capacity


def reasons(memory: Memory) -> list[str]:
    """Returns what decides a plan's place, in the order of the decision."""
    plan = memory.plan
    lines = memory.faults
    if memory.fits:
        lines = [f"fits: {memory.peak / GB:.0f} of {memory.capacity / GB:.0f} GB"]
    lines += notes(memory)
    if plan.layout.pp > 1:
        lines.append(f"waits {idle_share(plan):.0%} for the pipeline")
    return [*lines, f"{layer_collectives(plan)} collectives a layer"]


def notes(memory: Memory) -> list[str]:
    """Returns what to know beside the numbers of a plan."""
    lines = []
    if is_tight(memory):
        lines.append("tight")
    if memory.answers_at_once < memory.answers_needed:
        lines.append(f"KV for {memory.answers_at_once} of {memory.answers_needed}")
    if groups := across_nodes(memory.plan):
        lines.append(f"across nodes, slow: {', '.join(groups)}")
    return lines


# ---- what is near, and why there is nothing ----


def nearest(
    plan: Plan, settings: Settings | None = None, names: Collection[str] = CHANGEABLE
) -> list[Plan]:
    """The three legal plans nearest to one that is not: the same ranks, the fewest and smallest
    changes of the sizes in `names`, then of the batch.

    A size's change counts |log2(new / old)|, and every changed size 1 more: one number to retype is
    better than two. Switches (sequence_parallel, enable_expert_parallel and so on) are set as the
    layout needs them. Among equals, what fits into memory comes first.
    """
    layout = plan.layout
    ranked = []
    for training in training_layouts(plan.shape, layout.world, layout.ranks_per_node, plan.lora):
        for legal in legal_rollouts(replace(training, batch=plan.batch)):
            memory = with_memory(legal, settings)
            away = round(distance(plan, legal, names), 6)
            ranked.append((away, order(memory), legal))
    closest: dict[tuple, Plan] = {}  # by sizes in names
    for *_, legal in sorted(ranked, key=lambda entry: entry[:2]):
        closest.setdefault(tuple(getattr(legal.layout, name) for name in names), legal)
    return list(closest.values())[:3]


def distance(plan: Plan, other: Plan, names: Collection[str] = CHANGEABLE) -> float:
    """Returns how far two plans are apart, in changes of the sizes in `names`, those that a user
    typed, and of the batch.
    """
    away = abs(log2(other.batch.global_batch_size / plan.batch.global_batch_size))
    for name in names:
        old = getattr(plan.layout, name)
        new = getattr(other.layout, name)
        if new != old:
            away += 1 + abs(log2(new / old))
    return away


def changes(plan: Plan, other: Plan, names: Collection[str] | None = None) -> list[str]:
    """Returns what to retype to get from one plan to another, `tp 3 -> 2`: of the sizes in `names`,
    or of layout, switches and batch.
    """
    old = _values(plan)
    new = _values(other)
    lines = []
    for name in names or old:
        if old[name] != new.get(name):
            lines.append(f"{name} {old[name]} -> {new.get(name)}".lower())
    return lines


def _values(plan: Plan) -> dict[str, object]:
    return {**vars(plan.layout), **vars(plan.batch), "dispatch": None, **plan.batch.dispatch}


def why_none(shape: ModelShape, world: int, ranks_per_node: int) -> list[str]:
    """For a number of ranks without a layout: the sentences that refuse its candidates, the
    commonest first.
    """
    refusals: Counter[str] = Counter()
    for plan in _candidates(shape, world, ranks_per_node):
        refusals.update(fault.message for fault in broken(fit_batch(plan)))
    return [message for message, _ in refusals.most_common()]
