"""What the MindSpeed-RL engine cannot do, before anything heavy is imported. No torch, no upstream
here.

Upstream checks a config once more (config_cls/validate_config.py), after minutes and without our
names. The rules here are those that upstream lacks, or that it only meets in the middle of a run;
keys of one allowed value are in recipe/keys.yaml, layouts and batches in layout/rules.py.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from mindspeed_qerl.ascend.contract import UPSTREAM_VERIFIERS, upstream_versions
from mindspeed_qerl.common.errors import ConfigError
from mindspeed_qerl.families import family_of, read_config
from mindspeed_qerl.families.base import ModelShape
from mindspeed_qerl.families.fingerprint import model_files
from mindspeed_qerl.families.megatron import compare_with_model
from mindspeed_qerl.layout.blocks import SHARED_INPUTS, unfilled
from mindspeed_qerl.layout.plan import beyond_positions, plan_of
from mindspeed_qerl.layout.rules import broken
from mindspeed_qerl.recipe.compose import CONFIGS
from mindspeed_qerl.recipe.keys import Values
from mindspeed_qerl.recipe.reader import UPSTREAM_SECTIONS
from mindspeed_qerl.recipe.types import Recipe, Selection
from mindspeed_qerl.recipe.writer import to_config
from mindspeed_qerl.tasks import checks
from mindspeed_qerl.tasks.packed import pack_rows, read_packed
from mindspeed_qerl.tasks.rows import Row

UPSTREAM = True
MAY_CHANGE = frozenset()  # nothing: a checkpoint is of one layout
TRANSFER_DOCK_CPUS = 10  # trainer/utils/transfer_dock.py:248


def needed_cpus(recipe: Recipe) -> int:
    """Logical CPUs that upstream reserves: a bundle per NPU (launcher.py:90-104), the reward
    process (cli/train_grpo.py:155), the task that computes advantages, and the transfer dock.
    """
    return (
        recipe.layout.world * recipe.npu.cpus_per_npu
        + 2 * recipe.npu.cpus_for_tasks
        + TRANSFER_DOCK_CPUS
    )


def vllm_dp_size(recipe: Recipe) -> int:
    """VLLM_DP_SIZE: upstream's ranks of one expert parallel group serve their own prompts."""
    return recipe.layout.infer_ep if recipe.layout.enable_expert_parallel else 1


def epoch_steps(recipe: Recipe) -> int:
    """Iterations of one pass over the packed rows; upstream keeps prompts shorter than
    max_prompt_length (indexed_dataset.py:545).
    """
    lengths, _ = read_packed(f"{recipe.task.data_path}_packed_input_ids_document")
    kept = int((lengths < recipe.sampling.max_prompt_length).sum())
    return max(1, math.ceil(kept / recipe.batch.global_batch_size))


def npu_environment() -> dict[str, str]:
    """The variables of configs/envs/runtime_env.yaml: for every process on NPUs, unless the shell
    says otherwise.
    """
    return yaml.safe_load((CONFIGS / "envs" / "runtime_env.yaml").read_text(encoding="utf-8"))[
        "env_vars"
    ]


def worker_environment(recipe: Recipe, shell: Mapping[str, str]) -> dict[str, str]:
    """What the engine sets for each of its processes, besides what the shell has."""
    environment = {name: shell.get(name, value) for name, value in npu_environment().items()}
    return {
        **environment,
        "VLLM_DP_SIZE": str(vllm_dp_size(recipe)),
        "HCCL_BUFFSIZE": str(recipe.npu.hccl_buffer_mib),
    }


def upstream_sections(recipe: Recipe) -> dict[str, Any]:
    """The sections that go to upstream, by its key names, with every value of the recipe but those
    of the selection, which is ours: upstream's trainer would leave weight syncs to DAPO's, and cost
    the length once more.
    """
    kept = replace(
        recipe,
        run=replace(recipe.run, save_interval=recipe.run.save_interval or recipe.run.train_iters),
        selection=Selection(),
    )
    config = to_config(
        kept
    )  # without save_interval upstream computes 1 % None (grpo_trainer_hybrid.py:291)
    return {name: config[name] for name in ("model", *UPSTREAM_SECTIONS)}


def validate(recipe: Recipe) -> Iterator[str]:
    """See engines.Engine: faults of model, layout and task."""
    task, path = recipe.task, Path(recipe.model.path) / "config.json"
    try:
        yield from compare_with_model(recipe.model.arguments, read_config(path), str(path))
    except ConfigError as error:
        yield (
            f"megatron_training.tokenizer_name_or_path = {recipe.model.path!r}: no readable "
            f"config.json of a Hugging Face model there ({error})"
        )
    try:
        plan = plan_of(recipe)
        yield from [f"{rule.message} ({rule.source})" for rule in broken(plan)]
        yield from unfilled_blocks(recipe, plan.shape)
        yield from beyond_positions(plan, recipe.model.path) if path.is_file() else ()
    except ConfigError as error:
        yield from str(error).splitlines()
    yield from faults_of_values(recipe)
    if not task.data_path:
        yield "megatron_training.data_path is missing"
    yield from checks.missing_files(task, ("test_file",))
    for file in packed_files(recipe).values():
        for path in (Path(file), Path(file).with_suffix(".idx")):
            if task.data_path and not path.is_file():
                yield (
                    f"megatron_training.data_path = {task.data_path!r}: no file {path}. Make it "
                    "with `python tools/convert_gsm8k.py --format mindspeed --tokenizer MODEL_DIR "
                    "--input DIR_OR_HUB_NAME --output DIR`"
                )


