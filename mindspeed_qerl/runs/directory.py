"""The directory of one run: made once, never overwritten, with all it takes to repeat the run.

<root>/<name>/2025-11-21_14-03-59_aqn=off_seed1/ config.yaml     the resolved config command.txt
    the command line, quoted for a shell versions.json   Python, machine, every installed
    package, the source's git commit, and what the engine adds data.json       path, sha256,
    bytes and rows of each data file, and of the model's status.json     {"state": "running" |
    "finished" | "failed", "step", "reason", "started", "ended", "seed", "id"} lock
    held by the process that writes the run facts.json      what was measured once: start-up
    seconds, parameter counts, ... (`record`) metrics.jsonl, eval.jsonl, rollouts.jsonl,
    tensorboard/     written by metrics.py checkpoints/
    written by the engine summary.md, plots/                                          written by
    report.py
"""

import json
import re
import shlex
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import cache
from itertools import count
from operator import itemgetter
from pathlib import Path
from typing import IO, Any, Self
from uuid import uuid4

import yaml

from mindspeed_qerl.common.errors import ConfigError
from mindspeed_qerl.common.files import hold, json_text, sha256, whole_checkpoints, write_whole
from mindspeed_qerl.families.fingerprint import weights_digest
from mindspeed_qerl.runs.versions import own_versions

LABEL_LENGTH = 80  # characters; a folder's name may have 255 bytes, and date, seed and "-2" take 35
ACCEPTED = "run.accepted_checks"  # what the machine was found to lack changes no run


