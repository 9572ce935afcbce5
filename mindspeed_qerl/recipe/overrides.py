"""Overrides from the command line, by name: a known key works, an unknown one is refused with the
nearest known ones.

Hydra accepts only keys that the YAML has, and advises `+key=value` for any other, misspelt ones
included.
"""

import difflib
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from mindspeed_qerl.common.errors import ConfigError

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

Known = Mapping[str, Collection[str]]


def checked(
    overrides: Iterable[str], config: Mapping[str, Any], known: Known, name: str = "NAME"
) -> list[str]:
    """The overrides in a form that Hydra accepts: `++key=value` for a known key that the config
    does not set.

    Args:
        overrides: of values, not of groups: key=value, also with + or ++ before it, or ~key.
        config: the config that they change.
        known: {section: its keys}; "" is the top level, "a.b" a section within a section. What the
            config sets is known too, and so is every name below a key without a known one, such as
            `aqn.multipliers`.
        name: the config's, for the advice.

    Raises:
        ConfigError: unknown keys, a line for each with the nearest known ones, and how to list them
            all.

    >>> config = {"rl_config": {"epochs": 1}}
    >>> known = {"": ["rl_config"], "rl_config": ["epochs", "entropy_coeff"]}
    >>> checked(["rl_config.epochs=2", "rl_config.entropy_coeff=0.1"], config, known)
    ['rl_config.epochs=2', '++rl_config.entropy_coeff=0.1']
    """
    accepted, faults = [], []
    for override in overrides:
        prefix, key, rest = re.fullmatch(r"([+~]*)([^=]*)(.*)", override, re.DOTALL).groups()
        is_set = key in _paths(config)
        if not is_set and (prefix == "~" or not _is_known(key, config, known)):
            near = " or ".join(map(repr, nearest(key, config, known)))
            faults.append(f"unknown key {key!r}" + (f", did you mean {near}?" if near else ""))
        accepted.append(override if is_set and prefix in ("", "~") else f"++{key}{rest}")
    if faults:
        listing = (
            f"`python cli/train_grpo.py --config-name {name} --keys [SECTION]` lists the known keys"
        )
        raise ConfigError("\n".join([*faults, listing]))
    return accepted


def nearest(key: str, config: Mapping[str, Any], known: Known) -> list[str]:
    """The known keys that an unknown one may stand for: the nearest of all sections, then the
    nearest of its own.

    >>> nearest("rl_config.learning_rate", {"actor_config": {"lr": 1e-6}, "rl_config": {"epochs": 1}}, {})
    ['actor_config.lr']
    """
    top, _, rest = key.partition(".")
    for near in difflib.get_close_matches(top, _names_at("", config, known), n=1) if rest else ():
        if near != top and _is_known(
            f"{near}.{rest}", config, known
        ):  # its section alone is misspelt
            return [f"{near}.{rest}"]
    section, _, typed = key.rpartition(".")
    wanted = SYNONYMS.get(typed, typed)
    are_set = _paths(config)
    are_known = [
        f"{other}.{name}".lstrip(".") for other, names in known.items() for name in sorted(names)
    ]
    places: dict[str, list[str]] = {}
    for path in [*are_set, *are_known]:
        places.setdefault(path.rpartition(".")[2], []).append(path)
    anywhere = difflib.get_close_matches(wanted, places, n=1)
    here = difflib.get_close_matches(wanted, _names_at(section, config, known), n=1)
    return [
        min(
            places[name], key=lambda path: (path not in are_set, path.rpartition(".")[0] != section)
        )
        for name in dict.fromkeys([*anywhere, *here])
    ]


def _is_known(key: str, config: Mapping[str, Any], known: Known) -> bool:
    above, _, last = key.rpartition(".")
    names = _names_at(above, config, known)
    if names or not above:
        return last in names and (not above or _is_known(above, config, known))
    return _is_known(above, config, known) and not isinstance(at(above, config), (str, int, float))


def _names_at(section: str, config: Mapping[str, Any], known: Known) -> set[str]:
    there = at(section, config)
    return {*known.get(section, ()), *(there if isinstance(there, Mapping) else ())}


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
        path = f"{above}{key}"
        paths += [path, *(_paths(value, f"{path}.") if isinstance(value, Mapping) else ())]
    return paths
