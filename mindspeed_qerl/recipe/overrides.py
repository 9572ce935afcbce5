"""Overrides from the command line, by name: a known key works, an unknown one is refused with the
nearest known ones.

Hydra accepts only keys that the YAML has, and advises `+key=value` for any other, misspelt ones
included.
"""

import difflib
import os
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from mindspeed_qerl.common.errors import ConfigError, unknown

# What TRL (grpo_config.py) and verl (trainer/config/ppo_trainer.yaml) call it, where spelling does
# not lead here.
SYNONYMS = {
    "learning_rate": "lr",
    "warmup_ratio": "lr_warmup_fraction",
    "max_grad_norm": "clip_grad",
    "num_generations": "n_samples_per_prompt",
    "n": "n_samples_per_prompt",
    "beta": "init_kl_coef",
    "kl_coef": "init_kl_coef",
    "kl_loss_coef": "init_kl_coef",
    "epsilon": "clip_ratio",
    "epsilon_high": "clip_ratio_high",
    "ppo_epochs": "epochs",
    "num_iterations": "epochs",
    "train_batch_size": "global_batch_size",
    "ppo_mini_batch_size": "mini_batch_size",
    "per_device_train_batch_size": "micro_batch_size",
    "ppo_micro_batch_size_per_gpu": "micro_batch_size",
    "max_steps": "train_iters",
    "total_training_steps": "train_iters",
    "save_steps": "save_interval",
    "save_freq": "save_interval",
    "eval_steps": "every",
    "test_freq": "every",
    "max_completion_length": "max_tokens",
    "max_response_length": "max_tokens",
    "max_new_tokens": "max_tokens",
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
    "multipliers_file",
    "root",
    "resume",
    "models",
}

Known = Mapping[str, Collection[str]]


def checked(
    overrides: Iterable[str], config: Mapping[str, Any], known: Known, name: str = "NAME"
) -> list[str]:
    """The overrides in a form that Hydra accepts: `++key=value` for a known key that the config
    does not set.

    Args:
        overrides: of values, not of groups: key=value, also with + or ++ before it, or ~key.
        config: the config that they change; what it sets is known, and so is every name below a
            key that is no section, such as `aqn.multipliers`.
        known: {section: its keys}; "" is the top level, "a.b" a section within a section.
        name: the config's, for the advice.

    Raises:
        ConfigError: unknown keys, a line for each with the nearest known ones, and how to list them
            all.

    >>> config = {"rl_config": {"epochs": 1}}
    >>> known = {"": ["rl_config"], "rl_config": ["epochs", "entropy_coeff"]}
    >>> checked(["rl_config.epochs=2", "rl_config.entropy_coeff=0.1"], config, known)
    ['rl_config.epochs=2', '++rl_config.entropy_coeff=0.1']
    """
    set_paths = _paths(config)
    accepted, faults = [], []
    for override in overrides:
        match = re.fullmatch(r"([+~]*)([^=]*)(.*)", override, re.DOTALL)
        assert match, "the pattern matches any text"
        prefix, key, rest = match.groups()
        is_set = key in set_paths
        if not is_set and (prefix == "~" or not _is_known(key, config, known)):
            faults.append(f"unknown key {key!r}{guess(nearest(key, config, known))}")
        accepted.append(override if is_set and prefix in ("", "~") else f"++{key}{rest}")
    if faults:
        command = f"python cli/train_grpo.py --config-name {name} --keys [SECTION]"
        raise ConfigError(*faults, f"`{command}` lists the known keys")
    return accepted


def guess(near: Iterable[str]) -> str:
    """The end of a sentence about an unknown name."""
    names = " or ".join(map(repr, near))
    return f", did you mean {names}?" if names else ""


