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
    model = recipe.model
    layout = recipe.layout
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
    words = ["python", conversion.script, "--load-model-type", "hf", "--save-model-type", "mg"]
    words += ["--model-type-hf", conversion.name, *conversion.options]
    if family.experts and layout.tp > 1:
        words.append("--moe-tp-extend-ep")
    v2 = conversion.script != "convert_ckpt.py"
    options = {
        "--target-tensor-parallel-size": layout.tp,
        "--target-pipeline-parallel-size": layout.pp,
        "--target-expert-parallel-size": family.experts and layout.ep,
        "--num-layer-list": ",".join(map(str, layout.num_layer_list)),
        "--load-dir": source,
        "--save-dir": target,
        "--tokenizer-model": None if v2 else f"{source}/tokenizer.json",
    }
    for option, value in options.items():
        words += [option, str(value)] if value else []
    return words
