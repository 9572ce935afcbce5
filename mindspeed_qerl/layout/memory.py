"""What the fullest rank must hold, in bytes, at the four moments of an iteration. An estimate from
sizes; never measured on an NPU.

Moments: `rollout` (vLLM generates), `weight sync` (training weights on their way to vLLM),
`log-probs` (forward passes of policy and reference), `update` (forward, backward, optimizer).
Weights and activations are bfloat16, gradients, optimizer state and logits float32.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from mindspeed_qerl.families import ModelShape, family_of
from mindspeed_qerl.layout.plan import Plan
from mindspeed_qerl.recipe.types import Recipe

GB = 10**9
BF16, FP32 = 2, 4
ADAMW = 3 * FP32  # master weight and two moments
MOMENTS = ("rollout", "weight sync", "log-probs", "update")
KINDS = (
    "runtime",
    "training weights",
    "adapters and optimizer",
    "activations and logits",
    "vLLM's weights",
    "sync buffers",
    "KV cache",
)
# Assumptions, not counts:
RUNTIME = 2 * GB  # CANN, the operators' code and torch_npu's own
TIGHT = 0.9  # of a rank's memory
EXPERT_LOAD = (
    2  # the busiest rank gets this many times the average tokens in the layer that is computed
)
# copies in float32: logits, their clone (RL utils/compute.py:45), softmax; and the gradient
LOGITS_UPDATE, LOGITS_FORWARD = 4, 3


@dataclass(frozen=True)
class Settings:
    """What memory depends on beside layout and batch."""

    memory_gb: float = 64.0  # of one rank, 10^9 bytes
    gpu_memory_utilization: float = 0.6
    max_num_seqs: int = 128
    offload_train_param: bool = True
    offload_train_grad: bool = True
    offload_train_optimizer: bool = True
    distributed_optimizer: bool = True
    recompute: bool = True  # recompute_granularity full
    recompute_num_layers: int | None = None  # of each stage, method block; None = all
    lora_r: int = 32
    lora_targets: tuple[str, ...] = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
    hccl_buffer_mib: int = 640
    int8_rollouts: bool = False  # rollout_quantization int8_w8a8


@dataclass(frozen=True)
class Part:
    """One term of a sum: what it is, bytes, how they come about, and which of KINDS it is."""

    name: str
    bytes: int
    how: str
    kind: str


@dataclass(frozen=True)
class Memory:
    """The memory of a plan's fullest rank, bytes. `moments` maps each of MOMENTS to its parts;
    `kv_cache` is what vLLM can have for keys and values, 0 if nothing is left.
    """

    plan: Plan
    settings: Settings
    stage: int  # the pipeline stage whose ranks are fullest
    moments: Mapping[str, tuple[Part, ...]]
    kv_cache: int
    kv_token: int  # one token's keys and values
    kv_missing: int  # what vLLM lacks for one answer of full length
    answers_at_once: int  # full-length answers that the KV cache holds, of one vLLM replica
    answers_needed: int  # that one vLLM replica has to generate in an iteration

    def total(self, moment: str) -> int:
        """Bytes in use at that moment."""
        return sum(part.bytes for part in self.moments[moment])

    @property
    def capacity(self) -> int:
        return int(self.settings.memory_gb * GB)

    @property
    def peak(self) -> int:
        """Bytes at the fullest moment but the rollout, which vLLM's KV cache fills up to its own
        limit.
        """
        return max(self.total(moment) for moment in MOMENTS if moment != "rollout")

    @property
    def tight(self) -> bool:
        """Fits, but only just: what never met an NPU is not good to the last tenth."""
        return self.fits and self.peak > TIGHT * self.capacity

    @property
    def excess(self) -> int:
        """Bytes by which the worst moment is over, 0 if it fits."""
        return max(self.kv_missing, *(self.total(moment) - self.capacity for moment in MOMENTS), 0)

    @property
    def fits(self) -> bool:
        """Does every moment fit, and does vLLM start (a KV cache of at least one answer of full
        length)?
        """
        return not self.faults

    @property
    def faults(self) -> list[str]:
        """Why it does not fit, one sentence each."""
        over = [
            f"{moment} needs {self.total(moment) / GB:.1f} GB of {self.capacity / GB:.0f} GB"
            for moment in MOMENTS
            if self.total(moment) > self.capacity
        ]
        if self.answers_at_once < 1:
            over.append(
                f"vLLM has {self.kv_cache / GB:.1f} GB left for its KV cache, not enough for one "
                "answer of full length"
            )
        return over


def settings_of(recipe: Recipe, memory_gb: float = 64.0) -> Settings:
    """What a recipe says of memory, on ranks of `memory_gb` 10^9 bytes."""
    optimizer = recipe.optimizer
    return Settings(
        memory_gb,
        **vars(recipe.rollout),
        distributed_optimizer=optimizer.distributed,
        recompute=optimizer.recompute_granularity == "full",
        recompute_num_layers=optimizer.recompute_num_layers,
        lora_r=recipe.lora.r,
        lora_targets=recipe.lora.targets,
        hccl_buffer_mib=recipe.npu.hccl_buffer_mib,
        int8_rollouts=recipe.quantization.format == "int8_w8a8",
    )


# Numbers of parameters are pairs: all but experts, experts.
def layer_weights(shape: ModelShape, tp: int, expert_ranks: int) -> tuple[int, int]:
    """Of one layer on one rank."""
    family = family_of(shape)
    dense, experts = family.other_parameters(shape, tp), 0
    for linear in family.linears(shape):
        if linear.split == "expert":
            experts += linear.inputs * linear.outputs * linear.copies // expert_ranks
        else:
            dense += linear.inputs * linear.outputs // tp
    return dense, experts


def training_weights(plan: Plan, stage: int) -> tuple[int, int]:
    """Of one training rank in pipeline stage `stage` (0 .. PP-1)."""
    it = plan.layout
    return _shard(
        plan.shape, plan.rows, it.tp, it.ep, plan.layers[stage], stage == 0, stage == it.pp - 1
    )


def rollout_weights(plan: Plan) -> tuple[int, int]:
    """Of one vLLM rank."""
    it, shape = plan.layout, plan.shape
    return _shard(shape, plan.vllm_rows, it.infer_tp, it.infer_ep, shape.num_hidden_layers)


def model_parameters(shape: ModelShape) -> int:
    """Of the whole model, with experts."""
    return sum(_shard(shape, shape.vocab_size, 1, 1, shape.num_hidden_layers))


def _shard(
    shape: ModelShape,
    rows: int,
    tp: int,
    ep: int,
    layers: int,
    first: bool = True,
    last: bool = True,
) -> tuple[int, int]:
    """Of `layers` layers, with the embedding if they are the first, output layer and norm if they
    are the last.
    """
    dense, experts = layer_weights(shape, tp, tp * ep)
    tables = first + last - (first and last and shape.tie_word_embeddings)
    return dense * layers + (tables * (rows // tp) + last) * shape.hidden_size, experts * layers


def adapter_weights(plan: Plan, settings: Settings, stage: int) -> tuple[int, int]:
    """LoRA parameters on one training rank: PEFT's A is whole beside a column-parallel B, B is
    whole beside a row-parallel A (peft tuners/lora/tp_layer.py:89-109); experts have one pair each,
    never split (MindSpeed-LLM tasks/posttrain/lora/moe/experts.py:437).
    """
    it, dense, experts = plan.layout, 0, 0
    for linear in family_of(plan.shape).linears(plan.shape):
        if linear.target in settings.lora_targets:
            if linear.split == "expert":
                experts += linear.copies // (it.tp * it.ep) * (linear.inputs + linear.outputs)
            elif linear.split == "column":
                dense += linear.inputs + linear.outputs // it.tp
            else:
                dense += linear.inputs // it.tp + linear.outputs
    rank_layers = settings.lora_r * plan.layers[stage]
    return dense * rank_layers, experts * rank_layers


def layer_activations(plan: Plan, tokens: int, expert_load: float) -> int:
    """Bytes that the gradient of one layer needs, for `tokens` tokens on a rank's TP group."""
    shape, tp, h = plan.shape, plan.layout.tp, plan.shape.hidden_size
    q, kv = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    spread = tp if plan.layout.sequence_parallel else 1
    numbers = 4 * h / spread  # two residuals, two normed inputs
    numbers += (
        q + 2 * kv
    ) * 2 / tp + q / tp  # q, k, v before and after rotation and norm, attention's output
    numbers += (
        3 * (shape.intermediate_size + shape.shared_expert_intermediate_size) / tp
    )  # gate and up, their product
    statistics = (
        shape.num_attention_heads / tp * 2 * 8 * FP32
    )  # npu_fusion_attention keeps maximum and sum eightfold
    # of each copy of a token
    experts = (
        expert_load * shape.num_experts_per_tok / spread * (4 * h + 3 * shape.moe_intermediate_size)
    )
    return int(tokens * ((numbers + experts) * BF16 + statistics))


