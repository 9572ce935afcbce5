"""What a run ran on."""

import importlib.metadata
import os
import platform
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import mindspeed_qerl

SITES = {"site-packages", "dist-packages"}


@cache  # of the process
def own_versions() -> dict[str, Any]:
    """What the run ran on: Python, machine, every installed distribution (read, not imported) and
    the source's git state.
    """
    return {
        "mindspeed_qerl": mindspeed_qerl.__version__,
        "git": git_state(Path(mindspeed_qerl.__file__).resolve().parent.parent),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "packages": _installed(),
    }


def _installed() -> dict[str, str]:
    """Version of every distribution, by name. What a package has bundled in a folder of its own is
    none, though the package may put that folder on sys.path once it is imported, as Ray does.
    """
    packages: dict[str, str] = {}
    places = [place for place in sys.path if not _is_bundled(Path(place))]
    for distribution in importlib.metadata.distributions(path=places):
        metadata = distribution.metadata  # is read anew each time
        packages.setdefault(metadata["Name"], metadata["Version"])
    return packages


def _is_bundled(place: Path) -> bool:
    """Returns True for a folder inside an installed package; eggs are installed packages."""
    return place.suffix != ".egg" and bool(SITES & {path.name for path in place.parents})


def git_state(source: Path) -> dict[str, Any] | None:
    """{"commit", "dirty": tracked files are changed} when `source` is the top of a git checkout,
    else None (an installed package, or no git).
    """
    # site-packages inside somebody else's checkout must not be mistaken for ours
    if not (source / ".git").exists():
        return None
    # Without optional locks `git status` does not touch the index, so it cannot get in the way of a
    # commit being made; files that git does not track are results, data and notes.
    command = ["git", "--no-optional-locks", "-C", str(source), "status", "--porcelain=v2"]
    command += ["--branch", "--untracked-files=no"]
    try:
        answer = subprocess.run(command, check=True, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    lines = answer.stdout.splitlines()
    commit = lines[0].removeprefix("# branch.oid ")
    is_dirty = not all(line.startswith("#") for line in lines)
    return {"commit": commit, "dirty": is_dirty}
