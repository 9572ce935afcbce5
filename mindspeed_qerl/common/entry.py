"""How cli/*.py and tools/*.py start: as files, with any Python, or as console commands. Standard
library only.
"""

import importlib
import importlib.util
import os
import platform
import sys
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
NEEDED = (
    "hydra",
    "numpy",
    "pydantic",
    "rich",
    "yaml",
)  # of requirements/base.in, what no command can do without


def use_checkout() -> None:
    """Start again with the .venv of the checkout if this Python lacks packages; exit status 2 if
    there is none.

    The processes that a file of a checkout starts find the checkout on PYTHONPATH, whatever is
    installed.
    """
    python = CHECKOUT / ".venv" / "bin" / "python"
    lacking = [name for name in (*NEEDED, "torch") if importlib.util.find_spec(name) is None]
    unfit = lacking or sys.version_info < (3, 11)
    if unfit and python.exists() and Path(sys.prefix).resolve() != python.parents[1].resolve():
        os.execv(python, [str(python), *getattr(sys, "orig_argv", ["", *sys.argv])[1:]])
    if sys.version_info < (3, 11) or lacking not in ([], ["torch"]):
        is_old = sys.version_info < (3, 11)
        old = [f"is Python {platform.python_version()}, where 3.11 is needed,"] if is_old else []
        _explain(" and ".join([*old, *([f"has no {', '.join(lacking)}"] if lacking else [])]))
        sys.exit(2)
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [*paths, "" if str(CHECKOUT) in paths else str(CHECKOUT)])
    )
    sys.argv[1:] = map(_at_home, sys.argv[1:])
    sys.excepthook = _name_missing


def command() -> int:
    """What every console command calls: qerl-train is cli/train_grpo.py, qerl-plan-layout
    tools/plan_layout.py.
    """
    sys.argv[1:] = map(_at_home, sys.argv[1:])
    sys.excepthook = _name_missing
    name = Path(sys.argv[0]).name.removeprefix("qerl-").replace("-", "_")
    module = "mindspeed_qerl.cli.train_grpo" if name == "train" else f"mindspeed_qerl.tools.{name}"
    return importlib.import_module(module).main()


def _at_home(argument: str) -> str:
    """`--output=~/x`, whose `~` shells expand at the beginning of a word only. (recipe/compose.py
    has key=~/x.)
    """
    option, equals, value = argument.partition("=")
    return (
        f"{option}={os.path.expanduser(value)}" if option.startswith("--") and equals else argument
    )


def _name_missing(kind, error, trace) -> None:
    """A package that is not installed is a sentence instead of a traceback."""
    name = (getattr(error, "name", None) or "").partition(".")[0]
    if issubclass(kind, ModuleNotFoundError) and name != "mindspeed_qerl":
        _explain(f"has no {name}")
    else:
        sys.__excepthook__(kind, error, trace)


def _explain(lack: str) -> None:
    if (CHECKOUT / "Makefile").exists():
        way_out = (
            f"`make install` in {CHECKOUT} makes a .venv with everything, "
            f"`pip install {CHECKOUT}` adds what needs no engine"
        )
    else:
        way_out = "the local engine needs `make install` or `pip install '.[local]'` in a checkout"
    print(f"error: {sys.executable} {lack}: {way_out}; on NPUs see docs/ascend.md", file=sys.stderr)
