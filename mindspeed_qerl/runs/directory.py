"""The directory of one run: made once, never overwritten, with all it takes to repeat the run.

    <root>/<name>/2025-11-21_14-03-59_seed1/
        config.yaml     the resolved config
        command.txt     the command line, quoted for a shell
        versions.json   Python, machine, every installed package, the git commit of the source
        data.json       path, sha256, bytes and rows of each data file
        status.json     {"state": "running" | "finished" | "failed", "step", "reason", "started", "ended", "seed"}
        lock            held by the process that writes the run
        facts.json      what was measured once: start-up seconds, parameter counts, ... (`record`)
        metrics.jsonl, eval.jsonl, rollouts.jsonl, tensorboard/     written by metrics.py
        checkpoints/                                                written by the engine
        summary.md, plots/                                          written by report.py
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shlex
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import IO, Any

import mindspeed_qerl
from mindspeed_qerl.locks import hold


@dataclass(frozen=True)
class RunDirectory:
    """The files of one run. `create` makes a new one, `reopen` goes on with one, `open` reads one; it is accepted wherever a path is."""

    path: Path
    lock: IO | None = field(default=None, repr=False, compare=False)  # held open by the process that writes the run, for as long as it lives

    @classmethod
    def create(
        cls, root: Path, name: str, *, config: dict, command: list[str], seed: int, data_files: dict[str, Path]
    ) -> RunDirectory:
        """Make `root/name/<date>_<time>_seed<seed>`, with -2, -3, ... appended when that exists, and describe the run in it.

        `config` is the resolved config in plain Python types, `command` the argument list that started the run,
        `data_files` maps a label ("train", "test", ...) to a file.

        Raises ValueError for a bad name or a config that YAML cannot hold, FileNotFoundError for a missing data file (both
        before anything is made), and OSError when the directory cannot be written.
        """
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._=+-]*", name):
            raise ValueError(f"run name {name!r} becomes a folder: use letters, digits and . _ = + - only, starting with a "
                             "letter or digit")
        contents = {
            "config.yaml": _to_yaml(config),
            "command.txt": shlex.join(command) + "\n",
            "versions.json": _to_json(versions()),
            "data.json": _to_json({label: describe_data_file(Path(file)) for label, file in data_files.items()}),
        }
        started = _now()
        try:
            path = _make_new(Path(root) / name, f"{started:%Y-%m-%d_%H-%M-%S}_seed{seed}")
            run = cls(path, _hold(path))
            for file, text in contents.items():
                (run.path / file).write_text(text, encoding="utf-8")
            run._write_status(  # last: a directory that has it has everything
                {"state": "running", "step": 0, "reason": None, "started": started.isoformat(timespec="seconds"),
                 "ended": None, "seed": seed}
            )
        except OSError as error:
            raise OSError(
                error.errno,
                f"cannot make the run directory {Path(root).absolute() / name}: {error.strerror}. "
                "Choose a folder that can be written, on a disk with space left",
            ) from error
        return run

    @classmethod
    def reopen(cls, path: Path | str, *, config: dict, command: list[str], may_change: Iterable[str] = ()) -> RunDirectory:
        """An existing run, to be gone on with: the same config but for `run.resume` and the keys of `may_change`, such as the layout;
        config.yaml becomes what the run goes on with, what it was is kept as config.before.yaml. The command is added to command.txt.

        Raises FileNotFoundError when `path` is no run directory, ValueError when the run is finished, its config differs, or another process
        is writing it.
        """
        run = cls(cls.open(path).path, _hold(Path(path)))
        status, before = run.status(), run.config()
        if status["state"] == "finished":
            raise ValueError(f"{run.path} is finished after {status['step']} steps: there is nothing to resume")
        changed = _differences(before, config)
        if other := [line for key, line in changed.items() if key not in may_change]:
            raise ValueError(f"{run.path} was started with another config. A run resumes as it was; to try other values, start a new one.\n"
                             + "\n".join(other))
        if changed:
            _write_whole(run.path / "config.before.yaml", _to_yaml(before))
            _write_whole(run.config_file, _to_yaml(config))
        with open(run.path / "command.txt", "a", encoding="utf-8") as file:
            file.write(shlex.join(command) + "\n")
        run._write_status({**status, "state": "running", "reason": None, "ended": None})
        return run

    @classmethod
    def unfinished(cls, parent: Path, *, config: dict, may_change: Iterable[str] = ()) -> RunDirectory | None:
        """The newest run below `parent` that did not finish, has a checkpoint, and can be reopened with `config`."""
        runs = [cls(file.parent) for file in parent.glob("*/status.json")]
        for run in sorted(runs, key=lambda run: run.status()["started"], reverse=True):
            if (run.status()["state"] != "finished" and not _differences(run.config(), config).keys() - set(may_change)
                    and any(path.name.removeprefix("iter_").isdigit() for path in run.checkpoints_dir.glob("iter_*"))):
                return run
        return None

    @classmethod
    def finished(cls, parent: Path, *, config: dict) -> RunDirectory | None:
        """The newest run below `parent` that finished with `config`."""
        runs = [cls(file.parent) for file in parent.glob("*/status.json")]
        fitting = [run for run in runs if run.status()["state"] == "finished" and not _differences(run.config(), config)]
        return max(fitting, key=lambda run: run.status()["started"], default=None)

    @classmethod
    def open(cls, path: Path | str) -> RunDirectory:
        """An existing run directory. Raises FileNotFoundError when `path` is not one."""
        run = cls(Path(path))
        if not run.status_file.is_file():
            raise FileNotFoundError(f"{run.path} is not a run directory: it has no status.json. "
                                    "A run directory is named like <root>/<name>/2025-11-21_14-03-59_seed1")
        return run

    def __fspath__(self) -> str:
        return str(self.path)

    @property
    def config_file(self) -> Path:
        return self.path / "config.yaml"

    @property
    def status_file(self) -> Path:
        return self.path / "status.json"

    @property
    def facts_file(self) -> Path:
        return self.path / "facts.json"

    @property
    def metrics_file(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def eval_file(self) -> Path:
        return self.path / "eval.jsonl"

    @property
    def eval_answers_file(self) -> Path:
        return self.path / "eval_answers.jsonl"

    @property
    def rollouts_file(self) -> Path:
        return self.path / "rollouts.jsonl"

    @property
    def tensorboard_dir(self) -> Path:
        return self.path / "tensorboard"

    @property
    def checkpoints_dir(self) -> Path:
        return self.path / "checkpoints"

    @property
    def summary_file(self) -> Path:
        return self.path / "summary.md"

    @property
    def plots_dir(self) -> Path:
        return self.path / "plots"

    def config(self) -> dict[str, Any]:
        """The resolved config the run was started with."""
        import yaml

        return yaml.safe_load(self.config_file.read_text(encoding="utf-8"))

    def status(self) -> dict[str, Any]:
        """The content of status.json. A run that was killed outright still says "running"."""
        return json.loads(self.status_file.read_text(encoding="utf-8"))

    def facts(self) -> dict[str, Any]:
        """What `record` was told so far."""
        return json.loads(self.facts_file.read_text(encoding="utf-8")) if self.facts_file.exists() else {}

    def reached(self, step: int) -> None:
        """Note that `step` updates are done. `MetricsWriter.log` calls this."""
        self._write_status({**self.status(), "step": step})

    def finish(self) -> None:
        """Note that the run came to its end."""
        self._end("finished", None)

    def fail(self, reason: str) -> None:
        """Note that the run stopped before its end, and why."""
        self._end("failed", reason)

    def record(self, **facts: Any) -> None:
        """Add `facts` (JSON values) to facts.json: what was measured once, such as LoRA's parameter counts."""
        _write_whole(self.facts_file, _to_json({**self.facts(), **facts}))

    def _end(self, state: str, reason: str | None) -> None:
        self._write_status({**self.status(), "state": state, "reason": reason, "ended": _now().isoformat(timespec="seconds")})

    def _write_status(self, status: dict[str, Any]) -> None:
        _write_whole(self.status_file, _to_json(status))


