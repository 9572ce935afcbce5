"""What the fullest rank must hold, in bytes, at the four moments of an iteration. An estimate from
sizes; never measured on an NPU.

Moments: `rollout` (vLLM generates), `weight sync` (training weights on their way to vLLM),
`log-probs` (forward passes of policy and reference), `update` (forward, backward, optimizer).
"""

from dataclasses import dataclass, replace

from mindspeed_qerl.recipe.types import Recipe

from . import parts
from .parts import ALL_LAYERS, BF16, GB, MemorySettings, Part
from .plan import Plan
from .sizes import rollout_weights, training_weights

MOMENTS = ("rollout", "weight sync", "log-probs", "update")


@dataclass(frozen=True)
class Memory:
    """The memory of a plan's fullest ranks, bytes. `moments` maps each of MOMENTS to its parts: of
    the stage where the rollout leaves least for keys and values, else of the fullest stage.
    `kv_cache` is what vLLM can have for them, 0 if nothing is left.
    """

    plan: Plan
    settings: MemorySettings
    stage: int  # the pipeline stage whose ranks are fullest outside the rollout
    kv_stage: int  # the pipeline stage whose ranks have the least KV cache
    moments: dict[str, parts.Parts]
    kv_cache: int
    kv_token: int  # one token's keys and values, on one vLLM rank
    kv_missing: int  # what vLLM lacks for one answer of full length
    answers_at_once: int  # full-length answers that the KV cache holds, of one vLLM replica
    answers_needed: int  # that one vLLM replica has to generate in an iteration

    def total(self, moment: str) -> int:
        """Bytes in use at that moment."""
        return parts.size_of(self.moments[moment])

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
        over = []
        capacity = self.capacity / GB
        for moment in MOMENTS:
            needed = self.total(moment) / GB
            if needed > capacity:
                over.append(f"{moment} needs {needed:.1f} GB of {capacity:.0f} GB")
        if self.answers_at_once < 1:
            where = f" in pipeline stage {self.kv_stage}" if self.plan.layout.pp > 1 else ""
            over.append(
                f"vLLM has {self.kv_cache / GB:.1f} GB left for its KV cache{where}, not enough "
                "for one answer of full length"
            )
        return over


def settings_of(recipe: Recipe, memory_gb: float = 64.0) -> MemorySettings:
    """Returns what a recipe says of memory, on ranks of `memory_gb` 10^9 bytes."""
    optimizer = recipe.optimizer
    recomputed = 0
    if optimizer.recompute_granularity == "full":
        recomputed = optimizer.recompute_num_layers or ALL_LAYERS
    drawn_norms = 0
    if recipe.noise.enabled and recipe.noise.draws != "step":
        is_mixture = recipe.model.arguments.get("num_experts")
        drawn_norms = 1 if is_mixture and recipe.noise.targets == "auto" else 2
    answers_of_draw = 1
    if recipe.noise.draws == "group":
        answers_of_draw = recipe.batch.samples_per_prompt
    return MemorySettings(
        memory_gb,
        **vars(recipe.rollout),
        distributed_optimizer=optimizer.distributed,
        recompute_layers=recomputed,
        lora_r=recipe.lora.r,
        lora_targets=recipe.lora.targets,
        hccl_buffer_mib=recipe.npu.hccl_buffer_mib,
        int8_rollouts=recipe.quantization.format == "int8_w8a8",
        drawn_norms=drawn_norms,
        answers_of_draw=answers_of_draw,
    )


def estimate(plan: Plan, settings: MemorySettings) -> Memory:
    """The memory of a legal plan (`rules.broken` empty, so that shares have no remainder), of all
    whose pipeline stages the worst counts: the fullest outside the rollout, and in it the one with
    the least room for keys and values.
    """
    stages = [stage_memory(plan, settings, stage) for stage in range(plan.layout.pp)]
    fullest = max(stages, key=lambda memory: memory.peak)
    tightest = min(stages, key=lambda memory: (memory.kv_cache, -memory.kv_missing))
    return replace(
        tightest,
        stage=fullest.stage,
        moments=fullest.moments | {"rollout": tightest.moments["rollout"]},
    )


def stage_memory(plan: Plan, settings: MemorySettings, stage: int) -> Memory:
    """The memory of a rank in one pipeline stage."""
    batch = plan.batch
    runtime = parts.runtime(plan, settings)
    draws = [parts.draws(plan, settings)] if settings.drawn_norms else []
    name = "frozen base" if plan.lora else "weights"
    weights = parts.weights(name, training_weights(plan, stage))
    vllm = parts.weights("vLLM's weights", rollout_weights(plan))
    adapters, gradients, optimizer = parts.trained(plan, settings, stage)
    # Upstream offloads what is trained, never the frozen base (megatron_off_loader.py:224: the
    # buffers of parameters with a gradient).
    awake = []
    if not settings.offload_train_grad:
        awake.append(gradients)
    if not settings.offload_train_optimizer:
        awake.append(optimizer)
    frozen, trainable = (weights, adapters) if plan.lora else ([], weights)
    asleep = frozen + awake
    if not settings.offload_train_param:
        asleep += trainable

    rollout = [*runtime, *asleep, *vllm, parts.profiled(plan, settings)]
    left = int(settings.gpu_memory_utilization * settings.memory_gb * GB) - parts.size_of(rollout)
    kv_token = plan.shape.kv_numbers * BF16 // plan.layout.infer_tp
    answer = kv_token * batch.max_model_len
    kv_cache = max(0, left)
    at_once = kv_cache // answer
    needed = batch.answers // plan.layout.infer_dp
    how = (
        f"{settings.gpu_memory_utilization:g} x {settings.memory_gb:g} GB less the rest: "
        f"{at_once} answers of {batch.max_model_len} tokens at once, {needed} needed; "
        f"{kv_token / 1000:.0f} KB a token"
    )
    rollout.append(Part("KV cache", kv_cache, how))
    if settings.int8_rollouts:
        rollout.append(parts.int8_copies(plan))
    rollout += draws

    training = [*runtime, *weights, *adapters, *draws]
    held = []
    if not settings.enforce_eager:  # decode graphs keep what they read where it is
        graphs = parts.graphs(settings)
        rollout.append(graphs)
        held = [*vllm, Part("KV cache", kv_cache, "kept for decode graphs"), graphs]
    merged = parts.merged(plan, settings, stage)
    update = [*merged, gradients, optimizer, *parts.update(plan, settings, stage)]
    moments = {
        "rollout": rollout,
        "weight sync": [*training, *awake, *(held or vllm), *parts.sync(plan, stage)],
        "log-probs": [*training, *held, *merged, *awake, *parts.forward(plan, stage)],
        "update": [*training, *held, *update],
    }
    missing = max(0, answer - left)
    return Memory(
        plan, settings, stage, stage, moments, kv_cache, kv_token, missing, at_once, needed
    )
