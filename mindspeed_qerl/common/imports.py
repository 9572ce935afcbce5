"""Functions that a config names: our own, or a user's by import path; and the files of these."""

import importlib
import importlib.util
import inspect
import os
import sys
import sysconfig
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from .errors import ConfigError, unknown

CODE = "code/"  # of the labels of `own_code`
# Folders whose code a run's versions describe.
INSTALLED = {Path(__file__).parents[1], *map(Path, sysconfig.get_paths().values())}


def load(
    name: str, ours: Mapping[str, Callable[..., Any]], what: str, key: str
) -> Callable[..., Any]:
    """The function called `name`: one of `ours`, or "module:function", which may be in the current
    folder; of a class what its one instance does when it is called. ConfigError says what is wrong
    with the name, the module or the function, and what is nearest to it.

    Args:
        what: a word for such functions. key: of the config that names it.
    """
    if name in ours:
        return ours[name]
    path, colon, function = name.partition(":")
    if not colon:
        raise ConfigError(
            f"{key}: {unknown(what, name, ours)}. Your own is written module:function"
        )
    folder = _look_here()
    try:
        found = getattr(importlib.import_module(path), function, None)
        if inspect.isclass(found):
            found = _instance(found).__call__  # type: ignore[arg-type]  # classes are hashable
    except (Exception, SystemExit) as error:  # whatever a user's module does
        raise ConfigError(
            f"{what} {name!r} cannot be loaded: {type(error).__name__}: {error}. It is written "
            f"as in an import, my_package.my_module:my_{what}, and looked for in this folder "
            f"({folder}) and on PYTHONPATH"
        ) from error
    if not callable(found):
        functions = dict(inspect.getmembers(sys.modules[path], callable))
        raise ConfigError(f"{what} {name!r}: {unknown('function', function, functions)}")
    return found


@cache
def _instance(cls: type) -> Any:
    return cls()


def _look_here() -> str:
    """The current folder, where modules are found from now on."""
    folder = os.getcwd()
    if folder not in sys.path:  # python cli/train_grpo.py has cli/ there instead
        sys.path.append(folder)
    return folder


def own_code(names: Iterable[str]) -> dict[str, Path]:
    """The files, by "code/FILE", that a user wrote of the modules in `names`, "module:function":
    the module, or all modules of its package. What is installed is left out, and nothing is run.
    """
    _look_here()
    importlib.invalidate_caches()
    files: dict[str, Path] = {}
    for name in names:
        spec = None
        if ":" in name:
            with suppress(ValueError):  # no name of a module
                spec = importlib.util.find_spec(name.partition(":")[0].partition(".")[0])
        if spec is None:
            continue
        modules = [Path(str(spec.origin))] if spec.has_location else []
        above = modules[0].parent if modules else Path()
        for package in map(Path, spec.submodule_search_locations or ()):
            above = package.parent
            modules = [*package.rglob("*.py")]
        for file in modules:
            is_installed = "site-packages" in file.parts or INSTALLED & set(file.resolve().parents)
            if not is_installed:
                files[f"{CODE}{file.relative_to(above)}"] = file
    return dict(sorted(files.items()))
