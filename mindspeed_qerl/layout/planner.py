"""Which layouts exist for a model on a number of ranks, and which to take.

Candidates are every division of the ranks by TP, PP, EP and infer TP, EP; `rules` decides
which exist.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from math import ceil, lcm, log

from mindspeed_qerl.families import ModelShape
from mindspeed_qerl.recipe.types import Batch, Layout

from .memory import Memory, estimate
from .parts import GB, MemorySettings
from .plan import Plan
from .rules import TRAINING, broken
from .sizes import GRAPHS_TP, LARGEST
from .time import DEFAULT, Terms, groups, idle_share, iteration, layer_collectives, total

# as this project's configs have it: rows of whole answers, of 4,096 tokens
PACKED = Batch(
    use_remove_padding=True,
    use_dynamic_bsz=True,
    reset_attention_mask=True,
    no_pad_to_seq_lengths=True,
)
PROMPTS = 64  # of an iteration, or nearly so
UTILIZATIONS = (0.4, 0.9)  # least and most, in steps of STEP
STEP = 0.05
MOST_EVALUATED = (
    256  # sequences at once that an evaluation is worth: each is memory and an HCCL buffer
)
EVALUATED = 1319  # problems, of GSM8K's test set
BUFFER = 256  # MiB of a group in HCCL, where experts' tokens need no more (upstream's own)
TIGHT = 0.9  # of a rank's memory: what never met an NPU is not good to the last tenth


def new_plan(
    shape: ModelShape, layout: Layout, batch: Batch | None = None, prompts: int = PROMPTS
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


def with_memory(plan: Plan, memory_gb: float, terms: Terms = DEFAULT) -> Memory:
    """The plan's memory as a config for it has it, on ranks of `memory_gb` 10^9 bytes: decoding is
    captured and nothing offloaded, or eager and all offloaded; a dense model recomputes nothing, or
    all. Of these what fits best, then what has room to spare, is fastest, and takes least.
    """
    sequences = sequences_at_once(plan)
    settings = MemorySettings(
        memory_gb,
        max_num_seqs=sequences,
        recompute_layers=max(plan.layers),
        hccl_buffer_mib=buffer_for(plan.shape, sequences),
    )
    captured = replace(
        settings,
        enforce_eager=False,
        offload_train_param=False,
        offload_train_grad=False,
        offload_train_optimizer=False,
    )
    choices = [settings]
    if plan.layout.infer_tp in GRAPHS_TP:
        choices.append(captured)
    if not plan.shape.moe:
        choices += [replace(choice, recompute_layers=0) for choice in choices]
    found = [_with_cache(plan, choice, terms) for choice in choices]
    return min(found, key=partial(_worth, terms=terms))


def _with_cache(plan: Plan, settings: MemorySettings, terms: Terms) -> Memory:
    """The plan's memory at the least gpu_memory_utilization whose KV cache holds the longest answers
    of a rollout at once; at a lower one if decode graphs would keep more of it than an update
    leaves.
    """
    least, most = UTILIZATIONS
    fullest = estimate(plan, replace(settings, gpu_memory_utilization=most))
    if not fullest.kv_cache:
        return fullest
    capacity = fullest.capacity
    answers = min(fullest.answers_needed, settings.max_num_seqs)
    cache = answers * fullest.kv_token * (terms.prompt + terms.longest)
    wanted = ceil((most + (cache - fullest.kv_cache) / capacity) / STEP)
    if not settings.enforce_eager:
        room = most + TIGHT - fullest.peak / capacity
        wanted = min(wanted, int(room / STEP))
    share = min(max(round(wanted * STEP, 2), least), most)
    return estimate(plan, replace(settings, gpu_memory_utilization=share))


def _worth(memory: Memory, terms: Terms) -> tuple:
    seconds = sum(total(iteration(memory, terms))) / 2
    return memory.excess, is_tight(memory), seconds, memory.settings.gpu_memory_utilization


def sequences_at_once(plan: Plan) -> int:
    """Returns max_num_seqs for a plan: a replica's answers of a rollout, or of an evaluation, up to
    MOST_EVALUATED; in steps of 64.
    """
    replicas = plan.layout.infer_dp
    evaluated = min(-(-EVALUATED // replicas), MOST_EVALUATED)
    wanted = max(plan.batch.answers // replicas, evaluated)
    return min(-(-wanted // 64) * 64, LARGEST)


def dispatched(shape: ModelShape, sequences: int) -> float:
    """Returns the MiB of HCCL's buffer that CANN asks for to send the tokens of `sequences` to
    experts, whatever EP is (the sum in vllm-ascend pull request 5287; LARGEST tokens at most).
    """
    row = 2 * shape.hidden_size
    sent = (row + 512) * shape.num_experts + row * shape.num_experts_per_tok
    return 2 * min(sequences, LARGEST) * sent / 2**20


def buffer_for(shape: ModelShape, sequences: int) -> int:
    """Returns the MiB of HCCL's buffer for that, in steps of 64, at least BUFFER."""
    return max(BUFFER, (int(dispatched(shape, sequences)) // 64 + 1) * 64)


@cache
def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _candidates(
    shape: ModelShape, world: int, ranks_per_node: int, batch: Batch = PACKED
) -> Iterator[Plan]:
    """Plans whose TP x PP x EP groups fill the ranks, with vLLM's TP and EP as training's."""
    for tp in _divisors(world):
        for pp in _divisors(world // tp):
            for ep in _divisors(world // tp // pp) if shape.moe else (1,):
                layout = Layout(
                    world, tp, pp, ep=ep, infer_tp=tp, infer_ep=ep, ranks_per_node=ranks_per_node
                )
                yield new_plan(shape, layout, batch)


def _legal_rollouts(plan: Plan) -> Iterator[Plan]:
    """The plan with each legal rollout side and the nearest batch that it divides."""
    world = plan.layout.world
    for infer_tp in _divisors(world):
        for infer_ep in _divisors(world // infer_tp) if plan.shape.moe else (1,):
            layout = replace(plan.layout, infer_tp=infer_tp, infer_ep=infer_ep)
            fitted = fit_batch(replace(plan, layout=layout), PROMPTS)
            if not broken(fitted):
                yield fitted


def legal_layouts(
    shape: ModelShape,
    world: int,
    ranks_per_node: int = 16,
    memory_gb: float = 64.0,
    terms: Terms = DEFAULT,
    batch: Batch = PACKED,
) -> list[Memory]:
    """Every legal training layout with the global batch nearest to PROMPTS that it can divide,
    its best inference layout and the gpu_memory_utilization that it needs on ranks of `memory_gb`;
    the best first by `order`.
    """
    best = []
    place = partial(order, terms=terms)
    for training in _candidates(shape, world, ranks_per_node, batch):
        if broken(training, TRAINING):
            continue
        plans = _legal_rollouts(training)
        if memories := [with_memory(plan, memory_gb, terms) for plan in plans]:
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
