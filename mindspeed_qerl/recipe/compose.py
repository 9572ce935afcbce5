"""A config by its name: where configs lie, the files that one is made of, and what Hydra resolves
it to.
"""

import os
import re
import sys
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from yaml.constructor import ConstructorError
from yaml.reader import ReaderError

from mindspeed_qerl.common.errors import ConfigError, unknown
from mindspeed_qerl.common.files import expanded
from mindspeed_qerl.recipe.overrides import PATHS, at, checked, quoted, split_overrides

PACKAGE = Path(__file__).resolve().parents[1]
CONFIGS = PACKAGE / "configs"  # of an installation
if not CONFIGS.is_dir():
    CONFIGS = PACKAGE.parent / "configs"  # of a checkout


class Part(NamedTuple):
    """A file that a config is made of; `package` is the section that its values go to."""

    name: str  # of the config itself, or group/option, such as aqn/qerl
    file: Path
    package: str


def config_files(config_dir: str | None = None) -> dict[str, Path]:
    """{name: file} of every config: of `config_dir`, or else `configs` in the current directory,
    and of the package.

    The files in the folders of such a folder are parts of configs: `aqn=off` is aqn/off.yaml.
    """
    files = {}
    for folder in reversed(_folders(config_dir)):
        for file in sorted(folder.glob("*.yaml")):
            if file.is_file():
                files[file.stem] = file
    return files


def compose(
    name: str, overrides: Iterable[str] = (), config_dir: str | None = None
) -> dict[str, Any]:
    """The resolved config `name` with overrides, as `cli/train_grpo.py --config-name name` sees it,
    `~` of its paths expanded. A warning is printed, once a process, where the config's own values
    are overridden by what it is made of.

    Raises:
        ConfigError: no such config, files that are no YAML, an override of an unknown key, one that
            Hydra refuses, or a path with a shell's variable.
    """
    from hydra import compose as composed
    from omegaconf import OmegaConf

    name = name.removesuffix(".yaml")
    with _hydra(name, list(overrides), config_dir) as session:
        base = session.search_path + session.groups
        config = composed(name, base)
        plain = OmegaConf.to_container(config, resolve=False)
        _warn_of_overridden(session.parts, plain)
        if session.values:
            values = checked(session.values, plain, known_keys(plain), name)
            config = composed(name, base + values)
        resolved = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    return _with_paths(resolved)


def combinations(
    name: str, overrides: Iterable[str], config_dir: str | None = None
) -> list[list[str]]:
    """The overrides of each run of a sweep: one value of each that lists several, as in
    `aqn=off,qerl seed=1,2`.
    """
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.override_parser.overrides_parser import OverridesParser

    with _hydra(name.removesuffix(".yaml"), [], config_dir) as session:
        session.overrides = [quoted(override) for override in overrides]
        parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
        parsed = parser.parse_overrides(session.overrides)
        return BasicSweeper.split_arguments(parsed, max_batch_size=None)[0]


def config_parts(
    name: str, overrides: Iterable[str] = (), config_dir: str | None = None
) -> list[Part]:
    """The files that a config is made of, and those that overrides choose: the config first."""
    with _hydra(name.removesuffix(".yaml"), list(overrides), config_dir) as session:
        return session.parts


def known_keys(config: Mapping[str, Any]) -> dict[str, Collection[str]]:
    """{section: every key that it may have}; "" is the top level."""
    from mindspeed_qerl.recipe import reader

    known = reader.known_keys()
    models = {f"model.{model}": known["megatron_training"] for model in config.get("model") or ()}
    return {"": reader.TOP_LEVEL, **known, **models}


# ---- files ----


def config_folders(name: str, config_dir: str | None = None) -> list[Path]:
    """Where the parts of a config are looked for: beside its file first; ConfigError with the
    nearest names if there is no such config (Hydra only shows where it looked).
    """
    known = config_files(config_dir)
    if name not in known:
        listing = "`python cli/train_grpo.py` lists them"
        raise ConfigError(unknown("config name", name, known, listing))
    own = known[name].parent
    return [own, *(folder for folder in _folders(config_dir) if folder != own)]


def _folders(config_dir: str | None) -> list[Path]:
    own = Path(config_dir or "configs").resolve()
    if config_dir and not own.is_dir():
        raise ConfigError(f"--config-dir {config_dir}: no such folder")
    return [own, CONFIGS] if own.is_dir() and own != CONFIGS else [CONFIGS]


