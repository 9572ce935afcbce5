"""The config: its keys, its layout and memory; and the model that it names."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from mindspeed_qerl.common.errors import ConfigError, Fault
from mindspeed_qerl.families import ModelShape, read_config, shape_of
from mindspeed_qerl.families.checkpoint import Checkpoint, beside_single, whole_files
from mindspeed_qerl.families.fingerprint import is_pointer
from mindspeed_qerl.layout.memory import estimate, settings_of
from mindspeed_qerl.layout.parts import BF16
from mindspeed_qerl.layout.rules import broken
from mindspeed_qerl.layout.weights import model_parameters
from mindspeed_qerl.preflight.case import (
    Case,
    Check,
    failed,
    gigabytes,
    passed,
    skipped,
    warning,
)
from mindspeed_qerl.preflight.files import NEARLY
from mindspeed_qerl.preflight.machine import Machine

# Keys of files that have checks of their own.
FILES = ("megatron_training.data_path", "task.test_file", "task.train_file")
MODEL_DIR = "megatron_training.tokenizer_name_or_path"
CONTEXT = "generate_config.max_model_len"


def keys(machine: Machine, case: Case) -> Iterator[Check]:
    """What the engine's own check says, but for the layout, the model and the files, which have
    lines of their own.
    """
    faults = [fault for fault in case.faults if not _has_own_line(fault, case)]
    for fault in faults:
        yield failed(fault.message, fault.fix, fault.key or fault.rule)
    if not faults:
        yield passed(f"accepted by engine {case.recipe.engine}")


def _has_own_line(fault: Fault, case: Case) -> bool:
    if fault.rule == "layout":
        return case.upstream and case.plan is not None
    return fault.rule == "model" or fault.key in FILES or fault.key == MODEL_DIR


def layout(machine: Machine, case: Case) -> Iterator[Check]:
    """Upstream's rules for layout and batch, training and rollout."""
    if case.plan is None:
        yield skipped("the values above make no layout")
        return
    for rule in broken(case.plan):
        yield failed(f"{rule.message} ({rule.source})", name=rule.rule.replace("_", " "))
    if legal := case.legal:
        plan, batch = legal.layout, legal.batch
        yield passed(
            f"legal: TP {plan.tp} PP {plan.pp} EP {plan.ep} DP {plan.dp}, vLLM TP {plan.infer_tp} "
            f"EP {plan.infer_ep}, {batch.global_batch_size} prompts x {batch.samples_per_prompt}"
        )


def memory(machine: Machine, case: Case) -> Check:
    """The estimate of layout/memory.py, against the smallest die's: 64 GB, or less by npu-smi (a
    910B4, a slice).
    """
    plan = case.legal
    if plan is None:
        return skipped("no legal layout to estimate")
    settings = settings_of(case.recipe)
    sizes = [die.total * 2**20 / 1e9 for die in case.seen.dies if die.total]
    smallest = min([settings.memory_gb, *sizes])
    held = estimate(plan, replace(settings, memory_gb=smallest))
    if held.fits:
        sync, update = gigabytes(held.total("weight sync")), gigabytes(held.total("update"))
        return passed(
            f"estimated, never measured: weight sync {sync}, update {update} of "
            f"{gigabytes(held.capacity)}; the KV cache holds {held.answers_at_once} whole answers, "
            f"{held.answers_needed} are needed"
        )
    words = f"estimated: {'; '.join(held.faults)}"
    if smallest < settings.memory_gb:
        words += f"; the smallest die has {gigabytes(smallest * 1e9)} by npu-smi"
    return failed(
        words,
        f"python tools/plan_layout.py --config-name {case.name} --memory-gb {smallest:.0f}    # "
        "every part, and what else fits",
    )


def config_json(machine: Machine, case: Case) -> Check:
    folder = Path(case.recipe.model.path)
    try:
        shape = shape_of(read_config(folder / "config.json"), folder.name)
    except ConfigError as error:
        there = (folder / "config.json").is_file()
        return failed(f"{folder}: {error if there else 'there is no config.json'}")
    return passed(
        f"{shape.model_type}, {shape.num_hidden_layers} layers, hidden {shape.hidden_size}, "
        f"{shape.num_attention_heads} heads, {shape.num_key_value_heads} KV, "
        f"{shape.num_experts or 0} experts"
    )


