"""The config: its keys, its layout and memory; and the model that it names."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from mindspeed_qerl.common.errors import ConfigError
from mindspeed_qerl.common.files import TRACKER
from mindspeed_qerl.families import ModelShape, read_config, shape_of
from mindspeed_qerl.families.checkpoint import Checkpoint, beside_single, whole_files
from mindspeed_qerl.families.fingerprint import is_pointer
from mindspeed_qerl.layout.memory import estimate, settings_of
from mindspeed_qerl.layout.parts import BF16
from mindspeed_qerl.layout.rules import broken
from mindspeed_qerl.layout.weights import model_parameters
from mindspeed_qerl.preflight.case import (
    FAILED,
    PASSED,
    SKIPPED,
    WARNING,
    Case,
    Check,
    gigabytes,
    needs,
)
from mindspeed_qerl.preflight.files import NEARLY
from mindspeed_qerl.preflight.machine import Machine


def config(machine: Machine, case: Case) -> Iterator[Check]:
    """What the engine's own check says, but for the layout, the model and the data, which have
    lines of their own.
    """
    if case.rehearsal:
        yield Check(
            "keys and values",
            SKIPPED,
            "a rehearsal checks its config itself, before it makes anything",
        )
        return
    elsewhere = {"model", "file", *(["layout"] if case.upstream and case.plan else [])}
    faults = [fault for fault in case.faults if fault.rule not in elsewhere]
    for fault in faults:
        yield Check(
            fault.key or fault.rule,
            FAILED,
            str(fault),
            "Change the config, or override the key on the command line",
        )
    if not faults:
        yield Check("keys and values", PASSED, f"accepted by engine {case.recipe.engine}")


def layout_rules(machine: Machine, case: Case) -> Iterator[Check]:
    """Upstream's rules for layout and batch, training and rollout."""
    if not case.upstream and not case.rehearsal:
        yield Check(
            "layout", SKIPPED, "the rules are upstream's; this engine has checked its own above"
        )
    elif case.plan is None:
        yield Check("layout", SKIPPED, "the values above make no layout")
    elif case.legal:
        it, batch = case.plan.layout, case.plan.batch
        yield Check(
            "layout",
            PASSED,
            f"legal: TP {it.tp} PP {it.pp} EP {it.ep} DP {it.dp}, vLLM TP {it.infer_tp} EP "
            f"{it.infer_ep}, {batch.global_batch_size} prompts x {batch.samples_per_prompt}",
        )
    else:
        for rule in broken(case.plan):
            yield Check(
                rule.rule.replace("_", " "),
                FAILED,
                f"{rule.message} ({rule.source})",
                f"python tools/plan_layout.py --config-name {case.name}    # the nearest layouts "
                "that are legal",
            )


@needs("upstream", "memory of an NPU", "no NPU is used")
def memory(machine: Machine, case: Case) -> Iterator[Check]:
    """The estimate of layout/memory.py, against the smallest die's: 64 GB, or less by npu-smi (a
    910B4, a slice).
    """
    if not case.legal:
        yield Check("memory of an NPU", SKIPPED, "no legal layout to estimate")
        return
    full = settings_of(case.recipe)
    dies = case.seen.smi if isinstance(case.seen.smi, list) else []
    smallest = min([full.memory_gb, *(die.total * 2**20 / 1e9 for die in dies if die.total)])
    held = estimate(case.plan, replace(full, memory_gb=smallest))
    small = smallest < full.memory_gb  # a 910B4, a slice
    of = f" --memory-gb {smallest:.0f}    #" if small else "    #"
    sync, update, capacity = map(
        gigabytes, (held.total("weight sync"), held.total("update"), held.capacity)
    )
    if held.fits:
        yield Check(
            "memory of an NPU",
            PASSED,
            f"estimated, never measured: weight sync {sync}, update {update} of {capacity}; the "
            f"KV cache holds {held.answers_at_once} whole answers, {held.answers_needed} are "
            "needed",
        )
    else:
        yield Check(
            "memory of an NPU",
            FAILED,
            f"estimated: {'; '.join(held.faults)}"
            + (
                f"; the smallest die has {gigabytes(smallest * 1e9)} by npu-smi, and 64 GB are "
                "usual"
                if small
                else ""
            ),
            f"python tools/plan_layout.py --config-name {case.name}{of} every part, and what else "
            "fits",
        )