def communicators(plan: Plan) -> list[str]:
    """Groups of more than one rank over which a rank sends data; HCCL keeps two buffers of
    HCCL_BUFFSIZE for each (CANN, HCCL_BUFFSIZE).
    """
    it, moe = plan.layout, plan.shape.moe
    sizes = {
        "world": it.world,
        "TP": it.tp,
        "PP": it.pp,
        "DP": it.dp * it.cp,
        "EP": it.tp * it.ep * moe,
        "expert DP": it.expert_dp * moe,
        "vLLM TP": it.infer_tp,
        **dict.fromkeys(("vLLM EP", "vLLM MC2"), it.infer_tp * it.infer_ep * moe),
    }
    return [name for name, size in sizes.items() if size > 1]


def estimate(plan: Plan, settings: Settings, stage: int | None = None) -> Memory:
    """The memory of a rank in that pipeline stage (None: the fullest) of a legal plan
    (`rules.broken` empty): shares have no remainder.
    """
    pp = plan.layout.pp
    stages = (
        range(pp) if plan.layout.num_layer_list else {0, pp - 1}
    )  # of equal ones those between hold less
    stages = stages if stage is None else {stage}
    return max(
        (_stage(plan, settings, stage) for stage in stages),
        key=lambda memory: (memory.peak, memory.total("rollout") - memory.kv_cache),
    )


