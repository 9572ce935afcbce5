"""What `cli/train_grpo.py` prints about configs: their list, the text of one, and every key that it
may have.
"""

import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from mindspeed_qerl.common.errors import ConfigError, unknown
from mindspeed_qerl.recipe.compose import compose, config_files, config_parts, known_keys
from mindspeed_qerl.recipe.overrides import at


def list_of_configs(config_dir: str | None = None) -> str:
    """Each config in a line with the comment that it begins with."""
    files = config_files(config_dir)
    width = max(map(len, files), default=0)
    first = {
        name: file.read_text(encoding="utf-8", errors="replace").partition("\n")[0]
        for name, file in sorted(files.items())
    }
    return "\n".join(
        ["configs:", *(f"  {name:{width}}  {line.lstrip('# ')}" for name, line in first.items())]
    )


def text_of_config(name: str, overrides: Iterable[str] = (), config_dir: str | None = None) -> str:
    """The text of a config and of every file that it is made of."""
    parts = config_parts(name, overrides, config_dir).files
    return "\n".join(
        f"---- {part}.yaml ({file})\n{file.read_text(encoding='utf-8')}"
        for part, file in parts.items()
    )


def list_of_keys(
    name: str, section: str = "", overrides: Iterable[str] = (), config_dir: str | None = None
) -> str:
    """Every key of a section: those that the config sets with value and comment, then the names of
    the others.

    Without a section the keys that are set, of all sections, and the number of the others.

    Raises:
        ConfigError: no such config or section, or overrides that it cannot take.
    """
    overrides = list(overrides)
    config = compose(name, overrides, config_dir)
    known = known_keys(config)
    sections = [
        key for key in known if not section or key == section or key.startswith(f"{section}.")
    ]
    if not sections:
        raise ConfigError(
            unknown("section", section, filter(None, known), "leave it out to see all keys")
        )
    remarks: dict[str, str] = {}
    for part, file in reversed(config_parts(name, overrides, config_dir).files.items()):
        remarks |= comments(file.read_text(encoding="utf-8"), part.rpartition("/")[0])
    lines = []
    for key in sections:
        values = at(key, config)
        values = values if isinstance(values, Mapping) else {}
        for last, value in values.items():
            path = f"{key}.{last}".lstrip(".")
            if path not in known and (
                key or not isinstance(value, Mapping)
            ):  # sections have lines of their own
                lines.append(_line(path, value, remarks.get(path)))
        others = sorted(set(known[key]) - set(values))
        if others and section:
            lines += textwrap.wrap(
                f"{key}, not set here: {', '.join(others)}", 119, subsequent_indent="    "
            )
        elif others and key:
            lines.append(f"{key} has {len(others)} more, not set here: --keys {key}")
    return "\n".join(lines)


def comments(text: str, group: str = "") -> dict[str, str]:
    """{dotted key: the comment on its line}; keys of a file of a group are below its `# @package`,
    or its group.

    >>> comments("rl_config:\\n  epochs: 1  # passes\\n  beta: 2")
    {'rl_config.epochs': 'passes'}
    """
    import yaml

    package = re.search(r"^# @package (\S+)", text, re.MULTILINE)
    above = f"{package[1] if package else group}."
    lines = text.splitlines()
    found = {}
    for path, line, column in _places(yaml.compose(text), above.lstrip(".")):
        if remark := re.match(r"\s*#\s*(.+)", lines[line][column:]):
            found[path] = remark[1]
    return found


def _places(node: Any, above: str) -> Iterator[tuple[str, int, int]]:
    """(dotted key, line, column) of each key of a YAML mapping: behind its value, or behind the
    colon of a section.
    """
    for key, value in node.value if node else ():
        path = f"{above}{key.value}"
        if value.id == "mapping" and not value.flow_style:
            yield path, key.end_mark.line, key.end_mark.column + 1
            yield from _places(value, f"{path}.")
        else:
            yield path, value.end_mark.line, value.end_mark.column


def _line(path: str, value: Any, remark: str | None) -> str:
    """`path=value  # remark`, the value as one would type it."""
    import yaml

    shown = (
        yaml.safe_dump(value, default_flow_style=True, width=float("inf"))
        .removesuffix("\n")
        .removesuffix("\n...")
    )
    return f"{f'{path}={shown}':60}  # {remark}" if remark else f"{path}={shown}"
