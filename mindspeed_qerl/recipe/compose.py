"""A config by its name: where configs lie, the files that one is made of, and what Hydra resolves it to."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mindspeed_qerl.errors import ConfigError, unknown
from mindspeed_qerl.recipe.overrides import checked

PACKAGE = Path(__file__).resolve().parents[1]
CONFIGS = PACKAGE / "configs"  # of an installation
if not CONFIGS.is_dir():
    CONFIGS = PACKAGE.parent / "configs"  # of a checkout


def config_files(config_dir: str | None = None) -> dict[str, Path]:
    """{name: file} of every config: of `config_dir`, or else `configs` in the current directory, and of the package.

    The files in the folders of such a folder are parts of configs: `aqn=off` is aqn/off.yaml.
    """
    return {file.stem: file for folder in reversed(_folders(config_dir)) for file in sorted(folder.glob("*.yaml"))}


def compose(name: str, overrides: Iterable[str] = (), config_dir: str | None = None) -> dict[str, Any]:
    """The resolved config `name` with overrides, as `cli/train_grpo.py --config-name name` sees it.

    Raises:
        ConfigError: no such config, an override of an unknown key, or one that Hydra refuses.
    """
    from hydra import compose as composed
    from omegaconf import OmegaConf

    overrides, name = list(map(quoted, overrides)), name.removesuffix(".yaml")
    folders = config_folders(name, config_dir)
    chosen = {part.rpartition("/")[0] for part in config_parts(name, (), config_dir)}
    groups, values = [], []
    for override in overrides:
        key, equals, value = override.lstrip("+~").partition("=")
        if not key or not equals and not override.startswith("~"):
            raise ConfigError(f"{override!r} is no override: write key=value")
        options = {file.stem for folder in folders for file in (folder / key).glob("*.yaml")}
        if not options or value.startswith("{"):
            values.append(override)
        elif override.startswith("~"):
            groups.append(override)
        elif value in options or "," in value:  # of several values Hydra says that they are for --multirun
            groups.append(f"{'' if key in chosen else '+'}{key}={value}")
        else:
            raise ConfigError(unknown(key, value, options))
    with _hydra(name, overrides, folders) as search_path:
        config = composed(name, [*search_path, *groups])
        if values:
            plain = OmegaConf.to_container(config, resolve=False)
            config = composed(name, [*search_path, *groups, *checked(values, plain, known_keys(plain), name)])
        return OmegaConf.to_container(config, resolve=True)


def quoted(override: str) -> str:
    """An override whose value holds another "=", such as the folder of a run, in the quotes that Hydra wants then.

    >>> quoted("run.resume=runs/tiny/2026-11-22_aqn=off_seed1"), quoted("aqn=off")
    ("run.resume='runs/tiny/2026-11-22_aqn=off_seed1'", 'aqn=off')
    """
    key, _, value = override.partition("=")
    return f"{key}='{value}'" if "=" in value and not set(value) & set("'\"[{(") else override


def combinations(name: str, overrides: Iterable[str], config_dir: str | None = None) -> list[list[str]]:
    """The overrides of each run of a sweep: one value of each that lists several, as in `aqn=off,qerl seed=1,2`."""
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.override_parser.overrides_parser import OverridesParser

    overrides = list(map(quoted, overrides))
    with _hydra(name, overrides, config_folders(name, config_dir)):
        parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
        return BasicSweeper.split_arguments(parser.parse_overrides(overrides), max_batch_size=None)[0]


def known_keys(config: Mapping[str, Any]) -> dict[str, Collection[str]]:
    """{section: every key that it may have}; "" is the top level."""
    from mindspeed_qerl.recipe import reader

    known = reader.known_keys()
    models = {f"model.{model}": known["megatron_training"] for model in config.get("model") or ()}
    return {"": reader.TOP_LEVEL, **known, **models}


def config_parts(name: str, overrides: Iterable[str] = (), config_dir: str | None = None) -> dict[str, Path]:
    """{part: file} of what a config is made of: itself first, then what its defaults name, such as aqn/qerl."""
    import yaml

    folders = config_folders(name, config_dir)
    chosen = dict(override.lstrip("+").split("=", 1) for override in overrides if "=" in override)
    found: dict[str, Path] = {}
    waiting = [name.removesuffix(".yaml")]
    while waiting:
        part = waiting.pop(0)
        file = next((folder / f"{part}.yaml" for folder in folders if (folder / f"{part}.yaml").is_file()), None)
        if file is None or part in found:  # what is missing, Hydra names
            continue
        found[part] = file
        try:
            content = yaml.safe_load(file.read_text(encoding="utf-8"))
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ConfigError(f"{file} is no YAML: {' '.join(str(error).split())}") from error
        for default in content.get("defaults") or () if isinstance(content, dict) else ():
            if isinstance(default, dict):
                group, option = next(iter(default.items()))
                default = f"{group}/{chosen.get(group, option)}"
            waiting.append(str(default))
    return found


def self_before_base(config: Path) -> str | None:
    """A warning if a file of a config lists `_self_` before a config that it builds on: that one then overrides its
    own values. None if all is well. Groups (`aqn: qerl`) count if the file has values of the same section."""
    import yaml

    values = yaml.safe_load(config.read_text(encoding="utf-8"))
    defaults = values.pop("defaults", None) if isinstance(values, dict) else None
    if not isinstance(defaults, list) or "_self_" not in defaults:
        return None
    later = []
    for entry in defaults[defaults.index("_self_") + 1:]:
        group = next(iter(entry), "") if isinstance(entry, dict) else ""
        if values and (isinstance(entry, str) or group in values):
            later.append(entry if isinstance(entry, str) else f"{group}: {entry[group]}")
    if not later:
        return None
    return (f"{config}: `_self_` stands before {', '.join(later)} in `defaults`, so what these say overrides this "
            "file's own values. Move `_self_` behind them")


def config_folders(name: str, config_dir: str | None = None) -> list[Path]:
    """Where the parts of a config are looked for: beside its file first; ConfigError with the nearest names if there
    is no such config (Hydra only shows where it looked)."""
    known = config_files(config_dir)
    if name.removesuffix(".yaml") not in known:
        raise ConfigError(unknown("config name", name, known, "`python cli/train_grpo.py` lists them"))
    own = known[name.removesuffix(".yaml")].parent
    return [own, *(folder for folder in _folders(config_dir) if folder != own)]


def _folders(config_dir: str | None) -> list[Path]:
    own = Path(config_dir or "configs").resolve()
    if config_dir and not own.is_dir():
        raise ConfigError(f"--config-dir {config_dir}: no such folder")
    return list(dict.fromkeys([own, CONFIGS] if own.is_dir() else [CONFIGS]))


@contextmanager
def _hydra(name: str, overrides: list[str], folders: list[Path]) -> Iterator[list[str]]:
    """Hydra on the first of these folders; yields the override that adds the others. A refusal is a ConfigError."""
    from hydra import initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    others = ",".join(f"'file://{folder}'" for folder in folders[1:])
    try:
        with initialize_config_dir(str(folders[0]), version_base=None):
            yield [f"hydra.searchpath=[{others}]"] if others else []
    except ConfigError:
        raise
    except (HydraException, OmegaConfBaseException, ValueError) as error:  # ValueError is Hydra's own
        raise ConfigError(f"{name} with {' '.join(overrides)}: {error}") from error