class RunDirectory:
    """The files of one run. `create` makes a new one, `take` and `resume` resume one, `open` reads
    one. The process that writes the run holds its `lock`.
    """

    def __init__(self, path: Path | str, lock: IO | None = None) -> None:
        self.path, self.lock = Path(path), lock
        self.other_versions: list[
            str
        ] = []  # a line for each that a resumed run was not started with
        self.config_file = self.path / "config.yaml"
        self.status_file = self.path / "status.json"
        self.facts_file = self.path / "facts.json"
        self.metrics_file = self.path / "metrics.jsonl"
        self.eval_file = self.path / "eval.jsonl"
        self.eval_answers_file = self.path / "eval_answers.jsonl"
        self.rollouts_file = self.path / "rollouts.jsonl"
        self.tensorboard_dir = self.path / "tensorboard"
        self.checkpoints_dir = self.path / "checkpoints"
        self.summary_file = self.path / "summary.md"
        self.plots_dir = self.path / "plots"

    @classmethod
    def create(
        cls,
        root: Path | str,
        name: str,
        *,
        config: dict,
        command: list[str],
        seed: int,
        data_files: Mapping[str, Path],
        label: str = "",
        versions: Mapping[str, Any] = {},
    ) -> Self:
        """Make `root/name/<date>_<time>_<label>_seed<seed>`, with -2, -3, ... appended when that
        exists, and describe the run in it: its resolved `config` in plain Python types, the
        `command` that started it, its data files by label ("train", "test", ...), and JSON values
        for versions.json, as {"upstream": {"MindSpeed": <commit>}}.

        Raises ValueError for a bad name, FileNotFoundError for a missing data file (both before
        anything is made), and OSError when the directory cannot be written.
        """
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._=+-]*", name):
            raise ValueError(
                f"run name {name!r} becomes a folder: use letters, digits and . _ = + - only, "
                "starting with a letter or digit"
            )
        contents = {
            "config.yaml": _to_yaml(config),
            "command.txt": shlex.join(command) + "\n",
            "versions.json": json_text({**own_versions(), **versions}),
            "data.json": json_text(describe_data(data_files)),
        }
        started = _now()
        stem = "_".join(filter(None, [f"{started:%Y-%m-%d_%H-%M-%S}", label, f"seed{seed}"]))
        status = {
            "state": "running",
            "step": 0,
            "reason": None,
            "started": started.isoformat(timespec="seconds"),
            "ended": None,
            "seed": seed,
            "id": uuid4().hex,
        }
        try:
            path = _make_new(Path(root) / name, stem)
            run = cls(path, hold(path))
            for file, text in contents.items():
                (path / file).write_text(text, encoding="utf-8")
            write_whole(
                run.status_file, json_text(status)
            )  # last: a directory that has it has everything
        except OSError as error:
            message = (
                f"cannot make the run directory {Path(root).absolute() / name}: {error.strerror}. "
            )
            raise OSError(
                error.errno,
                message + "Choose a folder that can be written, on a disk with space left",
            ) from error
        return run

    @classmethod
    def take(cls, path: Path | str) -> Self:
        """An existing run, which this process alone may write from now on; nothing is written yet.
        Raises FileNotFoundError when `path` is no run directory, ValueError when another process is
        writing it.
        """
        run = cls.open(path)
        try:
            run.lock = hold(run.path)
        except BlockingIOError as error:
            raise ValueError(
                f"{path} is being written by another process: stop that one first, or wait for it"
            ) from error
        return run

    def resume(
        self,
        *,
        config: dict,
        command: list[str],
        data_files: Mapping[str, Path],
        may_change: Iterable[str] = (),
        versions: Mapping[str, Any] = {},
    ) -> Self:
        """Go on with a run that was taken: the same data, and the same config but for `run.resume`,
        the checks that were accepted, and the keys of `may_change`, such as the layout. config.yaml
        and versions.json become those of now, the earlier ones are kept as config.before.yaml and
        versions.before.json (`other_versions` has the differences). The command is added to
        command.txt.

        Raises FileNotFoundError when a data file is missing, ValueError when the run is finished,
        or its config or data differ.
        """
        status, before = self.status(), self.config()
        if status["state"] == "finished":
            raise ValueError(
                f"{self.path} is finished after {status['step']} steps: there is nothing to resume"
            )
        changed = _differences(before, config)
        if other := [line for key, line in changed.items() if key not in {*may_change, ACCEPTED}]:
            raise ValueError(
                f"{self.path} was started with another config. A run resumes as it was; to try "
                "other values, start a new one.\n" + "\n".join(other)
            )
        if other := self.other_data(data_files):
            raise ValueError(
                f"{self.path} was started with other data, or another model. Put the files back "
                "that it was started with, or start a new run.\n" + "\n".join(other)
            )
        if changed:
            write_whole(self.path / "config.before.yaml", _to_yaml(before))
            write_whole(self.config_file, _to_yaml(config))
        started_with = json.loads((self.path / "versions.json").read_text(encoding="utf-8"))
        resumed_with = {**own_versions(), **versions}
        self.other_versions = [*_differences(started_with, resumed_with).values()]
        if self.other_versions:
            write_whole(self.path / "versions.before.json", json_text(started_with))
            write_whole(self.path / "versions.json", json_text(resumed_with))
        with open(self.path / "command.txt", "a", encoding="utf-8") as file:
            file.write(shlex.join(command) + "\n")
        self._note(state="running", reason=None, ended=None)
        return self

    def other_data(self, data_files: Mapping[str, Path]) -> list[str]:
        """A line for each of the files that is not what the run was started with. FileNotFoundError
        for one that is missing.
        """
        recorded = json.loads((self.path / "data.json").read_text(encoding="utf-8"))
        return _other_data(recorded, describe_data(data_files))

    @classmethod
    def unfinished(
        cls, parent: Path, *, config: dict, may_change: Iterable[str] = ()
    ) -> Self | None:
        """The newest run below `parent` that did not finish, has a checkpoint, and can be resumed
        with `config`.
        """
        for run, state, started_with in _runs_below(parent):
            other = _differences(started_with, config).keys() - {*may_change, ACCEPTED}
            if state != "finished" and not other and whole_checkpoints(run.checkpoints_dir):
                return run
        return None

    @classmethod
    def finished(cls, parent: Path, *, config: dict, data_files: Mapping[str, Path]) -> Self | None:
        """The newest run below `parent` that finished with `config` and these data.
        FileNotFoundError for a file that is missing.
        """
        return next(
            (
                run
                for run, state, started_with in _runs_below(parent)
                if state == "finished"
                and not _differences(started_with, config).keys() - {ACCEPTED}
                and not run.other_data(data_files)
            ),
            None,
        )

    @classmethod
    def open(cls, path: Path | str) -> Self:
        """An existing run directory. Raises FileNotFoundError when `path` is not one."""
        run = cls(path)
        if not run.status_file.is_file():
            raise FileNotFoundError(
                f"{path} is not a run directory: it has no status.json. "
                "A run directory is named like <root>/<name>/2025-11-21_14-03-59_seed1"
            )
        return run

    def config(self) -> dict[str, Any]:
        """The resolved config the run was started with. ValueError for a damaged file."""
        try:
            with open(self.config_file, encoding="utf-8") as file:  # which errors name
                return dict(yaml.safe_load(file))
        except (
            yaml.YAMLError,
            TypeError,
            ValueError,
        ) as error:  # the latter two are of a file without sections
            raise ValueError(
                f"{self.config_file} is damaged: {' '.join(str(error).split())}"
            ) from error

    def status(self) -> dict[str, Any]:
        """The content of status.json. A run that was killed outright still says "running"."""
        return json.loads(self.status_file.read_text(encoding="utf-8"))

    @property
    def id(self) -> str | None:
        """Its own, which its checkpoints have, too; None for a run of an earlier version."""
        return self.status().get("id")

    def identity(self) -> dict[str, str | None]:
        """For its checkpoints: the run's own id, and the digest of the Hugging Face weights that it
        started from, None if there were none, or an earlier version did not look.
        """
        data = json.loads((self.path / "data.json").read_text(encoding="utf-8"))
        return {"run": self.id, "base": data.get("model/weights", {}).get("sha256")}

    def check_owner(self, checkpoint: Path, owner: str | None) -> None:
        """ValueError if `owner`, the id that a checkpoint has, is another run's; None is not known."""
        if None not in (owner, self.id) and owner != self.id:
            raise ValueError(
                f"{checkpoint} is of another run (id {owner}; {self.path} has {self.id}): bring "
                "this run's own back, or move it away to resume from the one before"
            )

    def facts(self) -> dict[str, Any]:
        """What `record` was told so far."""
        return (
            json.loads(self.facts_file.read_text(encoding="utf-8"))
            if self.facts_file.exists()
            else {}
        )

    def record(self, **facts: Any) -> None:
        """Add `facts` (JSON values) to facts.json: what was measured once, such as LoRA's parameter
        counts.
        """
        write_whole(self.facts_file, json_text({**self.facts(), **facts}))

    def keep(self, **facts: Any) -> None:
        """Record facts that a run which is resumed must have as it had them at its start;
        ConfigError if not.
        """
        before = self.facts()
        if other := [name for name, value in facts.items() if before.get(name, value) != value]:
            raise ConfigError(
                f"{self.path} was started with other {', '.join(other)}. What makes them may be "
                "another version now (versions.before.json): take that one again, or start a new "
                "run"
            )
        self.record(**facts)

    @property
    def started(self) -> datetime:
        """When the run was made, by the clock there."""
        return datetime.fromisoformat(self.status()["started"]).replace(tzinfo=None)

    def reached(self, step: int) -> None:
        """Note that `step` updates are done. `MetricsWriter.log` calls this."""
        self._note(step=step)

    def finish(self) -> None:
        """Note that the run came to its end."""
        self._note(state="finished", reason=None, ended=_now().isoformat(timespec="seconds"))

    def fail(self, reason: str) -> None:
        """Note that the run stopped before its end, and why."""
        self._note(state="failed", reason=reason, ended=_now().isoformat(timespec="seconds"))

    def _note(self, **changes: Any) -> None:
        write_whole(self.status_file, json_text({**self.status(), **changes}))


