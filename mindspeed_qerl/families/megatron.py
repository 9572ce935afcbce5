"""Whether the model that Megatron is told of is the one in config.json, which vLLM loads. Upstream
compares nothing.
"""

import json
from collections.abc import Mapping
from typing import Any

from mindspeed_qerl.common.errors import ConfigError, Fault

from . import family_of, shape_of
from .base import MEGATRON_DEFAULTS, Family
from .built import not_built
from .config import ConfigJson, unread_by_4


def compare_with_model(
    arguments: Mapping[str, Any], hf_config: ConfigJson, source: str = "config.json"
) -> list[Fault]:
    """Faults where the model that Megatron is told of is not the one that vLLM loads: `key` is
    Megatron's argument in the named model, or `source`. No value of either raises.

    Args:
        arguments: Megatron's, of the named model and the sections merged; one that is left out
            counts with Megatron's default. What no family here has, such as latent attention,
            keys.yaml refuses.
        hf_config: the content of the model's config.json. source: what messages call it.
    """
    try:
        shape = shape_of(hf_config, source)
    except ConfigError as error:
        return [Fault("model", line, source) for line in str(error).splitlines()]
    family = family_of(shape)
    faults = [
        Fault("model", f"{source}: {reason}", source) for reason in not_on_npus(hf_config, family)
    ]
    expected = family.megatron_arguments(shape)
    groups = shape.num_key_value_heads
    if groups == shape.num_attention_heads and not arguments.get("group_query_attention"):
        del expected["group_query_attention"], expected["num_query_groups"]
    width = shape.head_dim * shape.num_attention_heads
    if arguments.get("kv_channels") is None and width == shape.hidden_size:
        del expected["kv_channels"]  # Megatron derives it
    if arguments.get("use_rotary_position_embeddings") is True:
        del expected["position_embedding_type"]  # Megatron sets it (arguments.py:validate_args)
    for key, value in expected.items():
        given = arguments.get(key)
        told = MEGATRON_DEFAULTS.get(key) if given is None else given
        if _same(told, value):
            continue
        says = f"{key} = {given!r} in the config"
        if given is None:
            says = f"{key} is left out of the config, which is {told!r} to Megatron"
        message = (
            f"{says}, but the {family.model_type} model of {source} has {value!r}: Megatron and "
            "vLLM would run different models"
        )
        place = f"model.{arguments.get('model')}.{key}"
        faults.append(Fault("model", message, place, f"Set {key}: {json.dumps(value)}"))
    return faults


def not_on_npus(hf_config: ConfigJson, family: Family) -> list[str]:
    """Why the NPU engine does not run a model, whatever its config says; empty: it does."""
    faults = [f"{fault}, by Megatron as by vLLM" for fault in not_built(hf_config, family)]
    return faults + unread_by_4(hf_config)  # NPUs have vLLM 0.11 with transformers 4


def _same(told: Any, expected: Any) -> bool:
    """Equal for Megatron, which reads text by argparse: true is not 1, and a whole number may not
    be written 1e6.
    """
    kinds = (int, float) if isinstance(expected, float) else (type(expected),)
    return type(told) in kinds and told == expected
