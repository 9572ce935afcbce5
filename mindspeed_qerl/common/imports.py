"""Functions that a config names: our own, or a user's by import path."""

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from mindspeed_qerl.common.errors import ConfigError, unknown


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
    folder = os.getcwd()
    if folder not in sys.path:  # python cli/train_grpo.py has cli/ there instead
        sys.path.append(folder)
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
