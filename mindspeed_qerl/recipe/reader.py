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
from mindspeed_qerl.recipe.keys import TABLE, Values
from mindspeed_qerl.recipe.overrides import at, nearest
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
    unused: list[str] = field(
        default_factory=list
    )  # keys that are set and change nothing (keys.yaml says why)

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
    sections = _sections(raw, found.faults)
    values = Values(sections)
    parts = {name: _part(kind, values, found.faults) for name, kind in PARTS.items()}
    parts["model"] = replace(parts["model"], arguments=values.megatron)
    found.faults += _model_faults(sections)
    parts["selection"] = _derived_selection(parts, values)
    parts["batch"] = _derived_batch(parts, values, found)
    if parts["algorithm"].loss_scale_factor is None:
        longest = float(parts["sampling"].max_tokens)
        parts["algorithm"] = replace(parts["algorithm"], loss_scale_factor=longest)
    if values.get("rl_config.verifier_weight")[1] is None:
        names = parts["task"].verifier_function
        parts["task"] = replace(parts["task"], verifier_weight=(1.0,) * len(names))
    parts["noise"] = _checked_noise(
        parts["noise"], parts["run"].train_iters, parts["model"].dtype, found
    )
    found.faults += _conflicts(parts, values)
    emulate = sections.get("emulate_npu", False)
    if not isinstance(emulate, bool):
        message = f"emulate_npu = {emulate!r} must be true or false"
        found.faults.append(Fault("value", message, "emulate_npu"))
    engine = str(sections.get("engine"))
    return Recipe(engine=engine, emulate_npu=emulate is True, **parts, sections=sections), found


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


def key_of(part: type, name: str) -> str | None:
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
    near = [
        key.removeprefix(f"{section}.")
        for key in nearest(f"{section}.{name}", {}, {"": TOP_LEVEL, **known_keys()})
    ]
    guess = f", did you mean {' or '.join(map(repr, near))}?" if near else ""
    message = f"unknown key in {section}: {name!r}{guess}"
    return Fault("unknown", message, f"{section}.{name}")


def _sections(raw: Mapping[str, Any], faults: list[Fault]) -> dict[str, Any]:
    """`raw` with an empty mapping for every section that is missing or none; faults for unknown
    sections and keys.
    """
    sections = {str(name): value for name, value in raw.items()}
    for name in sorted(sections.keys() - set(TOP_LEVEL)):
        faults.append(Fault("unknown", unknown("section", name, TOP_LEVEL), name))
    for name in ("model", *UPSTREAM_SECTIONS, *OWN_SECTIONS):
        value = sections.get(name)
        if value is not None and not isinstance(value, Mapping):
            faults.append(Fault("value", f"section {name} must be a mapping, not {value!r}", name))
        sections[name] = dict(value) if isinstance(value, Mapping) else {}
    for name, known in known_keys().items():
        given = at(name, sections)
        if isinstance(given, Mapping):
            faults += [_unknown_key(key, name) for key in given if key not in known]
        elif given is not None:
            faults.append(Fault("value", f"{name} = {given!r} must be a mapping", name))
    return sections


def _model_faults(sections: Mapping[str, Any]) -> Iterator[Fault]:
    """Faults of a section model that is none, and of a named model that is not in it."""
    models = sections["model"]
    for name, sizes in models.items():
        if not isinstance(sizes, Mapping):
            message = f"model.{name} = {sizes!r} must be a mapping of sizes"
            yield Fault("value", message, f"model.{name}")
    for section in ("megatron_training", "actor_config"):
        name, key = sections[section].get("model"), f"{section}.model"
        if name is not None and name not in map(str, models):
            yield Fault("unknown", f"{key}: {unknown('model', name, map(str, models))}", key)


# ---- values ----


