"""The terms of a rank's memory: what is held, bytes, and how they come about.

Weights and activations are bfloat16; gradients, optimizer state and logits float32.
"""

from dataclasses import dataclass

from .plan import Plan
from .sizes import Weights, capture_sizes, linear_weights, training_weights

GB = 10**9
BF16 = 2
FP32 = 4
ADAMW = 3 * FP32  # master weight and two moments
ALL_LAYERS = 10**9  # more than a stage can have
# Assumptions, not counts:
RUNTIME = 2 * GB  # CANN, the operators' code and torch_npu's own
EXPERT_LOAD = 2  # tokens of the busiest rank over the average, in the layer that is computed
# copies in float32: logits, their clone (RL utils/compute.py:45), softmax; and the gradient
LOGITS_UPDATE = 4
LOGITS_FORWARD = 3
GRAPH = 50_000_000  # of one captured size, with its share of the pool


@dataclass(frozen=True)
class MemorySettings:
    """Describes what memory depends on beside layout and batch."""

    memory_gb: float = 64.0  # of one rank, 10^9 bytes
    gpu_memory_utilization: float = 0.6
    max_num_seqs: int = 128
    enforce_eager: bool = True
    offload_train_param: bool = True
    offload_train_grad: bool = True
    offload_train_optimizer: bool = True
    distributed_optimizer: bool = True
    recompute_layers: int = ALL_LAYERS  # of each stage: recompute_granularity full, method block
    lora_r: int = 32
    lora_targets: tuple[str, ...] = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
    hccl_buffer_mib: int = 640
    int8_rollouts: bool = False  # rollout_quantization int8_w8a8
    drawn_norms: int = 0  # norms of a layer that have a draw for each answer or group
    answers_of_draw: int = 1


@dataclass(frozen=True)
class Part:
    """One term of a sum: what it is, bytes, and how they come about."""

    name: str
    bytes: int
    how: str


Parts = list[Part]  # of a sum


def size_of(parts: Parts) -> int:
    """Bytes of all."""
    return sum(part.bytes for part in parts)


# ---- weights and what trains them ----


def weights(what: str, counts: Weights) -> Parts:
    """Weights in bfloat16: all but the experts, and the experts."""
    return [
        Part(f"{what}, {name}", count * BF16, f"{count / GB:.2f} x 10^9 parameters x 2")
        for name, count in zip(("dense part", "experts"), counts)
        if count
    ]


def adapter_weights(plan: Plan, settings: MemorySettings, stage: int) -> Weights:
    """LoRA parameters on one training rank: all but experts, experts.

    PEFT's A is whole beside a column-parallel B, B is whole beside a row-parallel A (peft
    tuners/lora/tp_layer.py:89-109); experts have one pair each, never split (MindSpeed-LLM
    tasks/posttrain/lora/moe/experts.py:437).
    """
    layout = plan.layout
    dense = 0
    experts = 0
    for linear in plan.shape.linears:
        if linear.target not in settings.lora_targets:
            continue
        if linear.split == "expert":
            copies = linear.copies // layout.expert_ranks
            experts += copies * (linear.inputs + linear.outputs)
        elif linear.split == "column":
            dense += linear.inputs + linear.outputs // layout.tp
        else:
            dense += linear.inputs // layout.tp + linear.outputs
    scale = settings.lora_r * plan.layers[stage]
    return dense * scale, experts * scale


def adapted_weights(plan: Plan, settings: MemorySettings, stage: int) -> int:
    """Weights on one training rank that have an adapter."""
    targets = settings.lora_targets if plan.lora else ()
    linears = [linear for linear in plan.shape.linears if linear.target in targets]
    return sum(linear_weights(linears, plan.layout.tp, plan.layout.ep)) * plan.layers[stage]


