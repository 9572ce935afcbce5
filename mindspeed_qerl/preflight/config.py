"""The config: its keys, its layout and memory; and the model that it names."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

from mindspeed_qerl.families import shape_of
from mindspeed_qerl.layout.memory import estimate, settings_of
from mindspeed_qerl.layout.rules import broken
from mindspeed_qerl.preflight.case import FAILED, PASSED, SKIPPED, WARNING, Case, Check, gigabytes
from mindspeed_qerl.preflight.machine import Machine

ABOUT_DATA = ("megatron_training.data_path", "task.test_file", "task.train_file")
ABOUT_MODEL = re.compile(r"megatron_training\.tokenizer_name_or_path|\S*rotary_base\b|.*/config\.json")


def config(machine: Machine, case: Case) -> Iterator[Check]:
    """What the engine's own check says, but for the layout, the model and the data, which have lines of their own."""
    if case.recipe.rehearsal.enabled:
        yield Check("keys and values", SKIPPED, "a rehearsal checks its config itself, before it makes anything")
        return
    rules = [rule.message for rule in broken(case.plan)] if case.upstream and case.plan else []
    faults = [fault for fault in case.faults if not fault.startswith(ABOUT_DATA) and not ABOUT_MODEL.match(fault)
              and not any(message in fault for message in rules)]
    for fault in faults:
        key = re.match(r"(?:unknown key in )?[\w.\[\]]*", fault)[0]
        yield Check(key or "fault", FAILED, fault, "Change the config, or override the key on the command line")
    if not faults:
        yield Check("keys and values", PASSED, f"accepted by engine {case.recipe.engine}")


def layout_rules(machine: Machine, case: Case) -> Iterator[Check]:
    """Upstream's rules for layout and batch, training and rollout."""
    if not case.upstream and not case.recipe.rehearsal.enabled:
        yield Check("layout", SKIPPED, "the rules are upstream's; this engine has checked its own above")
        return
    plan = case.plan
    if plan is None:
        yield Check("layout", SKIPPED, "the values above make no layout")
        return
    it = plan.layout
    for rule in broken(plan):
        yield Check(rule.rule.replace("_", " "), FAILED, f"{rule.message} ({rule.source})",
                    f"python tools/plan_layout.py --config-name {case.name}    # the nearest layouts that are legal")
    if case.legal:
        yield Check("layout", PASSED,
                    f"legal: TP {it.tp} PP {it.pp} EP {it.ep} DP {it.dp}, vLLM TP {it.infer_tp} EP {it.infer_ep}, "
                    f"{plan.batch.global_batch_size} prompts x {plan.batch.samples_per_prompt}")


def memory(machine: Machine, case: Case) -> Iterator[Check]:
    """The estimate of layout/memory.py, against one die's."""
    if not case.upstream:
        yield Check("memory of an NPU", SKIPPED, "no NPU is used")
        return
    if not case.legal:
        yield Check("memory of an NPU", SKIPPED, "no legal layout to estimate")
        return
    held = estimate(case.plan, settings_of(case.recipe))
    fix = f"python tools/plan_layout.py --config-name {case.name}    # every part, and what else fits"
    sync, update = (gigabytes(held.total(moment)) for moment in ("weight sync", "update"))
    sums = f"weight sync {sync}, update {update} of {gigabytes(held.capacity)}"
    if not held.fits:
        yield Check("memory of an NPU", FAILED, f"estimated: {'; '.join(held.faults)}", fix)
    else:
        yield Check("memory of an NPU", PASSED,
                    f"estimated, never measured: {sums}; the KV cache holds {held.answers_at_once} whole answers, "
                    f"{held.answers_needed} are needed")


def model(machine: Machine, case: Case) -> Iterator[Check]:
    """The model's directory, and what Megatron is told of the model against its own config.json."""
    if case.recipe.rehearsal.enabled:
        yield Check("config.json", SKIPPED, "a rehearsal makes a model of its own")
        return
    folder = case.model_dir
    try:
        described = json.loads((folder / "config.json").read_text())
        shape = shape_of(described, folder.name)
    except (OSError, ValueError) as error:  # ConfigError is a ValueError
        reason = "there is no config.json" if isinstance(error, FileNotFoundError) else str(error)
        yield Check("config.json", FAILED, f"{folder}: {reason}",
                    f"Put the Hugging Face model at {folder}, or: export MODELS=DIR    # the folder that "
                    f"{folder.name} is in")
        return
    wrong = [fault for fault in case.faults if "/config.json" in fault and not fault.startswith("rotary_base")]
    for fault in wrong:
        yield Check("shape", FAILED, fault,
                    "The model directory decides: correct the model's YAML, or give the directory that it describes")
    if not wrong:
        experts = f", {shape.num_experts} experts" if shape.moe else ""
        agree = ": YAML and config.json agree" if case.upstream else ""
        yield Check("shape", PASSED,
                    f"{shape.model_type}, {shape.num_hidden_layers} layers, hidden {shape.hidden_size}, "
                    f"{shape.num_attention_heads} heads, {shape.num_key_value_heads} KV{experts}{agree}")
    if case.upstream:
        yield rotary_base(shape.rope_theta, case)
    yield tokenizer(folder, case.recipe.task.prompt)
    yield weights(folder)


def rotary_base(theta: float, case: Case) -> Check:
    """Megatron's rotary base against rope_theta, which the Instruct-2507 models have changed. A wrong one trains,
    badly."""
    given, name = case.recipe.model.arguments.get("rotary_base"), case.recipe.model.arguments.get("model")
    if given is None:
        return Check("rotary base", FAILED, f"rotary_base is missing; config.json says rope_theta {theta:,.0f}",
                     f"++model.{name}.rotary_base={theta:.0f}    # an override of the config")
    if float(given) != theta:
        return Check("rotary base", FAILED, f"rotary_base is {float(given):,.0f} in the config, rope_theta "
                     f"{theta:,.0f} in config.json: Megatron "
                     "and vLLM would run different models",
                     f"model.{name}.rotary_base={theta:.0f}    # an override of the config")
    return Check("rotary base", PASSED, f"{theta:,.0f} in both")


def tokenizer(folder: Path, prompt: str) -> Check:
    if not any((folder / name).is_file() for name in ("tokenizer.json", "vocab.json", "tokenizer.model")):
        return Check("tokenizer", FAILED, f"{folder} has no tokenizer.json", "Download the model's whole directory")
    if prompt != "chat":
        return Check("tokenizer", PASSED, f"there; {prompt} prompts need no chat template")
    try:
        has_template = "chat_template" in json.loads((folder / "tokenizer_config.json").read_text())
    except (OSError, ValueError):
        has_template = False
    if has_template or (folder / "chat_template.jinja").is_file():
        return Check("tokenizer", PASSED, "with a chat template")
    return Check("tokenizer", WARNING, "no chat template",
                 "Take an instruct or chat model, or add its chat_template.jinja")


def weights(folder: Path) -> Check:
    """All files that the model's index names; they are needed for the conversion only."""
    try:
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        names = sorted(set(index["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        names = ["model.safetensors"]
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        return Check("weights", WARNING, f"{len(names) - len(missing)} of {len(names)} files: "
                     f"{missing[0]}{' ...' * (len(missing) > 1)} is missing; the conversion needs all",
                     "Download the model's whole directory")
    return Check("weights", PASSED, f"{len(names)} of {len(names)} files, "
                 f"{gigabytes(sum((folder / name).stat().st_size for name in names))}")
