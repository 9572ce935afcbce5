"""The command of MindSpeed-LLM that converts a config's base weights from Hugging Face's files to
Megatron's, for its training layout (docs/ascend.md).
"""

from pathlib import Path

from mindspeed_qerl.common.errors import ConfigError
from mindspeed_qerl.families import family_of
from mindspeed_qerl.layout.plan import shape_of_model
from mindspeed_qerl.recipe.types import Recipe


def conversion_command(recipe: Recipe) -> list[str]:
    """The words of the command, to be run in the folder of MindSpeed-LLM; paths are absolute.

    From `megatron_training.tokenizer_name_or_path` into `actor_config.load`. With experts and a
    tensor parallel size above 1 experts are dealt whole to the tensor ranks (`--moe-tp-extend-ep`);
    at 1 convert_ckpt_v2.py refuses the option (convert_hf2mg.py:70).

    Raises:
        ConfigError: no `load`, or a model that the engine does not know.
    """
    model, layout = recipe.model, recipe.layout
    if not model.load:
        raise ConfigError(
            "actor_config.load is not set: there is nowhere to convert the base weights to"
        )
    source, target = (str(Path(path).absolute()) for path in (model.path, model.load))
    family = family_of(shape_of_model(recipe))
    if family.conversion is None:
        raise ConfigError(
            f"{source}: MindSpeed-LLM's converters are not known to read {family.model_type}; the "
            "local engine needs no conversion"
        )
    conversion = family.conversion
    command = [
        "python",
        conversion.script,
        "--load-model-type",
        "hf",
        "--save-model-type",
        "mg",
        "--model-type-hf",
        conversion.name,
        *conversion.options,
    ]
    if family.experts and layout.tp > 1:
        command.append("--moe-tp-extend-ep")
    command += [
        "--target-tensor-parallel-size",
        str(layout.tp),
        "--target-pipeline-parallel-size",
        str(layout.pp),
    ]
    if family.experts:
        command += ["--target-expert-parallel-size", str(layout.ep)]
    if layout.num_layer_list:
        command += ["--num-layer-list", ",".join(map(str, layout.num_layer_list))]
    if layout.layers_per_virtual_stage:
        command += ["--num-layers-per-virtual-pipeline-stage", str(layout.layers_per_virtual_stage)]
    command += ["--load-dir", source, "--save-dir", target]
    if conversion.script == "convert_ckpt.py":
        command += ["--tokenizer-model", f"{source}/tokenizer.json"]
    return command
