"""The one reader: a resolved config, as YAML gives it, to a Recipe, with every fault at once."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from mindspeed_qerl.aqn.schedule import skipped_strongest_noise
from mindspeed_qerl.aqn.targets import check_multipliers, check_targets
from mindspeed_qerl.common.errors import ConfigError, Fault, unknown
from mindspeed_qerl.recipe.compose import read_yaml
from mindspeed_qerl.recipe.conflicts import conflicts
from mindspeed_qerl.recipe.keys import TABLE, Values
from mindspeed_qerl.recipe.overrides import at, guess, nearest
from mindspeed_qerl.recipe.types import DISPATCH, PARTS, Noise, Recipe

UPSTREAM_SECTIONS = ("megatron_training", "actor_config", "rl_config", "generate_config")
OWN_SECTIONS = {part.section: part for part in PARTS.values() if hasattr(part, "section")}
TOP_LEVEL = ("engine", "seed", "emulate_npu", "model", *UPSTREAM_SECTIONS, *OWN_SECTIONS)
RULES = {  # pydantic's types of errors
    "int_type": "int",
    "float_type": "float",
    "bool_type": "bool",
    "string_type": "str",
    "tuple_type": "list",
    "dict_type": "dict",
    "mapping_type": "dict",
    "finite_number": "finite",
    "greater_than_equal": "at least {ge:g}",
    "greater_than": "above {gt:g}",
    "less_than_equal": "at most {le:g}",
    "less_than": "below {lt:g}",
}
# Below it bfloat16 keeps less than half of the noise on weights of 1
# (tests/aqn/test_aqn_injector.py).
BF16_LEAST_SIGMA = 9e-4
YES_AND_NO = "YAML reads yes, no, on and off as true or false: put the word in quotes"


@dataclass
class Found:
    """What a check found; warnings are sentences."""

    faults: list[Fault] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    # keys that are set and change nothing (keys.yaml says why)
    unused: list[str] = field(default_factory=list)

    def raise_faults(self) -> None:
        """ConfigError with every fault, one a line, if there is one."""
        if self.faults:
            raise ConfigError(*self.faults)


def read_recipe(raw: Mapping[str, Any]) -> Recipe:
    """The Recipe of a resolved config; ConfigError with one line for every fault."""
    recipe, found = read(raw)
    found.raise_faults()
    return recipe


def read(raw: Mapping[str, Any]) -> tuple[Recipe, Found]:
    """The Recipe of a resolved config in plain dicts and lists, and what is wrong with it; a field
    at fault has its default.
    """
    found = Found()
    found.faults += _unknown_names(raw)
    values = Values(raw)
    parts = {name: _part(kind, values, found.faults) for name, kind in PARTS.items()}
    parts["model"] = replace(parts["model"], arguments=values.megatron)
    _fill_in(parts, values)
    parts["batch"] = replace(parts["batch"], dispatch=_dispatch(values, found.faults))
    parts["noise"] = _checked_noise(
        parts["noise"], parts["run"].train_iters, parts["model"].dtype, found
    )
    found.faults += conflicts(parts, values)
    emulate_npu = raw.get("emulate_npu", False)
    if not isinstance(emulate_npu, bool):
        message = f"emulate_npu = {emulate_npu!r} must be true or false"
        found.faults.append(Fault("value", message, "emulate_npu"))
    recipe = Recipe(str(raw.get("engine")), emulate_npu is True, **parts, sections=raw)
    return recipe, found


# ---- names ----


@cache
def known_keys() -> dict[str, list[str]]:
    """Every key of every section, as a config may set them."""
    own = {
        section: [
            name for name in part.__pydantic_fields__ if key_of(part, name) == f"{section}.{name}"
        ]
        for section, part in OWN_SECTIONS.items()
    }
    upstream = {section: sorted(table) for section, table in TABLE.items()}
    return {
        "megatron_training": upstream["megatron"],
        "actor_config": upstream["megatron"],
        "rl_config": upstream["rl_config"],
        "generate_config": upstream["generate_config"],
        "generate_config.sampling_config": upstream["sampling_config"],
        "rl_config.actor_resource": ["num_npus"],
        **own,
    }


def key_of(part: Any, name: str) -> str | None:
    """The YAML key that a part's field is read from; None for a field that follows from others.

    >>> from mindspeed_qerl.recipe.types import Layout, Noise
    >>> key_of(Layout, "tp"), key_of(Noise, "sigma_start")
    ('megatron.tensor_model_parallel_size', 'aqn.sigma_start')
    """
    extra = part.__pydantic_fields__[name].json_schema_extra
    if extra:
        return extra["key"]
    return f"{part.section}.{name}" if hasattr(part, "section") else None


def _unknown_key(name: Any, section: str) -> Fault:
    """The fault of an unknown key, with the nearest known ones of its section and of all."""
    near = nearest(f"{section}.{name}", {}, {"": TOP_LEVEL, **known_keys()})
    names = [key.removeprefix(f"{section}.") for key in near]
    message = f"unknown key in {section}: {name!r}{guess(names)}"
    return Fault("unknown", message, f"{section}.{name}")


def _unknown_names(raw: Mapping[str, Any]) -> Iterator[Fault]:
    """Faults of sections, keys and models that nobody knows, and of sections that are none."""
    for name in raw:
        if name not in TOP_LEVEL:
            yield Fault("unknown", unknown("section", name, TOP_LEVEL), str(name))
    for name in ("model", *known_keys()):
        section = at(name, raw)
        if section is None:
            continue
        if not isinstance(section, Mapping):
            yield Fault("value", f"section {name} = {section!r} must be a mapping", name)
        elif name != "model":
            yield from (_unknown_key(key, name) for key in section if key not in known_keys()[name])
    models = Values(raw).section("model")
    for name, sizes in models.items():
        if not isinstance(sizes, Mapping):
            message = f"model.{name} = {sizes!r} must be a mapping of sizes"
            yield Fault("value", message, f"model.{name}")
    for key in ("megatron_training.model", "actor_config.model"):
        name = at(key, raw)
        if name is not None and name not in map(str, models):
            yield Fault("unknown", f"{key}: {unknown('model', name, map(str, models))}", key)


# ---- values ----


def _part(kind: Any, values: Values, faults: list[Fault]) -> Any:
    """The part `kind`; a fault for each value that is of the wrong type or out of range, and its
    default instead.
    """
    given, places = {}, {}
    for name, info in kind.__pydantic_fields__.items():
        if (key := key_of(kind, name)) is None:
            continue
        places[name], value = values.get(key)
        extra = info.json_schema_extra
        # in a section of ours null is a value
        is_null = not extra and name in values.section(kind.section) and info.default is not None
        if value is not None or is_null:
            given[name] = value
        elif extra and extra["required"]:
            faults.append(Fault("missing", f"{places[name]} is missing", places[name]))
    try:
        return kind(**given)
    except ValidationError as error:
        errors: dict[Any, list[Any]] = {}
        for each in error.errors():
            if each["loc"][0] in given:  # else a default that follows from a value at fault
                errors.setdefault(each["loc"][0], []).append(each)
        for name, of_field in errors.items():
            faults.append(_value_fault(places[name], name, of_field))
        return kind(**{name: value for name, value in given.items() if name not in errors})


def _value_fault(place: str, name: str, errors: Sequence[Mapping[str, Any]]) -> Fault:
    """The fault of the value at `place`, by pydantic's errors: one, or one for each type of a
    union.
    """
    first, value = errors[0], errors[0]["input"]
    indices = [f"[{index}]" for index in first["loc"][1:] if isinstance(index, int)]
    item = place + "".join(indices)
    is_word = first["type"] in ("literal_error", "string_type")
    fix = YES_AND_NO if is_word and isinstance(value, bool) else ""
    if first["type"] == "literal_error":
        choices = re.findall("'([^']+)'", first["ctx"]["expected"])
        return Fault("unknown", f"{place}: {unknown(name, value, choices)}", place, fix)
    rules = [_rule(each) for each in errors if each["input"] is value]
    return Fault("value", f"{item} = {value!r} must be {', or '.join(rules)}", place, fix)


def _rule(error: Mapping[str, Any]) -> str:
    """The rule that a value breaks, as `must be` goes on."""
    if words := RULES.get(error["type"]):
        return words.format(**error.get("ctx", {}))
    return re.sub("^(Value error, must|Input should) be ", "", error["msg"])


def _fill_in(parts: dict[str, Any], values: Values) -> None:
    """Give keys that are left out the value that follows from another part's."""
    sampling, selection = parts["sampling"], parts["selection"]
    prompts = parts["batch"].global_batch_size
    selection = parts["selection"] = _followed(
        selection,
        values,
        filter_groups_train_batch_size=prompts,
        rollout_max_tokens=sampling.max_tokens,
    )
    if selection.filter_groups_enable:
        prompts = selection.filter_groups_train_batch_size
    parts["batch"] = _followed(
        parts["batch"],
        values,
        mini_batch_size=prompts,
        seq_length=sampling.longest,
        max_model_len=sampling.longest,
    )
    parts["algorithm"] = _followed(
        parts["algorithm"], values, loss_scale_factor=float(sampling.max_tokens)
    )


