"""What `cli/train_grpo.py` prints about configs: their list, the text of one, and every key that it
may have.
"""

import textwrap
from collections.abc import Iterable, Mapping
from typing import Any

from mindspeed_qerl.common.errors import ConfigError, unknown
from mindspeed_qerl.recipe.compose import compose, config_files, config_parts, known_keys
from mindspeed_qerl.recipe.keys import Values


def list_of_configs(config_dir: str | None = None) -> str:
    """Each config in a line with the comment that it begins with."""
    files = config_files(config_dir)
    width = max(map(len, files), default=0)
    lines = ["configs:"]
    for name, file in sorted(files.items()):
        first = file.read_text(encoding="utf-8", errors="replace").partition("\n")[0]
        lines.append(f"  {name:{width}}  {first.lstrip('# ')}")
    return "\n".join(lines)


def text_of_config(name: str, overrides: Iterable[str] = (), config_dir: str | None = None) -> str:
    """The text of a config and of every file that it is made of."""
    texts = []
    for part in config_parts(name, overrides, config_dir):
        texts.append(
            f"---- {part.name}.yaml ({part.file})\n{part.file.read_text(encoding='utf-8')}"
        )
    return "\n".join(texts)


def list_of_keys(
    name: str, section: str = "", overrides: Iterable[str] = (), config_dir: str | None = None
) -> str:
    """Every key of a section: those that the config sets with their values, then the names of the
    others. Without a section the keys that are set, and the number of the others.

    Raises:
        ConfigError: no such config or section, or overrides that it cannot take.
    """
    config = compose(name, overrides, config_dir)
    known = known_keys(config)
    sections = [key for key in known if not section or f"{key}.".startswith(f"{section}.")]
    if not sections:
        listing = "leave it out to see all keys"
        raise ConfigError(unknown("section", section, filter(None, known), listing))
    lines = []
    for key in sections:
        values = Values(config).section(key) if key else config
        for last, value in values.items():
            path = f"{key}.{last}".lstrip(".")
            is_section = path in known or not key and isinstance(value, Mapping)
            if not is_section:
                lines.append(f"{path}={_typed(value)}")
        others = sorted(set(known[key]) - set(values))
        if others and section:
            text = f"{key}, not set here: {', '.join(others)}"
            lines += textwrap.wrap(text, 119, subsequent_indent="    ")
        elif others and key:
            lines.append(f"{key} has {len(others)} more, not set here: --keys {key}")
    return "\n".join(lines)


def _typed(value: Any) -> str:
    """A value as one would type it."""
    import yaml

    text = yaml.safe_dump(value, default_flow_style=True, width=float("inf"))
    return text.removesuffix("\n").removesuffix("\n...")
