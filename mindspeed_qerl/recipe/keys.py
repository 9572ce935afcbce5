"""What becomes of each key of upstream's sections on each engine: the table in keys.yaml, applied
and printed.

`python -m mindspeed_qerl.recipe.keys` prints the table.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from mindspeed_qerl.common.errors import Fault

ENGINES = ("local", "mindspeed_rl")
UPSTREAM = "mindspeed_rl"  # where a key that is left out is upstream's to choose


@dataclass(frozen=True)
class Decision:
    """What one engine does with one key.

    Attributes:
        kind: "honoured", "neutral" (any value trains the same), or "only" (others than `allowed`
            are refused). why: the reason; "" for honoured. allowed: values; None stands for a key
            that is left out. default: (V,) if upstream takes V for a key that is left out, so that
            V is checked; () if it may be left out. conditions: keys of Megatron that must be set
            for an "only" to hold.
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
        sections: a config with all of upstream's sections, each a mapping.
    """

    def __init__(self, sections: Mapping[str, Any]):
        self.sections = sections
        training, actor, models = (
            sections["megatron_training"],
            sections["actor_config"],
            sections["model"],
        )
        name = actor.get("model", training.get("model"))
        model = models.get(name) if isinstance(name, str) else None
        merged = {
            f"model.{name}": model if isinstance(model, Mapping) else {},
            "megatron_training": training,
            "actor_config": actor,
        }
        self.megatron = {key: value for values in merged.values() for key, value in values.items()}
        self._places = {key: place for place, values in merged.items() for key in values}

    def get(self, key: str) -> tuple[str, Any]:
        """(the key as it stands in the config, its value or None)."""
        section, name = key.split(".", 1)
        if section == "megatron":
            return f"{self._places.get(name, 'megatron_training')}.{name}", self.megatron.get(name)
        key = f"generate_config.{key}" if section == "sampling_config" else key
        value: Any = self.sections
        for step in key.split("."):
            value = value.get(step) if isinstance(value, Mapping) else None
        return key, value


def check(sections: Mapping[str, Any], engine: str) -> tuple[list[Fault], list[str]]:
    """What `engine` makes of upstream's keys in a config, `sections` as `Values` takes them.

    Returns:
        (a fault for each value that is refused, "section.key" of each key that is set and
        neutral); `TABLE[section][key][engine].why` is the reason.
    """
    values = Values(sections)
    faults, neutral = [], []
    for section, table in TABLE.items():
        for key in sorted(table):
            decision, (place, value) = table[key][engine], values.get(f"{section}.{key}")
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
        state = f"{name} is left out{f', and upstream would take {value!r}' if value is not None else ''}; it"
    if any(_same(value, allowed) for allowed in decision.allowed):
        return []
    *words, last = [
        "left out" if allowed is None else repr(allowed) for allowed in decision.allowed
    ]
    wanted = f"{', '.join(words)} or {last}" if words else last
    condition = f" with {' and '.join(decision.conditions)}" if decision.conditions else ""
    return [Fault("unsupported", f"{state} must be {wanted}{condition}: {decision.why}", name)]


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
    conditions = given.get("if", [])
    return Decision(
        "only",
        given["why"],
        tuple(given["only"]),
        (given["default"],) if "default" in given else (),
        (conditions,) if isinstance(conditions, str) else tuple(conditions),
    )


def _by_key(group: Mapping[str, Any]) -> dict[str, dict[str, Decision]]:
    """{key: {engine: decision}} of {keys with commas between them: what is given there}."""
    found = {}
    for keys, given in group.items():
        each = (
            given
            if isinstance(given, dict) and given.keys() == set(ENGINES)
            else dict.fromkeys(ENGINES, given)
        )
        decisions = {engine: _decision(each[engine]) for engine in ENGINES}
        found |= {key: decisions for key in keys.split(", ")}
    return found


_LOADER = getattr(
    yaml, "CSafeLoader", yaml.SafeLoader
)  # the former takes a tenth of the time, and may not be there
_GROUPS = {
    section: {group: _by_key(given) for group, given in groups.items()}
    for section, groups in yaml.load(
        Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"), _LOADER
    ).items()
}
# {section: {key: {engine: its decision}}}; "megatron" are megatron_training, actor_config and the
# named model
TABLE = {
    section: {key: found for group in groups.values() for key, found in group.items()}
    for section, groups in _GROUPS.items()
}


# ---- the table, printed ----

_TITLES = {
    "megatron": "megatron_training, actor_config and the named model of model",
    "rl_config": "rl_config",
    "generate_config": "generate_config",
    "sampling_config": "generate_config.sampling_config",
}
_HEAD = """# What becomes of MindSpeed-RL's keys

Every key that MindSpeed-RL's sections allow, and what each engine does with it:

- **honoured**: the value is what happens.
- **only**: another value is refused before anything starts. Where upstream's own default would be refused, too, the
  key may not be left out.
- **neutral**: any value trains the same policy.

The code applies this table, `mindspeed_qerl/recipe/keys.yaml`; `python -m mindspeed_qerl.recipe.keys` prints it, and
`tests/upstream/test_keys.py` compares its keys with MindSpeed-RL's own.
"""


def markdown() -> str:
    """The table, as `python -m mindspeed_qerl.recipe.keys` prints it."""
    lines = _HEAD.splitlines()
    for section, groups in _GROUPS.items():
        lines += ["", f"## {_TITLES[section]}"]
        for group, keys in groups.items():
            lines += [
                "",
                f"### {group}",
                "",
                "| key | " + " | ".join(ENGINES) + " | why |",
                "|---|---|---|---|",
            ]
            lines += [_row(key, per_engine) for key, per_engine in keys.items()]
    return "\n".join(lines) + "\n"


def _row(key: str, per_engine: Mapping[str, Decision]) -> str:
    """The line of a key in the printed table."""
    reasons = {engine: decision.why for engine, decision in per_engine.items() if decision.why}
    same = len(set(reasons.values())) == 1 and len(reasons) == len(ENGINES)
    why = (
        reasons[UPSTREAM]
        if same
        else "; ".join(f"{engine}: {reason}" for engine, reason in reasons.items())
    )
    cells = (_cell(decision, engine) for engine, decision in per_engine.items())
    return f"| `{key}` | {' | '.join(cells)} | {why} |"


def _cell(decision: Decision, engine: str) -> str:
    if decision.kind != "only":
        return decision.kind
    values = " or ".join(
        "left out" if value is None else f"`{_yaml(value)}`" for value in decision.allowed
    )
    condition = (
        f" with {' and '.join(f'`{key}`' for key in decision.conditions)}"
        if decision.conditions
        else ""
    )
    if not decision.default or engine != UPSTREAM:
        return f"only {values}{condition}"
    return f"only {values}{condition}; upstream's default is `{_yaml(decision.default[0])}`"


def _yaml(value: Any) -> str:
    """A value as a config writes it.

    >>> _yaml(True), _yaml(["labels"]), _yaml("100,0,0")
    ('true', '[labels]', '100,0,0')
    """
    return (
        yaml.safe_dump(value, default_flow_style=True)
        .removesuffix("\n")
        .removesuffix("\n...")
        .strip("'")
    )


if __name__ == "__main__":
    print(markdown(), end="")