def _shape(folder: Path) -> ModelShape | None:
    try:
        return shape_of(read_config(folder / "config.json"), folder.name)
    except ConfigError:
        return None


def model_faults(case: Case) -> list[Fault]:
    """What Megatron is told of the model against its own config.json, where there is one."""
    return [fault for fault in case.faults if fault.rule == "model" and fault.key != MODEL_DIR]


def shape(machine: Machine, case: Case) -> Iterator[Check]:
    if _shape(Path(case.recipe.model.path)) is None:
        return  # said above
    faults = model_faults(case)
    for fault in faults:
        if fault.key != CONTEXT and not _is_rotary(fault):
            yield failed(fault.message, fault.fix)
    if not faults:
        yield passed("YAML and config.json agree")


def rotary_base(machine: Machine, case: Case) -> Iterator[Check]:
    """Another one in the Instruct-2507 models; a wrong one trains, badly."""
    shape = _shape(Path(case.recipe.model.path))
    for fault in filter(_is_rotary, model_faults(case)):
        assert shape, "the fault compares with its config.json"
        fix = f"++{fault.key}={shape.rope_theta:.0f}    # an override of the config"
        yield failed(fault.message, fix)


def _is_rotary(fault: Fault) -> bool:
    return fault.key.rpartition(".")[2] == "rotary_base"


def context(machine: Machine, case: Case) -> Iterator[Check]:
    for fault in model_faults(case):
        if fault.key == CONTEXT:
            yield failed(fault.message, fault.fix)


def vocabulary(machine: Machine, case: Case) -> Check | None:
    """Without padded_vocab_size Megatron takes the tokenizer's own number of tokens (Megatron-LM
    tokenizer.py:103).
    """
    if case.recipe.npu.padded_vocab_size is not None or case.plan is None:
        return None
    rows, name = case.plan.vllm_rows, case.recipe.model.arguments.get("model")
    return failed(
        "padded_vocab_size is left out of the config: Megatron would take the tokenizer's own "
        f"number of tokens, and vLLM's embedding has {rows:,} rows",
        f"++model.{name}.padded_vocab_size={rows}    # an override of the config",
    )


def tokenizer(machine: Machine, case: Case) -> Check:
    folder = Path(case.recipe.model.path)
    files = [folder / name for name in ("tokenizer.json", "vocab.json", "tokenizer.model")]
    if not any(file.is_file() for file in files):
        return failed(f"{folder} has no tokenizer.json")
    if any(is_pointer(file) for file in folder.glob("*.json")):
        return failed(f"tokenizer.json or another file of {folder} is a pointer of git-lfs")
    if case.recipe.task.prompt != "chat" or (folder / "chat_template.jinja").is_file():
        return passed("there")
    settings = folder / "tokenizer_config.json"
    if settings.is_file() and "chat_template" in settings.read_text():
        return passed("with a chat template")
    return warning("no chat template")


def weights(machine: Machine, case: Case) -> Check | None:
    """All files that the model's index names, of the size of this model: failed while the run or
    the conversion of the base weights reads them, else a warning.
    """
    folder = Path(case.recipe.model.path)
    shape = _shape(folder)
    if shape is None:
        return None  # said above
    read = case.base_to_convert or not case.upstream
    verdict, why = (failed, "") if read else (warning, "; the base weights are converted already")
    try:
        files = [folder / name for name in whole_files(folder)]
        pointers = sum(map(is_pointer, files))
        if pointers:
            return verdict(f"{pointers} of {len(files)} files are pointers of git-lfs{why}")
        size, least = sum(file.stat().st_size for file in files), BF16 * model_parameters(shape)
        if size < NEARLY * least:
            return verdict(
                f"{len(files)} files of {gigabytes(size)}, and the model of config.json has "
                f"{gigabytes(least)} in 16 bits: an interrupted download, or another model{why}"
            )
        if read:
            Checkpoint(folder, "np")
    except ConfigError as error:
        return verdict(f"{error}{why}")
    stray = [] if case.upstream else beside_single(folder)  # on NPUs vLLM loads nothing
    if stray:
        return failed(str(stray[0]), f"Move it out of {folder}")
    return passed(f"{len(files)} of {len(files)} files, {gigabytes(size)}")
