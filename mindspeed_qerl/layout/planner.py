"""Which layouts exist for a model on a number of ranks, and which to take.

Candidates are every division of the ranks by TP, PP, EP and infer TP, EP; `rules` decides
which exist.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from math import lcm, log

from mindspeed_qerl.families import ModelShape
from mindspeed_qerl.recipe.types import Batch, Layout

from .memory import Memory, estimate
from .parts import GB, MemorySettings
from .plan import Plan
from .rules import TRAINING, broken
from .time import (
    DEFAULT,
    Terms,
    groups,
    idle_share,
    iteration,
    layer_collectives,
    total,
)

# as this project's configs have it: rows of whole answers, of 4,096 tokens
PACKED = Batch(
    use_remove_padding=True,
    use_dynamic_bsz=True,
    reset_attention_mask=True,
    no_pad_to_seq_lengths=True,
)
UTILIZATIONS = (0.6, 0.7, 0.8, 0.9)
TIGHT = 0.9  # of a rank's memory: what never met an NPU is not good to the last tenth


def new_plan(
    shape: ModelShape,
    layout: Layout,
    batch: Batch | None = None,
    prompts: int = 64,
) -> Plan:
    """A plan with sequence parallelism where the layout has TP, without a reference; unless a batch
    is given, PACKED with the global batch nearest to `prompts` that divides.
    """
    layout = replace(layout, sequence_parallel=layout.tp > 1)
    plan = Plan(shape, layout, batch or PACKED, has_reference=False)
    return plan if batch else fit_batch(plan, prompts)


def fit_batch(plan: Plan, prompts: int) -> Plan:
    """The plan with one update of the global batch nearest to `prompts` that its layout can
    divide.
    """
    layout = plan.layout
    step = lcm(plan.dp, max(layout.infer_dp, 1), layout.nodes)
    fitted = prompts // step * step
    if not fitted or 2 * (prompts - fitted) > step:
        fitted += step
    batch = replace(plan.batch, global_batch_size=fitted, mini_batch_size=fitted)
    return replace(plan, batch=batch)


def with_memory(plan: Plan, memory_gb: float) -> Memory:
    """The plan's memory with the settings of this project's configs (everything offloaded, all
    layers recomputed, a larger HCCL buffer where experts are dispatched) on ranks of `memory_gb`
    10^9 bytes, at the least gpu_memory_utilization whose KV cache holds all answers at once, or the
    highest.
    """
    buffer = 640 if plan.shape.moe else 256
    for utilization in UTILIZATIONS:
        memory = estimate(plan, MemorySettings(memory_gb, utilization, hccl_buffer_mib=buffer))
        if memory.answers_at_once >= memory.answers_needed:
            break
    return memory


@cache
def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _candidates(shape: ModelShape, world: int, ranks_per_node: int) -> Iterator[Plan]:
    """Plans whose TP x PP x EP groups fill the ranks, with vLLM's TP and EP as training's."""
    for tp in _divisors(world):
        for pp in _divisors(world // tp):
            for ep in _divisors(world // tp // pp) if shape.moe else (1,):
                layout = Layout(
                    world, tp, pp, ep=ep, infer_tp=tp, infer_ep=ep, ranks_per_node=ranks_per_node
                )
                yield new_plan(shape, layout, PACKED)


def _legal_rollouts(plan: Plan, prompts: int) -> Iterator[Plan]:
    """The plan with each legal rollout side and the nearest batch that it divides."""
    world = plan.layout.world
    for infer_tp in _divisors(world):
        for infer_ep in _divisors(world // infer_tp) if plan.shape.moe else (1,):
            layout = replace(plan.layout, infer_tp=infer_tp, infer_ep=infer_ep)
            fitted = fit_batch(replace(plan, layout=layout), prompts)
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
    place = partial(order, terms=terms)
    for training in _candidates(shape, world, ranks_per_node):
        if broken(training, TRAINING):
            continue
        plans = _legal_rollouts(training, prompts)
        if memories := [with_memory(plan, memory_gb) for plan in plans]:
            best.append(min(memories, key=place))
    return sorted(best, key=place)


# ---- ranking ----


def across_nodes(plan: Plan) -> list[str]:
    """Groups of a legal plan that send data in every layer and do not lie inside one node."""
    return [
        f"{name} over {size}"
        for side in groups(plan).values()
        for name, size in side.items()
        if plan.layout.node_width % size
    ]


def order(memory: Memory, terms: Terms) -> tuple:
    """Orders plans: what fits into memory comes first, or is least over; then groups inside a node,
    and what has room to spare; the fastest in steps of 10 %, in the middle of a launch's range; no
    pipeline; fewest collectives; and least memory.
    """
    plan = memory.plan
    time = sum(total(iteration(memory, terms))) / 2
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


def why_none(shape: ModelShape, world: int, ranks_per_node: int) -> list[str]:
    """For a number of ranks without a layout: the sentences that refuse its candidates, the
    commonest first.
    """
    refusals: Counter[str] = Counter()
    for plan in _candidates(shape, world, ranks_per_node):
        refusals.update(
            fault.message for fault in broken(fit_batch(plan, plan.batch.global_batch_size))
        )
    return [message for message, _ in refusals.most_common()]
