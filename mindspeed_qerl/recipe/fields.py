"""What the parts of the Recipe are made of: fields that name their YAML key, and the types of
YAML's values.
"""

from typing import Annotated, Any, dataclass_transform

from pydantic import BeforeValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass

PART_CONFIG = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


@dataclass_transform(frozen_default=True)
def part(cls: type) -> type:
    return dataclass(cls, frozen=True, config=PART_CONFIG)


def key(name: str | None, default: Any = None, *, required: bool = False, **limits: Any) -> Any:
    """A field that is read from the YAML key `name`, or, with None, follows from others; `limits`
    are pydantic's.
    """
    if "default_factory" not in limits:
        limits["default"] = default
    return Field(json_schema_extra={"key": name, "required": required}, **limits)


def _number(value: Any) -> Any:
    """YAML 1.1 reads 5e-6 as text."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _names(value: Any) -> Any:
    """One name is a list of it, none is an empty one."""
    if value is None:
        return ()
    if isinstance(value, str):
        return (value,)
    return tuple(value) if isinstance(value, list) else value


def _layer_list(value: Any) -> Any:
    """num_layer_list, "14,14", as numbers."""
    text = isinstance(value, (str, int)) and not isinstance(value, bool) and value != ""
    parts = str(value).split(",") if text else value or ()
    if isinstance(parts, (list, tuple)) and all(str(item).strip().isdecimal() for item in parts):
        return tuple(map(int, parts))
    raise ValueError("must be whole numbers with commas between them, such as 14,14")


AS_NAMES = BeforeValidator(_names)
AS_KINDS = BeforeValidator(lambda value: () if value == "none" else _names(value))
Float = Annotated[float, BeforeValidator(_number)]
Names = Annotated[tuple[str, ...], AS_NAMES]
LayerList = Annotated[tuple[int, ...], BeforeValidator(_layer_list)]
Size = Annotated[int, Field(ge=1)]
