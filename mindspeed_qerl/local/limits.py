"""What the local engine cannot do. No torch here."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from mindspeed_qerl.common.errors import ConfigError, Fault
from mindspeed_qerl.families import ModelShape, family_of, read_config, read_shape
from mindspeed_qerl.families.built import not_built
from mindspeed_qerl.families.fingerprint import model_files
from mindspeed_qerl.layout.plan import NO_MODEL, Plan, beyond_positions
from mindspeed_qerl.layout.rules import RULES, layout_faults
from mindspeed_qerl.layout.sizes import unfilled
from mindspeed_qerl.recipe.reader import Faults
from mindspeed_qerl.recipe.types import LORA_TARGETS, Recipe
from mindspeed_qerl.tasks import checks
from mindspeed_qerl.tasks.rows import Row

UPSTREAM = False
# What vLLM's kernels for CPUs take (v1/attention/backends/cpu_attn.py; model_executor/layers/
# fused_moe/experts/cpu_moe.py). Not imported from there, which takes ten seconds.
HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
EXPERT_STEP = 32
# Of upstream's rules those that hold for any Megatron; its rollout, its nodes and its vLLM are not
# here.
OF_ANY_MEGATRON = """
    ranks_fill_training_groups ranks_fill_expert_groups heads_by_tp kv_heads_by_tp width_by_tp
    vocabulary_by_tp layers_by_pp layer_list_has_a_number_for_each_stage
    layer_list_sums_to_the_layers dense_model_without_ep experts_by_training_ranks
    mini_batch_by_training_dp
""".split()
LAYOUT_RULES = [rule for rule in RULES if rule.name in OF_ANY_MEGATRON]
# A checkpoint holds whole tensors, so a run may resume in another layout, and with other buffers.
LAYOUT_KEYS = """
    tensor_model_parallel_size pipeline_model_parallel_size expert_model_parallel_size
    num_layer_list sequence_parallel micro_batch_size
    recompute_granularity recompute_method recompute_num_layers
""".split()
OTHER_KEYS = """
    rl_config.actor_resource.num_npus rl_config.ref_forward_micro_batch_size
    rl_config.actor_forward_micro_batch_size megatron_training.save_interval local.kv_cache_gib
    local.keep_checkpoints run.prove_every run.min_arrived
""".split()
PLACES = ("megatron_training", "actor_config")
MAY_CHANGE = frozenset([f"{place}.{key}" for place in PLACES for key in LAYOUT_KEYS] + OTHER_KEYS)


def validate(recipe: Recipe) -> Faults:
    """See engines.engine_of: faults of model, layout, rollout and task."""
    yield from _model_faults(recipe)
    yield from _value_faults(recipe)
    yield from checks.missing_files(recipe.task, ("train_file", "test_file"))
    yield from checks.unknown_rewards(recipe.task.verifiers)


def _value_faults(recipe: Recipe) -> Faults:
    """Yields what this engine cannot do with any model."""
    layout = recipe.layout
    if not recipe.lora.targets:
        yield _unsupported(
            "megatron_training.lora_target_modules",
            f"is empty: the local engine trains LoRA adapters. Known: {', '.join(LORA_TARGETS)}",
        )
    if layout.tp > 1 and "gaussian" in recipe.hardware_error.training:
        yield _unsupported(
            "hardware_error.training",
            f"= gaussian with tensor_model_parallel_size = {layout.tp}: its ranks hold copies of "
            "some adapters, which would drift apart; use another kind, or expert, pipeline and "
            "data parallel ranks",
        )
    prompts = recipe.batch.global_batch_size
    mini = recipe.batch.mini_batch_size
    if prompts % mini and not recipe.selection.filter_groups_enable:
        message = (
            f"megatron_training.global_batch_size = {prompts} prompts must be a multiple of "
            f"rl_config.mini_batch_size = {mini}"
        )
        yield Fault("conflict", message, "rl_config.mini_batch_size")


def _unsupported(key: str, reason: str) -> Fault:
    return Fault("unsupported", f"{key} {reason}", key)


def _model_faults(recipe: Recipe) -> Faults:
    """Faults of config.json, and of what this engine cannot do with such a model."""
    path = recipe.model.path
    key = "megatron_training.tokenizer_name_or_path"
    file = Path(path) / "config.json"
    if not file.is_file():
        fix = (
            "Give a Hugging Face model directory, from where you are; the quickstart's, "
            "models/tiny_qwen3_moe, is in the repository"
        )
        yield Fault("model", NO_MODEL.format(path), key, fix)
        return
    try:
        shape = read_shape(path)
    except ConfigError as error:
        yield Fault("model", f"{key} = {path!r}: {error}", key)
        return
    for reason in refused(file, shape):
        yield Fault("model", f"{file}: {reason}", str(file))
    if recipe.algorithm.routing_replay != "none" and not shape.moe:
        yield _unsupported(
            "algorithm.routing_replay",
            f"= {recipe.algorithm.routing_replay!r} with {path}, which has no experts: there are "
            "no routes to replay; set it to none",
        )
    plan = Plan(shape, recipe.layout, recipe.batch, padded_vocab_size=shape.vocab_size)
    yield from layout_faults(plan, LAYOUT_RULES)
    yield from beyond_positions(plan, path)
    yield from unfilled(recipe.quantization.format, shape, 1)


def refused(file: Path, shape: ModelShape) -> list[str]:
    """Why this engine does not run the model of a config.json, whatever else is configured."""
    return not_built(read_config(file), family_of(shape)) + beyond_kernels(shape)


def beyond_kernels(shape: ModelShape) -> list[str]:
    """Which sizes of a model vLLM's kernels for CPUs do not take."""
    reasons = []
    if shape.head_dim not in HEAD_DIMS:
        reasons.append(
            f"head_dim = {shape.head_dim} must be one of {', '.join(map(str, HEAD_DIMS))}: vLLM's "
            "attention on CPUs takes no other"
        )
    for key in ("hidden_size", "moe_intermediate_size") if shape.moe else ():
        size = getattr(shape, key)
        if size % EXPERT_STEP:
            reasons.append(
                f"{key} = {size} must be a multiple of {EXPERT_STEP}: vLLM's experts on CPUs take "
                "no other, or pad them, and what is padded cannot be updated in place"
            )
    return reasons


def data_files(recipe: Recipe) -> dict[str, Path | str]:
    """The files that a run reads, by label."""
    task = recipe.task
    return {"train": task.train_file, "test": task.test_file, **model_files(recipe.model.path)}


def versions() -> dict[str, Any]:
    """Returns nothing: installed packages are all there is."""
    return {}


def rehearsed(recipe: Recipe, shape: ModelShape, rows: list[Row], model_dir: Path) -> Recipe:
    """`recipe` for one vLLM engine, in float32: bfloat16 is slow on most CPUs."""
    return replace(
        recipe,
        model=replace(recipe.model, dtype="float32"),
        layout=replace(recipe.layout, infer_tp=1),
        upstream={},
    )
