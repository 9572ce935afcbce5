"""A config by its name: where configs lie, the files that one is made of, and what Hydra resolves
it to.
"""

import os
import re
import sys
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from mindspeed_qerl.common.errors import ConfigError, unknown
from mindspeed_qerl.common.files import expanded
from mindspeed_qerl.recipe.overrides import checked

PACKAGE = Path(__file__).resolve().parents[1]
CONFIGS = PACKAGE / "configs"  # of an installation
if not CONFIGS.is_dir():
    CONFIGS = PACKAGE.parent / "configs"  # of a checkout
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
REFUSED = object()  # what Hydra cannot read


@dataclass
class Parts:
    """What a config is made of.

    Attributes:
        files: by part, the config first, then what its defaults name, such as aqn/qerl.
        places: file and line of each value, by dotted key; of several files the first in `files`.
        warnings: a sentence for each file whose own values are overridden by what it builds on.
    """

    files: dict[str, Path] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


def config_files(config_dir: str | None = None) -> dict[str, Path]:
    """{name: file} of every config: of `config_dir`, or else `configs` in the current directory,
    and of the package.

    The files in the folders of such a folder are parts of configs: `aqn=off` is aqn/off.yaml.
    """
    return {
        file.stem: file
        for folder in reversed(_folders(config_dir))
        for file in sorted(folder.glob("*.yaml"))
        if file.is_file()
    }


def compose(
    name: str, overrides: Iterable[str] = (), config_dir: str | None = None
) -> dict[str, Any]:
    """The resolved config `name` with overrides, as `cli/train_grpo.py --config-name name` sees it,
    `~` of its paths expanded. What its files say against each other is printed as a warning, once a
    process.

    Raises:
        ConfigError: no such config, files that are no YAML, an override of an unknown key, one that
            Hydra refuses, or a path with a shell's variable.
    """
    from hydra import compose as composed
    from omegaconf import OmegaConf

    overrides, name = list(map(quoted, overrides)), name.removesuffix(".yaml")
    folders, parts = config_folders(name, config_dir), config_parts(name, overrides, config_dir)
    chosen = {part.rpartition("/")[0] for part in config_parts(name, (), config_dir).files}
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
        elif (
            value in options or "," in value
        ):  # of several values Hydra says that they are for --multirun
            groups.append(f"{'' if key in chosen else '+'}{key}={value}")
        else:
            raise ConfigError(unknown(key, value, options))
    for warning in parts.warnings:
        _warn(warning)
    with _hydra(name, overrides, folders, parts) as search_path:
        config = composed(name, [*search_path, *groups])
        if values:
            plain = OmegaConf.to_container(config, resolve=False)
            config = composed(
                name, [*search_path, *groups, *checked(values, plain, known_keys(plain), name)]
            )
        return _with_paths(
            OmegaConf.to_container(config, resolve=True, throw_on_missing=True), parts
        )


def quoted(override: str) -> str:
    """An override in the quotes that Hydra wants where its value is no word of Hydra's grammar,
    such as a path in another script or a name with another "=". Sweeps, lists, what is quoted and
    interpolations stay as they are; where a path is wanted, one that exists is meant as it is
    typed, commas and all.

    >>> quoted("run.resume=runs/tiny/2026-11-22_aqn=off_seed1"), quoted("aqn=off,qerl")
    ("run.resume='runs/tiny/2026-11-22_aqn=off_seed1'", 'aqn=off,qerl')
    >>> quoted("task.train_file=/数据/a (1).jsonl,/数据/b.jsonl")
    "task.train_file='/数据/a (1).jsonl','/数据/b.jsonl'"
    """
    key, _, value = override.partition("=")
    is_path = key.rpartition(".")[2] in PATHS
    if is_path and value and value != "null" and os.path.exists(os.path.expanduser(value)):
        return f"{key}={_in_quotes(value)}"
    if _parsed(value) is not REFUSED:
        return override
    is_call = re.match(r"\w+\(", value)
    words = re.sub("[^,]+" if is_path and not is_call else r"[^][(){},]+", _word_in_quotes, value)
    if _parsed(words) is not REFUSED:
        return f"{key}={words}"
    is_text = is_path or not set(value) & set("[]{},'\"") and not is_call
    return f"{key}={_in_quotes(value)}" if is_text else override  # else for Hydra's words about it