def label_of(overrides: Sequence[str]) -> str:
    """Overrides of a command line, short, as a part of a folder's name: group=choice, last part of
    a key=value, at most `LABEL_LENGTH` characters. Left out are the seed, which stands behind the
    label, and `run.*`, which changes nothing but where the run is.

    >>> label_of(["aqn=off", "actor_config.lr=1e-5", "seed=3", "run.root=/tmp"])
    'aqn=off_lr=1e-5'
    >>> label_of(["aqn.enabled=false", "model=/models/Qwen3 30B", "+aqn.targets=[input,post_attention]"])
    'aqn.enabled=false_model=Qwen3-30B_targets=input-post_attention'
    """
    pairs = [override.lstrip("+~").partition("=") for override in overrides]
    kept = [
        (key.split("."), value)
        for key, _, value in pairs
        if key not in ("seed", "megatron_training.seed") and not key.startswith("run.")
    ]
    last_parts = Counter(key[-1] for key, _ in kept)
    words = []
    for key, value in kept:
        is_vague = key[-1] in ("enabled", "seed") or last_parts[key[-1]] > 1
        short_value = (
            re.sub(r"[^A-Za-z0-9.+_]+", "-", value.rstrip("/").rpartition("/")[2]).strip("-")
            or "none"
        )
        short_key = re.sub(r"[^A-Za-z0-9._+]+", "-", ".".join(key[-2:] if is_vague else key[-1:]))
        words.append(f"{short_key}={short_value}")
    label = "_".join(words)
    while len(label) > LABEL_LENGTH and len(words) > 1:
        words.pop()
        label = "_".join([*words, f"and-{len(kept) - len(words)}-more"])
    return label[:LABEL_LENGTH]


