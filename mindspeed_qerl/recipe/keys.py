"""What becomes of each key of upstream's sections on each engine: the table in keys.yaml, applied and printed.

`python -m mindspeed_qerl.recipe.keys > docs/keys.md` makes the page of the docs.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ENGINES = ("local", "mindspeed_rl")
UPSTREAM = "mindspeed_rl"  # where a key that is left out is upstream's to choose
# A config's section -> the table's, where they differ; `model.NAME` is megatron, too.
SECTIONS = {"megatron_training": "megatron", "actor_config": "megatron",
            "generate_config.sampling_config": "sampling_config"}
OFF = (None, False, 0, "", [])  # an `if` does not hold for these


@dataclass(frozen=True)
class Decision:
    """What one engine does with one key.

    Attributes:
        kind: "honoured", "neutral" (any value trains the same), or "only" (others than `allowed` are refused).
        why: the reason; "" for honoured.
        allowed: values; None stands for a key that is left out.
        default: (V,) if upstream takes V for a key that is left out, so that V is checked; () if it may be left out.
        conditions: keys of Megatron that must be set for an "only" to hold.
    """

    kind: str
    why: str = ""
    allowed: tuple[Any, ...] = ()
    default: tuple[Any, ...] = ()
    conditions: tuple[str, ...] = ()

    @property
    def wanted(self) -> str:
        """The allowed values in words.

        >>> Decision("only", allowed=(None, "block")).wanted
        "left out or 'block'"
        """
        words = ["left out" if value is None else repr(value) for value in self.allowed]
        return " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def decisions(section: str, key: str) -> dict[str, Decision]:
    """Engine -> what it does with `key`; `section` is the table's or a config's. KeyError for an unknown name.

    >>> decisions("rl_config", "clip_higher_enable")["mindspeed_rl"].allowed
    (False,)
    """
    return _ALL[_table_section(section)][key]


def known(section: str) -> list[str]:
    """The keys of a section, the table's or a config's."""
    return sorted(_ALL[_table_section(section)])


def check(raw: Mapping[str, Any], engine: str) -> tuple[list[str], list[str]]:
    """What `engine` makes of upstream's keys in a resolved config.

    Args:
        raw: plain dicts and lists; anything may stand in them. Unknown keys are passed over.

    Returns:
        (a sentence for each value that is refused, "section.key" of each key that is set and neutral);
        `decisions(section, key)[engine].why` is the reason.
    """
    given = _given(raw)
    megatron = {key: value for key, (_, value) in given["megatron_training"].items()}
    faults, neutral = [], []
    for section, values in given.items():
        for key in known(section):
            decision = decisions(section, key)[engine]
            place, value = values.get(key, (section, None))
            if decision.kind == "neutral" and value is not None:
                neutral.append(f"{place}.{key}")
            elif decision.kind == "only" and all(_is_on(megatron.get(name)) for name in decision.conditions):
                faults += _faults(decision, f"{place}.{key}", value, engine)
    return faults, neutral


def markdown() -> str:
    """docs/keys.md."""
    lines = _HEAD.splitlines()
    for section, groups in _GROUPS.items():
        lines += ["", f"## {_TITLES[section]}"]
        for group, keys in groups.items():
            lines += ["", f"### {group}", "", "| key | " + " | ".join(ENGINES) + " | why |", "|---|---|---|---|"]
            lines += [_row(key, per_engine) for key, per_engine in keys.items()]
    return "\n".join(lines) + "\n"


# ---- the table ----

def _decision(given: Any) -> Decision:
    if given == "honoured":
        return Decision("honoured")
    if "neutral" in given:
        return Decision("neutral", given["neutral"])
    conditions = given.get("if", [])
    return Decision("only", given["why"], tuple(given["only"]), (given["default"],) if "default" in given else (),
                    (conditions,) if isinstance(conditions, str) else tuple(conditions))


def _per_engine(given: Any) -> dict[str, Decision]:
    if isinstance(given, dict) and given.keys() == set(ENGINES):
        return {engine: _decision(given[engine]) for engine in ENGINES}
    return dict.fromkeys(ENGINES, _decision(given))


def _by_key(group: Mapping[str, Any]) -> dict[str, dict[str, Decision]]:
    return {key: _per_engine(given) for keys, given in group.items() for key in keys.split(", ")}


def _table_section(section: str) -> str:
    return "megatron" if section.startswith("model.") else SECTIONS.get(section, section)


# section -> group -> keys, with commas between them -> what is given there
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the former takes a tenth of the time, and may not be there
_TABLE = yaml.load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"), _LOADER)
_GROUPS = {section: {group: _by_key(given) for group, given in groups.items()} for section, groups in _TABLE.items()}
_ALL = {section: {key: found for group in groups.values() for key, found in group.items()}
        for section, groups in _GROUPS.items()}
MEGATRON_KEYS, RL_KEYS, GENERATE_KEYS, SAMPLING_KEYS = map(frozenset, _ALL.values())


# ---- a config ----

def _given(raw: Mapping[str, Any]) -> dict[str, dict[Any, tuple[str, Any]]]:
    """Section -> key -> (the section where it stands, its value), merged as upstream does (base_config.py:14)."""
    training, actor, models = (_mapping(raw, section) for section in ("megatron_training", "actor_config", "model"))
    name = actor.get("model", training.get("model"))
    name = name if isinstance(name, str) else ""
    generate = _mapping(raw, "generate_config")
    single = {"rl_config": _mapping(raw, "rl_config"), "generate_config": generate,
              "generate_config.sampling_config": _mapping(generate, "sampling_config")}
    merged = {f"model.{name}": _mapping(models, name), "megatron_training": training, "actor_config": actor}
    megatron = {key: (section, value) for section, values in merged.items() for key, value in values.items()}
    return {"megatron_training": megatron} | {section: _placed(section, values) for section, values in single.items()}


def _mapping(raw: Mapping[str, Any], name: str) -> Mapping[Any, Any]:
    value = raw.get(name)
    return value if isinstance(value, Mapping) else {}


def _placed(section: str, values: Mapping[Any, Any]) -> dict[Any, tuple[str, Any]]:
    return {key: (section, value) for key, value in values.items()}


def _faults(decision: Decision, name: str, value: Any, engine: str) -> list[str]:
    """The sentence for a value that is refused, or nothing."""
    if value is not None:
        state = f"{name} = {_shown(value)}"
    elif decision.default and engine == UPSTREAM:
        value = decision.default[0]
        state = f"{name} is left out{f', and upstream would take {value!r}' if value is not None else ''}; it"
    else:
        return []
    if any(_same(value, allowed) for allowed in decision.allowed):
        return []
    condition = f" with {' and '.join(decision.conditions)}" if decision.conditions else ""
    return [f"{state} must be {decision.wanted}{condition}: {decision.why}"]


def _same(value: Any, other: Any) -> bool:
    """Equal and of one kind: 1 is 1.0, and True is not 1. `other` is plain YAML, `value` may be anything."""
    if isinstance(value, (list, tuple)) and isinstance(other, list):
        return len(value) == len(other) and all(map(_same, value, other))
    if _is_number(value) and _is_number(other):
        return bool(value == other)
    return type(value) is type(other) and value == other


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_on(value: Any) -> bool:
    return not any(_same(value, off) for off in OFF)


def _shown(value: Any) -> str:
    try:
        return repr(value)
    except (ValueError, RecursionError):  # integers of more than 4,300 digits, lists in lists without end
        return f"a {type(value).__name__} that cannot be shown"


# ---- the docs ----

_TITLES = {"megatron": "megatron_training, actor_config and the named model of model", "rl_config": "rl_config",
           "generate_config": "generate_config", "sampling_config": "generate_config.sampling_config"}
_HEAD = """# What becomes of MindSpeed-RL's keys