def _parsed(value: str) -> Any:
    """What Hydra's grammar makes of the value of an override; `REFUSED` if it cannot be read."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        return OverridesParser.create().parse_override(f"key={value}").value()
    except HydraException:
        return REFUSED


def _word_in_quotes(match: re.Match) -> str:
    return match[0] if _parsed(match[0]) is not REFUSED else _in_quotes(match[0].strip())


def _in_quotes(value: str) -> str:
    from hydra.core.override_parser.types import Quote, QuotedString

    return QuotedString(value, Quote.single).with_quotes()


def combinations(
    name: str, overrides: Iterable[str], config_dir: str | None = None
) -> list[list[str]]:
    """The overrides of each run of a sweep: one value of each that lists several, as in
    `aqn=off,qerl seed=1,2`.
    """
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.override_parser.overrides_parser import OverridesParser

    overrides = list(map(quoted, overrides))
    name = name.removesuffix(".yaml")
    with _hydra(
        name, overrides, config_folders(name, config_dir), config_parts(name, overrides, config_dir)
    ):
        parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
        return BasicSweeper.split_arguments(parser.parse_overrides(overrides), max_batch_size=None)[
            0
        ]


def known_keys(config: Mapping[str, Any]) -> dict[str, Collection[str]]:
    """{section: every key that it may have}; "" is the top level."""
    from mindspeed_qerl.recipe import reader

    known = reader.known_keys()
    models = {f"model.{model}": known["megatron_training"] for model in config.get("model") or ()}
    return {"": reader.TOP_LEVEL, **known, **models}


def config_parts(name: str, overrides: Iterable[str] = (), config_dir: str | None = None) -> Parts:
    """What a config is made of, its own files and those that overrides choose.

    Raises:
        ConfigError: file and line of what is no YAML, of an entry in `defaults` that Hydra does not
            know, that nobody has, or that leads back to where it stands.
    """
    pairs = (override.lstrip("+").partition("=") for override in overrides)
    chosen = {
        key: (option, "")
        for key, _, option in pairs
        if key and re.fullmatch(r"[^][(){},'\"]+", option)
    }
    parts, folders = Parts(), config_folders(name, config_dir)
    _add_part(parts, name.removesuffix(".yaml"), "", folders, chosen, ())
    seen = {part.rpartition("/")[0] for part in parts.files}
    for group, (option, _) in chosen.items():  # added to the defaults
        if group not in seen and any(
            (folder / group / f"{option}.yaml").is_file() for folder in folders
        ):
            _add_part(parts, f"{group}/{option}", group.replace("/", "."), folders, chosen, ())
    return parts


class Entry(NamedTuple):
    """An entry of `defaults`: a config by name, or an option of a group."""

    place: str  # file and line
    group: str  # "" without one; "/aqn" is looked for from the top
    option: str
    package: str | None  # the section that its values go to, where the entry says so
    marks: list[str]  # of "optional" and "override"


def _add_part(
    parts: Parts,
    part: str,
    package: str,
    folders: list[Path],
    chosen: Mapping[str, tuple[str, str]],
    above: tuple[str, ...] = (),
) -> set[str]:
    """Add a part that is there, and the parts that its defaults name; the dotted keys that they
    set.

    Args:
        package: the section that its values are in, where its header names none.
        chosen: {group: (option, place)} of the files above and of the command line, whose place is
            "".
        above: the parts that lead to this one.
    """
    file, above = parts.files.setdefault(part, _file_of(part, folders)), (*above, part)
    node, _ = read_yaml(file)
    package = package_of(file.read_text(encoding="utf-8"), package)
    own = {f"{package}.{key}".lstrip("."): f"{file}:{line}" for key, line in _leaves(node)}
    parts.places = {**own, **parts.places}
    own.pop(f"{package}.defaults".lstrip("."), None)
    entries, group = list(_entries(node, file)), part.rpartition("/")[0]
    chosen = {
        _joined(group, each.group): (each.option, each.place)
        for each in entries
        if "override" in each.marks
    } | chosen
    keys, behind = set(own), {}
    for number, entry in enumerate(entries):
        folder = _joined(group, entry.group)
        option, place = chosen.get(folder if entry.group else None, (entry.option, entry.place))
        if option in ("_self_", "null") or folder.startswith("hydra/") or set(option) & set("${?*"):
            continue  # for Hydra
        name = f"{folder}/{option}".lstrip("/").removesuffix(".yaml")
        if name in above:
            raise ConfigError(
                f"{entry.place}: {part} is made of itself: {' -> '.join([*above, name])}"
            )
        if _file_of(name, folders) is None:
            if "optional" in entry.marks or any(
                key.startswith("hydra.") for key in parts.places
            ):  # other folders
                continue
            known = [each.stem for path in folders for each in (path / folder).glob("*.yaml")]
            words = (
                unknown(entry.group or "config", option, known)
                if known
                else (f"there is no folder {folder} with options, such as {option}")
            )
            raise ConfigError(f"{place}: {words}".removeprefix(": "))
        if "override" in entry.marks:
            continue
        section = (
            entry.group.strip("/").replace("/", ".") if entry.package is None else entry.package
        )
        below = _add_part(parts, name, f"{package}.{section}".strip("."), folders, chosen, above)
        keys |= below
        if any(each.option == "_self_" for each in entries[:number]):
            behind[f"{entry.group}: {option}" if entry.group else option] = [
                key
                for key in own
                if any(_is_within(key, other) or _is_within(other, key) for other in below)
            ]
    if lost := sorted({key for overridden in behind.values() for key in overridden}):
        names = ", ".join(name for name, overridden in behind.items() if overridden)
        parts.warnings.append(
            f"{file}: `_self_` stands before {names} in `defaults`, so what these say overrides "
            f"this file's own values ({', '.join(lost[:3])}{', ...' if len(lost) > 3 else ''}). "
            "Move `_self_` behind them"
        )
    return keys


def _entries(node: Any, file: Path) -> Iterator[Entry]:
    """The entries of a file's `defaults`, an option each; ConfigError with its line for what is
    none.
    """
    defaults = (
        next((value for key, value in node.value if key.value == "defaults"), None)
        if node
        else None
    )
    if defaults is None:
        return
    if defaults.id != "sequence":
        raise ConfigError(
            f"{_place(file, defaults)}: `defaults` must be a list, such as [base, aqn: qerl, "
            "_self_]"
        )
    for entry in defaults.value:
        place = _place(file, entry)
        pair = entry.value[0] if entry.id == "mapping" and len(entry.value) == 1 else (None, entry)
        options = pair[1].value if pair[0] and pair[1].id == "sequence" else [pair[1]]
        if any(option.id != "scalar" for option in options):
            raise ConfigError(f"{place}: an entry of `defaults` is a name, or one `group: option`")
        for option in options:
            is_null = option.tag.endswith(":null")
            if not option.tag.endswith(":str") and not is_null:
                raise ConfigError(
                    f"{place}: YAML reads {option.value} as {option.tag.rpartition(':')[2]}, and "
                    f"this must be a name: write '{option.value}'"
                )
            *marks, name = pair[0].value.split() if pair[0] else [option.value]
            name, at, package = name.partition("@")
            package = package.removeprefix("_global_").lstrip(".") if at else None
            chosen = "null" if is_null else option.value if pair[0] else name
            yield Entry(place, name if pair[0] else "", chosen, package, marks)


def _joined(folder: str, group: str) -> str:
    """The path of a group that a part in `folder` names."""
    return group.strip("/") if group.startswith("/") else f"{folder}/{group}".strip("/")


def _is_within(key: str, section: str) -> bool:
    return f"{key}.".startswith(f"{section}.")


def _file_of(part: str, folders: list[Path]) -> Path | None:
    return next(
        (folder / f"{part}.yaml" for folder in folders if (folder / f"{part}.yaml").is_file()), None
    )


def package_of(text: str, default: str) -> str:
    """The section that the values of a file are in: its header's `# @package`, or else `default`."""
    header = re.match(r"\s*#\s*@package (\S+)", text)
    return re.sub(r"^_global_\.?", "", header[1].replace("_group_", default)) if header else default


