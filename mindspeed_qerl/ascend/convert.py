"""The command of MindSpeed-LLM that converts a config's base weights from Hugging Face's files to Megatron's, for its training layout.

Two converters (docs/ascend.md): convert_ckpt_v2.py knows Qwen3 and Qwen3-MoE and reads file by file; convert_ckpt.py serves Qwen2-MoE, and
Qwen2.5 as `llama2` with biases, and builds the whole model in memory.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mindspeed_qerl.errors import ConfigError
from mindspeed_qerl.families import Family, family_of, read_config
from mindspeed_qerl.layout.plan import arguments_of, shape_of_config

TRACKER = "latest_checkpointed_iteration.txt"  # megatron/training/checkpointing.py:get_checkpoint_tracker_filename


def conversion_command(raw: Mapping[str, Any]) -> list[str]:
    """The words of the command, to be run in the folder of MindSpeed-LLM; paths are absolute.

    From `megatron_training.tokenizer_name_or_path` into `actor_config.load`. With experts and a tensor parallel size above 1 experts are
    dealt whole to the tensor ranks (`--moe-tp-extend-ep`); at 1 convert_ckpt_v2.py refuses the option (convert_hf2mg.py:70).

    Raises:
        ConfigError: no `load`, or a model that the engine does not know.
    """
    arguments = arguments_of(raw)
    if not arguments.get("load"):
        raise ConfigError("actor_config.load is not set: there is nowhere to convert the base weights to")
    source, target = (str(Path(arguments[key]).absolute()) for key in ("tokenizer_name_or_path", "load"))
    family = family_of_model(source, raw)
    if family.conversion is None:
        raise ConfigError(f"{source}: the NPU engine has no conversion of weights for model_type {family.model_type!r}; the local engine runs it")
    conversion = family.conversion
    tp, pp, ep = (arguments.get(f"{kind}_model_parallel_size") or 1 for kind in ("tensor", "pipeline", "expert"))
    command = ["python", conversion.script, "--load-model-type", "hf", "--save-model-type", "mg", "--model-type-hf", conversion.name, *conversion.options]
    if arguments.get("num_experts") and tp > 1:
        command.append("--moe-tp-extend-ep")
    command += ["--target-tensor-parallel-size", str(tp), "--target-pipeline-parallel-size", str(pp)]
    if arguments.get("num_experts"):
        command += ["--target-expert-parallel-size", str(ep)]
    for key in ("num_layer_list", "num_layers_per_virtual_pipeline_stage"):
        if arguments.get(key):
            command += [f"--{key.replace('_', '-')}", str(arguments[key])]
    command += ["--load-dir", source, "--save-dir", target]
    if conversion.script == "convert_ckpt.py":
        command += ["--tokenizer-model", f"{source}/tokenizer.json"]
    return command


def family_of_model(directory: str, raw: Mapping[str, Any]) -> Family:
    """By the model's config.json; while that is not there, by what Megatron's arguments amount to. ConfigError for a family that is not known."""
    try:
        kind = read_config(Path(directory) / "config.json").get("model_type")
    except ConfigError:
        return family_of(shape_of_config(raw))
    try:
        return family_of(kind)
    except ConfigError as error:
        raise ConfigError(f"{directory}: {error}") from error


def rank_folder(t: int, p: int, e: int, *, pp: int, ep: int) -> str:
    """The folder of one rank's file (megatron/training/checkpointing.py:get_checkpoint_name)."""
    return f"mp_rank_{t:02d}" + (f"_{p:03d}" if pp > 1 else "") + (f"_{e:03d}" if ep > 1 else "")
