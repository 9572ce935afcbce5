"""What the local engine cannot do. No torch here."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from mindspeed_qerl.common.errors import ConfigError
from mindspeed_qerl.families import ModelShape, family_of, read_config, read_shape
from mindspeed_qerl.families.config import not_built
from mindspeed_qerl.families.fingerprint import model_files
from mindspeed_qerl.layout.blocks import SHARED_INPUTS, unfilled
from mindspeed_qerl.layout.plan import Plan, beyond_positions
from mindspeed_qerl.layout.rules import RULES, broken
from mindspeed_qerl.recipe.types import Recipe
from mindspeed_qerl.tasks import checks
from mindspeed_qerl.tasks.rows import Row

UPSTREAM = False
EXPERT_WIDTH_STEP = 32  # vllm fused_moe/experts/cpu_moe.py: CPUUnquantizedExperts.output_alignment
# Of upstream's rules those that hold for any Megatron; its rollout, its nodes and its vLLM are not
# here.
LAYOUT_RULES = [
    rule
    for rule in RULES
    if rule.name
    in {
        "ranks_fill_training_groups",
        "ranks_fill_expert_groups",
        "heads_by_tp",
        "kv_heads_by_tp",
        "width_by_tp",
        "vocabulary_by_tp",
        "layers_by_pp",
        "layer_list_has_a_number_for_each_stage",
        "layer_list_sums_to_the_layers",
        "dense_model_without_ep",
        "experts_by_training_ranks",
        "mini_batch_by_training_dp",
    }
]
# A checkpoint holds whole tensors, so a run may resume in another layout, and with other buffers.
LAYOUT_KEYS = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "expert_model_parallel_size",
    "num_layer_list",
    "sequence_parallel",
    "micro_batch_size",
    "recompute_granularity",
    "recompute_method",
    "recompute_num_layers",
)
BESIDE_ROUNDED = (
    "the engine gets base and adapter as one weight of that dtype, and an adapter of a thousandth "
    "of the weight is 80 % off when it is taken out again."
)
MAY_CHANGE = frozenset(
    [
        *(
            f"{section}.{key}"
            for section in ("megatron_training", "actor_config")
            for key in LAYOUT_KEYS
        ),
        "rl_config.actor_resource.num_npus",
        "rl_config.ref_forward_micro_batch_size",
        "rl_config.actor_forward_micro_batch_size",
        "megatron_training.save_interval",
        "local.kv_cache_gib",
        "local.keep_checkpoints",
        "local.sync_buffer_mib",
        "run.prove_every",
        "rollout_quantization.probe_answers",
    ]
)


def validate(recipe: Recipe) -> Iterator[str]:
    """See engines.Engine: faults of model, layout, rollout and task."""
    yield from _of_model(recipe)
    granularity, method = recipe.optimizer.recompute_granularity, recipe.optimizer.recompute_method
    if granularity and (granularity, method) != ("full", "block"):
        yield (
            f"megatron_training.recompute_granularity = {granularity!r} with recompute_method = "
            f"{method!r}: the local engine has 'full' with 'block'"
        )
    if not recipe.lora.targets:
        yield (
            "megatron_training.lora_target_modules is empty: the local engine trains LoRA "
            "adapters. Known: linear_qkv, linear_proj, linear_fc1, linear_fc2"
        )
    hardware, layout = recipe.hardware_error, recipe.layout
    for side in ("rollout", "evaluation"):
        if layout.infer_tp > 1 and getattr(hardware, side):
            yield (
                f"hardware_error.{side} with generate_config.infer_tensor_parallel_size = "
                f"{layout.infer_tp}: errors of other hardware are modelled in a single engine "
                "only; set it to 1"
            )
    if layout.tp > 1 and "gaussian" in hardware.training:
        yield (
            f"hardware_error.training = gaussian with tensor_model_parallel_size = {layout.tp}: "
            "its ranks hold copies of some adapters, which would drift apart; use another kind, "
            "or expert, pipeline and data parallel ranks"
        )
    quantization = recipe.quantization
    if quantization.enabled and quantization.lora == "beside" and recipe.model.dtype != "float32":
        yield (
            f"rollout_quantization.lora = 'beside' with a model in {recipe.model.dtype}: "
            f"{BESIDE_ROUNDED} Take generate_config.dtype=float32, or "
            "rollout_quantization.lora=merged"
        )
    available = psutil.virtual_memory().available / 2**30
    if recipe.local.kv_cache_gib >= available:
        yield (
            f"local.kv_cache_gib = {recipe.local.kv_cache_gib}, but only {available:.1f} GiB of "
            "memory are available for vLLM's KV cache. Ask for less, or free some"
        )
    yield from checks.missing_files(recipe.task, ("train_file", "test_file"), quickstart=True)
    yield from checks.unknown_rewards(recipe.task.verifiers)


def _of_model(recipe: Recipe) -> Iterator[str]:
    path = recipe.model.path
    if not (Path(path) / "config.json").is_file():
        yield (
            f"megatron_training.tokenizer_name_or_path = {path!r}: no config.json there. Give a "
            "Hugging Face model directory; the quickstart's is made by `python "
            "tools/make_tiny_model.py --output models/tiny_qwen3_moe`"
        )
        return
    try:
        shape = read_shape(path)
    except ConfigError as error:
        yield f"megatron_training.tokenizer_name_or_path = {path!r}: {error}"
        return
    config = read_config(Path(path) / "config.json")
    yield from (f"{path}/config.json: {fault}" for fault in not_built(config, family_of(shape)))
    if shape.moe and shape.moe_intermediate_size % EXPERT_WIDTH_STEP:
        yield (
            f"{path}/config.json: moe_intermediate_size = {shape.moe_intermediate_size} must be a "
            f"multiple of {EXPERT_WIDTH_STEP}; vLLM's CPU backend pads other widths, and padded "
            "experts cannot be updated in place"
        )
    if recipe.layout.cp > 1:
        yield f"actor_config.context_parallel_size = {recipe.layout.cp}: the local engine runs it at 1 only"
    prompts, mini = recipe.batch.global_batch_size, recipe.batch.mini_batch_size
    if prompts % mini and not recipe.selection.filter_groups_enable:
        yield (
            f"megatron_training.global_batch_size = {prompts} prompts must be a multiple of "
            f"rl_config.mini_batch_size = {mini}"
        )
    if recipe.algorithm.routing_replay != "none" and not shape.moe:
        yield (
            f"algorithm.routing_replay = {recipe.algorithm.routing_replay!r} with {path}, which "
            "has no experts: there are no routes to replay; set it to none"
        )
    plan = Plan(shape, recipe.layout, recipe.batch, padded_vocab_size=shape.vocab_size)
    yield from (
        f"{rule.message} ({rule.rule}, docs/layouts.md)" for rule in broken(plan, LAYOUT_RULES)
    )
    yield from beyond_positions(plan, path)
    size, format = recipe.layout.infer_tp, recipe.quantization.format
    # which round the activations of each engine's part
    yield from unfilled(format, shape, size, SHARED_INPUTS if format in ("fp8", "mxfp8") else ())
    for name in (
        "num_attention_heads",
        "num_key_value_heads",
        "intermediate_size",
        "moe_intermediate_size",
        "shared_expert_intermediate_size",
    ):  # which vLLM's tensor parallel engines share equally
        width, step = (
            getattr(shape, name),
            EXPERT_WIDTH_STEP if name == "moe_intermediate_size" else 1,
        )
        if width % (size * step):
            pads = (
                f"; vLLM's CPU backend pads experts of other widths than multiples of {step}"
                if step > 1
                else ""
            )
            yield (
                f"generate_config.infer_tensor_parallel_size = {size}: the model's {name} = "
                f"{width} is no multiple of {size * step}{pads}"
            )


def data_files(recipe: Recipe) -> dict[str, str]:
    """The files that a run reads, by label."""
    return {"train": recipe.task.train_file, **recipe.data_files, **model_files(recipe.model.path)}


def versions() -> dict[str, Any]:
    """Of nothing but installed packages."""
    return {}


def rehearsed(recipe: Recipe, shape: ModelShape, rows: list[Row], model_dir: Path) -> Recipe:
    """`recipe` for one vLLM engine, in float32: bfloat16 is slow on most CPUs."""
    return replace(
        recipe,
        model=replace(recipe.model, dtype="float32"),
        layout=replace(recipe.layout, infer_tp=1),
    )
