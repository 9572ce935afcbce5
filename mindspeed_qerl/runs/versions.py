"""What a run ran on."""

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import mindspeed_qerl


def own_versions() -> dict[str, Any]:
    """What the run ran on: Python, machine, every installed distribution (read, not imported) and the source's git
    state."""
    packages = {dist.name: dist.version for dist in importlib.metadata.distributions() if dist.name}
    return {
        "mindspeed_qerl": mindspeed_qerl.__version__,
        "git": git_state(Path(mindspeed_qerl.__file__).resolve().parent.parent),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "packages": dict(sorted(packages.items(), key=lambda item: item[0].lower())),
    }


def git_state(source: Path) -> dict[str, Any] | None:
    """{"commit", "dirty": tracked files are changed} when `source` is the top of a git checkout, else None (an
    installed package, or no git)."""
    if not (source / ".git").exists():  # site-packages inside somebody else's checkout must not be mistaken for ours
        return None
    commit = _git(source, "rev-parse", "--verify", "HEAD")
    # files that git does not track are results, data and notes
    changes = _git(source, "status", "--porcelain", "--untracked-files=no")
    if changes is None:
        return None
    return {"commit": commit, "dirty": bool(changes)}


def _git(source: Path, *arguments: str) -> str | None:
    # Without optional locks `git status` does not touch the index, so it cannot get in the way of a commit being made.
    command = ["git", "--no-optional-locks", "-C", str(source), *arguments]
    try:
        answer = subprocess.run(command, check=False, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() if answer.returncode == 0 else None
