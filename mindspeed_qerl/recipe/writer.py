"""A Recipe back as a config: what upstream is given, and what the directory of a rehearsal keeps.
`read(to_config(recipe))` is the recipe.
"""

import copy
from typing import Any

from .reader import key_of
from .types import PARTS, Recipe

# Sections of YAML by the first part of a field's key; actor_config goes before the model's and
# megatron_training.
PLACES = {"megatron": "actor_config", "sampling_config": "generate_config.sampling_config"}


def to_config(recipe: Recipe) -> dict[str, Any]:
    """The config of `recipe`, with every value that it holds, so that no engine's own default comes
    between, and what upstream alone reads.
    """
    arguments = recipe.model.arguments
    config: dict[str, Any] = {
        "engine": recipe.engine,
        "model": {name: {} for name in (arguments.get("model"),) if name},
        "megatron_training": {},
        "actor_config": dict(arguments),
        **copy.deepcopy(dict(recipe.upstream)),
    }
    for name, kind in PARTS.items():
        if name == "lora" and not recipe.lora.targets:
            continue
        for field in kind.__pydantic_fields__:
            if key := key_of(kind, field):
                _put(config, key, getattr(getattr(recipe, name), field))
    return config


def _put(config: dict[str, Any], key: str, value: Any) -> None:
    """Set a field's key; one that is None is left out."""
    section, _, name = key.rpartition(".")
    place = config
    for step in filter(None, PLACES.get(section, section).split(".")):
        place = place.setdefault(step, {})
    place.pop(name, None)
    if name == "num_layer_list":
        value = ",".join(map(str, value)) or None
    elif name == "lora_alpha" and value % 1 == 0:
        value = int(value)  # MindSpeed-LLM's --lora-alpha takes no point
    elif isinstance(value, tuple):
        value = list(value)
    if value is not None:
        place[name] = value
