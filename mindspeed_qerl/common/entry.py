"""How cli/*.py and tools/*.py start: as files, with any Python, or as console commands. Standard
library only.
"""

import argparse
import contextlib
import importlib
import importlib.util
import json
import os
import platform
import select
import sys
from collections.abc import Callable
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
# of setup.py's extra `tools`, what no command can do without
NEEDED = "hydra numpy pydantic rich yaml".split()


def json_object(text: str) -> dict:
    """A value of an option, such as '{"enable_thinking": false}'."""
    with contextlib.suppress(ValueError):
        if isinstance(value := json.loads(text), dict):
            return value
    raise argparse.ArgumentTypeError(f'{text} is no JSON object like {{"enable_thinking": false}}')


def use_checkout() -> None:
    """Start again with the .venv of the checkout if this Python lacks packages; exit status 2 if
    there is none.

    The processes that a file of a checkout starts find the checkout on PYTHONPATH, whatever is
    installed.
    """
    python = CHECKOUT / ".venv" / "bin" / "python"
    lacking = [name for name in (*NEEDED, "torch") if importlib.util.find_spec(name) is None]
    is_old = sys.version_info < (3, 11)
    is_other = Path(sys.prefix).resolve() != python.parents[1].resolve()
    if (lacking or is_old) and is_other and python.exists():
        words = getattr(sys, "orig_argv", ["", *sys.argv])[1:]  # Python 3.9 has none
        os.execv(python, [str(python), *words])
    if is_old:
        _explain(f"is Python {platform.python_version()}, where 3.11 is needed")
        sys.exit(2)
    if lacking not in ([], ["torch"]):
        _explain(f"has no {', '.join(lacking)}")
        sys.exit(2)
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if str(CHECKOUT) not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [*paths, str(CHECKOUT)]))
    sys.excepthook = _name_missing


def quietly(main: Callable[[], int | None]) -> int | None:
    """The exit status of `main`; 0 if whoever reads what it prints leaves early, as `head` does."""
    try:
        try:
            return main()
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        pipe = select.poll()
        pipe.register(sys.stdout, 0)
        if not pipe.poll(0):  # another pipe's
            raise
        # else Python would try once more when it ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def command() -> int | None:
    """Runs a console command: qerl-train is cli/train_grpo.py, qerl-plan-layout
    tools/plan_layout.py.
    """
    sys.excepthook = _name_missing
    name = Path(sys.argv[0]).name.removeprefix("qerl-").replace("-", "_")
    module = "mindspeed_qerl.cli.train_grpo" if name == "train" else f"mindspeed_qerl.tools.{name}"
    return quietly(importlib.import_module(module).main)


def _name_missing(kind, error, trace) -> None:
    """A package that is not installed is a sentence instead of a traceback."""
    name = (getattr(error, "name", None) or "").partition(".")[0]
    if issubclass(kind, ModuleNotFoundError) and name != "mindspeed_qerl":
        _explain(f"has no {name}")
    else:
        sys.__excepthook__(kind, error, trace)


def _explain(lack: str) -> None:
    print(
        f"error: {sys.executable} {lack}: `make install` in a checkout makes a .venv with "
        "everything, `pip install '.[tools]'` there adds what needs no engine; on NPUs see docs/ascend.md",
        file=sys.stderr,
    )
