"""A config by its name: where configs lie, the files that one is made of, what Hydra resolves it
to, and what `cli/train_grpo.py` prints about configs.
"""

import os
import re
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from mindspeed_qerl.common.errors import ConfigError, unknown
from mindspeed_qerl.recipe.overrides import PATHS, at, hydra_override, parsed_override, quoted

PACKAGE = Path(__file__).resolve().parents[1]
CONFIGS = PACKAGE / "configs"  # of an installation
if not CONFIGS.is_dir():
    CONFIGS = PACKAGE.parent / "configs"  # of a checkout


def compose(
    name: str, overrides: Iterable[str] = (), config_dir: str | None = None
) -> dict[str, Any]:
    """The resolved config `name` with overrides, as `cli/train_grpo.py --config-name name` sees it,
    `~` of its paths expanded. Whether its keys are known is the reader's to say.

    Raises:
        ConfigError: no such config, what Hydra refuses, a file whose own values would be
            overridden by what it is made of, or a path with a shell's variable.
    """
    from hydra import compose as composed
    from omegaconf import OmegaConf

    name = name.removesuffix(".yaml")
    with _hydra(name, config_dir) as folders:
        words = _hydra_overrides(name, overrides, folders)
        config = composed(name, words)
        resolved = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    return _with_paths(resolved)


def combinations(
    name: str, overrides: Iterable[str], config_dir: str | None = None
) -> list[list[str]]:
    """The overrides of each run of a sweep: one value of each that lists several, as in
    `aqn=off,qerl seed=1,2`.
    """
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper

    with _hydra(name.removesuffix(".yaml"), config_dir):
        parsed = _parsed([quoted(override) for override in overrides])
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


def _files(name: str, words: list[str], folders: list[Path]) -> list[Path]:
    """The files of config `name` with overrides in Hydra's form, the config first."""
    files = []
    for part in [name, *(entry.config_path for entry in _defaults(name, words).defaults)]:
        places = [folder / f"{part}.yaml" for folder in folders]
        files += [file for file in places if file.is_file()][:1]
    return list(dict.fromkeys(files))


def _folders(config_dir: str | None) -> list[Path]:
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


def list_of_configs(config_dir: str | None) -> str:
    """Each config in a line with the comment that it begins with."""
    files = config_files(config_dir)
    width = max(map(len, files), default=0)
    lines = ["configs:"]
    for name, file in sorted(files.items()):
        first = file.read_text(encoding="utf-8", errors="replace").partition("\n")[0]
        lines.append(f"  {name:{width}}  {first.lstrip('# ')}")
    return "\n".join(lines)


def text_of_config(name: str, overrides: Iterable[str], config_dir: str | None) -> str:
    """The text of a config and of every file that it, or an override, is made of: its own first."""
    name = name.removesuffix(".yaml")
    with _hydra(name, config_dir) as folders:
        files = _files(name, _hydra_overrides(name, overrides, folders), folders)
    return "\n".join(f"---- {file}\n{file.read_text(encoding='utf-8')}" for file in files)


def list_of_keys(name: str, section: str, overrides: Iterable[str], config_dir: str | None) -> str:
    """The keys of a section: those that the config sets with their values, and the names of the
    others; without a section the names of the sections. ConfigError if there is no such section.
    """
    from mindspeed_qerl.recipe.reader import known_keys

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
def _hydra(name: str, config_dir: str | None) -> Iterator[list[Path]]:
    """Hydra, ready for config `name`; yields the folders where its parts are looked for, that of
    its file first. What Hydra refuses is a ConfigError.
    """
    from hydra import initialize_config_dir

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
            yield folders
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
    """Returns what Hydra reads in `overrides`."""
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.override_parser.overrides_parser import OverridesParser

    parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
    return [parsed_override(override, parser) for override in overrides]


def _hydra_overrides(name: str, overrides: Iterable[str], folders: list[Path]) -> list[str]:
    """`overrides` as Hydra wants them for config `name`, and the folders of its parts."""
    others = ",".join(f"'file://{folder}'" for folder in folders[1:])
    search_path = f"hydra.searchpath=[{others}]"
    made_of = _defaults(name, [search_path])
    if made_of.defaults[-1].config_path != name:
        raise ConfigError(
            f"{name}.yaml: what its `defaults` name behind `_self_` would override its own "
            "values: put `_self_` last"
        )
    chosen = made_of.overrides.known_choices
    words = [hydra_override(override, folders, chosen) for override in overrides]
    _parsed(words)
    return [search_path, *words]
