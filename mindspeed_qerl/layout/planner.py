"""Which layouts exist for a model on a number of ranks, which to take, and what is near a layout
that does not exist.

Candidates are every division of the ranks by TP, PP, EP and infer TP, EP (CP 1: no config here
needs it); `rules` decides which exist.
"""

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import replace
from math import isqrt, lcm, log2

from mindspeed_qerl.families import ModelShape, family_of
from mindspeed_qerl.layout.memory import Memory, estimate
from mindspeed_qerl.layout.parts import GB, Settings
from mindspeed_qerl.layout.plan import Plan
from mindspeed_qerl.layout.rules import ROLLOUT, TRAINING, broken
from mindspeed_qerl.recipe.types import Batch, Layout

CHANGEABLE = ("tp", "pp", "cp", "ep", "infer_tp", "infer_ep")
SWITCHES = ("sequence_parallel", "tp_extend_ep", "enable_expert_parallel")
UTILISATIONS = (0.6, 0.7, 0.8, 0.9)


def new_plan(
    shape: ModelShape, layout: Layout, batch: Batch | None = None, lora: bool = True
) -> Plan:
    """A plan with the switches that the layout asks for (sequence parallelism with TP, whole
    experts, vLLM's expert parallelism) and, unless a batch is given, the global batch nearest to 64
    prompts that divides.
    """
    layout = replace(
        layout,
        sequence_parallel=layout.tp > 1,
        tp_extend_ep=shape.moe,
        enable_expert_parallel=shape.moe,
    )
    plan = Plan(shape, layout, batch or Batch(), lora=lora, share_backbone=lora)
    return plan if batch else fit_batch(plan)


def fit_batch(plan: Plan) -> Plan:
    """The plan with the nearest global batch that its layout can divide; a mini-batch that was
    smaller stays a fraction that divides; sizes of dispatch that no longer divide are left to
    upstream.
    """
    layout, batch = plan.layout, plan.batch
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
    for utilisation in UTILISATIONS:
        memory = estimate(
            plan, Settings(memory_gb, utilisation, hccl_buffer_mib=640 if plan.shape.moe else 256)
        )
        if memory.answers_at_once >= memory.answers_needed:
            break
    return memory


def complete(shape: ModelShape, layout: Layout, given: Collection[str]) -> Plan:
    """The layout with the inference sizes that are not among the `given` names chosen: a legal and
    the best choice if there is one, else one that breaks the fewest rules; and with the nearest
    batch to 64 prompts.
    """

    def choices(name: str) -> list[int]:
        if name in given:
            return [getattr(layout, name)]
        return _divisors(layout.world) if shape.moe or name == "infer_tp" else [1]

    plans = []
    for infer_tp in choices("infer_tp"):
        for infer_ep in choices("infer_ep"):
            plans.append(new_plan(shape, replace(layout, infer_tp=infer_tp, infer_ep=infer_ep)))
    legal = [with_memory(plan) for plan in plans if not broken(plan)]
    if legal:
        return min(legal, key=rollout_key).plan

    def wrongness(plan: Plan) -> tuple[int, int]:
        rollout, training = plan.layout.infer_tp * plan.layout.infer_ep, layout.tp * layout.ep
        return len(broken(plan)), abs(rollout - training)

    return min(plans, key=wrongness)


def _divisors(number: int) -> list[int]:
    small = [divisor for divisor in range(1, isqrt(number) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})