def merged(plan: Plan, settings: MemorySettings, stage: int) -> Parts:
    """Returns what adapted layers multiply with in training, from the first pass of an iteration to
    its update (ascend/lora.py): a second copy of their weights.
    """
    count = adapted_weights(plan, settings, stage)
    if not count:
        return []
    return [
        Part("merged weights", count * BF16, f"W + BA of {count / GB:.2f} x 10^9 parameters x 2")
    ]


def trained(plan: Plan, settings: MemorySettings, stage: int) -> tuple[Parts, Part, Part]:
    """Returns what training adds to the base weights: adapters, gradients, optimizer. Without LoRA
    the weights themselves are trained.
    """
    layout = plan.layout
    if plan.lora:
        dense, experts = adapter_weights(plan, settings, stage)
    else:
        dense, experts = training_weights(plan, stage)
    dp = 1
    expert_dp = 1
    if settings.distributed_optimizer:
        dp = layout.dp
        expert_dp = layout.expert_dp
    total = dense + experts
    numbers = f"{total / 1e6:.1f} x 10^6"
    state = dense * ADAMW // dp + experts * ADAMW // expert_dp
    how = f"12 bytes (master weight, two moments): {dense / 1e6:.1f} x 10^6 over {dp} ranks"
    if experts:
        how += f", {experts / 1e6:.1f} x 10^6 of experts over {expert_dp}"
    adapters = []
    if plan.lora:
        adapters.append(Part("adapters", total * BF16, f"r {settings.lora_r}: {numbers} x 2"))
    return adapters, Part("gradients", total * FP32, f"{numbers} x 4"), Part("AdamW", state, how)


# ---- the runtime ----


def communicators(plan: Plan) -> list[str]:
    """Groups of more than one rank over which a rank sends data; HCCL keeps two buffers of
    HCCL_BUFFSIZE for each (CANN, HCCL_BUFFSIZE).
    """
    layout = plan.layout
    moe = plan.shape.moe
    sizes = {
        "world": layout.world,
        "TP": layout.tp,
        "PP": layout.pp,
        "DP": layout.dp,
        "EP": layout.expert_ranks * moe,
        "expert DP": layout.expert_dp * moe,
        "vLLM TP": layout.infer_tp,
        "vLLM EP": layout.infer_expert_ranks * moe,
        "vLLM MC2": layout.infer_expert_ranks * moe,
    }
    return [name for name, size in sizes.items() if size > 1]


def runtime(plan: Plan, settings: MemorySettings) -> Parts:
    groups = communicators(plan)
    each = settings.hccl_buffer_mib
    how = f"2 x {each} MiB for each of {len(groups)} groups: {', '.join(groups)}"
    return [
        Part("runtime", RUNTIME, "assumed: CANN, operators, torch_npu"),
        Part("HCCL buffers", len(groups) * 2 * each * 2**20, how),
    ]


# ---- forward and backward passes ----


def layer_activations(plan: Plan, tokens: int, expert_load: float) -> int:
    """Bytes that the gradient of one layer needs, for `tokens` tokens on a rank's TP group."""
    shape = plan.shape
    tp = plan.layout.tp
    hidden = shape.hidden_size
    queries = shape.num_attention_heads * shape.head_dim
    keys = shape.num_key_value_heads * shape.head_dim
    spread = _sequence_share(plan)
    # two residuals, two normed inputs
    numbers = 4 * hidden / spread
    # q, k, v before and after rotation and norm, attention's output
    numbers += (queries + 2 * keys) * 2 / tp + queries / tp
    # gate and up, their product
    numbers += 3 * (shape.intermediate_size + shape.shared_expert_intermediate_size) / tp
    # npu_fusion_attention keeps maximum and sum eightfold
    statistics = shape.num_attention_heads / tp * 2 * 8 * FP32
    copies_of_token = expert_load * shape.num_experts_per_tok / spread
    experts = copies_of_token * (4 * hidden + 3 * shape.moe_intermediate_size)
    return int(tokens * ((numbers + experts) * BF16 + statistics))


