"""Functions that a config names: our own, or a user's by import path; and the files of these."""

import ast
import importlib
import importlib.util
import inspect
import os
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from importlib.machinery import PathFinder
from itertools import accumulate
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
    """The files, by "code/MODULE", of the modules in `names`, "module:function", and of all that
    they import, wherever in their text, that a user wrote: that is not installed. Nothing is run.
    """
    _look_here()
    importlib.invalidate_caches()
    files: dict[str, Path] = {}
    waiting = [name.partition(":")[0] for name in names if ":" in name]
    for name in waiting:  # which grows
        for module in accumulate(name.split("."), "{}.{}".format):
            file = _file_of(module)
            if file is not None and CODE + module not in files:
                files[CODE + module] = file
                waiting += _imported(module, file)
    return dict(sorted(files.items()))


def _file_of(module: str) -> Path | None:
    """The file of a module that a user wrote; None for others, and where there is none."""
    head, *inner = module.split(".")
    spec = None
    with suppress(ImportError, ValueError):
        spec = importlib.util.find_spec(head)
    for name in inner:
        folders = spec.submodule_search_locations if spec else None
        spec = PathFinder.find_spec(name, folders or ())
    if spec is None or not spec.has_location:
        return None
    file = Path(str(spec.origin)).resolve()
    is_installed = "site-packages" in file.parts or INSTALLED & set(file.parents)
    return None if is_installed else file


def _imported(module: str, file: Path) -> Iterator[str]:
    """The modules, or names in modules, that the text of a module imports."""
    package = module if file.stem == "__init__" else module.rpartition(".")[0]
    with suppress(SyntaxError, ValueError):  # a compiled one
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                relative = f"{'.' * node.level}{node.module or ''}"
                with suppress(ImportError):  # above all packages
                    base = importlib.util.resolve_name(relative, package)
                    yield from (f"{base}.{alias.name}" for alias in node.names)
            elif isinstance(node, ast.Call) and "import" in ast.unparse(node.func):
                words = [each.value for each in node.args if isinstance(each, ast.Constant)]
                yield from (word for word in words if isinstance(word, str))