def read_yaml(file: Path) -> tuple[Any, Any]:
    """(node, values) of a YAML file, as Hydra reads it.

    Raises:
        ConfigError: file and line of what is no YAML, or no mapping; of an anchor that holds
            itself; and of numbers that YAML 1.1, which Hydra reads, takes for others than are
            written: 040 is 32, and 1:30 is 90.
    """
    import yaml
    from omegaconf._utils import get_yaml_loader
    from yaml.reader import ReaderError

    try:
        data = file.read_bytes()
        loader = get_yaml_loader()(data.decode("utf-8"))
        node = loader.get_single_node()
        if node is None or node.tag.endswith(":null"):
            return None, None
        if node.id != "mapping":
            raise ConfigError(f"{_place(file, node)}: this must be a mapping, such as `seed: 1`")
        _check_node(node, file, ())
        return node, loader.construct_document(node)
    except ConfigError:
        raise
    except (UnicodeDecodeError, ReaderError) as error:
        is_text = isinstance(error, ReaderError)
        before = data.decode()[: error.position] if is_text else data[: error.start].decode()
        line = before.count("\n") + 1
        raise ConfigError(f"{file}:{line}: {error.reason}: save the file as UTF-8 text") from error
    except yaml.MarkedYAMLError as error:
        tab = ". Indent with spaces, not with tabs" if "\\t" in error.problem else ""
        raise ConfigError(f"{file}:{error.problem_mark.line + 1}: {error.problem}{tab}") from error
    except (
        OSError,
        RecursionError,
        ValueError,
    ) as error:  # the last two are PyYAML's, of [[[[... and !!int x
        raise ConfigError(f"{file}: {' '.join(str(error).split())}") from error