def _sequence_share(plan: Plan) -> int:
    """Ranks that share what lies between attention and MLP."""
    return plan.layout.tp if plan.layout.sequence_parallel else 1


def update(plan: Plan, settings: MemorySettings, stage: int) -> Parts:
    """Activations of forward and backward passes, with those kept for micro-batches in flight."""
    batch = plan.batch
    layers = plan.layers[stage]
    hidden = plan.shape.hidden_size
    tokens = min(batch.update_tokens, plan.mini_share * batch.seq_length)
    in_flight = min(plan.layout.pp - stage, plan.micro_batches)
    recomputed = min(settings.recompute_layers, layers)
    parts = []
    if recomputed:
        inputs = in_flight * recomputed * tokens * hidden * BF16 // _sequence_share(plan)
        how = f"{recomputed} layers, {in_flight} x {tokens} tokens x {hidden} x 2"
        parts.append(Part("layer inputs kept", inputs, how))
    if layers > recomputed:
        kept = in_flight * (layers - recomputed) * layer_activations(plan, tokens, 1)
        how = f"{layers - recomputed} layers, {in_flight} x {tokens} tokens"
        parts.append(Part("activations kept", kept, how))
    layer = 2 * layer_activations(plan, tokens, EXPERT_LOAD)
    parts.append(Part("one layer at work", layer, f"update: {tokens} tokens, with gradients"))
    return parts + _logits(plan, stage, tokens, LOGITS_UPDATE, "update")


def forward(plan: Plan, stage: int) -> Parts:
    """Activations of the passes for log-probs."""
    tokens = min(plan.batch.forward_tokens, plan.share * plan.batch.seq_length)
    layer = layer_activations(plan, tokens, EXPERT_LOAD)
    return [
        Part("one layer at work", layer, f"log-probs: {tokens} tokens"),
        *_logits(plan, stage, tokens, LOGITS_FORWARD, "log-probs"),
    ]


def _logits(plan: Plan, stage: int, tokens: int, copies: int, moment: str) -> Parts:
    if stage < plan.layout.pp - 1:
        return []
    rows = plan.rows // plan.layout.tp
    size = copies * tokens * rows * FP32
    return [Part("logits", size, f"{moment}: {copies} x {tokens} tokens x {rows:,} x 4")]


# ---- from training to vLLM ----


def sync(plan: Plan, stage: int) -> Parts:
    """The fuller of the container's two passes (vllm_weight_container.py): tensor after tensor into
    vLLM's buffers, joined and cut where infer TP is not TP (:461-464); then the experts of one
    pipeline stage after the other, in a buffer that is N times a vLLM rank's share, which is a
    training rank's (:490-546). Our adaptor merges one tensor after the other, and the one before is
    still there.
    """
    return max(*_dense_sync(plan, stage), *_experts_sync(plan, stage), key=size_of)


def _dense_sync(plan: Plan, stage: int) -> list[Parts]:
    layout = plan.layout
    shape = plan.shape
    first = stage == 0
    last = stage == layout.pp - 1
    tables = first + (last and not shape.tie_word_embeddings)
    joined, kept = _joined(plan, plan.rows * shape.hidden_size)
    embedding = (tables > 0) * joined + (tables > 1) * kept
    how = (
        f"TP {layout.tp} to infer TP {layout.infer_tp}: {plan.rows:,} x {shape.hidden_size} x 2 "
        "joined and cut"
    )
    largest = max(
        linear.inputs * linear.outputs for linear in shape.linears if linear.split != "expert"
    )
    joined, kept = _joined(plan, largest)
    merging = joined + kept
    if plan.lora:
        share = largest // layout.tp
        # rounded in one tensor, copied to another
        merging = max(share * (2 * FP32 + 2 * BF16), share * BF16 + merging)
    how_merged = f"W + BA of the largest linear layer, {largest / 1e6:.1f} x 10^6, and random bits"
    return [[Part("embedding on its way", embedding, how)], [Part("merging", merging, how_merged)]]