def _part(kind: type, values: Values, faults: list[Fault]) -> Any:
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
        is_null = not extra and name in values.sections[kind.section] and info.default is not None
        if value is not None or is_null:
            given[name] = value
        elif extra and extra["required"]:
            faults.append(Fault("missing", f"{places[name]} is missing", places[name]))
    try:
        return kind(**given)
    except ValidationError as error:
        errors: dict[str, list[Any]] = {}
        for each in error.errors():
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


def _derived_batch(parts: Mapping[str, Any], values: Values, found: Found) -> Any:
    """The batch with what follows where a key is left out."""
    batch, sampling = parts["batch"], parts["sampling"]
    longest = sampling.max_prompt_length + sampling.max_tokens
    trained = parts["selection"].filter_groups_train_batch_size
    prompts = trained if parts["selection"].filter_groups_enable else batch.global_batch_size
    follows = {
        "mini_batch_size": ("rl_config.mini_batch_size", prompts),
        "seq_length": ("megatron.seq_length", longest),
        "max_model_len": ("generate_config.max_model_len", longest),
    }
    derived = {name: value for name, (key, value) in follows.items() if values.get(key)[1] is None}
    dispatch = {}
    for name in DISPATCH:
        place, dispatch[name] = values.get(f"rl_config.{name}")
        if dispatch[name] is not None and (type(dispatch[name]) is not int or dispatch[name] < 1):
            message = f"{place} = {dispatch[name]!r} must be a whole number of at least 1"
            found.faults.append(Fault("value", message, place))
            dispatch[name] = None
    return replace(batch, **derived, dispatch=dispatch)


def _derived_selection(parts: Mapping[str, Any], values: Values) -> Any:
    """The selection with what follows where a key is left out."""
    follows = {
        "filter_groups_train_batch_size": parts["batch"].global_batch_size,
        "rollout_max_tokens": parts["sampling"].max_tokens,
    }
    return replace(
        parts["selection"],
        **{
            name: value
            for name, value in follows.items()
            if values.get(f"rl_config.{name}")[1] is None
        },
    )


# ---- across fields ----


def _conflicts(parts: Mapping[str, Any], values: Values) -> Iterator[Fault]:
    """Faults of values that exclude each other."""
    batch, sampling, evaluation = parts["batch"], parts["sampling"], parts["evaluation"]
    optimizer, task = parts["optimizer"], parts["task"]
    names, weights = len(task.verifier_function), len(task.verifier_weight)
    if names != weights or not names:
        yield _conflict(
            "rl_config.verifier_weight",
            f"rl_config: {names} verifier_function and {weights} verifier_weight must be lists, as "
            "long as each other, of at least one",
        )
    if sampling.max_prompt_length + sampling.max_tokens > batch.max_model_len:
        yield _conflict(
            "generate_config.max_model_len",
            f"rl_config.max_prompt_length = {sampling.max_prompt_length} plus sampling max_tokens "
            f"= {sampling.max_tokens} exceeds generate_config.max_model_len = "
            f"{batch.max_model_len}",
        )
    if batch.samples_per_prompt < 2:
        yield _conflict(
            "rl_config.n_samples_per_prompt",
            f"rl_config.n_samples_per_prompt = {batch.samples_per_prompt} must be at least 2: GRPO "
            "compares the answers to one prompt",
        )
    if evaluation.temperature == 0 and evaluation.samples_per_problem > 1:
        yield _conflict(
            "eval.temperature",
            f"eval.temperature = 0 with eval.samples_per_problem = "
            f"{evaluation.samples_per_problem}: it must be above 0, or 0 (greedy) with 1 sample",
        )
    if optimizer.min_lr > optimizer.lr:
        yield _conflict(
            "actor_config.min_lr",
            f"actor_config.lr = {optimizer.lr} must not be below actor_config.min_lr = "
            f"{optimizer.min_lr}",
        )
    yield from _algorithm_conflicts(parts, values)
    if parts["selection"].overlong_buffer_enable:
        yield from _overlong_conflicts(parts)
    if parts["selection"].filter_groups_enable:
        yield from _filter_conflicts(parts)