def _check_node(node: Any, file: Path, above: tuple[Any, ...]) -> None:
    """ConfigError for an anchor that holds itself, and for a number that is not read as it is
    written.
    """
    if any(node is each for each in above):
        raise ConfigError(f"{_place(file, node)}: this anchor holds itself")
    if node is None or node.id == "scalar":
        if node is None or not node.tag.endswith((":int", ":float")):
            return
        octal = (
            re.fullmatch(r"[-+]?0[0-7_]+", node.value) and len(node.value.lstrip("-+0_")) > 1
        )  # 07 is 7 in both
        if octal or ":" in node.value:
            system, way_out = ("octal", "zeros before it") if octal else ("base 60", "a colon")
            raise ConfigError(
                f"{_place(file, node)}: YAML reads {node.value} as {system}. Write the number "
                f"without {way_out}, or a text in quotes: '{node.value}'"
            )
        return
    for each in node.value:
        for child in each if isinstance(each, tuple) else (each,):
            _check_node(child, file, (*above, node))


def _place(file: Path, node: Any) -> str:
    return f"{file}:{node.start_mark.line + 1}"


def _leaves(node: Any, above: str = "") -> Iterator[tuple[str, int]]:
    """(dotted key, line) of each value of a YAML mapping."""
    for key, value in node.value if node else ():
        path = f"{above}{key.value}"
        if value.id == "mapping" and value.value:
            yield from _leaves(value, f"{path}.")
        else:
            yield path, key.start_mark.line + 1