def faults_of_values(recipe: Recipe) -> Iterator[str]:
    """What this engine cannot do, whatever model and files are there: a rehearsal asks it too."""
    yield from _wrong_pairs(recipe)
    yield from _cannot_replay(recipe)
    if recipe.task.prompt != "chat":
        yield (
            f"task.prompt = {recipe.task.prompt!r} must be 'chat': the packed training rows hold "
            "chat prompts, and evaluation must ask alike"
        )
    selection, asked = recipe.selection, recipe.batch.global_batch_size
    if selection.filter_groups_enable and selection.filter_groups_train_batch_size != asked:
        yield (
            "rl_config.filter_groups_train_batch_size = "
            f"{selection.filter_groups_train_batch_size} must be "
            f"megatron_training.global_batch_size = {asked}, or left out: the transfer dock has "
            "room for the answers of one batch"
        )
    if selection.filter_groups_metric and len(recipe.task.verifiers) > 1:
        yield (
            f"rl_config.filter_groups_metric = {selection.filter_groups_metric!r} with several "
            "verifiers must be left out: the transfer dock keeps their sum; the local engine "
            "knows each"
        )
    for side in ("rollout", "training", "evaluation"):
        if kinds := getattr(recipe.hardware_error, side):
            yield (
                f"hardware_error.{side} = {', '.join(kinds)} must be none: errors are modelled on "
                "the local engine only, NPUs have their own"
            )
    yield from _cannot_quantize(recipe)
    yield from checks.unknown_rewards(recipe.task.verifiers, UPSTREAM_VERIFIERS)


def _cannot_quantize(recipe: Recipe) -> Iterator[str]:
    """Faults of rollout_quantization, whatever the widths of the model."""
    quantization = recipe.quantization
    chosen = f"rollout_quantization.format = {quantization.format!r}"
    if not quantization.enabled:
        return
    if quantization.format in ("fp8", "mxfp8"):
        yield (
            f"{chosen} must be none, int8_w8a8, mxfp4 or nvfp4: it rounds activations, and "
            "vllm-ascend at the pin has no such layers; the local engine emulates it"
        )
    if quantization.format == "int8_w8a8" and recipe.model.arguments.get("num_experts"):
        yield (
            f"{chosen} with a mixture of experts: vllm-ascend's int8 experts "
            "(ops/moe/moe_mlp.py:144) need weights in FRACTAL_NZ, which is off in RL; nvfp4 and "
            "mxfp4 take experts, and the local engine has int8_w8a8"
        )
    if quantization.lora != "merged":
        yield (
            f"rollout_quantization.lora = {quantization.lora!r} must be 'merged': a sync brings "
            "merged weights alone; the local engine keeps adapters beside them"
        )
    if quantization.probe_answers:
        yield (
            f"rollout_quantization.probe_answers = {quantization.probe_answers} must be 0: no "
            "answer is computed again by other policies here; the local engine does that"
        )


def unfilled_blocks(recipe: Recipe, shape: ModelShape) -> Iterator[str]:
    """Faults of rollout_quantization with the widths of a model: a rank rounds its own part, of
    experts whole ones.
    """
    shared = [name for name in SHARED_INPUTS if name != "moe_intermediate_size"]
    yield from unfilled(recipe.quantization.format, shape, recipe.layout.infer_tp, shared)


