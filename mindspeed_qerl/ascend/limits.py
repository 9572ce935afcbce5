"""What the MindSpeed-RL engine cannot do, before anything heavy is imported. No torch, no upstream
here.

Upstream checks a config once more (config_cls/validate_config.py), after minutes and without our
names. The rules here are those that upstream lacks, or that it only meets in the middle of a run;
keys of one allowed value are in recipe/keys.yaml, layouts and batches in layout/rules.py.
"""

import json
import shlex
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from mindspeed_qerl.common.errors import ConfigError, Fault
from mindspeed_qerl.families import ModelShape, family_of, read_config
from mindspeed_qerl.families.fingerprint import model_files
from mindspeed_qerl.families.megatron import compare_with_model
from mindspeed_qerl.layout.plan import beyond_positions, plan_of
from mindspeed_qerl.layout.rules import layout_faults
from mindspeed_qerl.layout.sizes import GRAPHS_TP, unfilled
from mindspeed_qerl.recipe.compose import CONFIGS
from mindspeed_qerl.recipe.reader import UPSTREAM_SECTIONS, Faults
from mindspeed_qerl.recipe.types import Recipe, Selection
from mindspeed_qerl.recipe.writer import to_config
from mindspeed_qerl.tasks import checks
from mindspeed_qerl.tasks.packed import pack_rows, packed_template_kwargs
from mindspeed_qerl.tasks.rows import Row

from .contract import check, installed

UPSTREAM = True
# what trains nothing; a checkpoint is of one layout
MAY_CHANGE = frozenset(["run.prove_every", "run.min_arrived"])
TRANSFER_DOCK_CPUS = 10  # trainer/utils/transfer_dock.py:248
# Captured decoding, whatever the shell says. 2: torch_npu's queue cannot be captured (upstream's
# gspo_qwen3_32b_A3.sh:6); 1: vLLM would trace the model once, before its layers are ours.
GRAPHS = {"TASK_QUEUE_ENABLE": "1", "TORCHDYNAMO_DISABLE": "1"}
LOCAL_ERRORS = "must be left out: errors are modelled on the local engine only, NPUs have their own"
# whether it applies, the key that is at fault, what is wrong with its value
Case = tuple[Any, str, str]


def needed_cpus(recipe: Recipe) -> int:
    """Logical CPUs that upstream reserves: a bundle per NPU (launcher.py:90-104), the reward
    process (cli/train_grpo.py:155), the task that computes advantages, and the transfer dock.
    """
    return (
        recipe.layout.world * recipe.npu.cpus_per_npu
        + 2 * recipe.npu.cpus_for_tasks
        + TRANSFER_DOCK_CPUS
    )


@cache
def npu_environment() -> dict[str, str]:
    """The variables of configs/envs/runtime_env.yaml: for every process on NPUs, unless the shell
    says otherwise.
    """
    return yaml.safe_load((CONFIGS / "envs" / "runtime_env.yaml").read_text(encoding="utf-8"))[
        "env_vars"
    ]