def describe_data(data_files: Mapping[str, Path | str]) -> dict[str, dict[str, Any]]:
    """Absolute path, sha256, size in bytes and rows (of .parquet and .jsonl; None for other kinds)
    of each data file; of a folder with weights the digest of these (fingerprint.py), and no size.
    FileNotFoundError for one that is missing.
    """
    described = {}
    for label, path in data_files.items():
        path = Path(path)
        if path.is_dir():
            described[label] = {
                "path": str(path.absolute()),
                "sha256": weights_digest(path),
                "bytes": None,
                "rows": None,
            }
            continue
        if not path.is_file():
            raise FileNotFoundError(f"data file {path} does not exist or is not a file")
        described[label] = {
            "path": str(path.absolute()),
            "sha256": sha256(path),
            "bytes": path.stat().st_size,
            "rows": _count_rows(path),
        }
    return described


def _other_data(before: Mapping[str, dict], after: Mapping[str, dict]) -> list[str]:
    """A line for each file that is not what it was, and for each of the model's that came or went,
    unless one of both (a run of an earlier version) did not look at the model.
    """
    lines, saw_model = (
        [],
        all(any(label.startswith("model/") for label in each) for each in (before, after)),
    )
    for label in dict.fromkeys([*before, *after]):
        old, new = (each.get(label) for each in (before, after))
        if old and new and old["sha256"] != new["sha256"]:
            lines.append(
                f"{label} data {new['path']}: sha256 was {old['sha256']} and is {new['sha256']}"
            )
        elif not (old and new) and label.startswith("model/") and saw_model:
            lines.append(
                f"{label} data {(old or new)['path']}: {'is gone' if old else 'was not there'}"
            )
    return lines


def _count_rows(path: Path) -> int | None:
    if path.suffix == ".parquet":
        import pyarrow.parquet

        return pyarrow.parquet.read_metadata(path).num_rows
    if path.suffix == ".jsonl":
        with open(path, "rb") as file:
            return sum(1 for line in file if line.strip())
    return None


def dotted(value: Any, name: str = "") -> dict[str, Any]:
    """The values of a nested config by dotted key; a section that is empty is a value.

    >>> dotted({"aqn": {"enabled": True, "exclude": []}, "task": {}})
    {'aqn.enabled': True, 'aqn.exclude': [], 'task': {}}
    """
    if not isinstance(value, dict) or not value:
        return {name: value}
    return {
        key: leaf
        for part in value
        for key, leaf in dotted(value[part], f"{name}.{part}".lstrip(".")).items()
    }


def _differences(before: Any, after: Any) -> dict[str, str]:
    """A line for each key whose value changed, `run.resume` aside; one that is not there is none."""
    before, after = dotted(before), dotted(after)
    changed = [
        key
        for key in dict.fromkeys([*before, *after])
        if before.get(key) != after.get(key) and key != "run.resume"
    ]
    was, now = (
        {key: repr(values[key]) if key in values else "not there" for key in changed}
        for values in (before, after)
    )
    return {key: f"{key} was {was[key]} and is {now[key]}" for key in changed}


def _runs_below(parent: Path) -> list[tuple[RunDirectory, str, dict[str, Any]]]:
    """The runs below `parent`, newest first, with their state and config; damaged ones are left
    out, and named on the screen.
    """
    found = []
    for file in sorted(parent.glob("*/status.json")):
        run = RunDirectory(file.parent)
        try:
            status, config = run.status(), run.config()
            found.append(
                (
                    datetime.fromisoformat(status["started"]).timestamp(),
                    (run, status["state"], config),
                )
            )
        except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError) as error:
            _name_damaged(run.path, f"{type(error).__name__}: {error}")
    return [run for _, run in sorted(found, key=itemgetter(0), reverse=True)]


@cache  # once a process: a sweep looks again for each of its runs
def _name_damaged(path: Path, reason: str) -> None:
    print(
        f"warning: {path} is damaged and is skipped ({' '.join(reason.split())}); move it away to "
        "silence this",
        file=sys.stderr,
        flush=True,
    )


def _make_new(parent: Path, stem: str) -> Path:
    """Make `parent/stem`, or the first free of `stem-2`, `stem-3`, ...; mkdir decides between runs
    started at once.
    """
    parent.mkdir(parents=True, exist_ok=True)
    for path in (parent / (stem if attempt == 1 else f"{stem}-{attempt}") for attempt in count(1)):
        with suppress(FileExistsError):
            path.mkdir()
            return path


def _now() -> datetime:
    return datetime.now().astimezone()


def _to_yaml(config: dict) -> str:
    return yaml.safe_dump(config, sort_keys=False, allow_unicode=True, width=120)