def _training_candidates(shape: ModelShape, world: int, ranks_per_node: int) -> Iterator[Layout]:
    """Layouts whose TP x PP x EP groups fill the ranks, with vLLM's TP and EP as training's."""
    for tp in _divisors(world):
        for pp in _divisors(world // tp):
            for ep in _divisors(world // tp // pp) if shape.moe else (1,):
                yield Layout(
                    world,
                    tp=tp,
                    pp=pp,
                    ep=ep,
                    infer_tp=tp,
                    infer_ep=ep,
                    ranks_per_node=ranks_per_node,
                )


def training_layouts(
    shape: ModelShape, world: int, ranks_per_node: int = 16, lora: bool = True
) -> Iterator[Plan]:
    """Plans whose training side is legal; the rollout's is still the same."""
    for layout in _training_candidates(shape, world, ranks_per_node):
        plan = new_plan(shape, layout, Batch(), lora)
        if not any(rule.check(plan.layout, plan) for rule in TRAINING):
            yield plan


def rollout_layouts(plan: Plan) -> Iterator[Plan]:
    """The plan with each legal rollout side."""
    world = plan.layout.world
    for infer_tp in _divisors(world):
        for infer_ep in _divisors(world // infer_tp) if plan.shape.moe else (1,):
            layout = replace(plan.layout, infer_tp=infer_tp, infer_ep=infer_ep)
            candidate = replace(plan, layout=layout)
            if not any(rule.check(layout, candidate) for rule in ROLLOUT):
                yield candidate


def legal_layouts(
    shape: ModelShape, world: int, ranks_per_node: int = 16, memory_gb: float = 64.0
) -> list[Memory]:
    """Every legal training layout with the global batch nearest to 64 prompts that it can divide,
    its best inference layout and the gpu_memory_utilization that it needs on ranks of `memory_gb`;
    the best first.

    Order: what fits into memory, else what is least over; groups inside a node; the share of an
    update that a rank waits for its pipeline (in steps of 5 %); fewest collectives that a layer
    waits for (TP: 2 all-gathers and 2 reduce-scatters, experts: 2 all-to-alls); the least memory on
    the fullest rank.
    """
    best = []
    for training in training_layouts(shape, world, ranks_per_node):
        plans = map(fit_batch, rollout_layouts(training))
        legal = [with_memory(plan, memory_gb=memory_gb) for plan in plans if not broken(plan)]
        if legal:
            best.append(min(legal, key=rollout_key))
    return sorted(best, key=training_key)


# ---- ranking ----


def layer_collectives(plan: Plan) -> tuple[int, int]:
    """Collectives that a layer's forward pass waits for, in training and in vLLM."""
    layout, moe = plan.layout, plan.shape.moe
    training = 4 * (layout.tp > 1) + 2 * (moe and layout.tp * layout.ep > 1)
    rollout = 2 * (layout.infer_tp > 1) + 2 * (moe and layout.infer_tp * layout.infer_ep > 1)
    return training, rollout


def stage_work(plan: Plan) -> list[float]:
    """Multiplications a token of each pipeline stage: the weights that it meets, attention over
    half the sequence, and the output layer.
    """
    shape = plan.shape
    layer: float = plan.batch.seq_length * shape.num_attention_heads * shape.head_dim
    layer += shape.hidden_size * shape.num_experts
    for linear in family_of(shape).linears(shape):
        layer += linear.inputs * linear.outputs * linear.active
    work = [layers * layer for layers in plan.layers]
    work[-1] += shape.vocab_size * shape.hidden_size
    return work


def idle_share(plan: Plan) -> float:
    """Share of an update that the average rank waits for its pipeline: its first and last
    micro-batches, and its slowest stage.
    """
    work, pp = stage_work(plan), plan.layout.pp
    micro_batches = plan.mini_share // plan.batch.micro_batch_size
    return 1 - sum(work) / pp / max(work) * micro_batches / (micro_batches + pp - 1)


def groups_across_nodes(plan: Plan) -> tuple[list[str], list[str]]:
    """Groups that send data in every layer and do not lie inside one node: training's, vLLM's."""
    layout, moe = plan.layout, plan.shape.moe
    experts, infer_experts = layout.tp * layout.ep, layout.infer_tp * layout.infer_ep
    training = {f"TP {layout.tp}": layout.tp}
    rollout = {f"infer TP {layout.infer_tp}": layout.infer_tp}
    if moe:
        training[f"experts over {experts} ranks"] = experts
        rollout[f"vLLM's experts over {infer_experts} ranks"] = infer_experts

    def across(groups: dict[str, int]) -> list[str]:
        return [
            name for name, size in groups.items() if layout.nodes > 1 and layout.node_width % size
        ]

    return across(training), across(rollout)


def rollout_key(memory: Memory) -> tuple:
    """Order of the inference layouts of one training layout. Groups as large as training's leave
    every expert on its rank.
    """
    plan, layout = memory.plan, memory.plan.layout
    group = layout.infer_tp * layout.infer_ep
    moves = group // (layout.tp * layout.ep) if plan.shape.moe else 1
    short = max(0, 1 - memory.answers_at_once / max(memory.answers_needed, 1))
    return (
        memory.excess,
        len(groups_across_nodes(plan)[1]),
        layer_collectives(plan)[1],
        round(short, 1),
        moves,
        memory.settings.gpu_memory_utilization,
        group,
    )


def training_key(memory: Memory) -> tuple:
    """Order of the layouts."""
    plan = memory.plan
    return (
        memory.excess,
        sum(map(len, groups_across_nodes(plan))),
        int(idle_share(plan) / 0.05),
        layer_collectives(plan)[0],
        memory.peak,
    )


def reasons(memory: Memory) -> list[str]:
    """What decides a plan's place, in the order of the decision."""
    plan, layout = memory.plan, memory.plan.layout
    lines = memory.faults
    if memory.fits:
        tight = ", tight" if memory.tight else ""
        lines = [f"fits{tight}: {memory.peak / GB:.0f} of {memory.capacity / GB:.0f} GB"]
    lines += across_nodes(plan)
    if layout.pp > 1:
        lines.append(f"waits {idle_share(plan):.0%} for the pipeline")
    kinds = []
    if layout.tp > 1:
        kinds.append("TP: 2 all-gathers, 2 reduce-scatters")
    if plan.shape.moe and layout.tp * layout.ep > 1:
        kinds.append("experts: 2 all-to-alls")
    collectives = f"{layer_collectives(plan)[0]} collectives a layer"
    lines.append(f"{collectives} ({'; '.join(kinds)})" if kinds else collectives)
    if memory.answers_at_once < memory.answers_needed:
        held = f"{memory.answers_at_once} of {memory.answers_needed}"
        lines.append(f"KV cache for {held} answers at once")
    return lines


def across_nodes(plan: Plan) -> list[str]:
    """A sentence with the groups that do not lie inside one node, if there are any."""
    training, rollout = groups_across_nodes(plan)
    groups = ", ".join(training + rollout)
    return [f"across nodes, slow: {groups}"] if groups else []


# ---- what is near, and why there is nothing ----


def nearest(
    plan: Plan, k: int = 3, settings: Settings | None = None, names: Collection[str] = CHANGEABLE
) -> list[Plan]:
    """The legal plans nearest to one that is not: the same ranks, the fewest and smallest changes
    of the sizes in `names`, then of the batch.

    A size's change counts |log2(new / old)|, and every changed size 1 more: one number to retype is
    better than two. Switches (sequence_parallel, enable_expert_parallel and so on) are set as the
    layout needs them. Among equals, what fits into memory comes first.
    """
    layout = plan.layout
    # sizes in names -> (distance, plan) of each candidate
    groups: dict[tuple, list[tuple[float, Plan]]] = {}
    for training in training_layouts(plan.shape, layout.world, layout.ranks_per_node, plan.lora):
        for candidate in rollout_layouts(replace(training, batch=plan.batch)):
            kept = fit_batch(candidate) if broken(candidate) else candidate
            if not broken(kept):
                sizes = tuple(getattr(kept.layout, name) for name in names)
                groups.setdefault(sizes, []).append((distance(plan, kept, names), kept))
    least = sorted(min(away for away, _ in group) for group in groups.values())
    limit = least[min(k, len(least)) - 1] if least else 0
    close = []
    for group in groups.values():
        choices = [
            (round(away, 6), with_memory(kept, settings)) for away, kept in group if away <= limit
        ]
        if choices:
            close.append(min(choices, key=lambda choice: (choice[0], rollout_key(choice[1]))))
    close.sort(key=lambda choice: (choice[0], training_key(choice[1]), rollout_key(choice[1])))
    return [memory.plan for _, memory in close[:k]]


def distance(plan: Plan, other: Plan, names: Collection[str] = CHANGEABLE) -> float:
    """How far two plans are apart, in changes of the sizes in `names`, those that a user typed, and
    of the batch.
    """
    away = abs(log2(other.batch.global_batch_size / plan.batch.global_batch_size))
    for name in names:
        old, new = getattr(plan.layout, name), getattr(other.layout, name)
        if new != old:
            away += 1 + abs(log2(new / old))
    return away


def changes(
    plan: Plan, other: Plan, names: Collection[str] = CHANGEABLE, batch: bool = True
) -> list[str]:
    """What to retype to get from one plan to another: `tp 3 -> 2`; with `batch`, switches and batch
    as well.
    """

    def retyped(old: object, new: object, names: Collection[str]) -> list[str]:
        changed = [name for name in names if getattr(old, name) != getattr(new, name)]
        return [f"{name} {getattr(old, name)} -> {getattr(new, name)}".lower() for name in changed]

    if not batch:
        return retyped(plan.layout, other.layout, names)
    lines = retyped(plan.layout, other.layout, [*names, *SWITCHES])
    if plan.layout.num_layer_list and not other.layout.num_layer_list:
        lines.append("num_layer_list left out")
    sizes = ("global_batch_size", "mini_batch_size", "micro_batch_size")
    lines += retyped(plan.batch, other.batch, sizes)
    for name, size in plan.batch.dispatch.items():
        if size and not other.batch.dispatch.get(name):
            lines.append(f"{name} left out")
    return lines


def why_none(shape: ModelShape, world: int, ranks_per_node: int = 16) -> list[tuple[str, int]]:
    """For a number of ranks without a layout: the sentences that refuse its candidates, and how
    many each refuses alone or with others.
    """
    refusals: Counter[str] = Counter()
    for layout in _training_candidates(shape, world, ranks_per_node):
        refusals.update(fault.message for fault in broken(new_plan(shape, layout)))
    return refusals.most_common()


def other_worlds(shape: ModelShape, world: int, ranks_per_node: int = 16) -> list[int]:
    """The nearest smaller and larger numbers of ranks for which a layout exists."""

    def exists(size: int) -> bool:
        layouts = training_layouts(shape, size, ranks_per_node)
        return any(next(rollout_layouts(training), None) for training in layouts)

    smaller, larger = range(world - 1, 0, -1), range(world + 1, 2 * world + 2 * ranks_per_node)
    nearest_sizes = [next(filter(exists, sizes), None) for sizes in (smaller, larger)]
    return [size for size in nearest_sizes if size]