def _conflict(key: str, message: str, fix: str = "") -> Fault:
    return Fault("conflict", message, key, fix)


def _algorithm_conflicts(parts: Mapping[str, Any], values: Values) -> Iterator[Fault]:
    algorithm = parts["algorithm"]
    if parts["correction"].method == "sequence_tis" and algorithm.loss_mode == "cispo":
        yield _conflict(
            "rollout_correction.method",
            "rollout_correction.method = 'sequence_tis' with algorithm.loss_mode = 'cispo': CISPO "
            "weighs each token by a ratio of its own, and an answer's would undo its bound",
            "Take token_tis, or loss_mode=vanilla",
        )
    if algorithm.use_kl_in_reward and not algorithm.kl_coefficient:
        yield _conflict(
            "rl_config.use_kl_in_reward",
            "rl_config.use_kl_in_reward = true with rl_config.init_kl_coef = 0 takes nothing off "
            "the rewards, and pays for the reference",
            "Set init_kl_coef above 0, or use_kl_in_reward=false",
        )
    if values.get("rl_config.token_level_loss")[1] and algorithm.loss_agg_mode != "token-mean":
        yield _conflict(
            "algorithm.loss_agg_mode",
            "rl_config.token_level_loss = true with algorithm.loss_agg_mode = "
            f"{algorithm.loss_agg_mode!r}: leave one of them out; token_level_loss is token-mean",
        )


def _overlong_conflicts(parts: Mapping[str, Any]) -> Iterator[Fault]:
    selection, max_tokens = parts["selection"], parts["sampling"].max_tokens
    if not 1 <= selection.overlong_buffer <= max_tokens:
        yield _conflict(
            "rl_config.overlong_buffer",
            f"rl_config.overlong_buffer = {selection.overlong_buffer} with overlong_buffer_enable "
            f"must be between 1 and sampling max_tokens = {max_tokens}: it is the tokens before "
            "the limit that cost reward",
            "rl_config.overlong_buffer_enable=false switches it off",
        )
    if selection.rollout_max_tokens != max_tokens:
        yield _conflict(
            "rl_config.rollout_max_tokens",
            f"rl_config.rollout_max_tokens = {selection.rollout_max_tokens} with "
            f"overlong_buffer_enable must be sampling max_tokens = {max_tokens}, or left out",
        )


def _filter_conflicts(parts: Mapping[str, Any]) -> Iterator[Fault]:
    """Of dynamic sampling."""
    selection, batch, task = parts["selection"], parts["batch"], parts["task"]
    wanted, batches = selection.filter_groups_train_batch_size, selection.filter_groups_max_batches
    key = "rl_config.filter_groups_train_batch_size"
    if parts["noise"].enabled and parts["noise"].restart_every == "epoch":
        yield _conflict(
            "aqn.restart_every",
            "aqn.restart_every = 'epoch' with rl_config.filter_groups_enable: how many prompts a "
            "step asks is not known before, so neither is how many steps are a pass over the data",
            "Give a number of steps",
        )
    if 0 < batches * batch.global_batch_size < wanted:
        yield _conflict(
            key,
            f"{key} = {wanted} prompts cannot come from filter_groups_max_batches = {batches} "
            f"batches of megatron_training.global_batch_size = {batch.global_batch_size}",
        )
    if wanted % batch.mini_batch_size:
        yield _conflict(
            key,
            f"{key} = {wanted} prompts must be a multiple of rl_config.mini_batch_size = "
            f"{batch.mini_batch_size}",
        )
    metric = selection.filter_groups_metric
    if metric is not None and metric not in task.verifier_function:
        key = "rl_config.filter_groups_metric"
        sentence = unknown("verifier of verifier_function", metric, task.verifier_function)
        yield _conflict(key, f"{key}: {sentence}")


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