@cache  # once a process: a sweep composes one config for each of its runs
def _warn(warning: str) -> None:
    print(f"Warning: {warning}", file=sys.stderr)


def config_folders(name: str, config_dir: str | None = None) -> list[Path]:
    """Where the parts of a config are looked for: beside its file first; ConfigError with the
    nearest names if there is no such config (Hydra only shows where it looked).
    """
    known = config_files(config_dir)
    if name.removesuffix(".yaml") not in known:
        raise ConfigError(
            unknown("config name", name, known, "`python cli/train_grpo.py` lists them")
        )
    own = known[name.removesuffix(".yaml")].parent
    return [own, *(folder for folder in _folders(config_dir) if folder != own)]


def _folders(config_dir: str | None) -> list[Path]:
    own = Path(config_dir or "configs").resolve()
    if config_dir and not own.is_dir():
        raise ConfigError(f"--config-dir {config_dir}: no such folder")
    return list(dict.fromkeys([own, CONFIGS] if own.is_dir() else [CONFIGS]))


def _with_paths(config: dict[str, Any], parts: Parts, above: str = "") -> dict[str, Any]:
    """`config` with `~` and `~user` of its paths expanded; ConfigError for a shell's variable in
    one.
    """
    for key, value in config.items():
        if isinstance(value, dict):
            _with_paths(value, parts, f"{above}{key}.")
        elif key in PATHS and isinstance(value, str):
            try:
                config[key] = expanded(value)
            except ValueError as error:
                raise ConfigError(f"{above}{key} = {value!r} {error}") from error
    return config


@contextmanager
def _hydra(
    name: str, overrides: list[str], folders: list[Path], parts: Parts
) -> Iterator[list[str]]:
    """Hydra on the first of these folders; yields the override that adds the others. What it
    refuses, or is not ready for, is a ConfigError.
    """
    from hydra import initialize_config_dir

    others = ",".join(f"'file://{folder}'" for folder in folders[1:])
    try:
        with warnings.catch_warnings(), initialize_config_dir(str(folders[0]), version_base=None):
            warnings.filterwarnings(
                "ignore", "In .*: Defaults list is missing `_self_`"
            )  # own values come last then
            yield [f"hydra.searchpath=[{others}]"] if others else []
    except ConfigError:
        raise
    except (
        Exception
    ) as error:  # Hydra has assertions and errors of any kind for what it does not expect
        raise ConfigError(_reason(error, name, overrides, parts)) from error


def _reason(error: Exception, name: str, overrides: list[str], parts: Parts) -> str:
    """An error of Hydra or OmegaConf in a line that begins with the place that it is about."""
    from hydra.errors import OverrideParseException

    while not str(error) and error.__cause__:
        error = error.__cause__
    text = (
        str(error)
        .partition("\n    full_key:")[0]
        .partition("\nSee https:")[0]
        .partition("Config search path:")[0]
    )
    words = " ".join(text.split()) or type(error).__name__
    key = getattr(error, "full_key", None) or ""
    is_given = any(override.lstrip("+").partition("=")[0] == key for override in overrides)
    if key in parts.places and not is_given:
        return f"{parts.places[key]}: {key}: {words}{_way_out(words, key)}"
    if isinstance(error, OverrideParseException):
        words += ". A text with characters of its own goes in quotes within quotes: \"key='value'\""
    elif key:
        words = f"{key}: {words}{_way_out(words, key)}"
    where = (
        f"{name} with {' '.join(overrides)}"
        if overrides
        else parts.places.get("defaults", parts.files[name])
    )
    return f"{where}: {words}"


def _way_out(words: str, key: str) -> str:
    """What to do about a value that OmegaConf cannot resolve."""
    variable = re.match(r"Interpolation key '(\w+)' not found", words)
    if variable and variable[1] in os.environ:
        return f". A variable of the environment is ${{oc.env:{variable[1]}}}"
    return f". Give it: {key}=VALUE" if words.startswith("Missing mandatory value") else ""
