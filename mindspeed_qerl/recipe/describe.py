"""What `cli/train_grpo.py` prints about configs: their list, the text of one, and every key that it
may have.
"""

from collections.abc import Iterable

from mindspeed_qerl.common.errors import ConfigError, unknown
from mindspeed_qerl.recipe.compose import compose, config_files, config_parts
from mindspeed_qerl.recipe.overrides import at


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
    """The text of a config and of every file that it is made of."""
    files = config_parts(name, overrides, config_dir)
    return "\n".join(f"---- {file}\n{file.read_text(encoding='utf-8')}" for file in files)


def list_of_keys(name: str, section: str, overrides: Iterable[str], config_dir: str | None) -> str:
    """The keys of a section: those that the config sets with their values, and the names of the
    others; without a section the names of the sections. ConfigError if there is no such section.
    """
    import yaml

    from mindspeed_qerl.recipe.reader import known_keys

    known = known_keys()
    if not section:
        return f"--keys SECTION, of: {', '.join(known)}"
    if section not in known:
        raise ConfigError(unknown("section", section, known))
    values = at(section, compose(name, overrides, config_dir)) or {}
    others = ", ".join(sorted(known[section] - values.keys()))
    return f"{yaml.safe_dump({section: values}, sort_keys=False)}# not set: {others}"
