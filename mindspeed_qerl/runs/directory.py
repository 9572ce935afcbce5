"""The directory of one run: made once, never overwritten, with all it takes to repeat the run.

    <root>/<name>/2025-11-21_14-03-59_aqn=off_seed1/
        config.yaml     the resolved config
        command.txt     the command line, quoted for a shell
        versions.json   Python, machine, every installed package, the source's git commit, and what the engine adds
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
import json
import os
import re
import shlex
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import IO, Any

from mindspeed_qerl.errors import ConfigError
from mindspeed_qerl.files import checkpoint_iterations, write_whole
from mindspeed_qerl.locks import hold
from mindspeed_qerl.runs.versions import own_versions

LABEL_LENGTH = 80  # characters; a folder's name may have 255 bytes, and date, seed and "-2" take 35


@dataclass(frozen=True)
class RunDirectory:
    """The files of one run. `create` makes a new one, `reopen` resumes one, `open` reads one; it is accepted wherever
    a path is."""

    path: Path
    lock: IO | None = field(default=None, repr=False, compare=False)  # held by the process that writes the run

    @classmethod
    def create(cls, root: Path, name: str, *, config: dict, command: list[str], seed: int,
               data_files: Mapping[str, Path], label: str = "", versions: Mapping[str, Any] = {}) -> RunDirectory:
        """Make `root/name/<date>_<time>_<label>_seed<seed>`, with -2, -3, ... appended when that exists, and describe
        the run in it.

        Args:
            config: the resolved config in plain Python types.
            command: the argument list that started the run.
            data_files: label ("train", "test", ...) -> file.
            label: what tells the run from others of its name; see `label_of`.
            versions: JSON values added to versions.json, such as {"upstream": {"MindSpeed": <commit>}}.

        Raises ValueError for a bad name or a config that YAML cannot hold, FileNotFoundError for a missing data file
        (both before anything is made), and OSError when the directory cannot be written.
        """
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._=+-]*", name):
            raise ValueError(f"run name {name!r} becomes a folder: use letters, digits and . _ = + - only, starting "
                             "with a letter or digit")
        contents = {
            "config.yaml": _to_yaml(config),
            "command.txt": shlex.join(command) + "\n",
            "versions.json": _to_json({**own_versions(), **versions}),
            "data.json": _to_json(_describe(data_files)),
        }
        started = _now()
        try:
            differs = f"_{label}" if label else ""
            path = _make_new(Path(root) / name, f"{started:%Y-%m-%d_%H-%M-%S}{differs}_seed{seed}")
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
    def reopen(cls, path: Path | str, *, config: dict, command: list[str], data_files: Mapping[str, Path],
               may_change: Iterable[str] = ()) -> RunDirectory:
        """Resume an existing run: the same data, and the same config but for `run.resume` and the keys of
        `may_change`, such as the layout. config.yaml becomes the config that is resumed with, the earlier one is kept
        as config.before.yaml. The command is added to command.txt.

        Raises FileNotFoundError when `path` is no run directory or a data file is missing, ValueError when the run is
        finished, its config or data differ, or another process is writing it.
        """
        run = cls(cls.open(path).path, _hold(Path(path)))
        status, before = run.status(), run.config()
        if status["state"] == "finished":
            raise ValueError(f"{run.path} is finished after {status['step']} steps: there is nothing to resume")
        changed = _differences(before, config)
        if other := [line for key, line in changed.items() if key not in may_change]:
            raise ValueError(f"{run.path} was started with another config. A run resumes as it was; to try other "
                             "values, start a new one.\n" + "\n".join(other))
        run._check_data(data_files)
        if changed:
            write_whole(run.path / "config.before.yaml", _to_yaml(before))
            write_whole(run.config_file, _to_yaml(config))
        with open(run.path / "command.txt", "a", encoding="utf-8") as file:
            file.write(shlex.join(command) + "\n")
        run._write_status({**status, "state": "running", "reason": None, "ended": None})
        return run

    @classmethod
    def unfinished(cls, parent: Path, *, config: dict, may_change: Iterable[str] = ()) -> RunDirectory | None:
        """The newest run below `parent` that did not finish, has a checkpoint, and can be reopened with `config`."""
        for run, state, started_with in _runs_below(parent):
            other = _differences(started_with, config).keys() - set(may_change)
            if state != "finished" and not other and checkpoint_iterations(run.checkpoints_dir):
                return run
        return None

    @classmethod
    def finished(cls, parent: Path, *, config: dict) -> RunDirectory | None:
        """The newest run below `parent` that finished with `config`."""
        for run, state, started_with in _runs_below(parent):
            if state == "finished" and not _differences(started_with, config):
                return run
        return None

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
        write_whole(self.facts_file, _to_json({**self.facts(), **facts}))

    def _end(self, state: str, reason: str | None) -> None:
        ended = _now().isoformat(timespec="seconds")
        self._write_status({**self.status(), "state": state, "reason": reason, "ended": ended})

    def _write_status(self, status: dict[str, Any]) -> None:
        write_whole(self.status_file, _to_json(status))

    def _check_data(self, data_files: Mapping[str, Path]) -> None:
        recorded = json.loads((self.path / "data.json").read_text(encoding="utf-8"))
        changed = [f"{label} data {entry['path']}: sha256 was {recorded[label]['sha256']} and is {entry['sha256']}"
                   for label, entry in _describe(data_files).items()
                   if label in recorded and entry["sha256"] != recorded[label]["sha256"]]
        if changed:
            raise ValueError(f"{self.path} was started with other data. Put the files back that it was started with, "
                             "or start a new run.\n" + "\n".join(changed))


def label_of(overrides: Sequence[str]) -> str:
    """Overrides of a command line, short, as a part of a folder's name: group=choice, last part of a key=value, at
    most `LABEL_LENGTH` characters. Left out are the seed, which stands behind the label, and `run.*`, which changes
    nothing but where the run is.

    >>> label_of(["aqn=off", "actor_config.lr=1e-5", "seed=3", "run.root=/tmp"])
    'aqn=off_lr=1e-5'
    >>> label_of(["aqn.enabled=false", "model=/models/Qwen3 30B", "+aqn.targets=[input,post_attention]"])
    'aqn.enabled=false_model=Qwen3-30B_targets=input-post_attention'
    """
    pairs = [override.lstrip("+~").partition("=") for override in overrides]
    kept = [(key.split("."), value) for key, _, value in pairs
            if key not in ("seed", "megatron_training.seed") and not key.startswith("run.")]
    last_parts = Counter(key[-1] for key, _ in kept)
    words = []
    for key, value in kept:
        is_vague = key[-1] in ("enabled", "seed") or last_parts[key[-1]] > 1
        short_value = re.sub(r"[^A-Za-z0-9.+_]+", "-", value.rstrip("/").rpartition("/")[2]).strip("-") or "none"
        short_key = re.sub(r"[^A-Za-z0-9._+]+", "-", ".".join(key[-2:] if is_vague else key[-1:]))
        words.append(f"{short_key}={short_value}")
    label = "_".join(words)
    while len(label) > LABEL_LENGTH and len(words) > 1:
        words.pop()
        label = "_".join([*words, f"and-{len(kept) - len(words)}-more"])
    return label[:LABEL_LENGTH]


def runs_folder(config: dict[str, Any], name: str) -> Path:
    """The folder of the runs of a resolved config: `run.root`/`run.name`, the latter `name` unless it is set.
    ConfigError if one is no text.

    >>> runs_folder({"run": {"root": "runs", "name": None}}, "tiny").as_posix()
    'runs/tiny'
    """
    section = config.get("run") or {}
    if not isinstance(section, dict):
        raise ConfigError(f"run = {section!r} must be a section with keys such as root and name")
    root, own_name = section.get("root", "runs"), section.get("name") or name
    for key, value in (("run.root", root), ("run.name", own_name)):
        if not isinstance(value, str):
            raise ConfigError(f"{key} = {value!r} must be text, such as {key}=my_runs")
    return Path(root) / own_name


def _runs_below(parent: Path) -> list[tuple[RunDirectory, str, dict[str, Any]]]:
    """The runs below `parent`, newest first, with their state and config; damaged ones are left out, and named on the
    screen."""
    import yaml

    found = []
    for file in sorted(parent.glob("*/status.json")):
        run = RunDirectory(file.parent)
        try:
            status, config = run.status(), run.config()
            started = datetime.fromisoformat(status["started"]).timestamp()
            found.append((started, run, status["state"], config))
        except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError) as error:
            _name_damaged(run.path, f"{type(error).__name__}: {error}")
    found.sort(key=lambda entry: entry[0], reverse=True)
    return [(run, state, config) for _, run, state, config in found]


@cache  # once a process: a sweep looks again for each of its runs
def _name_damaged(path: Path, reason: str) -> None:
    print(f"warning: {path} is damaged and is skipped ({' '.join(reason.split())}); move it away to silence this",
          file=sys.stderr, flush=True)


def describe_data_file(path: Path) -> dict[str, Any]:
    """Absolute path, sha256, size in bytes and rows (of .parquet and .jsonl; None for other kinds) of one data
    file."""
    if not path.is_file():
        raise FileNotFoundError(f"data file {path} does not exist or is not a file")
    with open(path, "rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    return {"path": str(path.absolute()), "sha256": sha256, "bytes": path.stat().st_size, "rows": count_rows(path)}


def _describe(data_files: Mapping[str, Path]) -> dict[str, dict[str, Any]]:
    return {label: describe_data_file(Path(file)) for label, file in data_files.items()}


def count_rows(path: Path) -> int | None:
    """Rows of a .parquet or .jsonl file; None for other kinds."""
    if path.suffix == ".parquet":
        import pyarrow.parquet

        return pyarrow.parquet.read_metadata(path).num_rows
    if path.suffix == ".jsonl":
        with open(path, "rb") as file:
            return sum(1 for line in file if line.strip())
    return None


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
    """Make `parent/stem`, or the first free of `stem-2`, `stem-3`, ...; os.mkdir decides between runs started at
    once."""
    parent.mkdir(parents=True, exist_ok=True)
    attempt = 1
    while True:
        path = parent / (stem if attempt == 1 else f"{stem}-{attempt}")
        try:
            os.mkdir(path)
            return path
        except FileExistsError:
            attempt += 1


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