def _joined(plan: Plan, numbers: int) -> tuple[int, int]:
    """Bytes to bring a tensor of so many numbers from training's TP ranks to vLLM's, and what is
    left of them while the next one comes (:655-760): training's shares are gathered, joined and
    cut.
    """
    layout = plan.layout
    if layout.tp == layout.infer_tp:
        return 0, 0
    kept = numbers * BF16
    if layout.tp > layout.infer_tp:  # a part of what was joined
        kept //= layout.infer_tp
    return (layout.tp > 1) * numbers * BF16 + kept, kept


def _experts_sync(plan: Plan, stage: int) -> list[Parts]:
    """With pipeline stages the buffer of the one before is still there: variables hold views of it
    (:535-537).
    """
    if not plan.shape.moe:
        return []
    _, layer = linear_weights(plan.shape.linears, plan.layout.tp, plan.layout.ep)

    buffers = []
    for last in range(plan.layout.pp):
        layers = plan.layers[max(last - 1, 0) : last + 1]
        owner = "a stage's" if len(layers) == 1 else "two stages'"
        how = f"a second copy of {owner} experts, {sum(layers)} layers"
        buffers.append([Part("experts on their way", layer * sum(layers) * BF16, how)])
    if plan.lora:  # a stage merges while the buffer of its own experts is filled
        merging = layer * 2 // 3 * (2 * FP32 + BF16)
        how = "W + BA of one layer's fc1, float32, random bits, and rounded"
        buffers[stage].append(Part("merging", merging, how))
    return buffers


# ---- vLLM ----


def int8_copies(plan: Plan) -> Part:
    """Returns int8 copies of the linear weights but experts (ascend/quantized.py), beside
    gpu_memory_utilization: vLLM measures before.
    """
    dense, _ = linear_weights(plan.shape.linears, plan.layout.infer_tp, 1)
    numbers = plan.shape.num_hidden_layers * dense
    return Part("int8 copies", numbers, f"{numbers / GB:.2f} x 10^9 x 1")


def draws(plan: Plan, settings: MemorySettings) -> Part:
    """Returns the weights of each sequence that is served (aqn/rows.py), beside
    gpu_memory_utilization.
    """
    places = settings.max_num_seqs + 1
    numbers = settings.drawn_norms * plan.shape.num_hidden_layers * places * plan.shape.hidden_size
    return Part("draws of the noise", numbers * BF16, f"{numbers / 1e6:.1f} x 10^6 x 2")


def graphs(settings: MemorySettings) -> Part:
    """Decode graphs, beside gpu_memory_utilization: they are captured when the KV cache is there."""
    sizes = len(capture_sizes(settings.max_num_seqs))
    return Part("decode graphs", sizes * GRAPH, f"{sizes} sizes x {GRAPH / 1e6:.0f} MB")


def profiled(plan: Plan, settings: MemorySettings) -> Part:
    """Returns what vLLM's profiling run leaves aside: the widest point of one layer for
    max_num_batched_tokens, and the logits of max_num_seqs.
    """
    shape = plan.shape
    tokens = plan.batch.max_num_batched_tokens
    hidden = shape.hidden_size
    sequences = settings.max_num_seqs
    mlp = 3 * (shape.intermediate_size + shape.shared_expert_intermediate_size)
    width = mlp / plan.layout.infer_tp + 2 * hidden
    width += shape.num_experts_per_tok * (2 * hidden + 3 * shape.moe_intermediate_size)
    how = (
        f"one layer for {tokens} tokens, and 2 x {sequences} sequences x {plan.vllm_rows:,} "
        "logits x 4"
    )
    size = int(tokens * width * BF16) + 2 * sequences * plan.vllm_rows * FP32
    return Part("vLLM's activations", size, how)