def read_yaml(file: Path) -> tuple[Any, Any]:
    """(node, values) of a YAML file, as Hydra reads it; (None, None) of an empty one.

    Raises:
        ConfigError: file and line of what is no YAML, or no mapping; and of numbers that YAML 1.1,
            which Hydra reads, takes for others than are written: 040 is 32, and 1:30 is 90.
    """
    try:
        loader = _loader()(file.read_bytes().decode("utf-8"))
        node = loader.get_single_node()
        if node is None or node.tag.endswith(":null"):
            return None, None
        if node.id != "mapping":
            problem = "this must be a mapping, such as `seed: 1`"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
        _check_options(node)
        return node, loader.construct_document(node)
    except (yaml.YAMLError, OSError, RecursionError, ValueError) as error:
        raise ConfigError(_yaml_reason(error, str(file))) from error


def _check_options(node: Any) -> None:
    """MarkedYAMLError for an option in `defaults` that YAML reads as a truth value, such as off."""
    lists = [value for key, value in node.value if key.value == "defaults"]
    for entry in lists[0].value if lists and lists[0].id == "sequence" else ():
        for _, option in entry.value if entry.id == "mapping" else ():
            if option.tag.endswith(":bool"):
                problem = f"YAML reads {option.value} as true or false: write '{option.value}'"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=option.start_mark)


def _loader() -> type:
    """Hydra's loader of YAML, which refuses numbers that are not what is written."""
    from omegaconf._utils import get_yaml_loader

    class Loader(get_yaml_loader()):  # type: ignore[misc]  # a base made at run time
        def number(self, node: Any) -> int | float:
            digits = node.value.lstrip("-+0_")
            # 07 is 7 in both
            is_octal = re.fullmatch(r"[-+]?0[0-7_]+", node.value) and len(digits) > 1
            if is_octal or ":" in node.value:
                system, way_out = "base 60", "a colon"
                if is_octal:
                    system, way_out = "octal", "zeros before it"
                problem = (
                    f"YAML reads {node.value} as {system}. Write the number without {way_out}, or "
                    f"a text in quotes: '{node.value}'"
                )
                raise ConstructorError(problem=problem, problem_mark=node.start_mark)
            if node.tag.endswith(":int"):
                return self.construct_yaml_int(node)
            return self.construct_yaml_float(node)

    for kind in ("int", "float"):
        Loader.add_constructor(f"tag:yaml.org,2002:{kind}", Loader.number)
    return Loader


def _yaml_reason(error: BaseException, file: str) -> str:
    """An error of PyYAML in a line that begins with file and line, as far as they are known."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark:
        mark = error.problem_mark
        tab = ". Indent with spaces, not with tabs" if "\\t" in str(error.problem) else ""
        return f"{_named(mark.name, file)}:{mark.line + 1}: {error.problem}{tab}"
    if isinstance(error, (UnicodeDecodeError, ReaderError)):
        name = getattr(error, "name", file)
        return f"{_named(name, file)}: {error.reason}: save the file as UTF-8 text"
    return f"{file}: {' '.join(str(error).split())}"


def _named(name: str, file: str) -> str:
    """The file that PyYAML names; `file` where it read a text."""
    return name if name.startswith("/") else file


def leaves(node: Any, above: str = "") -> Iterator[tuple[str, int]]:
    """(dotted key, line) of each value of a YAML mapping."""
    for key, value in node.value if node else ():
        path = f"{above}.{key.value}".lstrip(".")
        if value.id == "mapping" and value.value:
            yield from leaves(value, path)
        else:
            yield path, key.start_mark.line + 1


def _warn_of_overridden(parts: list[Part], config: Mapping[str, Any]) -> None:
    """Print a warning if values of the config's own file are not those of the composed `config`."""
    from omegaconf import OmegaConf

    file = parts[0].file
    node, values = read_yaml(file)
    own = OmegaConf.to_container(OmegaConf.create(values or {}))
    keys = [key for key, _ in leaves(node) if key.partition(".")[0] != "defaults"]
    lost = [key for key in keys if at(key, own) not in ({}, at(key, config))]
    if lost:
        more = ", ..." if len(lost) > 3 else ""
        _warn(
            f"{file}: its own values ({', '.join(lost[:3])}{more}) are overridden by what its "
            "`defaults` name: put `_self_` behind them"
        )


@cache  # once a process: a sweep composes one config for each of its runs
def _warn(warning: str) -> None:
    print(f"Warning: {warning}", file=sys.stderr)


