"""The one reader: a resolved config, as YAML gives it, to a Recipe, with every fault at once."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from pydantic import ValidationError

from mindspeed_qerl.aqn.schedule import skipped_strongest_noise
from mindspeed_qerl.aqn.targets import check_targets
from mindspeed_qerl.common.errors import ConfigError, Fault, unknown
from mindspeed_qerl.recipe.conflicts import conflicts
from mindspeed_qerl.recipe.keys import TABLE, Values
from mindspeed_qerl.recipe.overrides import Config, at, nearest
from mindspeed_qerl.recipe.types import DISPATCH, PARTS, Noise, Recipe

UPSTREAM_SECTIONS = ("megatron_training", "actor_config", "rl_config", "generate_config")
OWN_SECTIONS = {
    part.section: part
    for part in PARTS.values()
    if hasattr(part, "section") and part.section not in TABLE
}
TOP_LEVEL = ("engine", "seed", "emulate_npu", "model", *UPSTREAM_SECTIONS, *OWN_SECTIONS)
TARGET_KEYS = ("target_start", "target_end", "sigma_min", "sigma_max")


@dataclass
class Found:
    """Describes what a check found; warnings are sentences."""

    faults: list[Fault] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    # keys that are set and change nothing (keys.yaml says why)
    unused: list[str] = field(default_factory=list)

    def raise_faults(self) -> None:
        """ConfigError with every fault, one a line, if there is one."""
        if self.faults:
            raise ConfigError(*self.faults)


def read_recipe(raw: Config) -> Recipe:
    """The Recipe of a resolved config; ConfigError with one line for every fault."""
    recipe, found = read(raw)
    found.raise_faults()
    return recipe


def read(raw: Config) -> tuple[Recipe, Found]:
    """The Recipe of a resolved config in plain dicts and lists, and what is wrong with it; a field
    at fault has its default.
    """
    values = Values(raw)
    found = Found([*_unknown_names(raw), *_set_twice(values)])
    sizes = {name: values.get(f"rl_config.{name}")[1] for name in DISPATCH}
    computed = {"model": {"arguments": values.megatron}, "batch": {"dispatch": sizes}}
    parts = {
        name: _part(kind, values, computed.get(name, {}), found.faults)
        for name, kind in PARTS.items()
    }
    _fill_in(parts, values)
    recipe = Recipe(str(raw.get("engine")), **parts, sections=raw)
    _check_noise(recipe, found)
    found.faults += conflicts(recipe, values)
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


def _unknown_names(raw: Config) -> Iterator[Fault]:
    """Faults of keys and models that nobody knows, and of sections that are none."""
    known = {"": TOP_LEVEL, **known_keys()}
    for section in ("model", *known):
        values = at(section, raw)
        if values is not None and not isinstance(values, Mapping):
            yield Fault("value", f"section {section} = {values!r} must be a mapping", section)
        elif values and section != "model":
            for name in values.keys() - known[section]:
                key = f"{section}.{name}".lstrip(".")
                near = nearest(key, known, raw)
                guess = f", did you mean {near!r}?" if near else ""
                yield Fault("unknown", f"unknown key {key!r}{guess}", key)
    models = Values(raw).section("model")
    for name, sizes in models.items():
        if not isinstance(sizes, Mapping):
            message = f"model.{name} = {sizes!r} must be a mapping of sizes"
            yield Fault("value", message, f"model.{name}")
    for key in ("megatron_training.model", "actor_config.model"):
        name = at(key, raw)
        if name is not None and str(name) not in models:
            yield Fault("unknown", f"{key}: {unknown('model', str(name), map(str, models))}", key)


# ---- values ----


def _set_twice(values: Values) -> Iterator[Fault]:
    """Faults of keys with two values, of which upstream would take one in silence."""
    training = values.section("megatron_training")
    actor = values.section("actor_config")
    for name in sorted(training.keys() & actor.keys()):
        if training[name] != actor[name]:
            key = f"megatron_training.{name}"
            message = f"{key} = {training[name]!r} and actor_config.{name} = {actor[name]!r}"
            fix = f"Set actor_config.{name}, which is the one that counts, and leave {key} out"
            yield Fault("conflict", message, key, fix)


def _part(kind: Any, values: Values, computed: Mapping[str, Any], faults: list[Fault]) -> Any:
    """The part `kind`, with the fields that are `computed`; a fault for each value that pydantic
    refuses, and its default instead.
    """
    given = dict(computed)
    places = dict.fromkeys(computed, "rl_config")
    for name, info in kind.__pydantic_fields__.items():
        if (key := key_of(kind, name)) is None:
            continue
        places[name], value = values.get(key)
        if value is not None:
            given[name] = value
        elif info.json_schema_extra and info.json_schema_extra["required"]:
            faults.append(Fault("missing", f"{places[name]} is missing", places[name]))
    try:
        return kind(**given)
    except ValidationError as error:
        for each in error.errors():
            name, *inside = each["loc"]
            if name in places:  # else a default that follows from a value at fault
                place = ".".join([places[name], *map(str, inside)])
                reason = each["msg"].removeprefix("Value error, ")
                message = f"{place} = {each['input']!r}: {reason}"
                faults.append(Fault("value", message, places[name]))
            given.pop(name, None)
        return kind(**given)


def _fill_in(parts: dict[str, Any], values: Values) -> None:
    """Give keys that are left out the value that follows from another part's."""
    sampling = parts["sampling"]
    selection = parts["selection"]
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


# ---- noise ----


def _check_noise(recipe: Recipe, found: Found) -> None:
    """Faults for what cannot be, a warning for a schedule that the run cuts short."""
    noise = recipe.noise
    if not noise.enabled:
        return
    try:
        schedule = noise.noise_schedule(recipe.run.train_iters)
        check_targets(noise.exclude)
        for name in TARGET_KEYS:
            if noise.schedule != "target" and getattr(noise, name) != getattr(Noise(), name):
                raise ValueError(
                    f"{name} is read with schedule 'target', not {noise.schedule!r}: use aqn=target"
                )
        if not check_targets(noise.targets):
            raise ValueError("targets is empty; to run without noise, use aqn=off")
    except (ValueError, TypeError) as error:
        found.faults.append(Fault("value", f"aqn: {error}", "aqn"))
        return
    if warning := skipped_strongest_noise(schedule):
        found.warnings.append(f"aqn: {warning}")
