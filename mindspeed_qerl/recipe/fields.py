"""What the parts of the Recipe are made of: fields that name their YAML key, and the types of
YAML's values.
"""

from collections.abc import Callable
from typing import Annotated, Any, dataclass_transform

from pydantic import BeforeValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass

PART_CONFIG = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


@dataclass_transform(frozen_default=True)
def part(section: str = "") -> Callable[[type], type]:
    """Makes a class a part of the Recipe, whose fields are keys of `section`, unless their `key`
    says otherwise.
    """

    def made(cls: type) -> type:
        cls.section = section  # type: ignore[attr-defined]
        return dataclass(cls, frozen=True, config=PART_CONFIG)

    return made


def key(name: str, default: Any = None, *, required: bool = False, **limits: Any) -> Any:
    """A field that is read from the YAML key `name`; `limits` are pydantic's."""
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
    """One name is a list of it."""
    if isinstance(value, str):
        return (value,)
    return tuple(value) if isinstance(value, list) else value


def _layer_list(value: Any) -> Any:
    """num_layer_list, "14,14", as numbers; "" has none."""
    parts = value if isinstance(value, list | tuple) else str(value).split(",")
    texts = [str(part).strip() for part in parts]
    if texts == [""]:
        return ()
    if not all(text.isdecimal() for text in texts):
        raise ValueError("must be whole numbers with commas between them, such as 14,14")
    return tuple(map(int, texts))


AS_NAMES = BeforeValidator(_names)
AS_KINDS = BeforeValidator(lambda value: () if value == "none" else _names(value))
Float = Annotated[float, BeforeValidator(_number)]
Names = Annotated[tuple[str, ...], AS_NAMES]
LayerList = Annotated[tuple[int, ...], BeforeValidator(_layer_list)]
Size = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Positive = Annotated[Float, Field(gt=0)]
NonNegative = Annotated[Float, Field(ge=0)]
Share = Annotated[Float, Field(ge=0, le=1)]