def _wrong_pairs(recipe: Recipe) -> Iterator[str]:
    """Faults of keys that upstream takes in other forms, or one by one and not together."""
    values, optimizer, epochs = Values(recipe.sections), recipe.optimizer, recipe.batch.epochs
    if recipe.run.resume and not recipe.model.load:
        yield "run.resume needs actor_config.load, the base weights: checkpoints hold the adapters only"
    if epochs > 1 and (optimizer.lr_decay_style != "constant" or optimizer.lr_warmup_fraction > 0):
        style, warmup = (
            values.get(f"megatron.{key}")[0] for key in ("lr_decay_style", "lr_warmup_fraction")
        )
        yield (
            f"rl_config.epochs = {epochs} with {style} = {optimizer.lr_decay_style!r} and {warmup} "
            f"= {optimizer.lr_warmup_fraction}: upstream moves the schedule on in every epoch "
            f"(base_training_engine.py:519), {epochs} times too fast. Set rl_config.epochs=1, or "
            f"{style}=constant and {warmup}=0.0"
        )
    place, alpha = values.get("megatron.lora_alpha")
    if alpha is not None and not isinstance(alpha, int):
        yield (
            f"{place} = {alpha!r} must be a whole number, written without a point: MindSpeed-LLM's "
            "--lora-alpha takes no other (training/arguments.py:351)"
        )
    if (
        recipe.model.arguments.get("num_experts")
        and recipe.model.arguments.get("moe_aux_loss_coeff") is None
    ):
        name = recipe.model.arguments.get("model")
        place = f"model.{name}" if name else "megatron_training"
        yield (
            f"{place}.moe_aux_loss_coeff is left out, and upstream would add 0.001 of the load "
            "balancing loss to GRPO's (megatron_config.py:372): set "
            f"{place}.moe_aux_loss_coeff=0.0, or the value that is meant"
        )


def _cannot_replay(recipe: Recipe) -> Iterator[str]:
    """Faults of algorithm.routing_replay with what goes another way than its routes."""
    mode, values = recipe.algorithm.routing_replay, Values(recipe.sections)
    if mode == "none":
        return
    chosen = f"algorithm.routing_replay = {mode!r}"
    if not recipe.model.arguments.get("num_experts"):
        yield f"{chosen} with a model that has no experts: there are no routes to replay; set it to none"
    if recipe.layout.cp > 1:
        yield (
            f"{chosen} with context_parallel_size = {recipe.layout.cp}: a rank has parts of a "
            "sequence, and routes are replayed over whole ones; set one of them to 1, the other "
            "to none"
        )
    if recipe.layout.layers_per_virtual_stage:
        yield (
            f"{chosen} with num_layers_per_virtual_pipeline_stage = "
            f"{recipe.layout.layers_per_virtual_stage}: each forward pass is checked to go through "
            "all layers of a rank, and would have one chunk's; leave it out"
        )
    for key in ("use_remove_padding", "use_dynamic_bsz"):
        place, value = values.get(f"rl_config.{key}")
        if value:
            yield (
                f"{chosen} with {place} = {value}: tokens of several answers become one sequence, "
                f"in an order that routes are not brought into; set {place}=false"
            )
    place, value = values.get("generate_config.enable_prefix_caching")
    if mode == "rollout" and value:
        yield (
            f"{chosen} with {place} = {value}: vLLM computes no routes for tokens that it finds in "
            f"its cache; set {place}=false"
        )


def data_files(recipe: Recipe) -> dict[str, str]:
    """The files that a run reads, by label."""
    rows = Path(f"{recipe.task.data_path}_rows.jsonl")  # of a task of one's own (tasks/packed.py)
    return {
        **packed_files(recipe),
        **({"train_rows": str(rows)} if rows.is_file() else {}),
        **recipe.data_files,
        **model_files(recipe.model.path),
        **({"base_weights": recipe.model.load} if recipe.model.load else {}),
    }


def packed_files(recipe: Recipe) -> dict[str, str]:
    """The packed training rows, by label (tasks/gsm8k/packed.py)."""
    prefix = f"{recipe.task.data_path}_packed"
    return {
        f"train_{column}": f"{prefix}_{column}_document.bin" for column in ("input_ids", "labels")
    }


def versions() -> dict[str, Any]:
    """Upstream's commits, or the hashes of its sources where there is no git."""
    return {"upstream": upstream_versions()}


def rehearsed(recipe: Recipe, shape: ModelShape, rows: list[Row], model_dir: Path) -> Recipe:
    """`recipe` with what upstream is told of the model besides its config.json, packed rows of its
    tokenizer, random weights, and few CPUs for Ray to count.
    """
    told = {
        **family_of(shape).megatron_arguments(shape),
        "padded_vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.max_position_embeddings,
    }
    actor = recipe.sections["actor_config"]
    told = {key: value for key, value in told.items() if value is not None and key not in actor}
    sections = {
        **recipe.sections,
        "megatron_training": {**recipe.sections["megatron_training"], **told},
    }
    optimizer = recipe.optimizer
    layers = optimizer.recompute_num_layers and min(
        optimizer.recompute_num_layers, shape.num_hidden_layers
    )
    packed = pack_rows(rows[:2000], model_dir / "data" / "train", model_dir)
    return replace(
        recipe,
        sections=sections,
        model=replace(recipe.model, load=None, arguments={**recipe.model.arguments, **told}),
        optimizer=replace(optimizer, recompute_num_layers=layers),
        run=replace(recipe.run, save_interval=recipe.run.train_iters),
        task=replace(recipe.task, data_path=str(packed.data_path)),
        npu=replace(
            recipe.npu, cpus_per_npu=1, hccl_buffer_mib=1, padded_vocab_size=shape.vocab_size
        ),
    )