def _stage(plan: Plan, settings: Settings, stage: int) -> Memory:
    it, batch, shape = plan.layout, plan.batch, plan.shape
    runtime = _runtime(plan, settings)
    of_layers = f", {plan.layers[stage]} of {shape.num_hidden_layers} layers" if it.pp > 1 else ""
    weights = _weights(
        "frozen base" if plan.lora else "weights",
        "training weights",
        training_weights(plan, stage),
        f"TP {it.tp}{of_layers}",
        f"{shape.num_experts} / (TP {it.tp} x EP {it.ep}) = "
        f"{shape.num_experts // (it.tp * it.ep)} of each of {plan.layers[stage]} layers",
    )
    vllm = _weights(
        "vLLM's weights",
        "vLLM's weights",
        rollout_weights(plan),
        f"infer TP {it.infer_tp}",
        f"{shape.num_experts} / (infer TP {it.infer_tp} x EP {it.infer_ep}) = "
        f"{shape.num_experts // (it.infer_tp * it.infer_ep)} of each layer",
    )
    adapters, gradients, optimizer = _trained(plan, settings, stage)
    awake = (
        *([] if settings.offload_train_grad else gradients),
        *([] if settings.offload_train_optimizer else optimizer),
    )
    # Upstream offloads what is trained, never the frozen base (megatron_off_loader.py:224: the
    # buffers of parameters with a gradient).
    frozen, trained = (weights, adapters) if plan.lora else ([], weights)
    asleep = (*frozen, *([] if settings.offload_train_param else trained), *awake)

    used = (*runtime, *asleep, *vllm, _profiled(plan, settings))
    left = int(settings.gpu_memory_utilization * settings.memory_gb * GB) - sum(
        part.bytes for part in used
    )
    kv_cache = max(0, left)
    kv_token = (
        2
        * shape.num_hidden_layers
        * shape.num_key_value_heads
        * shape.head_dim
        * BF16
        // it.infer_tp
    )
    at_once, needed = kv_cache // (kv_token * batch.max_model_len), batch.answers // it.infer_dp
    cache = Part(
        "KV cache",
        kv_cache,
        f"{settings.gpu_memory_utilization:g} x {settings.memory_gb:g} GB less the rest: "
        f"{at_once} answers of {batch.max_model_len} tokens at once, {needed} needed; "
        f"{kv_token / 1000:.0f} KB a token",
        "KV cache",
    )
    return Memory(
        plan,
        settings,
        stage,
        {
            "rollout": (*used, cache, *_int8_copies(plan, settings)),
            "weight sync": (*runtime, *weights, *adapters, *awake, *vllm, *_sync(plan, stage)),
            "log-probs": (*runtime, *weights, *adapters, *awake, *_forward(plan, stage)),
            "update": (
                *runtime,
                *weights,
                *adapters,
                *gradients,
                *optimizer,
                *_update(plan, settings, stage),
            ),
        },
        kv_cache,
        kv_token,
        max(0, kv_token * batch.max_model_len - left),
        at_once,
        needed,
    )