def worker_environment(recipe: Recipe, shell: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables of each of the engine's processes; those of `shell` win."""
    environment = {name: shell.get(name, value) for name, value in npu_environment().items()}
    if not recipe.rollout.enforce_eager:
        environment |= GRAPHS
    # upstream's ranks of one expert parallel group serve their own prompts
    groups = recipe.layout.infer_ep if recipe.model.arguments.get("num_experts") else 1
    return {
        **environment,
        "VLLM_DP_SIZE": str(groups),
        "HCCL_BUFFSIZE": str(recipe.npu.hccl_buffer_mib),
    }


def upstream_sections(recipe: Recipe) -> dict[str, Any]:
    """The sections that go to upstream, by its key names, with every value of the recipe but those
    of the selection, which is ours: upstream's trainer would leave weight syncs to DAPO's, and cost
    the length once more.
    """
    # without save_interval upstream computes 1 % None (grpo_trainer_hybrid.py:291)
    run = replace(recipe.run, save_interval=recipe.run.save_interval or recipe.run.train_iters)
    config = to_config(replace(recipe, run=run, selection=Selection()))
    return {name: config.get(name, {}) for name in ("model", *UPSTREAM_SECTIONS)}


def validate(recipe: Recipe) -> Faults:
    """See engines.engine_of: faults of model, layout and task."""
    folder = recipe.model.path
    key = "megatron_training.tokenizer_name_or_path"
    file = Path(folder) / "config.json"
    try:
        yield from compare_with_model(recipe.model.arguments, read_config(file), str(file))
    except ConfigError as error:
        reason = f"no readable config.json of a Hugging Face model there ({error})"
        yield Fault("model", f"{key} = {folder!r}: {reason}", key)
    yield from faults_of_plan(recipe)
    yield from faults_of_values(recipe)
    yield from checks.missing_files(recipe.task, ("test_file",))
    yield from _missing_rows(recipe)


def faults_of_plan(recipe: Recipe) -> Faults:
    """Yields what no layout, and no vLLM, can do with the model; rehearsals ask too."""
    try:
        plan = plan_of(recipe)
    except ConfigError as error:
        key = "megatron_training.tokenizer_name_or_path"
        yield from (Fault("model", line, key) for line in str(error).splitlines())
        return
    yield from layout_faults(plan)
    yield from unfilled(recipe.quantization.format, plan.shape, plan.layout.infer_tp)
    if Path(recipe.model.path, "config.json").is_file():
        yield from beyond_positions(plan, recipe.model.path)


def _missing_rows(recipe: Recipe) -> Faults:
    """A fault for each file of the packed training rows that is not there, or of other prompts than
    those of the evaluation.
    """
    key = "megatron_training.data_path"
    fix = (
        "Make it with `python tools/convert_gsm8k.py --format mindspeed --tokenizer MODEL_DIR "
        "--input DIR_OR_HUB_NAME --output DIR`"
    )
    for name in packed_files(recipe).values():
        for file in (Path(name), Path(name).with_suffix(".idx")):
            if not file.is_file():
                yield Fault("file", f"{key} = {recipe.task.data_path!r}: no file {file}", key, fix)
    wanted = dict(recipe.task.chat_template_kwargs or {})
    packed = packed_template_kwargs(recipe.task.data_path)
    if packed != wanted:
        key = "task.chat_template_kwargs"
        message = f"{key} = {wanted}, and {recipe.task.data_path} was packed with {packed}"
        fix = f"Pack it again with --chat-template-kwargs {shlex.quote(json.dumps(wanted))}"
        yield Fault("conflict", message, key, fix)


def faults_of_values(recipe: Recipe) -> Faults:
    """Yields what this engine cannot do whatever model and files are there; rehearsals ask too."""
    for is_wrong, key, reason in (*_cases_of_training(recipe), *_cases_of_rollout(recipe)):
        if is_wrong:
            yield Fault("unsupported", f"{key} {reason}", key)
    yield from checks.unknown_rewards(recipe.task.verifiers)


def _cases_of_training(recipe: Recipe) -> tuple[Case, ...]:
    optimizer = recipe.optimizer
    epochs = recipe.batch.epochs
    style = optimizer.lr_decay_style
    warmup = optimizer.lr_warmup_fraction
    arguments = recipe.model.arguments
    aux_loss = f"model.{arguments.get('model')}.moe_aux_loss_coeff"
    errors = recipe.hardware_error
    return (
        (errors.rollout, "hardware_error.rollout", LOCAL_ERRORS),
        (errors.training, "hardware_error.training", LOCAL_ERRORS),
        (errors.evaluation, "hardware_error.evaluation", LOCAL_ERRORS),
        (
            recipe.task.prompt != "chat",
            "task.prompt",
            "must be left out: the packed training rows hold chat prompts, as evaluation must ask",
        ),
        (
            recipe.run.resume and not recipe.model.load,
            "run.resume",
            "needs actor_config.load, the base weights: checkpoints hold the adapters only",
        ),
        (
            epochs > 1 and (style != "constant" or warmup > 0),
            "rl_config.epochs",
            (
                f"= {epochs} with actor_config.lr_decay_style = {style!r} and "
                f"actor_config.lr_warmup_fraction = {warmup}: upstream moves the schedule on in every "
                f"epoch (base_training_engine.py:519), {epochs} times too fast. Set rl_config.epochs=1,"
                " or actor_config.lr_decay_style=constant and actor_config.lr_warmup_fraction=0.0"
            ),
        ),
        (
            arguments.get("num_experts") and arguments.get("moe_aux_loss_coeff") is None,
            aux_loss,
            (
                "is left out, and upstream would add 0.001 of the load balancing loss to GRPO's "
                f"(megatron_config.py:372). Set {aux_loss}=0.0, or the value that is meant"
            ),
        ),
        (
            recipe.batch.use_remove_padding and not arguments.get("use_flash_attn"),
            "rl_config.use_remove_padding",
            "needs megatron_training.use_flash_attn: true, the only attention for packed answers",
        ),
        (
            recipe.lora.alpha % 1 > 0,
            "actor_config.lora_alpha",
            f"= {recipe.lora.alpha} must be a whole number, for MindSpeed-LLM's --lora-alpha",
        ),
    )


def _cases_of_rollout(recipe: Recipe) -> tuple[Case, ...]:
    selection = recipe.selection
    filters = selection.filter_groups_enable
    prompts = recipe.batch.global_batch_size
    format = recipe.quantization.format
    has_experts = recipe.model.arguments.get("num_experts")
    captures = not recipe.rollout.enforce_eager
    tp = recipe.layout.infer_tp
    replay = recipe.algorithm.routing_replay
    replays = replay != "none"
    return (
        (
            filters and selection.filter_groups_train_batch_size != prompts,
            "rl_config.filter_groups_train_batch_size",
            f"must be global_batch_size = {prompts}: the transfer dock has room for one batch",
        ),
        (
            filters and selection.filter_groups_max_batches < 1,
            "rl_config.filter_groups_max_batches",
            "must be at least 1: else a step whose groups are all alike never ends",
        ),
        (
            selection.filter_groups_metric and len(recipe.task.verifiers) > 1,
            "rl_config.filter_groups_metric",
            "must be left out with several verifiers: the transfer dock keeps their sum",
        ),
        (
            format in ("fp8", "mxfp8"),
            "rollout_quantization.format",
            f"= {format!r} rounds activations, for which vllm-ascend at the pin has no layers",
        ),
        (
            format == "int8_w8a8" and has_experts,
            "rollout_quantization.format",
            "= 'int8_w8a8' with experts: vllm-ascend's need FRACTAL_NZ, which is off in RL",
        ),
        (
            captures and format == "int8_w8a8",
            "generate_config.enforce_eager",
            "must be True with int8_w8a8: graphs would multiply by freed copies",
        ),
        (
            captures and tp not in GRAPHS_TP,
            "generate_config.enforce_eager",
            f"must be True with infer TP {tp}: graphs were tried with {GRAPHS_TP}",
        ),
        (
            replays and not has_experts,
            "algorithm.routing_replay",
            f"= {replay!r} with a model that has no experts. Set one of them back",
        ),
        (
            replays and recipe.npu.enable_prefix_caching,
            "algorithm.routing_replay",
            (
                f"= {replay!r} with generate_config.enable_prefix_caching: vLLM computes no routes for "
                "tokens that it finds in its cache. Set one of them back"
            ),
        ),
    )


def data_files(recipe: Recipe) -> dict[str, str]:
    """The files that a run reads, by label."""
    files = {
        **packed_files(recipe),
        **model_files(recipe.model.path),
        "test": recipe.task.test_file,
    }
    rows = Path(f"{recipe.task.data_path}_rows.jsonl")  # of a task of one's own (tasks/packed.py)
    if rows.is_file():
        files["train_rows"] = str(rows)
    if recipe.model.load:
        files["base_weights"] = recipe.model.load
    return files


def packed_files(recipe: Recipe) -> dict[str, str]:
    """The packed training rows, by label (tasks/packed.py)."""
    prefix = f"{recipe.task.data_path}_packed"
    return {
        f"train_{column}": f"{prefix}_{column}_document.bin" for column in ("input_ids", "labels")
    }


def versions() -> dict[str, Any]:
    """Returns upstream's repositories by title: the commit of one at the pin, else "sha256:..." of
    its files.
    """
    upstream = {
        report.pin.title: report.pin.commit if report.at_pin else f"sha256:{report.content}"
        for report in check(installed())
    }
    return {"upstream": upstream}


def rehearsed(recipe: Recipe, shape: ModelShape, rows: list[Row], model_dir: Path) -> Recipe:
    """`recipe` with what upstream is told of the model besides its config.json, packed rows of its
    tokenizer, random weights, and few CPUs for Ray to count.
    """
    told = {
        **family_of(shape).megatron_arguments(shape),
        "padded_vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.max_position_embeddings,
    }
    told = {key: value for key, value in told.items() if value is not None}
    optimizer = recipe.optimizer
    layers = optimizer.recompute_num_layers and min(
        optimizer.recompute_num_layers, shape.num_hidden_layers
    )
    packed = pack_rows(rows[:2000], model_dir / "data" / "train", model_dir)
    return replace(
        recipe,
        model=replace(recipe.model, load=None, arguments={**recipe.model.arguments, **told}),
        optimizer=replace(optimizer, recompute_num_layers=layers),
        run=replace(recipe.run, save_interval=recipe.run.train_iters),
        task=replace(recipe.task, data_path=str(packed.data_path)),
        npu=replace(
            recipe.npu, cpus_per_npu=1, hccl_buffer_mib=1, padded_vocab_size=shape.vocab_size
        ),
    )