def model(machine: Machine, case: Case) -> Iterator[Check]:
    """The model's directory, and what Megatron is told of the model against its own config.json."""
    if case.rehearsal:
        yield Check("config.json", SKIPPED, "a rehearsal makes a model of its own")
        return
    folder = Path(case.recipe.model.path)
    file = folder / "config.json"
    try:
        shape = shape_of(read_config(file), folder.name)
    except ConfigError as error:
        reason = str(error) if file.is_file() else "there is no config.json"
        yield Check(
            "config.json",
            FAILED,
            f"{folder}: {reason}",
            f"Put the Hugging Face model at {folder}, or: "
            f"export MODELS=DIR    # the folder that {folder.name} is in",
        )
        return
    wrong = [fault for fault in case.faults if fault.rule == "model"]
    long = [fault for fault in wrong if fault.key == "generate_config.max_model_len"]
    wrong = [fault for fault in wrong if fault not in long]
    # rope_theta is another one in the Instruct-2507 models; a wrong one trains, badly
    rotary = [fault for fault in wrong if fault.key.endswith(".rotary_base")]
    if wrong == rotary:
        experts = f", {shape.num_experts} experts" if shape.moe else ""
        agree = ": YAML and config.json agree" if case.upstream else ""
        yield Check(
            "shape",
            PASSED,
            f"{shape.model_type}, {shape.num_hidden_layers} layers, hidden {shape.hidden_size}, "
            f"{shape.num_attention_heads} heads, {shape.num_key_value_heads} KV{experts}{agree}",
        )
    for fault in wrong:
        if fault not in rotary:
            yield Check(
                "shape",
                FAILED,
                str(fault),
                "The model directory decides: correct the model's YAML, or give the "
                "directory that it describes",
            )
    name = case.recipe.model.arguments.get("model")
    for fault in rotary:
        yield Check(
            "rotary base",
            FAILED,
            str(fault),
            f"++model.{name}.rotary_base={shape.rope_theta:.0f}    # an override of the config",
        )
    if case.upstream and not rotary:
        yield Check("rotary base", PASSED, f"{shape.rope_theta:,.0f} in both")
    for fault in long:
        yield Check(
            "context",
            FAILED,
            fault.message,
            f"generate_config.max_model_len={shape.max_position_embeddings}    # an override; "
            "prompt and answer must fit",
        )
    if (
        case.upstream and case.recipe.npu.padded_vocab_size is None and case.plan
    ):  # Megatron-LM tokenizer.py:103
        yield Check(
            "vocabulary",
            FAILED,
            "padded_vocab_size is left out of the config: Megatron would take the tokenizer's "
            f"own number of tokens, and vLLM's embedding has {case.plan.vllm_rows:,} rows",
            f"++model.{name}.padded_vocab_size={case.plan.vllm_rows}    # an override of the "
            "config",
        )
    yield tokenizer(folder, case.recipe.task.prompt)
    converted = case.recipe.model.load and (Path(case.recipe.model.load) / TRACKER).is_file()
    needed = not case.upstream or case.recipe.model.load and not converted
    yield weights(folder, shape, FAILED if needed else WARNING, case.upstream)


def tokenizer(folder: Path, prompt: str) -> Check:
    if not any(
        (folder / name).is_file() for name in ("tokenizer.json", "vocab.json", "tokenizer.model")
    ):
        return Check(
            "tokenizer",
            FAILED,
            f"{folder} has no tokenizer.json",
            "Download the model's whole directory",
        )
    if any(is_pointer(file) for file in folder.glob("*.json")):
        return Check(
            "tokenizer",
            FAILED,
            f"tokenizer.json or another file of {folder} is a pointer of git-lfs",
            f"(cd {folder} && git lfs pull)",
        )
    if prompt != "chat":
        return Check("tokenizer", PASSED, f"there; {prompt} prompts need no chat template")
    if (folder / "chat_template.jinja").is_file() or "chat_template" in _json(
        folder / "tokenizer_config.json"
    ):
        return Check("tokenizer", PASSED, "with a chat template")
    return Check(
        "tokenizer",
        WARNING,
        "no chat template",
        "Take an instruct or chat model, or add its chat_template.jinja",
    )


def weights(folder: Path, shape: ModelShape, state: str, upstream: bool) -> Check:
    """All files that the model's index names, of the size of this model; `state` is what it means
    if they are not.
    """
    why = "the run reads them all" if not upstream else "the conversion needs all"
    why += ", and it is done" if state == WARNING else ""
    whole = "Download the model's whole directory"
    try:
        files = [folder / name for name in whole_files(folder)]
        if pointers := sum(map(is_pointer, files)):
            return Check(
                "weights",
                state,
                f"{pointers} of {len(files)} files are pointers of git-lfs, not weights; {why}",
                f"(cd {folder} && git lfs pull)",
            )
        size = sum(file.stat().st_size for file in files)
        if size < NEARLY * (least := BF16 * model_parameters(shape)):
            return Check(
                "weights",
                state,
                f"{len(files)} files of {gigabytes(size)}, and the model of config.json has "
                f"{gigabytes(least)} in 16 bits: a download that was cut short, or another "
                f"model's; {why}",
                whole,
            )
        if state == FAILED:
            Checkpoint(folder, "np")
    except ConfigError as error:
        return Check("weights", state, f"{error}; {why}", whole)
    if not upstream and (fault := beside_single(folder)):  # on NPUs vLLM loads nothing
        return Check("weights", FAILED, fault[0], f"Move it out of {folder}")
    return Check("weights", PASSED, f"{len(files)} of {len(files)} files, {gigabytes(size)}")


def _json(file: Path) -> dict[str, Any]:
    """The object in a file; {} where there is none."""
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