def _followed(part: Any, values: Values, **follows: Any) -> Any:
    """`part` with the values of `follows` whose keys are left out."""
    for name, value in follows.items():
        key = key_of(type(part), name)
        if key is not None and values.get(key)[1] is None:
            part = replace(part, **{name: value})
    return part


def _dispatch(values: Values, faults: list[Fault]) -> dict[str, int | None]:
    sizes = {}
    for name in DISPATCH:
        place, size = values.get(f"rl_config.{name}")
        if size is not None and (type(size) is not int or size < 1):
            message = f"{place} = {size!r} must be a whole number of at least 1"
            faults.append(Fault("value", message, place))
            size = None
        sizes[name] = size
    return sizes


# ---- noise ----


def _checked_noise(noise: Noise, train_iters: int, dtype: str, found: Found) -> Noise:
    """The noise with its factors; faults for what cannot be, a warning for stages that bfloat16
    cannot hold.
    """
    if not noise.enabled:
        return noise
    try:
        schedule = noise.noise_schedule(train_iters)
        factors = _multipliers(noise)
        check_targets(noise.exclude)
        if not check_targets(noise.targets):
            raise ValueError("targets is empty; to run without noise, use aqn=off")
    except (ValueError, TypeError, OSError) as error:
        found.faults.append(Fault("value", f"aqn: {error}", "aqn"))
        return noise
    if warning := skipped_strongest_noise(schedule):
        found.warnings.append(f"aqn: {warning}")
    small = [
        step for step, sigma in enumerate(schedule.sigmas(), 1) if 0 < sigma < BF16_LEAST_SIGMA
    ]
    if small and dtype == "bfloat16":
        found.warnings.append(
            f"aqn: sigma is below {BF16_LEAST_SIGMA:g} in {len(small)} of {train_iters} steps "
            f"(first in step {small[0]}), where bfloat16 rounds most of it away on norm weights "
            "near 1; aqn/measured_std will say what is left (docs/aqn.md). Raise aqn.sigma_end to "
            "keep it"
        )
    return replace(noise, factors=tuple(factors))


def _multipliers(noise: Noise) -> list[tuple[str, float]]:
    """Those of the config and of the file; ValueError or OSError if one is wrong."""
    factors = check_multipliers(noise.multipliers or {})
    if noise.multipliers_file:
        try:
            profile = read_yaml(Path(noise.multipliers_file))[1]
        except ConfigError as error:
            raise ConfigError(f"multipliers_file is neither YAML nor JSON: {error}") from error
        if not isinstance(profile, Mapping):
            raise ConfigError(
                f"multipliers_file = {noise.multipliers_file!r} must hold a mapping of layers to "
                "numbers, such as 0: 1.5"
            )
        factors += check_multipliers(profile)
    return factors
