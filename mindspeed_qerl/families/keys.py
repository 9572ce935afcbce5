"""A model's values, read key by key, with every fault at once."""

from collections.abc import Mapping
from typing import Any

from mindspeed_qerl.common.errors import ConfigError

LARGEST = 10**9  # of any one size


class Keys:
    """Values read key by key; each that is missing or impossible becomes a line of `faults`, and a
    possible one takes its place.

    Args:
        place: words behind the value, such as " in config.json". missing: what to say of None;
            None: as of any value.
    """

    def __init__(self, values: Mapping[str, Any], place: str = "", missing: str | None = None):
        self.values, self.place, self.missing = values, place, missing
        self.faults: list[str] = []

    def fault(self, key: str, value: Any, rule: str) -> None:
        if value is None and self.missing:
            self.faults.append(f"{key} {self.missing}")
        else:
            self.faults.append(f"{key} = {value!r}{self.place} must be {rule}")

    def size(self, key: str, default: int | None = None, low: int = 1) -> int:
        value = self.values.get(key, default)
        if value is None and self.missing:
            value = default
        if isinstance(value, int) and not isinstance(value, bool) and low <= value <= LARGEST:
            return value
        self.fault(key, value, f"a whole number of at least {low} and at most {LARGEST:,}")
        return 1

    def number(self, key: str, value: Any, default: float | None = None) -> float:
        """`value`, found somewhere as `key`, or the default for None."""
        value = default if value is None else value
        if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < 1e30:
            return float(value)
        self.fault(key, value, "a finite number above 0")
        return default or 1.0

    def truth(self, key: str) -> bool:
        value = self.values.get(key)
        if value is not None and not isinstance(value, bool):
            self.fault(key, value, "true or false")
        return value is True

    def check(self, name: str = "") -> None:
        """ConfigError with every fault, one a line."""
        if self.faults:
            raise ConfigError(*[f"{name}: {fault}" if name else fault for fault in self.faults])
