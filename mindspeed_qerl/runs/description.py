"""What describes a run: a label for its folder, its data files, what it ran on, and in what two
configs differ.
"""

import hashlib
import importlib.metadata
import os
import platform
import re
import subprocess
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import mindspeed_qerl
from mindspeed_qerl.common.files import row_files, sha256
from mindspeed_qerl.families.fingerprint import weights_digest

# characters; a folder's name may have 255 bytes, and date, seed and "-2" take 35
LABEL_LENGTH = 80
SEEDS = ("seed", "megatron_training.seed")
Content = dict[str, Any]  # of one of a run's files
DataFiles = Mapping[str, Path | str]  # by label: "train", "test", "model/..."
# rooms that train nothing, and change no number of a run
WITHOUT_NUMBERS = ("compare", "demo", "integrations", "preflight", "runs", "sweep.py")


def label_of(overrides: Sequence[str]) -> str:
    """Overrides of a command line, short, as a part of a folder's name: the last parts of keys and
    values, at most `LABEL_LENGTH` characters. Left out are the seed, which stands behind the label,
    and `run.*`, which changes nothing but where the run is.

    >>> label_of(["aqn=off", "actor_config.lr=1e-5", "seed=3", "run.root=/tmp"])
    'aqn=off_lr=1e-5'
    >>> label_of(["model=/models/Qwen3 30B", "+aqn.targets=[input,final]"])
    'model=Qwen3-30B_targets=input-final'
    """
    words = []
    for override in overrides:
        key, _, value = override.lstrip("+~").partition("=")
        if key not in SEEDS and not key.startswith("run."):
            last_parts = key.rpartition(".")[2], value.strip("[]'\"/").rpartition("/")[2]
            words.append(re.sub(r"[^A-Za-z0-9.+_=]+", "-", "=".join(last_parts)))
    return "_".join(words)[:LABEL_LENGTH]


def describe_data(data_files: DataFiles) -> dict[str, dict[str, str]]:
    """Absolute path and sha256 of each data file; of several with rows the digest of theirs, of a
    folder with weights the digest of these (fingerprint.py). FileNotFoundError for one that is missing.
    """
    described = {}
    for label, path in data_files.items():
        path = Path(path)
        if label in ("train", "test") and not path.is_file():
            parts = "".join(map(sha256, row_files(path)))
            digest = hashlib.sha256(parts.encode()).hexdigest()
        else:
            digest = weights_digest(path) if path.is_dir() else sha256(path)
        described[label] = {"path": str(path.absolute()), "sha256": digest}
    return described


def dotted(value: Any, name: str = "") -> Content:
    """The values of a nested config by dotted key; a section that is empty is a value.

    >>> dotted({"aqn": {"enabled": True, "exclude": []}, "task": {}})
    {'aqn.enabled': True, 'aqn.exclude': [], 'task': {}}
    """
    if not isinstance(value, dict) or not value:
        return {name: value}
    leaves: Content = {}
    for part in value:
        leaves |= dotted(value[part], f"{name}.{part}".lstrip("."))
    return leaves


def differences(before: Any, after: Any) -> dict[str, str]:
    """A line for each key whose value changed, by dotted key; a missing one counts as null.

    >>> differences({"aqn": {"seed": None}, "seed": 1}, {"seed": 2})
    {'seed': 'seed was 1 and is 2'}
    """
    before = dotted(before)
    after = dotted(after)
    lines = {}
    for key in dict.fromkeys([*before, *after]):
        was = before.get(key)
        now = after.get(key)
        if was != now:
            lines[key] = f"{key} was {was!r} and is {now!r}"
    return lines


@cache  # of the process
def own_versions() -> Content:
    """Returns what the run ran on: Python, machine, every installed distribution (read, not
    imported), the source's git state and the digest of what trains.
    """
    source = Path(mindspeed_qerl.__file__).resolve().parent
    packages: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        packages.setdefault(distribution.name, distribution.version)
    return {
        "mindspeed_qerl": mindspeed_qerl.__version__,
        "code": code_digest(source),
        "git": git_state(source.parent),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "packages": packages,
    }


def code_digest(package: Path) -> str:
    """Returns the digest of the package's files that decide a run's numbers, 64 hexadecimal digits:
    its own Python and YAML, but for the rooms `WITHOUT_NUMBERS`.
    """
    digest = hashlib.sha256()
    for file in sorted({*package.rglob("*.py"), *package.rglob("*.yaml")}):
        name = file.relative_to(package)
        if name.parts[0] not in WITHOUT_NUMBERS:
            digest.update(f"{name.as_posix()} {sha256(file)}\n".encode())
    return digest.hexdigest()


def git_state(source: Path) -> Content | None:
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
