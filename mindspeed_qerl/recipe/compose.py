"""A config by its name: where configs lie, the files that one is made of, what Hydra resolves it
to, and what `cli/train_grpo.py` prints about configs.
"""

import difflib
import os
import re
import shlex
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from mindspeed_qerl.common.errors import ConfigError, unknown

Config = Mapping[str, Any]  # as YAML gives it, resolved
Overrides = Iterable[str]  # as they are typed, key=value
Folder = str | None  # --config-dir

# another library's key -> ours, where spelling does not lead here
SYNONYMS = yaml.safe_load(Path(__file__).with_name("synonyms.yaml").read_text())

# The last parts of the keys whose values are paths, in every section.
PATHS = set(
    """tokenizer_name_or_path load data_path eplb_token_save_path train_file test_file root resume
    models""".split()
)

# what YAML 1.1 reads as octal or base 60
MISREAD = re.compile(r"[-+]?0[0-7_]*[1-7][0-7_]+|[-+]?[1-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?")

PACKAGE = Path(__file__).resolve().parents[1]
CONFIGS = PACKAGE / "configs"  # of an installation
if not CONFIGS.is_dir():
    CONFIGS = PACKAGE.parent / "configs"  # of a checkout


def compose(name: str, overrides: Overrides = (), config_dir: Folder = None) -> dict[str, Any]:
    """The resolved config `name` with overrides, as `cli/train_grpo.py --config-name name` sees it,
    `~` of its paths expanded. Whether its keys are known is the reader's to say.

    Raises:
        ConfigError: no such config, what Hydra refuses, a file whose own values would be
            overridden by what it is made of, or a path with a shell's variable.
    """
    from hydra import compose as composed
    from omegaconf import OmegaConf

    with _hydra(name, overrides, config_dir) as (words, files):
        config = composed(name, words)
        for file in files:
            _check_numbers(file)
        resolved = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    return _with_paths(resolved)


def combinations(name: str, overrides: Overrides, config_dir: Folder = None) -> list[list[str]]:
    """The overrides of each run of a sweep: one value of each that lists several, as in
    `aqn=off,qerl seed=1,2`.
    """
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper

    with _hydra(name, (), config_dir):
        parsed = _parsed([quoted(override) for override in overrides])
        return BasicSweeper.split_arguments(parsed, max_batch_size=None)[0]


# ---- files ----


def config_files(config_dir: Folder) -> dict[str, Path]:
    """{name: file} of every config: of `config_dir`, or else `configs` in the current directory,
    and of the package.

    The files in the folders of such a folder are parts of configs: `aqn=off` is aqn/off.yaml.
    """
    files: dict[str, Path] = {}
    for folder in reversed(_folders(config_dir)):
        files |= {file.stem: file for file in sorted(folder.glob("*.yaml"))}
    return files


def _check_numbers(file: Path) -> None:
    """ConfigError for a number that YAML 1.1, which Hydra reads, takes for another one."""
    for token in yaml.scan(file.read_text()):
        if isinstance(token, yaml.ScalarToken) and token.plain and MISREAD.fullmatch(token.value):
            raise ConfigError(
                f"{file}:{token.start_mark.line + 1}: YAML reads {token.value} as octal or base 60: "
                f"write a decimal number, or a text in quotes: '{token.value}'"
            )


def _folders(config_dir: Folder) -> list[Path]:
    own = Path(config_dir or "configs").resolve()
    if config_dir and not own.is_dir():
        raise ConfigError(f"--config-dir {config_dir}: no such folder")
    return [own, CONFIGS] if own.is_dir() and own != CONFIGS else [CONFIGS]


def _with_paths(config: dict[str, Any], above: str = "") -> dict[str, Any]:
    """`config` with `~` and `~user` of its paths expanded; ConfigError for a shell's variable in
    one.
    """
    for key, value in config.items():
        if isinstance(value, dict):
            _with_paths(value, f"{above}{key}.")
        elif key in PATHS and isinstance(value, str):
            if re.search(r"\$[\w{]", value):
                raise ConfigError(
                    f"{above}{key} = {value!r} has a shell's variable, which is not read here: "
                    "write ${oc.env:NAME}"
                )
            config[key] = os.path.expanduser(value)
    return config