def terms(memory: Memory) -> dict[str, int]:
    """Bytes of what a rehearsal measures as well, by the names of tests/upstream/measure.py."""
    parts = {part.name: part.bytes for part in memory.moments["update"]}

    def of_kind(kind: str) -> int:
        return sum(part.bytes for part in memory.moments["weight sync"] if part.kind == kind)

    return {
        "KV cache of a token": memory.kv_token,
        **{name: parts[name] for name in ("adapters", "gradients", "AdamW")},
        "frozen base": of_kind("training weights"),
        "vLLM's weights": of_kind("vLLM's weights"),
        "sync buffers": of_kind("sync buffers"),
        **{
            part.name: part.bytes
            for part in memory.moments["rollout"]
            if part.name == "int8 copies"
        },
    }


def _runtime(plan: Plan, settings: Settings) -> list[Part]:
    groups = communicators(plan)
    return [
        Part("runtime", RUNTIME, "assumed: CANN, operators, torch_npu", "runtime"),
        Part(
            "HCCL buffers",
            len(groups) * 2 * settings.hccl_buffer_mib * 2**20,
            f"2 x {settings.hccl_buffer_mib} MiB for each of {len(groups)} groups: "
            f"{', '.join(groups)}",
            "runtime",
        ),
    ]


def _weights(what: str, kind: str, weights: tuple[int, int], shared: str, dealt: str) -> list[Part]:
    """In bfloat16; `shared` and `dealt` are in words what of all but the experts, and of them, a
    rank has.
    """
    dense, experts = weights
    parts = [
        Part(
            f"{what}, dense part",
            dense * BF16,
            f"{dense / GB:.2f} x 10^9 parameters ({shared}) x 2",
            kind,
        )
    ]
    if experts:
        parts.append(
            Part(
                f"{what}, experts", experts * BF16, f"{dealt}: {experts / GB:.2f} x 10^9 x 2", kind
            )
        )
    return parts


def _trained(
    plan: Plan, settings: Settings, stage: int
) -> tuple[list[Part], list[Part], list[Part]]:
    """Adapters (none without LoRA: the weights themselves are trained), gradients, optimizer."""
    it, kind = plan.layout, "adapters and optimizer"
    dense, experts = (
        adapter_weights(plan, settings, stage) if plan.lora else training_weights(plan, stage)
    )
    dp, expert_dp = (it.dp * it.cp, it.expert_dp) if settings.distributed_optimizer else (1, 1)
    total, numbers = dense + experts, f"{(dense + experts) / 1e6:.1f} x 10^6"
    of_experts = f", {experts / 1e6:.1f} x 10^6 of experts over {expert_dp}" if experts else ""
    return (
        [Part("adapters", total * BF16, f"r {settings.lora_r}: {numbers} x 2", kind)]
        if plan.lora
        else [],
        [Part("gradients", total * FP32, f"{numbers} x 4", kind)],
        [
            Part(
                "AdamW",
                dense * ADAMW // dp + experts * ADAMW // expert_dp,
                f"12 bytes (master weight, two moments): {dense / 1e6:.1f} x 10^6 over {dp} "
                f"ranks{of_experts}",
                kind,
            )
        ],
    )