def nearest(key: str, config: Mapping[str, Any], known: Known) -> list[str]:
    """The known keys that an unknown one may stand for: the nearest of all sections, then the
    nearest of its own.

    >>> nearest("rl_config.learning_rate", {"actor_config": {"lr": 1}}, {"rl_config": ["epochs"]})
    ['actor_config.lr']
    """
    section, _, typed = key.rpartition(".")
    wanted = SYNONYMS.get(typed, typed)
    set_paths = _paths(config)
    places: dict[str, list[str]] = {}
    for path in [*set_paths, *_known_paths(known)]:
        places.setdefault(path.rpartition(".")[2], []).append(path)

    if wanted in places and section not in known:  # its section alone is misspelt
        near = difflib.get_close_matches(key, places[wanted], n=1)
        return near or [places[wanted][0]]
    here = [name for name, paths in places.items() if f"{section}.{name}".lstrip(".") in paths]
    names = [
        *difflib.get_close_matches(wanted, places, n=1),
        *difflib.get_close_matches(wanted, here, n=1),
    ]

    def rank(path: str) -> tuple[bool, bool]:
        return path not in set_paths, path.rpartition(".")[0] != section

    return [min(places[name], key=rank) for name in dict.fromkeys(names)]


def _is_known(key: str, config: Mapping[str, Any], known: Known) -> bool:
    above, _, _ = key.rpartition(".")
    if key in _known_paths(known):
        return True
    if not above or above in known:
        return False
    return _is_known(above, config, known) and not isinstance(at(above, config), (str, int, float))


def _known_paths(known: Known) -> list[str]:
    paths = []
    for section, names in known.items():
        paths += [f"{section}.{name}".lstrip(".") for name in sorted(names)]
    return paths


def at(path: str, config: Mapping[str, Any]) -> Any:
    """The value at a dotted path, the config itself at ""; None where there is none."""
    value: Any = config
    for step in filter(None, path.split(".")):
        value = value.get(step) if isinstance(value, Mapping) else None
    return value


def _paths(config: Mapping[str, Any], above: str = "") -> list[str]:
    """Every dotted path of the config, sections included."""
    paths = []
    for key, value in config.items():
        paths.append(f"{above}{key}")
        if isinstance(value, Mapping):
            paths += _paths(value, f"{above}{key}.")
    return paths


# ---- Hydra's grammar ----


def quoted(override: str) -> str:
    """An override in the quotes that Hydra wants where its value is a text that is no word of
    Hydra's grammar, such as a path with "=" or a space. Where a path is wanted, one that exists is
    meant as it is typed, commas and all.

    >>> quoted("run.resume=runs/tiny/2026-11-22_aqn=off_seed1"), quoted("aqn=off,qerl")
    ("run.resume='runs/tiny/2026-11-22_aqn=off_seed1'", 'aqn=off,qerl')
    """
    from hydra.core.override_parser.types import Quote, QuotedString

    key, _, value = override.partition("=")
    is_path = key.rpartition(".")[2] in PATHS
    exists = is_path and value not in ("", "null") and os.path.exists(os.path.expanduser(value))
    is_word = not set(value) & set("[]{},'\"") and not re.match(r"\w+\(", value)
    if exists or (is_path or is_word) and not _is_readable(value):
        return f"{key}={QuotedString(value, Quote.single).with_quotes()}"
    return override


def _is_readable(value: str) -> bool:
    """Whether Hydra's grammar takes `value` for that of an override."""
    if re.fullmatch(r"[A-Za-z0-9_./-]+", value):  # most are; Hydra's parser takes 0.1 s
        return True
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        OverridesParser.create().parse_override(f"key={value}").value()
    except HydraException:
        return False
    return True


def split_overrides(
    overrides: list[str], folders: list[Path], chosen: Collection[str]
) -> tuple[list[str], list[str]]:
    """(overrides that choose an option of a group, overrides of values), the former with the `+`
    that Hydra wants for a group that the config has not `chosen`.
    """
    groups: list[str] = []
    values: list[str] = []
    for override in overrides:
        key, equals, value = override.lstrip("+~").partition("=")
        if not key or not equals and not override.startswith("~"):
            raise ConfigError(f"{override!r} is no override: write key=value")
        options = {file.stem for folder in folders for file in (folder / key).glob("*.yaml")}
        if not options or value.startswith("{"):
            values.append(override)
        elif override.startswith("~"):
            groups.append(override)
        elif value in options or "," in value:  # Hydra says that several are for --multirun
            added = "" if key in chosen else "+"
            groups.append(f"{added}{key}={value}")
        else:
            raise ConfigError(unknown(key, value, options))
    return groups, values
