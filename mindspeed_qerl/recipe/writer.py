"""A Recipe back as a config: what upstream is given, and what a run directory keeps.
`read(to_config(recipe))` is the recipe.
"""

import copy
from collections.abc import Mapping
from typing import Any

from mindspeed_qerl.recipe.keys import Values
from mindspeed_qerl.recipe.reader import key_of
from mindspeed_qerl.recipe.types import PARTS, Recipe


def to_config(recipe: Recipe) -> dict[str, Any]:
    """The config of `recipe`: as it was read, with every value that the recipe holds, also where a
    key was left out. So no engine's own default comes between.
    """
    config = copy.deepcopy(dict(recipe.sections))
    values = Values(config)
    for name, kind in PARTS.items():
        if name == "lora" and not recipe.lora.targets:
            continue
        for field in kind.__pydantic_fields__:
            if key := key_of(kind, field):
                _put(values, key, getattr(getattr(recipe, name), field))
    for name, size in recipe.batch.dispatch.items():
        _put(values, f"rl_config.{name}", size)
    return {**config, "engine": recipe.engine}


def _put(values: Values, key: str, value: Any) -> None:
    """Set a dotted key where it stands, or where it belongs; what is none and was left out stays
    left out.
    """
    place, before = values.get(key)
    section, _, last = place.rpartition(".")
    if last == "num_layer_list":
        value = ",".join(map(str, value)) or None
    elif isinstance(value, tuple):
        value = list(value)
    elif isinstance(value, Mapping):
        value = dict(value)
    if value == before:
        return
    if section.startswith("model."):
        section = "megatron_training"
    target: Any = values.config
    for step in filter(None, section.split(".")):
        target[step] = target.get(step) or {}
        target = target[step]
    target[last] = value
