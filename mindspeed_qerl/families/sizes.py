"""The numbers of a model: what each may be, and one sentence for each that is not."""

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import Field, ValidationError

from mindspeed_qerl.common.errors import ConfigError

LARGEST = 10**9  # of any one size
Size = Annotated[int, Field(ge=1, le=LARGEST)]
Count = Annotated[int, Field(ge=0, le=LARGEST)]
Number = Annotated[float, Field(gt=0, lt=1e30, strict=True)]
Sizes = TypeVar("Sizes")


def checked(kind: type[Sizes], values: Mapping[str, Any]) -> Sizes:
    """A `kind`, a dataclass of pydantic's, of those values of a config.json that it has.

    Raises:
        ConfigError: a fault for each value that is missing or impossible.
    """
    try:
        return kind(**values)
    except ValidationError as error:
        faults = []
        for wrong in error.errors():
            message = wrong["msg"].removeprefix("Value error, ")
            if wrong["type"] == "missing":
                message = f"{wrong['loc'][-1]} is missing in config.json"
            elif wrong["loc"]:
                message = f"{wrong['loc'][-1]} = {wrong['input']!r} in config.json: {message}"
            faults.append(message)
        raise ConfigError(*faults) from error


def head_dim_of(hidden_size: Any, num_attention_heads: Any) -> Any:
    """The width of a head that nothing else says; None for what has none."""
    try:
        return hidden_size // num_attention_heads
    except (TypeError, ZeroDivisionError):
        return None
