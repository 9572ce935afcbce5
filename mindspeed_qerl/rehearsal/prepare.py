"""From a config for NPUs to the config of its rehearsal."""

import copy
import json
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mindspeed_qerl.errors import ConfigError
from mindspeed_qerl.families import ModelShape
from mindspeed_qerl.layout.plan import Plan, read_plan, shape_of_model
from mindspeed_qerl.layout.rules import broken
from mindspeed_qerl.local.settings import check
from mindspeed_qerl.recipe.config import (
    Reader,
    RehearsalConfig,
    check_aqn,
    check_lora_targets,
    check_names,
    check_task_sections,
    check_verifiers,
)
from mindspeed_qerl.rehearsal.model import make_model, narrow
from mindspeed_qerl.runs.directory import count_rows
from mindspeed_qerl.tasks.gsm8k.dataset import read_converted
from mindspeed_qerl.tasks.gsm8k.packed import convert_packed
from mindspeed_qerl.tasks.gsm8k.verifier import VERIFIERS


def prepare(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The config that `raw` is rehearsed with: its layout, batch arithmetic, LoRA and AQN settings, a narrow model (made here, if it is not
    there yet), short answers, a few steps.

    Raises:
        ConfigError: what is wrong with `raw` itself, every fault found: a layout that cannot exist, a misspelt name, missing data.
    """
    raw = {section: {} if values is None else values for section, values in raw.items()}
    reader = Reader(raw)
    settings: RehearsalConfig = reader.own("rehearsal")
    plan = plan_to_rehearse(raw, reader)
    gsm8k, evaluation, run = (reader.own(section) for section in ("gsm8k", "eval", "run"))
    check_task_sections(reader, gsm8k, evaluation, run, ("train_file", "test_file"))
    check_verifiers(reader, VERIFIERS)
    try:
        check_lora_targets(reader.upstream("megatron_training", "lora_target_modules", None, (list,)))
    except ConfigError as error:
        reader.fault(f"megatron_training.lora_target_modules: {error}")
    check_aqn(reader, reader.upstream("megatron_training", "train_iters", 1, low=1, required=True), lambda: count_rows(Path(gsm8k.train_file)))
    reader.upstream("rl_config", "max_prompt_length", 512, low=1)
    reader.upstream("generate_config", "max_num_batched_tokens", 0)
    reader.upstream("generate_config", "sampling_config", {}, (dict,))
    check_names(reader)
    for name in ("steps", "layers", "max_tokens", "eval_problems"):
        if (value := getattr(settings, name)) is not None and value < 1:
            reader.fault(f"rehearsal.{name} = {value} must be at least 1")
    if plan and settings.layers is not None and (settings.layers < plan.layout.pp or settings.layers % plan.layout.pp):
        reader.fault(f"rehearsal.layers = {settings.layers} must be a multiple of pipeline_model_parallel_size = {plan.layout.pp}")
    if raw["engine"] != "local" and not raw.get("emulate_npu"):
        reader.fault("rehearsal.enabled = true with engine = mindspeed_rl needs emulate_npu=true; or engine=local, which needs no upstream")
    if reader.faults:
        raise ConfigError("\n".join(reader.faults))
    shape = narrow(plan.shape, plan.layout, settings.layers)
    if raw["engine"] == "local":
        _check_for_local_engine(raw, settings, shape)
    try:
        rows = read_converted(gsm8k.train_file)
    except (ValueError, OSError) as error:
        raise ConfigError(f"gsm8k.train_file: {error}") from error
    try:
        directory = make_model(shape, rows, Path(settings.models))
    except OSError as error:
        raise ConfigError(f"rehearsal.models = {settings.models!r}: the narrow model cannot be written there: {error}") from error
    config = _adapted(raw, settings, shape, directory)
    if raw["engine"] != "local":
        _adapt_for_upstream(config, shape, _packed_data(rows, directory))
    return config


def _check_for_local_engine(raw: Mapping[str, Any], settings: RehearsalConfig, shape: ModelShape) -> None:
    """ConfigError for what the local engine would refuse once the model is made; of the model it reads config.json alone."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(asdict(shape)))
        check(_adapted(raw, settings, shape, Path(folder)))


def plan_to_rehearse(raw: Mapping[str, Any], reader: Reader) -> Plan | None:
    """The plan of `raw`; faults for what cannot be read and for broken rules."""
    try:
        plan = read_plan(raw, shape_of_model(raw))
    except ConfigError as error:
        for line in str(error).splitlines():
            reader.fault(line)
        return None
    for rule in broken(plan):
        reader.fault(f"layout: {rule.message} ({rule.rule}; {rule.source})")
    return plan


def _adapted(raw: Mapping[str, Any], settings: RehearsalConfig, shape: ModelShape, directory: Path) -> dict[str, Any]:
    config = copy.deepcopy(dict(raw))
    training, rollout, actor = config["megatron_training"], config["generate_config"], config.setdefault("actor_config", {})
    longest = config["rl_config"].get("max_prompt_length", 512) + settings.max_tokens
    training.update(tokenizer_name_or_path=str(directory), train_iters=settings.steps, seq_length=longest)
    for section in (training, actor):
        if section.get("num_layer_list") and settings.layers:
            del section["num_layer_list"]
    rollout.update(max_model_len=longest, max_num_batched_tokens=max(longest, rollout.get("max_num_batched_tokens", 0)),
                   sampling_config={**(rollout.get("sampling_config") or {}), "max_tokens": settings.max_tokens})
    if raw["engine"] == "local":
        rollout.update(dtype="float32", infer_tensor_parallel_size=1)
    config["eval"] = {**config.get("eval", {}), "every": settings.steps, "n_problems": settings.eval_problems}
    run = config.setdefault("run", {})
    run["root"] = str(Path(run.get("root", "runs")) / "rehearsals")
    if config.get("aqn", {}).get("enabled"):  # the first stage has no noise: at least the last step must have some
        config["aqn"].update(num_stages=min(config["aqn"].get("num_stages", 10), settings.steps), restart_every=None)
    return config


def _adapt_for_upstream(config: dict[str, Any], shape: ModelShape, data: Path) -> None:
    """What upstream is told of the model besides its config.json; random weights of its own; few CPUs for Ray to count."""
    training, actor = config["megatron_training"], config["actor_config"]
    sizes = {"num_layers": shape.num_hidden_layers, "hidden_size": shape.hidden_size, "kv_channels": shape.head_dim,
             "padded_vocab_size": shape.vocab_size, "max_position_embeddings": shape.max_position_embeddings,
             "ffn_hidden_size": shape.intermediate_size or shape.moe_intermediate_size}
    if shape.moe:
        sizes["moe_ffn_hidden_size"] = shape.moe_intermediate_size
    if shape.shared_expert_intermediate_size:
        sizes["n_shared_experts"] = shape.shared_expert_intermediate_size // shape.moe_intermediate_size
    config["model"][training["model"]].update(sizes)
    training.update(data_path=str(data), save_interval=training["train_iters"])
    if training.get("recompute_num_layers"):
        training["recompute_num_layers"] = min(training["recompute_num_layers"], shape.num_hidden_layers)
    actor["load"] = None
    config["rl_config"].update(num_cpus_for_placement_group=1, hccl_buffersize=1)


def _packed_data(rows: list[dict], directory: Path) -> Path:
    """The first rows, packed with the narrow model's tokenizer, beside the model: the data_path of upstream."""
    packed = directory / "data"
    if not packed.is_dir():
        with tempfile.TemporaryDirectory() as folder:
            raw = Path(folder) / "train.jsonl"
            raw.write_text("".join(json.dumps({"question": row["question"], "answer": row["solution"]}) + "\n" for row in rows[:2000]))
            convert_packed(raw, packed, directory)
    return packed.absolute() / "gsm8k_train"
