"""The directory of one run: made once, never overwritten, with all it takes to repeat the run.

<root>/<name>/2025-11-21_14-03-59_aqn=off_seed1/
    config.yaml     the resolved config
    command.txt     the command line, quoted for a shell
    versions.json   Python, machine, every installed package, the source's git commit, and what the
                    engine adds
    data.json       path and sha256 of each data file, of the model's, and of the user's own code
    status.json     state ("running", "finished" or "failed"), step, reason, started, ended, seconds
                    of all processes that wrote the run, seed, id
    lock            held by the process that writes the run
    facts.json      what was measured once: start-up seconds, parameter counts, ... (`record`)
    metrics.jsonl, eval.jsonl, eval_answers.jsonl, rollouts.jsonl, tensorboard/ (metrics.py)
    checkpoints/    written by the engine
    summary.md, plots/ (report.py)
"""

import json
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import IO, Any, Self
from uuid import uuid4

import yaml

from mindspeed_qerl.common.errors import ConfigError
from mindspeed_qerl.common.files import hold, json_text, whole_checkpoints, write_whole

from .description import Content, DataFiles, describe_data, differences, own_versions

ACCEPTED = "run.accepted_checks"  # what the machine was found to lack changes no run


NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=+-]*")  # of a run, or an evaluation
NAME_RULE = (
    "it becomes a folder: use letters, digits and . _ = + - only, starting with a letter or digit"
)


