"""What becomes of each key of upstream's sections on each engine: the table in keys.yaml, applied.

`python -m mindspeed_qerl.recipe.keys` prints it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from mindspeed_qerl.common.entry import quietly
from mindspeed_qerl.common.errors import Fault

from .compose import Config, at

# each with its room, which has the modules `limits` and `engine` (engines/__init__.py)
ENGINES = {"local": "local", "mindspeed_rl": "ascend"}
UPSTREAM = "mindspeed_rl"  # where a key that is left out is upstream's to choose


@dataclass(frozen=True)
class Decision:
    """Describes what one engine does with one key: its value is honoured, unless one of the first
    two says otherwise.

    Attributes:
        neutral: why any value trains the same policy.
        unless: a key of the same section with which the value is honoured.
        only: the values that are not refused; None stands for a key that is left out.
        why: the reason for `only`.
        default: what upstream takes for a key that is left out; ...: it may be left out.
        where: keys of Megatron that must be set for `only` to hold.
    """

    neutral: str = ""
    unless: str = ""
    only: Sequence[Any] = ()
    why: str = ""
    default: Any = ...
    where: str = ""

    def __str__(self) -> str:
        if self.only:
            return f"{self.rule()}: {self.why}"
        return f"neutral: {self.neutral}" if self.neutral else "honoured"

    def rule(self) -> str:
        """The values that `only` has, and where."""
        values = " or ".join("left out" if each is None else repr(each) for each in self.only)
        where = f" with {' and '.join(self.where.split())}" if self.where else ""
        return f"must be {values}{where}"

    def allows(self, value: Any) -> bool:
        """Returns True if `only` has the value; True is not 1 there."""
        is_bool = isinstance(value, bool)
        return any(value == each and is_bool == isinstance(each, bool) for each in self.only)


class Values:
    """The values of a config by dotted key. `megatron.X` is X of actor_config, megatron_training or
    the named model, merged as upstream does (base_config.py:14); `megatron` are all of these.

    Args:
        config: a resolved config; a section that is missing or no mapping has no values.
    """

    def __init__(self, config: Config):
        self.config = config
        training = self.section("megatron_training")
        actor = self.section("actor_config")
        name = actor.get("model", training.get("model"))
        self.megatron: dict[str, Any] = {}
        self._places: dict[str, str] = {}
        model = self.section("model").get(str(name))
        merged = {f"model.{name}": model, "megatron_training": training, "actor_config": actor}
        for place, values in merged.items():
            if isinstance(values, Mapping):
                self.megatron |= values
                self._places |= dict.fromkeys(values, place)

    def section(self, path: str) -> Config:
        """The section at a dotted path, "" for the top level."""
        section = at(path, self.config)
        return section if isinstance(section, Mapping) else {}

    def get(self, key: str) -> tuple[str, Any]:
        """(the key as it stands in the config, its value or None)."""
        section, _, name = key.rpartition(".")
        if section == "megatron":
            return f"{self._places.get(name, 'megatron_training')}.{name}", self.megatron.get(name)
        if section == "sampling_config":
            section = "generate_config.sampling_config"
        return f"{section}.{name}".lstrip("."), self.section(section).get(name)


def check(values: Values, engine: str) -> tuple[list[Fault], list[str]]:
    """Checks what `engine` makes of upstream's keys in a config.

    Returns:
        (a fault for each value that is refused, "section.key" of each key that is set and
        neutral).
    """
    faults = []
    neutral = []
    for section, table in TABLE.items():
        for key in sorted(table):
            decision = table[key][engine]
            place, value = values.get(f"{section}.{key}")
            is_read = decision.unless and values.get(f"{section}.{decision.unless}")[1]
            if decision.neutral and value is not None and not is_read:
                neutral.append(place)
            holds = decision.only and all(map(values.megatron.get, decision.where.split()))
            state = f"{place} = {value!r}"
            if value is None:
                value = decision.default if engine == UPSTREAM else ...
                state = f"{place} is left out, and upstream would take {value!r}; it"
            if holds and value is not ... and not decision.allows(value):
                message = f"{state} {decision.rule()}: {decision.why}"
                faults.append(Fault("unsupported", message, place))
    return faults, neutral


# ---- the table ----


def _by_key(groups: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Decision]]:
    """{key: {engine: decision}} of {title: {keys with commas between them: what is given there}}."""
    by_key: dict[str, dict[str, Decision]] = {}
    for group in groups.values():
        for keys, given in group.items():
            decisions = {}
            for engine in ENGINES:
                settings = given.get(engine, given) if isinstance(given, dict) else given
                decisions[engine] = Decision(**({} if settings == "honoured" else settings))
            by_key |= dict.fromkeys(keys.split(", "), decisions)
    return by_key


_TEXT = Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
# {section: {key: {engine: its decision}}}; "megatron" are megatron_training, actor_config and the
# named model. CSafeLoader takes a tenth of the time, and may not be there.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
TABLE = {section: _by_key(groups) for section, groups in yaml.load(_TEXT, _LOADER).items()}


def main() -> None:
    for section, table in TABLE.items():
        print(f"\n# {section}")
        for key, decisions in sorted(table.items()):
            print(key, *(f"    {engine}: {each}" for engine, each in decisions.items()), sep="\n")


if __name__ == "__main__":
    quietly(main)