# ---- what the command prints ----


def list_of_configs(config_dir: Folder) -> str:
    """Each config in a line with the comment that it begins with."""
    files = config_files(config_dir)
    width = max(map(len, files), default=0)
    lines = ["configs:"]
    for name, file in sorted(files.items()):
        first = file.read_text(encoding="utf-8", errors="replace").partition("\n")[0]
        lines.append(f"  {name:{width}}  {first.lstrip('# ')}")
    return "\n".join(lines)


def text_of_config(name: str, overrides: Overrides, config_dir: Folder) -> str:
    """The text of a config and of every file that it, or an override, is made of: its own first."""
    with _hydra(name, overrides, config_dir) as (_, files):
        pass
    texts = [f"---- {file}\n{file.read_text(encoding='utf-8')}" for file in files]
    return "\n".join(texts)


def list_of_keys(name: str, section: str, overrides: Overrides, config_dir: Folder) -> str:
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
def _hydra(
    name: str, overrides: Overrides, config_dir: Folder
) -> Iterator[tuple[list[str], list[Path]]]:
    """Hydra, ready for config `name`; yields `overrides` as it wants them, and the files that the
    config then is made of, its own first. What Hydra refuses is a ConfigError.
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
            yield _made_of(name, overrides, folders)
    except ConfigError:
        raise
    except Exception as error:  # Hydra has assertions and errors of any kind
        reason = str(error) or str(error.__cause__)
        mark = getattr(error, "problem_mark", None)  # YAML's, of any of the files
        place = mark.name if mark else known[name]
        raise ConfigError(f"{place}: {' '.join(reason.split())}") from error


def _defaults(name: str, overrides: list[str]) -> Any:
    """Returns what Hydra makes of the config's `defaults`."""
    from hydra.core.global_hydra import GlobalHydra
    from hydra.types import RunMode

    loader = GlobalHydra.instance().config_loader()
    return loader.compute_defaults_list(name, overrides, RunMode.RUN)


def _parsed(overrides: list[str]) -> list[Any]:
    """Returns what Hydra reads in `overrides`; ConfigError for one in which it reads nothing, with
    the form in which it would.
    """
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.override_parser.overrides_parser import OverridesParser

    parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
    parsed = []
    for override in overrides:
        try:
            parsed.append(parser.parse_overrides([override])[0])
        except Exception as error:  # of several kinds, and of two libraries
            key, _, value = override.lstrip("+").partition("=")
            whole = f"{key}={_in_quotes(value)}"
            in_shell = shlex.quote(whole) if set(whole) & set('"$`!') else f'"{whole}"'
            raise ConfigError(
                f"{key}={value} is not read: quotes, commas, colons, brackets and the like have a "
                "meaning in Hydra's grammar (https://hydra.cc/docs). As one text, in a shell: "
                f"{in_shell}"
            ) from error
    return parsed


def _made_of(name: str, overrides: Overrides, folders: list[Path]) -> tuple[list[str], list[Path]]:
    """`overrides` as Hydra wants them for config `name`, with the folders of its parts; and the
    files that it then is made of, the config first.
    """
    others = ",".join(f"'file://{folder}'" for folder in folders[1:])
    search_path = f"hydra.searchpath=[{others}]"
    alone = _defaults(name, [search_path])
    if alone.defaults[-1].config_path != name:
        raise ConfigError(
            f"{name}.yaml: what its `defaults` name behind `_self_` would override its own "
            "values: put `_self_` last"
        )
    chosen = alone.overrides.known_choices
    words = [hydra_override(override, folders, chosen) for override in overrides]
    _parsed(words)
    words.append(search_path)
    parts = [name, *(entry.config_path for entry in _defaults(name, words).defaults)]
    files = []
    for part in dict.fromkeys(parts):
        places = [folder / f"{part}.yaml" for folder in folders]
        files += [file for file in places if file.is_file()][:1]
    return words, files


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
