"""What the fullest rank must hold, in bytes, at the four moments of an iteration. An estimate from
sizes; never measured on an NPU.

Moments: `rollout` (vLLM generates), `weight sync` (training weights on their way to vLLM),
`log-probs` (forward passes of policy and reference), `update` (forward, backward, optimizer).
"""

from collections.abc import Mapping
from dataclasses import dataclass

from mindspeed_qerl.layout import parts
from mindspeed_qerl.layout.parts import BF16, GB, Part, Settings
from mindspeed_qerl.layout.plan import Plan
from mindspeed_qerl.layout.weights import rollout_weights, training_weights
from mindspeed_qerl.recipe.types import Recipe

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
TIGHT = 0.9  # of a rank's memory: what never met an NPU is not good to the last tenth


@dataclass(frozen=True)
class Memory:
    """The memory of a plan's fullest rank, bytes. `moments` maps each of MOMENTS to its parts;
    `kv_cache` is what vLLM can have for keys and values, 0 if nothing is left.
    """

    plan: Plan
    settings: Settings
    stage: int  # the pipeline stage whose ranks are fullest
    moments: Mapping[str, list[Part]]
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


def estimate(plan: Plan, settings: Settings, stage: int | None = None) -> Memory:
    """The memory of a rank in that pipeline stage (None: the fullest) of a legal plan
    (`rules.broken` empty): shares have no remainder.
    """
    if stage is not None:
        return _stage(plan, settings, stage)
    stages = [0, plan.layout.pp - 1]  # of equal ones those between hold less
    if plan.layout.num_layer_list:
        stages = list(range(plan.layout.pp))
    memories = [_stage(plan, settings, stage) for stage in stages]
    return max(
        memories, key=lambda memory: (memory.peak, memory.total("rollout") - memory.kv_cache)
    )


def _stage(plan: Plan, settings: Settings, stage: int) -> Memory:
    layout, batch = plan.layout, plan.batch
    runtime = parts.runtime(plan, settings)
    weights, vllm = _training_part(plan, stage), _vllm_part(plan)
    trained = parts.trained(plan, settings, stage)
    adapters = trained.adapters
    awake = []
    if not settings.offload_train_grad:
        awake += trained.gradients
    if not settings.offload_train_optimizer:
        awake += trained.optimizer
    # Upstream offloads what is trained, never the frozen base (megatron_off_loader.py:224: the
    # buffers of parameters with a gradient).
    frozen, trainable = (weights, adapters) if plan.lora else ([], weights)
    asleep = frozen + awake if settings.offload_train_param else frozen + trainable + awake

    rollout = [*runtime, *asleep, *vllm, parts.profiled(plan, settings)]
    limit = int(settings.gpu_memory_utilization * settings.memory_gb * GB)
    left = limit - parts.size_of(rollout)
    kv_token = _kv_token(plan)
    answer = kv_token * batch.max_model_len
    kv_cache = max(0, left)
    at_once, needed = kv_cache // answer, batch.answers // layout.infer_dp
    how = f"{settings.gpu_memory_utilization:g} x {settings.memory_gb:g} GB less the rest: "
    how += f"{at_once} answers of {batch.max_model_len} tokens at once, {needed} needed; "
    how += f"{kv_token / 1000:.0f} KB a token"
    rollout.append(Part("KV cache", kv_cache, how, "KV cache"))
    if settings.int8_rollouts:
        rollout.append(parts.int8_copies(plan))

    synced = [*runtime, *weights, *adapters, *awake, *vllm, *parts.sync(plan, stage)]
    forward = [*runtime, *weights, *adapters, *awake, *parts.forward(plan, stage)]
    update = [*runtime, *weights, *adapters, *trained.gradients, *trained.optimizer]
    update += parts.update(plan, settings, stage)
    moments = dict(zip(MOMENTS, (rollout, synced, forward, update), strict=True))
    missing = max(0, answer - left)
    return Memory(plan, settings, stage, moments, kv_cache, kv_token, missing, at_once, needed)


def _training_part(plan: Plan, stage: int) -> list[Part]:
    layout, shape, layers = plan.layout, plan.shape, plan.layers[stage]
    shared = f"TP {layout.tp}"
    if layout.pp > 1:
        shared += f", {layers} of {shape.num_hidden_layers} layers"
    experts = shape.num_experts // (layout.tp * layout.ep)
    dealt = f"{shape.num_experts} / (TP {layout.tp} x EP {layout.ep}) = {experts} of each of "
    dealt += f"{layers} layers"
    name = "frozen base" if plan.lora else "weights"
    return parts.weights(name, "training weights", training_weights(plan, stage), shared, dealt)


def _vllm_part(plan: Plan) -> list[Part]:
    layout, shape, name = plan.layout, plan.shape, "vLLM's weights"
    experts = shape.num_experts // (layout.infer_tp * layout.infer_ep)
    dealt = f"{shape.num_experts} / (infer TP {layout.infer_tp} x EP {layout.infer_ep}) = "
    dealt += f"{experts} of each layer"
    return parts.weights(name, name, rollout_weights(plan), f"infer TP {layout.infer_tp}", dealt)


def _kv_token(plan: Plan) -> int:
    """Bytes of one token's keys and values on one vLLM rank."""
    shape = plan.shape
    width = shape.num_key_value_heads * shape.head_dim
    return 2 * shape.num_hidden_layers * width * BF16 // plan.layout.infer_tp


def terms(memory: Memory) -> dict[str, int]:
    """Bytes of what a rehearsal measures as well, by the names of tests/upstream/measure.py."""
    update = {part.name: part.bytes for part in memory.moments["update"]}
    sizes = {"KV cache of a token": memory.kv_token}
    sizes |= {name: update[name] for name in ("adapters", "gradients", "AdamW")}
    sizes |= {"frozen base": 0, "vLLM's weights": 0, "sync buffers": 0}
    for part in memory.moments["weight sync"]:
        name = "frozen base" if part.kind == "training weights" else part.kind
        if name in sizes:
            sizes[name] += part.bytes
    for part in memory.moments["rollout"]:
        if part.name == "int8 copies":
            sizes[part.name] = part.bytes
    return sizes