class RunDirectory:
    """The files of one run. `create` makes a new one, `take` and `resume` resume one, `open` reads
    one. The process that writes the run holds its `lock`.
    """

    def __init__(self, path: Path | str):
        self.path = Path(path)
        self.lock: IO | None = None
        # when it would have been opened, had one process written it without a pause
        self._opened = time.monotonic()
        # a line for each that a resumed run was not started with
        self.other_versions: list[str] = []
        self.status_file = self.path / "status.json"
        self.facts_file = self.path / "facts.json"
        self.metrics_file = self.path / "metrics.jsonl"
        self.eval_file = self.path / "eval.jsonl"
        self.eval_answers_file = self.path / "eval_answers.jsonl"
        self.rollouts_file = self.path / "rollouts.jsonl"
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
        data_files: DataFiles,
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
        if not NAME.fullmatch(name):
            raise ValueError(f"run.name = {name!r}: {NAME_RULE}")
        contents = {
            "config.yaml": _to_yaml(config),
            "command.txt": shlex.join(command) + "\n",
            "versions.json": json_text({**own_versions(), **versions}),
            "data.json": json_text(describe_data(data_files)),
        }
        started = _now()
        words = [f"{datetime.fromisoformat(started):%Y-%m-%d_%H-%M-%S}", label, f"seed{seed}"]
        status = {
            "state": "running",
            "step": 0,
            "reason": None,
            "started": started,
            "ended": None,
            "seconds": 0.0,
            "seed": seed,
            "id": uuid4().hex,
        }
        # last: a directory that has it has everything
        contents["status.json"] = json_text(status)
        try:
            path = _make_new(Path(root) / name, "_".join(filter(None, words)))
        except OSError as error:
            raise ConfigError(
                f"run.root = {str(root)!r}: no folder can be made: {error}"
            ) from error
        run = cls(path)
        run.lock = hold(path)
        for file, text in contents.items():
            write_whole(path / file, text)
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
        data_files: DataFiles,
        may_change: Iterable[str] = (),
        versions: Mapping[str, Any] = {},
    ) -> Self:
        """Go on with a run that was taken: the same data, and the same config but for `run.resume`,
        the checks that were accepted, and the keys of `may_change`, such as the layout. config.yaml
        and versions.json become those of now; the earlier versions are kept as
        versions.before.json (`other_versions` has the differences). The command is added to
        command.txt.

        Raises FileNotFoundError when a data file is missing, ValueError when the run is finished,
        or its config or data differ.
        """
        status = self.status()
        if status["state"] == "finished":
            raise ValueError(
                f"{self.path} is finished after {status['step']} steps: there is nothing to resume"
            )
        if lines := self._other_config(config, may_change):
            raise ValueError(
                f"{self.path} was started with another config. A run resumes as it was; to try "
                "other values, start a new one.\n" + "\n".join(lines)
            )
        if lines := self.other_data(data_files):
            raise ValueError(
                f"{self.path} was started with other data, code of your own, or another "
                "model. Put the files back that it was started with, or start a new run.\n"
                + "\n".join(lines)
            )
        self._opened -= status.get("seconds", 0.0)
        self.summary_file.unlink(missing_ok=True)  # that of its failure
        write_whole(self.path / "config.yaml", _to_yaml(config))
        started_with = self.read_json("versions.json")
        resumed_with = {**own_versions(), **versions}
        self.other_versions = list(differences(started_with, resumed_with).values())
        if self.other_versions:
            write_whole(self.path / "versions.before.json", json_text(started_with))
            write_whole(self.path / "versions.json", json_text(resumed_with))
        with open(self.path / "command.txt", "a", encoding="utf-8") as file:
            file.write(shlex.join(command) + "\n")
        self._note(state="running", reason=None, ended=None)
        return self

    def _other_config(self, config: dict, may_change: Iterable[str]) -> list[str]:
        """A line for each key that `config` has otherwise, but for those that may change."""
        changed = differences(self.config(), config)
        for key in (*may_change, "run.resume", ACCEPTED):
            changed.pop(key, None)
        return list(changed.values())

    def other_data(self, data_files: DataFiles) -> list[str]:
        """A line for each of the files that is not what the run was started with; of the model, if
        it is given, also for those that are gone. FileNotFoundError for one that is missing.
        """
        before = self.read_json("data.json")
        after = describe_data(data_files)
        given = set(after)
        if any(label.startswith("model/") for label in after):
            given |= {label for label in before if label.startswith("model/")}
        digests = {f"{label}.sha256" for label in given}
        return [line for key, line in differences(before, after).items() if key in digests]

    @classmethod
    def unfinished(
        cls, parent: Path, *, config: dict, may_change: Iterable[str] = ()
    ) -> Self | None:
        """The newest run below `parent` that did not finish, has a checkpoint, and can be resumed
        with `config`.
        """
        for run in cls._newest_first(parent, config, may_change):
            if run.status()["state"] != "finished" and whole_checkpoints(run.checkpoints_dir):
                return run
        return None

    @classmethod
    def finished(cls, parent: Path, *, config: dict, data_files: DataFiles) -> Self | None:
        """The newest run below `parent` that finished with `config` and these data.
        FileNotFoundError for a file that is missing.
        """
        for run in cls._newest_first(parent, config):
            if run.status()["state"] == "finished" and not run.other_data(data_files):
                return run
        return None

    @classmethod
    def _newest_first(
        cls, parent: Path, config: dict, may_change: Iterable[str] = ()
    ) -> Iterator[Self]:
        """The runs of `config` below `parent`; their names begin with their dates. Damaged ones are
        left out, and named on the screen.
        """
        for file in sorted(parent.glob("*/status.json"), reverse=True):
            run = cls(file.parent)
            try:
                run.status()
                is_other = run._other_config(config, may_change)
            except (OSError, ValueError) as error:
                print(f"warning: {run.path} is skipped: {error}", file=sys.stderr, flush=True)
                continue
            if not is_other:
                yield run

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

    def config(self) -> Content:
        """The resolved config of the run. ValueError for a damaged file."""
        return self._read("config.yaml", yaml.safe_load)

    def status(self) -> Content:
        """The content of status.json. A run that was killed outright still says "running"."""
        return self.read_json("status.json")

    @property
    def id(self) -> str:
        """Its own, which its checkpoints have, too."""
        return self.status()["id"]

    def identity(self) -> dict[str, str | None]:
        """For its checkpoints: the run's own id, and the digest of the Hugging Face weights that it
        started from, None if there were none.
        """
        weights = self.read_json("data.json").get("model/weights", {})
        return {"run": self.id, "base": weights.get("sha256")}

    def check_owner(self, checkpoint: Path, owner: str | None) -> None:
        """ValueError if `owner`, the id that a checkpoint has, if any, is another run's."""
        if owner not in (None, self.id):
            raise ValueError(
                f"{checkpoint} is of another run (id {owner}; {self.path} has {self.id}): bring "
                "this run's own back, or move it away to resume from the one before"
            )

    def facts(self) -> Content:
        """Returns what `record` was told so far."""
        return self.read_json("facts.json") if self.facts_file.exists() else {}

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
        other = [name for name, value in facts.items() if before.get(name, value) != value]
        if other:
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
        self._note(state="finished", reason=None, ended=_now())

    def fail(self, reason: str) -> None:
        """Note that the run stopped before its end, and why."""
        self._note(state="failed", reason=reason, ended=_now())

    def read_json(self, name: str) -> Content:
        """The content of one of its files; ValueError for a damaged one."""
        return self._read(name, json.loads)

    def _read(self, name: str, parse: Callable[[str], Any]) -> Content:
        file = self.path / name
        try:
            return dict(parse(file.read_text(encoding="utf-8")))
        except (yaml.YAMLError, TypeError, ValueError) as error:
            words = " ".join(str(error).split())
            raise ValueError(
                f"{file} is damaged: {words}. Restore it, or move the run away"
            ) from error

    def _note(self, **changes: Any) -> None:
        status = {**self.status(), **changes}
        status["seconds"] = round(time.monotonic() - self._opened, 1)
        write_whole(self.status_file, json_text(status))


def _make_new(parent: Path, stem: str) -> Path:
    """Make `parent/stem`, or the first free of `stem-2`, `stem-3`, ...; mkdir decides between runs
    started at once.
    """
    parent.mkdir(parents=True, exist_ok=True)
    for attempt in count(1):
        path = parent / (stem if attempt == 1 else f"{stem}-{attempt}")
        with suppress(FileExistsError):
            path.mkdir()
            break
    return path


def _now() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")


def _to_yaml(config: dict) -> str:
    return yaml.safe_dump(config, sort_keys=False, allow_unicode=True, width=120)
