"""Overrides from the command line in the form that Hydra accepts, and the known key that an
unknown one may stand for.
"""

import difflib
import shlex
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from mindspeed_qerl.common.errors import ConfigError, unknown

QUOTES = ("'", '"')
Config = Mapping[str, Any]  # as YAML gives it, resolved

# What TRL (grpo_config.py) and verl (trainer/config/ppo_trainer.yaml) call it, where spelling does
# not lead here.
SYNONYMS = {
    "learning_rate": "lr",
    "max_grad_norm": "clip_grad",
    "num_generations": "n_samples_per_prompt",
    "beta": "init_kl_coef",
    "epsilon": "clip_ratio",
    "num_iterations": "epochs",
    "train_batch_size": "global_batch_size",
    "max_steps": "train_iters",
    "save_steps": "save_interval",
    "eval_steps": "every",
    "max_completion_length": "max_tokens",
    "reward_funcs": "verifier_function",
    "model_name_or_path": "tokenizer_name_or_path",
    "lora_rank": "lora_r",
}

# The last parts of the keys whose values are paths, in every section.
PATHS = {
    "tokenizer_name_or_path",
    "load",
    "data_path",
    "eplb_token_save_path",
    "train_file",
    "test_file",
    "root",
    "resume",
    "models",
}


def nearest(key: str, known: Mapping[str, Collection[str]], config: Config) -> str:
    """The known key that an unknown one may stand for: one that `config` sets, and of the same
    section, if there are several; "" if none is near.

    Args:
        known: {section: its keys}; "" is the top level, "a.b" a section within a section.

    >>> known = {"rl_config": ["epochs"], "megatron_training": ["lr"], "actor_config": ["lr"]}
    >>> nearest("rl_config.learning_rate", known, {"actor_config": {"lr": 1}})
    'actor_config.lr'
    """
    section, _, typed = key.rpartition(".")
    places: dict[str, list[str]] = {}
    for place, names in known.items():
        for name in names:
            places.setdefault(name, []).append(f"{place}.{name}".lstrip("."))

    def rank(path: str) -> tuple[bool, bool]:
        return at(path, config) is None, path.rpartition(".")[0] != section

    typed = SYNONYMS.get(typed, typed)
    for names in ([typed], known.get(section, ()), places):
        near = difflib.get_close_matches(typed, set(names) & places.keys(), n=1)
        if near:
            return min(places[near[0]], key=rank)
    return ""


def at(path: str, config: Config) -> Any:
    """The value at a dotted path, the config itself at ""; None where there is none."""
    value: Any = config
    for step in filter(None, path.split(".")):
        value = value.get(step) if isinstance(value, Mapping) else None
    return value


def quoted(override: str) -> str:
    """An override in quotes where its value is a path, which may have "=" or spaces, unless it has
    characters of Hydra's own grammar.

    >>> quoted("run.resume=runs/tiny/2026-11-22_aqn=off_seed1"), quoted("aqn=off,qerl")
    ("run.resume='runs/tiny/2026-11-22_aqn=off_seed1'", 'aqn=off,qerl')
    """
    key, _, value = override.partition("=")
    is_path = key.rpartition(".")[2] in PATHS
    if is_path and value != "null" and value[:1] not in QUOTES and not set(value) & set("\\,[{"):
        return f"{key}={_in_quotes(value)}"
    return override


def _in_quotes(value: str) -> str:
    """A text as Hydra's grammar has it, where a backslash before a quote makes it one of it."""
    escaped = value.replace("'", r"\'")
    return f"'{escaped}'"


def parsed_override(override: str, parser: Any) -> Any:
    """Returns what Hydra's `parser` makes of an override; ConfigError, with one that it reads, if
    nothing.
    """
    try:
        return parser.parse_overrides([override])[0]
    except Exception as error:  # of several kinds, and of two libraries
        key, _, value = override.lstrip("+").partition("=")
        whole = f"{key}={_in_quotes(value)}"
        in_shell = shlex.quote(whole) if set(whole) & set('"$`!') else f'"{whole}"'
        raise ConfigError(
            f"{key}={value} is not read: quotes, commas, colons, brackets and the like have a "
            f"meaning in Hydra's grammar (https://hydra.cc/docs). As one text, in a shell: {in_shell}"
        ) from error


def hydra_override(override: str, folders: list[Path], chosen: Collection[str]) -> str:
    """An override as Hydra wants it: `+` before an option of a group that the config has not
    `chosen`, `++` before a value, whether the YAML has its key or not.

    Raises:
        ConfigError: it is no override, or names an option that no file in `folders` is.
    """
    if override.startswith("~"):
        return override
    key, equals, value = override.lstrip("+").partition("=")
    if not key or not equals:
        raise ConfigError(f"{override!r} is not an override: write key=value, without dashes")
    options = {file.stem for folder in folders for file in (folder / key).glob("*.yaml")}
    if not options or value.startswith("{"):
        return f"++{quoted(f'{key}={value}')}"
    if value not in options and "," not in value:  # Hydra says that several are for --multirun
        raise ConfigError(unknown(key, value, options))
    added = "" if key in chosen else "+"
    return f"{added}{key}={value}"
