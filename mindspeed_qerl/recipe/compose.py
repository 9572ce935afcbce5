"""A config by its name: where configs lie, what Hydra resolves one to, and what
`cli/train_grpo.py` prints about configs.
"""

import difflib
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from mindspeed_qerl.common.errors import ConfigError, unknown

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

PACKAGE = Path(__file__).resolve().parents[1]
CONFIGS = PACKAGE / "configs"  # of an installation
if not CONFIGS.is_dir():
    CONFIGS = PACKAGE.parent / "configs"  # of a checkout


def compose(
    name: str, overrides: Iterable[str] = (), config_dir: str | None = None
) -> dict[str, Any]:
    """The resolved config `name` with overrides, as `cli/train_grpo.py --config-name name` sees it.
    Whether its keys are known is the reader's to say.

    Raises:
        ConfigError: no such config, or what Hydra refuses.
    """
    from hydra import compose as composed
    from omegaconf import OmegaConf

    with _hydra(name, overrides, config_dir) as words:
        config = composed(name, words)
        return OmegaConf.to_container(config, resolve=True, throw_on_missing=True)


def combinations(
    name: str, overrides: Iterable[str], config_dir: str | None = None
) -> list[list[str]]:
    """The overrides of each run of a sweep: one value of each that lists several, as in
    `aqn=off,qerl seed=1,2`.
    """
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.override_parser.overrides_parser import OverridesParser

    with _hydra(name, (), config_dir):
        parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
        parsed = parser.parse_overrides([quoted(override) for override in overrides])
        return BasicSweeper.split_arguments(parsed, max_batch_size=None)[0]


# ---- files ----


def config_files(config_dir: str | None) -> dict[str, Path]:
    """{name: file} of every config: of `config_dir`, or else `configs` in the current directory,
    and of the package.

    The files in the folders of such a folder are parts of configs: `aqn=off` is aqn/off.yaml.
    """
    files: dict[str, Path] = {}
    for folder in reversed(_folders(config_dir)):
        files |= {file.stem: file for file in sorted(folder.glob("*.yaml"))}
    return files


def _folders(config_dir: str | None) -> list[Path]:
    own = Path(config_dir or "configs").resolve()
    if config_dir and not own.is_dir():
        raise ConfigError(f"--config-dir {config_dir}: no such folder")
    return [own, CONFIGS] if own.is_dir() and own != CONFIGS else [CONFIGS]


# ---- what the command prints ----


def list_of_configs(config_dir: str | None) -> str:
    """Each config in a line with the comment that it begins with."""
    files = config_files(config_dir)
    width = max(map(len, files), default=0)
    lines = ["configs:"]
    for name, file in sorted(files.items()):
        first = file.read_text(encoding="utf-8", errors="replace").partition("\n")[0]
        lines.append(f"  {name:{width}}  {first.lstrip('# ')}")
    return "\n".join(lines)


def list_of_keys(name: str, section: str, overrides: Iterable[str], config_dir: str | None) -> str:
    """The keys of a section: those that the config sets with their values, and the names of the
    others; without a section the names of the sections. ConfigError if there is no such section.
    """
    from .reader import known_keys

    known = known_keys()
    if not section:
        return f"--keys SECTION, of: {', '.join(known)}"
    if section not in known:
        raise ConfigError(unknown("section", section, known))
    values = at(section, compose(name, overrides, config_dir)) or {}
    others = ", ".join(sorted(known[section] - values.keys()))
    return f"{yaml.safe_dump({section: values}, sort_keys=False)}# not set: {others}"


# ---- Hydra ----


@contextmanager
def _hydra(name: str, overrides: Iterable[str], config_dir: str | None) -> Iterator[list[str]]:
    """Hydra, ready for config `name`; yields `overrides` as it wants them. What Hydra refuses is a
    ConfigError.
    """
    from hydra import initialize_config_dir

    name = name.removesuffix(".yaml")
    known = config_files(config_dir)
    if name not in known:
        words = unknown("config name", name, known).removesuffix(".")
        raise ConfigError(f"{words}; `python cli/train_grpo.py` lists them")
    own = known[name].parent
    folders = [own, *(folder for folder in _folders(config_dir) if folder != own)]
    try:
        with warnings.catch_warnings(), initialize_config_dir(str(own), version_base=None):
            # own values come last then
            warnings.filterwarnings("ignore", "In .*: Defaults list is missing `_self_`")
            yield _for_hydra(name, overrides, folders)
    except ConfigError:
        raise
    except Exception as error:  # Hydra has assertions and errors of any kind
        reason = str(error) or str(error.__cause__)
        mark = getattr(error, "problem_mark", None)  # YAML's, of any of the files
        place = mark.name if mark else getattr(error, "override", known[name])
        raise ConfigError(f"{place}: {' '.join(reason.split())}") from error


def _for_hydra(name: str, overrides: Iterable[str], folders: list[Path]) -> list[str]:
    """`overrides` as Hydra wants them for config `name`, with the folders of its parts."""
    from hydra.core.global_hydra import GlobalHydra
    from hydra.types import RunMode

    others = ",".join(f"'file://{folder}'" for folder in folders[1:])
    search_path = f"hydra.searchpath=[{others}]"
    loader = GlobalHydra.instance().config_loader()
    alone = loader.compute_defaults_list(name, [search_path], RunMode.RUN)
    chosen = alone.overrides.known_choices
    words = [hydra_override(override, folders, chosen) for override in overrides]
    return [*words, search_path]


# ---- overrides in the form that Hydra accepts, and the known key for an unknown one ----


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
    if (
        is_path
        and value != "null"
        and value[:1] not in ("'", '"')
        and not set(value) & set("\\,[{")
    ):
        return f"{key}={_in_quotes(value)}"
    return override


def _in_quotes(value: str) -> str:
    """A text as Hydra's grammar has it, where a backslash before a quote makes it one of it."""
    escaped = value.replace("'", r"\'")
    return f"'{escaped}'"


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
