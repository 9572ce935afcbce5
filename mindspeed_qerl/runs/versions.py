"""What a run ran on."""

import hashlib
import importlib.metadata
import os
import platform
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import mindspeed_qerl
from mindspeed_qerl.common.files import sha256

# rooms that train nothing, and change no number of a run
WITHOUT_NUMBERS = ("compare", "demo", "integrations", "preflight", "runs", "sweep.py")

SITES = {"site-packages", "dist-packages"}


@cache  # of the process
def own_versions() -> dict[str, Any]:
    """Returns what the run ran on: Python, machine, every installed distribution (read, not
    imported), the source's git state and the digest of what trains.
    """
    return {
        "mindspeed_qerl": mindspeed_qerl.__version__,
        "code": code_digest(Path(mindspeed_qerl.__file__).parent),
        "git": git_state(Path(mindspeed_qerl.__file__).resolve().parent.parent),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "packages": _installed(),
    }


def code_digest(package: Path) -> str:
    """Returns the digest of the package's files that decide a run's numbers, 64 hexadecimal digits:
    its own Python and YAML, but for the rooms `WITHOUT_NUMBERS`.
    """
    files = sorted({*package.rglob("*.py"), *package.rglob("*.yaml")})
    digest = hashlib.sha256()
    for file in files:
        name = file.relative_to(package)
        if name.parts[0] not in WITHOUT_NUMBERS:
            digest.update(f"{name.as_posix()} {sha256(file)}\n".encode())
    return digest.hexdigest()


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
    # Without optional locks git does not touch the index, so it cannot get in the way of a
    # commit being made; files that git does not track are results, data and notes.
    command = ["git", "--no-optional-locks", "-C", str(source), "describe", "--always", "--dirty"]
    command += ["--abbrev=40", "--exclude=*"]
    try:
        answer = subprocess.run(command, check=True, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    commit, dash, _ = answer.stdout.strip().partition("-")
    return {"commit": commit, "dirty": bool(dash)}