def _with_paths(config: dict[str, Any], above: str = "") -> dict[str, Any]:
    """`config` with `~` and `~user` of its paths expanded; ConfigError for a shell's variable in
    one.
    """
    for key, value in config.items():
        if isinstance(value, dict):
            _with_paths(value, f"{above}{key}.")
        elif key in PATHS and isinstance(value, str):
            try:
                config[key] = expanded(value)
            except ValueError as error:
                raise ConfigError(f"{above}{key} = {value!r} {error}") from error
    return config


# ---- Hydra ----


class Session:
    """Hydra, ready for one config: what it is made of and the overrides in Hydra's form."""

    def __init__(self, name: str, overrides: list[str], folders: list[Path]) -> None:
        self.name, self.folders = name, folders
        self.overrides = [quoted(override) for override in overrides]
        others = ",".join(f"'file://{folder}'" for folder in folders[1:])
        self.search_path = [f"hydra.searchpath=[{others}]"]
        # the config first, for words about what Hydra cannot read
        self.parts = [Part(name, folders[0] / f"{name}.yaml", "")]
        self.groups: list[str] = []
        self.values: list[str] = []

    def load(self) -> None:
        """Find the parts, and check each; ConfigError for what is no YAML."""
        read_yaml(self.parts[0].file)
        made_of = self._defaults()
        chosen = made_of.overrides.known_choices
        self.groups, self.values = split_overrides(self.overrides, self.folders, chosen)
        if self.groups:
            made_of = self._defaults()
        for entry in reversed(made_of.defaults):
            part, is_main = entry.config_path, entry.config_path == self.name
            if part is None or is_main or part.startswith("hydra/"):
                continue
            files = [folder / f"{part}.yaml" for folder in self.folders]
            file = next((file for file in files if file.is_file()), None)
            if file:
                read_yaml(file)
                self.parts.append(Part(part, file, entry.package))

    def _defaults(self) -> Any:
        from hydra.core.global_hydra import GlobalHydra
        from hydra.types import RunMode

        loader = GlobalHydra.instance().config_loader()
        return loader.compute_defaults_list(self.name, self.search_path + self.groups, RunMode.RUN)

    def reason(self, error: BaseException) -> str:
        """An error of Hydra or OmegaConf in a line that begins with the place that it is about."""
        from hydra.errors import OverrideParseException

        while not str(error) and error.__cause__:
            error = error.__cause__
        file = str(self.parts[0].file)
        if isinstance(error, (yaml.YAMLError, UnicodeDecodeError)):
            return _yaml_reason(error, file)
        if isinstance(error, RecursionError):
            return f"{file}: an anchor, or an entry of `defaults`, leads back to itself"
        text = re.split(r"\n    full_key:|\nSee https:|Config search path:", str(error))[0]
        words = " ".join(text.split()) or type(error).__name__
        key = getattr(error, "full_key", None) or ""
        where = f"{self.name} with {' '.join(self.overrides)}" if self.overrides else file
        if isinstance(error, OverrideParseException):
            words += (
                ". A text with characters of its own goes in quotes within quotes: \"key='value'\""
            )
        elif key:
            words = f"{key}: {words}{_way_out(words, key)}"
            where = self._place(key) or where
        return f"{where}: {words}"

    def _place(self, key: str) -> str:
        """File and line of a value, unless it is of the command line; of several files the one that
        counts.
        """
        if any(override.lstrip("+").partition("=")[0] == key for override in self.values):
            return ""
        for part in self.parts:
            for path, line in leaves(read_yaml(part.file)[0], part.package):
                if path == key:
                    return f"{part.file}:{line}"
        return ""


@contextmanager
def _hydra(name: str, overrides: list[str], config_dir: str | None) -> Iterator[Session]:
    """A session for config `name`. What Hydra refuses, or is not ready for, is a ConfigError."""
    from hydra import initialize_config_dir

    session = Session(name, overrides, config_folders(name, config_dir))
    folder = str(session.folders[0])
    try:
        with warnings.catch_warnings(), initialize_config_dir(folder, version_base=None):
            # own values come last then
            warnings.filterwarnings("ignore", "In .*: Defaults list is missing `_self_`")
            session.load()
            yield session
    except ConfigError:
        raise
    except Exception as error:  # Hydra has assertions and errors of any kind
        raise ConfigError(session.reason(error)) from error


def _way_out(words: str, key: str) -> str:
    """What to do about a value that OmegaConf cannot resolve."""
    variable = re.match(r"Interpolation key '(\w+)' not found", words)
    if variable and variable[1] in os.environ:
        return f". A variable of the environment is ${{oc.env:{variable[1]}}}"
    return f". Give it: {key}=VALUE" if words.startswith("Missing mandatory value") else ""
