"""The one reader: a resolved config, as YAML gives it, to a Recipe, with every fault at once."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from pydantic import ValidationError

from mindspeed_qerl.aqn.schedule import skipped_strongest_noise
from mindspeed_qerl.aqn.targets import check_multipliers, check_targets
from mindspeed_qerl.common.errors import ConfigError, Fault, unknown

from .compose import Config, at, nearest
from .keys import ENGINES, TABLE, UPSTREAM, Values, check
from .types import LOSS_MODES, PARTS, Algorithm, Noise, Recipe

UPSTREAM_SECTIONS = ("megatron_training", "actor_config", "rl_config", "generate_config")
OWN_SECTIONS = {part.section: part for part in PARTS.values() if part.section not in {"", *TABLE}}
TOP_LEVEL = ("engine", "seed", "emulate_npu", "model", *UPSTREAM_SECTIONS, *OWN_SECTIONS)
# keys of some loss modes only; one's own may read all
READ_BY = {"clip_ratio_c": ("vanilla", "gspo"), "tau_pos": ("sapo",), "tau_neg": ("sapo",)}
Faults = Iterator[Fault]
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
    """The Recipe of a resolved config in plain dicts and lists, and what is wrong with it by itself
    and for its engine's keys; a field at fault has its default.
    """
    values = Values(raw)
    found = Found([*_unknown_names(raw), *_set_twice(values)])
    parts = {name: _part(kind, values, found.faults) for name, kind in PARTS.items()}
    parts["model"] = replace(parts["model"], arguments=values.megatron)
    _fill_in(parts, values)
    upstream = {name: values.section(name) for name in ("rl_config", "generate_config")}
    recipe = Recipe(str(raw.get("engine")), **parts, upstream=upstream)
    _check_noise(recipe, found)
    found.faults += _conflicts(recipe, values)
    if recipe.engine in ENGINES:
        refused, found.unused = check(values, recipe.engine)
        if recipe.rehearsal.enabled:  # of a config for NPUs, whichever engine rehearses it
            refused, _ = check(values, UPSTREAM)
        found.faults += refused
    return recipe, found


# ---- names ----


@cache
def known_keys() -> dict[str, Collection[str]]:
    """Every key of every section, as a config may set them."""
    known: dict[str, Any] = {
        "megatron_training": TABLE["megatron"],
        "actor_config": TABLE["megatron"],
        "rl_config": TABLE["rl_config"],
        "generate_config": TABLE["generate_config"],
        "generate_config.sampling_config": TABLE["sampling_config"],
        "rl_config.actor_resource": ["num_npus"],
    }
    for section in OWN_SECTIONS:
        known[section] = []
    for part in PARTS.values():
        for name in part.__pydantic_fields__:
            section, _, last = (key_of(part, name) or "").rpartition(".")
            if section in OWN_SECTIONS:
                known[section].append(last)
    return known


def key_of(part: Any, name: str) -> str | None:
    """The YAML key that a part's field is read from; None for a field that follows from others.

    >>> from mindspeed_qerl.recipe.types import Layout, Noise
    >>> key_of(Layout, "tp"), key_of(Noise, "sigma_start")
    ('megatron.tensor_model_parallel_size', 'aqn.sigma_start')
    """
    extra = part.__pydantic_fields__[name].json_schema_extra
    if extra:
        return extra["key"]
    return f"{part.section}.{name}" if part.section else None


def _unknown_names(raw: Config) -> Faults:
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


def _set_twice(values: Values) -> Faults:
    """Faults of keys with two values, of which upstream would take one in silence."""
    training = values.section("megatron_training")
    actor = values.section("actor_config")
    for name in sorted(training.keys() & actor.keys()):
        if training[name] != actor[name]:
            key = f"megatron_training.{name}"
            message = f"{key} = {training[name]!r} and actor_config.{name} = {actor[name]!r}"
            fix = f"Set actor_config.{name}, which is the one that counts, and leave {key} out"
            yield Fault("conflict", message, key, fix)


def _part(kind: Any, values: Values, faults: list[Fault]) -> Any:
    """The part `kind`; a fault for each value that pydantic refuses, and its default instead."""
    given = {}
    places = {}
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

    def follow(name: str, **follows: Any) -> None:
        part = parts[name]
        for left_out, value in follows.items():
            if values.get(str(key_of(type(part), left_out)))[1] is None:
                part = replace(part, **{left_out: value})
        parts[name] = part

    prompts = parts["batch"].global_batch_size
    longest = parts["sampling"].longest
    tokens = parts["sampling"].max_tokens
    follow("selection", filter_groups_train_batch_size=prompts, rollout_max_tokens=tokens)
    if parts["selection"].filter_groups_enable:
        prompts = parts["selection"].filter_groups_train_batch_size
    follow("batch", mini_batch_size=prompts, seq_length=longest, max_model_len=longest)
    follow("algorithm", loss_scale_factor=float(tokens))


# ---- noise ----


def _check_noise(recipe: Recipe, found: Found) -> None:
    """Faults for what cannot be, a warning for a schedule that the run cuts short."""
    noise = recipe.noise
    if not noise.enabled:
        return
    try:
        schedule = noise.noise_schedule(recipe.run.train_iters)
        check_multipliers(noise.multipliers or {})
        check_targets(noise.exclude)
        for name in TARGET_KEYS:
            if noise.schedule != "target" and getattr(noise, name) != getattr(Noise(), name):
                raise ValueError(
                    f"{name} is read with schedule 'target', not {noise.schedule!r}: use aqn=target"
                )
        if noise.draws != "answer" and noise.repeat_every != Noise().repeat_every:
            raise ValueError(
                f"repeat_every is read with draws 'answer', not {noise.draws!r}: use "
                "aqn.draws=answer"
            )
        n = recipe.batch.samples_per_prompt
        if noise.draws == "answer" and noise.repeat_every and (n % 2 or n < 4):
            raise ValueError(
                f"repeat_every = {noise.repeat_every} gives a draw to two answers in turn, for "
                f"which n_samples_per_prompt = {n} must be even and at least 4: or take "
                "repeat_every=0"
            )
        if not check_targets(noise.targets):
            raise ValueError("targets is empty; to run without noise, use aqn=off")
    except (ValueError, TypeError) as error:
        found.faults.append(Fault("value", f"aqn: {error}", "aqn"))
        return
    if warning := skipped_strongest_noise(schedule):
        found.warnings.append(f"aqn: {warning}")


# ---- values that exclude each other, whatever the engine ----


def _conflicts(recipe: Recipe, values: Values) -> Faults:
    """Faults of values that exclude each other."""
    longest = recipe.batch.max_model_len
    evaluation = recipe.evaluation
    optimizer = recipe.optimizer
    task = recipe.task
    names = len(task.verifier_function)
    weights = len(task.verifier_weight)
    if names != weights or not names:
        yield _conflict(
            "rl_config.verifier_weight",
            f"rl_config: {names} verifier_function and {weights} verifier_weight must be lists, as "
            "long as each other, of at least one",
        )
    if task.chat_template_kwargs and task.prompt == "plain":
        yield _conflict(
            "task.chat_template_kwargs",
            f"task.chat_template_kwargs = {dict(task.chat_template_kwargs)} with task.prompt = "
            "'plain', which has no template: leave one of them out",
        )
    if recipe.sampling.longest > longest:
        yield _conflict(
            "generate_config.max_model_len",
            f"rl_config.max_prompt_length = {recipe.sampling.max_prompt_length} plus sampling "
            f"max_tokens = {recipe.sampling.max_tokens} exceeds generate_config.max_model_len = "
            f"{longest}",
        )
    if evaluation.temperature == 0 and evaluation.samples_per_problem > 1:
        yield _conflict(
            "eval.temperature",
            "eval.temperature = 0 (greedy) needs eval.samples_per_problem = 1, or be above 0",
        )
    if optimizer.min_lr > optimizer.lr:
        yield _conflict(
            "actor_config.min_lr",
            f"actor_config.lr = {optimizer.lr} must not be below actor_config.min_lr = "
            f"{optimizer.min_lr}",
        )
    yield from _algorithm_conflicts(recipe, values)
    yield from _selection_conflicts(recipe)


def _conflict(key: str, message: str) -> Fault:
    return Fault("conflict", message, key)


def _algorithm_conflicts(recipe: Recipe, values: Values) -> Faults:
    algorithm = recipe.algorithm
    method = recipe.correction.method
    mode = algorithm.loss_mode
    if mode not in LOSS_MODES and ":" not in mode:
        sentence = unknown("loss", mode, LOSS_MODES)
        yield _conflict(
            "algorithm.loss_mode",
            f"algorithm.loss_mode: {sentence}. Your own is written module:function",
        )
    if method in ("sequence_tis", "sequence_mask") and mode == "cispo":
        yield _conflict(
            "rollout_correction.method",
            f"rollout_correction.method = {method!r} with algorithm.loss_mode = 'cispo': an "
            "answer's weight would undo CISPO's bound of each token's. Take token_tis",
        )
    if method in ("token_tis", "sequence_tis") and recipe.correction.floor:
        yield _conflict(
            "rollout_correction.floor",
            f"rollout_correction.floor is read by the masks and icepop, not by {method!r}: leave "
            "it out",
        )
    for name, modes in READ_BY.items():
        is_set = getattr(algorithm, name) != getattr(Algorithm(), name)
        if is_set and ":" not in mode and mode not in modes:
            yield _conflict(
                f"algorithm.{name}",
                f"algorithm.{name} is read with algorithm.loss_mode = {' or '.join(modes)}, not "
                f"{mode!r}: leave it out",
            )
    if algorithm.use_kl_in_reward and not algorithm.kl_coefficient:
        yield _conflict(
            "rl_config.use_kl_in_reward",
            "rl_config.use_kl_in_reward = true with rl_config.init_kl_coef = 0 takes nothing off "
            "the rewards: set init_kl_coef above 0, or use_kl_in_reward=false",
        )
    if values.get("rl_config.token_level_loss")[1] and algorithm.loss_agg_mode != "token-mean":
        yield _conflict(
            "algorithm.loss_agg_mode",
            "rl_config.token_level_loss = true with algorithm.loss_agg_mode = "
            f"{algorithm.loss_agg_mode!r}: leave one of them out; token_level_loss is token-mean",
        )


def _selection_conflicts(recipe: Recipe) -> Faults:
    """Yields the conflicts of overlong shaping and of dynamic sampling."""
    selection = recipe.selection
    batch = recipe.batch
    max_tokens = recipe.sampling.max_tokens
    if selection.overlong_buffer_enable:
        if not 1 <= selection.overlong_buffer <= max_tokens:
            yield _conflict(
                "rl_config.overlong_buffer",
                f"rl_config.overlong_buffer = {selection.overlong_buffer} with "
                f"overlong_buffer_enable must be between 1 and sampling max_tokens = {max_tokens}",
            )
        if selection.rollout_max_tokens != max_tokens:
            yield _conflict(
                "rl_config.rollout_max_tokens",
                f"rl_config.rollout_max_tokens = {selection.rollout_max_tokens} with "
                f"overlong_buffer_enable must be sampling max_tokens = {max_tokens}, or left out",
            )
    if not selection.filter_groups_enable:
        return
    wanted = selection.filter_groups_train_batch_size
    batches = selection.filter_groups_max_batches
    key = "rl_config.filter_groups_train_batch_size"
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
    verifiers = recipe.task.verifier_function
    if metric is not None and metric not in verifiers:
        key = "rl_config.filter_groups_metric"
        sentence = unknown("verifier of verifier_function", metric, verifiers)
        yield _conflict(key, f"{key}: {sentence}")