def versions() -> dict[str, Any]:
    """What the run ran on: Python, machine, every installed distribution (read, not imported) and the source's git state."""
    packages = {dist.name: dist.version for dist in importlib.metadata.distributions() if dist.name}
    return {
        "mindspeed_qerl": mindspeed_qerl.__version__,
        "git": _git_state(Path(mindspeed_qerl.__file__).resolve().parent.parent),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "packages": dict(sorted(packages.items(), key=lambda item: item[0].lower())),
    }


def describe_data_file(path: Path) -> dict[str, Any]:
    """Absolute path, sha256, size in bytes and rows (of .parquet and .jsonl; None for other kinds) of one data file."""
    if not path.is_file():
        raise FileNotFoundError(f"data file {path} does not exist or is not a file")
    with open(path, "rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    return {"path": str(path.absolute()), "sha256": sha256, "bytes": path.stat().st_size, "rows": count_rows(path)}


def count_rows(path: Path) -> int | None:
    """Rows of a .parquet or .jsonl file; None for other kinds."""
    if path.suffix == ".parquet":
        import pyarrow.parquet

        return pyarrow.parquet.read_metadata(path).num_rows
    if path.suffix == ".jsonl":
        with open(path, "rb") as file:
            return sum(1 for line in file if line.strip())
    return None


def _git_state(source: Path) -> dict[str, Any] | None:
    """{"commit", "dirty"} when `source` is the top of a git checkout, else None (an installed package, or no git)."""
    if not (source / ".git").exists():  # site-packages inside somebody else's checkout must not be mistaken for ours
        return None
    commit = _git(source, "rev-parse", "--verify", "HEAD")
    changes = _git(source, "status", "--porcelain")
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


def _hold(path: Path) -> IO:
    try:
        return hold(path)
    except BlockingIOError as error:
        raise ValueError(f"{path} is being written by another process: stop that one first, or wait for it") from error


def _differences(before: Any, after: Any, name: str = "") -> dict[str, str]:
    """A line for each key whose value changed, `run.resume` aside."""
    if isinstance(before, dict) and isinstance(after, dict):
        keys = dict.fromkeys([*before, *after])
        return {key: line for part in keys
                for key, line in _differences(before.get(part), after.get(part), f"{name}.{part}".lstrip(".")).items()}
    return {} if before == after or name == "run.resume" else {name: f"{name} was {before!r} and is {after!r}"}


def _make_new(parent: Path, stem: str) -> Path:
    """Make `parent/stem`, or the first free of `stem-2`, `stem-3`, ...; os.mkdir decides between runs started at once."""
    parent.mkdir(parents=True, exist_ok=True)
    attempt = 1
    while True:
        path = parent / (stem if attempt == 1 else f"{stem}-{attempt}")
        try:
            os.mkdir(path)
            return path
        except FileExistsError:
            attempt += 1


def _write_whole(file: Path, text: str) -> None:
    """Write a file that readers, and a kill at any moment, find either as it was or complete."""
    scratch = file.with_name(file.name + ".tmp")
    scratch.write_text(text, encoding="utf-8")
    os.replace(scratch, file)


def _now() -> datetime:
    return datetime.now().astimezone()


def _to_json(value: Any) -> str:
    return json.dumps(value, indent=2) + "\n"


def _to_yaml(config: dict) -> str:
    import yaml

    try:
        return yaml.safe_dump(config, sort_keys=False, allow_unicode=True, width=120)
    except yaml.representer.RepresenterError as error:
        raise ValueError(f"the config holds a value that is not plain Python: {error}. "
                         "Pass OmegaConf.to_container(config, resolve=True)") from error
