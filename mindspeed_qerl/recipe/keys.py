"""What becomes of each key of upstream's sections on each engine: the table in keys.yaml, applied
and printed.

`python -m mindspeed_qerl.recipe.keys` prints the table.
"""

from collections import ChainMap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from mindspeed_qerl.common.errors import Fault
from mindspeed_qerl.recipe.overrides import at

# each with its room, which has the modules `limits` and `engine` (engines/__init__.py)
ENGINES = {"local": "local", "mindspeed_rl": "ascend"}
UPSTREAM = "mindspeed_rl"  # where a key that is left out is upstream's to choose


@dataclass(frozen=True)
class Decision:
    """What one engine does with one key.

    Attributes:
        kind: "honoured", "neutral" (any value trains the same), or "only" (others than `allowed`
            are refused).
        why: the reason; "" for honoured.
        allowed: values; None stands for a key that is left out.
        default: (V,) if upstream takes V for a key that is left out, so that V is checked; () if it
            may be left out.
        conditions: keys of Megatron that must be set for an "only" to hold.
    """

    kind: str
    why: str = ""
    allowed: tuple[Any, ...] = ()
    default: tuple[Any, ...] = ()
    conditions: tuple[str, ...] = ()


class Values:
    """The values of a config by dotted key. `megatron.X` is X of actor_config, megatron_training or
    the named model, merged as upstream does (base_config.py:14); `megatron` are all of these.

    Args:
        config: a resolved config; a section that is missing or no mapping has no values.
    """

    def __init__(self, config: Mapping[str, Any]):
        self.config = config
        training, actor = self.section("megatron_training"), self.section("actor_config")
        name = actor.get("model", training.get("model"))
        self.megatron: dict[str, Any] = {}
        self._places: dict[str, str] = {}
        model = self.section("model").get(str(name))
        merged = {f"model.{name}": model, "megatron_training": training, "actor_config": actor}
        for place, values in merged.items():
            if isinstance(values, Mapping):
                self.megatron |= values
                self._places |= dict.fromkeys(values, place)

    def section(self, path: str) -> Mapping[str, Any]:
        """The section at a dotted path."""
        section = at(path, self.config)
        return section if isinstance(section, Mapping) else {}

    def get(self, key: str) -> tuple[str, Any]:
        """(the key as it stands in the config, its value or None)."""
        section, name = key.split(".", 1)
        if section == "megatron":
            return f"{self._places.get(name, 'megatron_training')}.{name}", self.megatron.get(name)
        if section == "sampling_config":
            key = f"generate_config.{key}"
        section, _, name = key.rpartition(".")
        return key, self.section(section).get(name)


def check(config: Mapping[str, Any], engine: str) -> tuple[list[Fault], list[str]]:
    """What `engine` makes of upstream's keys in a resolved config.

    Returns:
        (a fault for each value that is refused, "section.key" of each key that is set and
        neutral); `TABLE[section][key][engine].why` is the reason.
    """
    values = Values(config)
    faults: list[Fault] = []
    neutral = []
    for section, table in TABLE.items():
        for key in sorted(table):
            decision = table[key][engine]
            place, value = values.get(f"{section}.{key}")
            if decision.kind == "neutral" and value is not None:
                neutral.append(place)
            elif decision.kind == "only" and all(map(values.megatron.get, decision.conditions)):
                faults += _faults(decision, place, value, engine)
    return faults, neutral


def _faults(decision: Decision, name: str, value: Any, engine: str) -> list[Fault]:
    """The fault of a value that is refused, or nothing."""
    state = f"{name} = {value!r}"
    if value is None:
        if not decision.default or engine != UPSTREAM:
            return []
        value = decision.default[0]
        state = f"{name} is left out"
        if value is not None:
            state += f", and upstream would take {value!r}"
        state += "; it"
    if any(_same(value, allowed) for allowed in decision.allowed):
        return []
    message = f"{state} must be {_rule(decision)}: {decision.why}"
    return [Fault("unsupported", message, name)]


def _rule(decision: Decision) -> str:
    """The values that an "only" takes, and with what."""
    values = ["left out" if value is None else repr(value) for value in decision.allowed]
    rule = " or ".join(values)
    if decision.conditions:
        rule += f" with {' and '.join(decision.conditions)}"
    return rule


def _same(value: Any, other: Any) -> bool:
    """Equal and of one kind: 1 is 1.0, and True is not 1."""
    kinds = {type(value), type(other)}
    return (len(kinds) == 1 or kinds == {int, float}) and value == other


# ---- the table ----


def _decision(given: Any) -> Decision:
    if given == "honoured":
        return Decision("honoured")
    if "neutral" in given:
        return Decision("neutral", given["neutral"])
    default = tuple(given[name] for name in ("default",) if name in given)
    conditions = given.get("if", "").split()
    return Decision("only", given["why"], tuple(given["only"]), default, tuple(conditions))


def _by_key(group: Mapping[str, Any]) -> dict[str, dict[str, Decision]]:
    """{key: {engine: decision}} of {keys with commas between them: what is given there}."""
    by_key: dict[str, dict[str, Decision]] = {}
    for keys, given in group.items():
        if not (isinstance(given, dict) and given.keys() <= ENGINES.keys()):
            given = dict.fromkeys(ENGINES, given)
        decisions = {engine: _decision(given[engine]) for engine in ENGINES}
        by_key |= dict.fromkeys(keys.split(", "), decisions)
    return by_key


# the former takes a tenth of the time, and may not be there
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_TEXT = Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
# {section: {key: {engine: its decision}}}; "megatron" are megatron_training, actor_config and the
# named model
TABLE = {
    section: dict(ChainMap(*map(_by_key, groups.values())))
    for section, groups in yaml.load(_TEXT, _LOADER).items()
}


# ---- the table, printed ----

_HEAD = """What each engine does with every key of MindSpeed-RL's sections:

- honoured: the value is what happens.
- must be: another value is refused before anything starts.
- neutral: any value trains the same policy.
"""


def markdown() -> str:
    """The table, as `python -m mindspeed_qerl.recipe.keys` prints it."""
    lines = [_HEAD]
    for section, keys in TABLE.items():
        lines += [f"## {section}", "", f"| key | {' | '.join(ENGINES)} |", "|---|---|---|"]
        for key, decisions in sorted(keys.items()):
            cells = [_cell(decision) for decision in decisions.values()]
            lines.append(f"| `{key}` | {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def _cell(decision: Decision) -> str:
    if decision.kind == "honoured":
        return "honoured"
    rule = f"must be {_rule(decision)}" if decision.kind == "only" else "neutral"
    return f"{rule}: {decision.why}"


if __name__ == "__main__":
    print(markdown())