Every key that MindSpeed-RL's sections allow, and what each engine does with it:

- **honoured**: the value is what happens.
- **only**: another value is refused before anything starts. Where upstream's own default would be refused, too, the key
  may not be left out.
- **neutral**: any value trains the same policy.

The code applies this table, `mindspeed_qerl/recipe/keys.yaml`; `python -m mindspeed_qerl.recipe.keys` prints it, and
`tests/upstream/test_keys.py` compares its keys with MindSpeed-RL's own.
"""


def _row(key: str, per_engine: Mapping[str, Decision]) -> str:
    """The line of a key in the docs' table."""
    reasons = {engine: decision.why for engine, decision in per_engine.items() if decision.why}
    same = len(set(reasons.values())) == 1 and len(reasons) == len(ENGINES)
    why = reasons[UPSTREAM] if same else "; ".join(f"{engine}: {reason}" for engine, reason in reasons.items())
    cells = (_cell(decision, engine) for engine, decision in per_engine.items())
    return f"| `{key}` | {' | '.join(cells)} | {why} |"


def _cell(decision: Decision, engine: str) -> str:
    if decision.kind != "only":
        return decision.kind
    values = " or ".join("left out" if value is None else f"`{_yaml(value)}`" for value in decision.allowed)
    condition = f" with {' and '.join(f'`{key}`' for key in decision.conditions)}" if decision.conditions else ""
    if not decision.default or engine != UPSTREAM:
        return f"only {values}{condition}"
    return f"only {values}{condition}; upstream's default is `{_yaml(decision.default[0])}`"


def _yaml(value: Any) -> str:
    """A value as a config writes it.

    >>> _yaml(True), _yaml(["labels"]), _yaml("100,0,0")
    ('true', '[labels]', '100,0,0')
    """
    return yaml.safe_dump(value, default_flow_style=True).removesuffix("\n").removesuffix("\n...").strip("'")


if __name__ == "__main__":
    print(markdown(), end="")