def _update(plan: Plan, settings: Settings, stage: int) -> list[Part]:
    it, batch, layers, kind = plan.layout, plan.batch, plan.layers[stage], "activations and logits"
    tokens, hidden = batch.micro_batch_size * batch.seq_length // it.cp, plan.shape.hidden_size
    in_flight = min(it.pp - stage, max(1, plan.mini_share // batch.micro_batch_size))
    times = f" x {in_flight} micro-batches in flight" if in_flight > 1 else ""
    recomputed = min(settings.recompute_num_layers or layers, layers) if settings.recompute else 0
    spread = it.tp if it.sequence_parallel else 1
    parts = []
    if recomputed:
        shared = f" / TP {spread}" if spread > 1 else ""
        parts.append(
            Part(
                "layer inputs kept",
                in_flight * recomputed * tokens * hidden * BF16 // spread,
                f"{recomputed} layers x {tokens} tokens x {hidden} x 2{shared}{times}",
                kind,
            )
        )
    if layers > recomputed:
        kept = layer_activations(plan, tokens, 1)
        parts.append(
            Part(
                "activations kept",
                in_flight * (layers - recomputed) * kept,
                f"{layers - recomputed} layers x {kept / GB:.2f} GB for {tokens} tokens{times}",
                kind,
            )
        )
    one = layer_activations(plan, tokens, EXPERT_LOAD)
    busiest = f", {EXPERT_LOAD} x the average tokens on the busiest rank" if plan.shape.moe else ""
    parts.append(
        Part(
            "one layer at work",
            2 * one,
            f"update: {one / GB:.2f} GB and its gradient{busiest}",
            kind,
        )
    )
    return [*parts, *_logits(plan, stage, tokens, LOGITS_UPDATE, "update")]


def _forward(plan: Plan, stage: int) -> list[Part]:
    tokens = (
        max(plan.batch.actor_forward, plan.batch.ref_forward)
        * plan.batch.seq_length
        // plan.layout.cp
    )
    return [
        Part(
            "one layer at work",
            layer_activations(plan, tokens, EXPERT_LOAD),
            f"log-probs: {tokens} tokens",
            "activations and logits",
        ),
        *_logits(plan, stage, tokens, LOGITS_FORWARD, "log-probs"),
    ]


def _logits(plan: Plan, stage: int, tokens: int, copies: int, moment: str) -> list[Part]:
    if stage < plan.layout.pp - 1:
        return []
    rows = plan.rows // plan.layout.tp
    return [
        Part(
            "logits",
            copies * tokens * rows * FP32,
            f"{moment}: {copies} x {tokens} tokens x {rows:,} x 4",
            "activations and logits",
        )
    ]


def _sync(plan: Plan, stage: int) -> list[Part]:
    """The fuller of the container's two passes (vllm_weight_container.py): tensor after tensor into
    vLLM's buffers, joined and cut where infer TP is not TP (:461-464); then the experts of one
    pipeline stage after the other, in a buffer that is N times a vLLM rank's share, which is a
    training rank's (:490-546). Our adaptor merges one tensor after the other, and the one before is
    still there.
    """
    return max(
        _dense_sync(plan, stage),
        _experts_sync(plan, stage),
        key=lambda parts: sum(part.bytes for part in parts),
    )


def _dense_sync(plan: Plan, stage: int) -> list[Part]:
    it, shape = plan.layout, plan.shape
    tables = (stage == 0) + (stage == it.pp - 1 and not shape.tie_word_embeddings)
    joined, kept = _joined(plan, plan.rows * shape.hidden_size)
    of_tables = Part(
        "embedding on its way",
        bool(tables) * joined + (tables > 1) * kept,
        f"TP {it.tp} to infer TP {it.infer_tp}: {plan.rows:,} x {shape.hidden_size} x 2 joined "
        f"and cut{', beside the output layer' if tables > 1 else ''}",
        "sync buffers",
    )
    linears = [linear for linear in family_of(shape).linears(shape) if linear.split != "expert"]
    largest = max(linear.inputs * linear.outputs for linear in linears)
    merging = 2 * largest // it.tp * FP32 if plan.lora else 0
    joined, kept = _joined(plan, largest)
    of_linears = Part(
        "merging",
        max(merging, largest // it.tp * BF16 * plan.lora + joined + kept),
        f"the largest linear layer, {largest / 1e6:.1f} x 10^6 / TP {it.tp}: W and W + BA, float32",
        "sync buffers",
    )
    return [max(of_tables, of_linears, key=lambda part: part.bytes)]


def _joined(plan: Plan, numbers: int) -> tuple[int, int]:
    """Bytes to bring a tensor of so many numbers from training's TP ranks to vLLM's, and what is
    left of them while the next one comes (:655-760): training's shares are gathered, joined and
    cut.
    """
    it = plan.layout
    if it.tp == it.infer_tp:
        return 0, 0
    kept = (
        numbers * BF16 // it.infer_tp if it.tp > it.infer_tp else numbers * BF16
    )  # a part of what was joined
    return (it.tp > 1) * numbers * BF16 + kept, kept


def _experts_sync(plan: Plan, stage: int) -> list[Part]:
    """With pipeline stages the buffer of the one before is still there: variables hold views of it
    (:535-537).
    """
    if not plan.shape.moe:
        return []
    _, layer = layer_weights(plan.shape, plan.layout.tp, plan.layout.tp * plan.layout.ep)
    merging = Part(
        "merging",
        layer * 2 // 3 * 2 * FP32 + layer // 3 * BF16,
        "W and W + BA of one layer's fc1, float32, beside fc2",
        "sync buffers",
    )

    def buffers(last: int) -> Part:
        layers = plan.layers[max(last - 1, 0) : last + 1]
        of = "a stage's" if len(layers) == 1 else "two stages'"
        return Part(
            "experts on their way",
            layer * sum(layers) * BF16,
            f"a second copy of {of} experts, {sum(layers)} layers",
            "sync buffers",
        )

    own = [
        buffers(stage),
        *([merging] if plan.lora else []),
    ]  # merges while the buffer of its own stage is filled
    return max(
        own,
        *([buffers(last)] for last in range(plan.layout.pp)),
        key=lambda parts: sum(part.bytes for part in parts),
    )


def _int8_copies(plan: Plan, settings: Settings) -> list[Part]:
    """Of the linear weights but experts (ascend/quantized.py), beside gpu_memory_utilization: vLLM
    measures before.
    """
    shape, tp = plan.shape, plan.layout.infer_tp
    numbers = shape.num_hidden_layers * (
        layer_weights(shape, tp, 1)[0] - family_of(shape).other_parameters(shape, tp)
    )
    return settings.int8_rollouts * [
        Part("int8 copies", numbers, f"{numbers / GB:.2f} x 10^9 x 1", "vLLM's weights")
    ]


def _profiled(plan: Plan, settings: Settings) -> Part:
    """What vLLM's profiling run leaves aside: the widest point of one layer for
    max_num_batched_tokens, and the logits of max_num_seqs.
    """
    shape, it, tokens = plan.shape, plan.layout, plan.batch.max_num_batched_tokens
    width = (
        3 * (shape.intermediate_size + shape.shared_expert_intermediate_size) / it.infer_tp
        + 2 * shape.hidden_size
    )
    width += shape.num_experts_per_tok * (2 * shape.hidden_size + 3 * shape.moe_intermediate_size)
    return Part(
        "vLLM's activations",
        int(tokens * width * BF16) + 2 * settings.max_num_seqs * plan.vllm_rows * FP32,
        f"one layer for {tokens} tokens, and 2 x {settings.max_num_seqs} sequences x "
        f"{plan.vllm_rows:,} logits x 4",
        "activations and logits",
    )
