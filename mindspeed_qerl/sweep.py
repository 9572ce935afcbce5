"""Several runs after one another, each in a process of its own: what is finished is not run again,
and what fails is not in the way.

    python cli/train_grpo.py --multirun --config-name grpo_tiny_moe_cpu aqn=off,qerl seed=1,2,3
"""

import ctypes
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mindspeed_qerl.common.errors import ConfigError
from mindspeed_qerl.engines import data_files
from mindspeed_qerl.recipe.reader import read, read_recipe
from mindspeed_qerl.runs.directory import RunDirectory

PR_SET_PDEATHSIG = 1  # prctl(2)
# Of one run of a sweep: its overrides; "finished", "finished before" or "failed"; its directory, if
# it is finished
Outcome = tuple[str, str, RunDirectory | None]


def check(raw: dict[str, Any]) -> None:
    """ConfigError for a resolved config that no run of a sweep can have: one with faults, or a
    rehearsal, whose run has another config than was asked for, so that it could not be found again.
    """
    recipe, found = read(raw)
    if recipe.rehearsal.enabled:
        raise ConfigError(
            "rehearsal.enabled=true with --multirun: rehearse one config at a time, without "
            "--multirun"
        )
    found.raise_faults()


def run_one(
    raw: dict[str, Any], name: str, overrides: Sequence[str], command: Sequence[str]
) -> Outcome:
    """Run one config of a sweep, unless a run of it is finished; resume one that stopped.

    `raw` is its resolved config, `name` the config's name, `overrides` what makes it this one,
    `command` what runs the config without them. KeyboardInterrupt if the run was interrupted.
    """
    what = " ".join(overrides)
    if done := finished(raw, name):
        print(f"sweep: {what}: finished before, in {done.path}", flush=True)
        return what, "finished before", done
    print(f"sweep: {what}", flush=True)
    words = [sys.executable, *command, "run.resume=auto", *overrides]
    process = subprocess.Popen(words, preexec_fn=_end_with_parent)  # noqa: PLW1509  no threads here
    try:
        code = process.wait()
    except KeyboardInterrupt:
        # the terminal has sent it to the run as well, which notes it in its directory
        process.wait()
        raise
    if code == 130:
        raise KeyboardInterrupt
    return what, "failed" if code else "finished", finished(raw, name)


def report(outcomes: Sequence[Outcome]) -> int:
    """Print what became of each run; the sweep's exit status: 0 if all are finished, else 1."""
    for overrides, result, run in outcomes:
        line = f"{overrides}: {result}"
        if run:
            line += f", in {run.path}"
        print(line)
    failed = sum(result == "failed" for _, result, _ in outcomes)
    if failed:
        print(
            f"error: {failed} of {len(outcomes)} runs failed; started again with the same "
            "command, the sweep tries them again",
            file=sys.stderr,
        )
    return int(failed > 0)


def finished(raw: dict[str, Any], name: str) -> RunDirectory | None:
    """The newest run of the resolved config `raw`, named `name`, with the data, the code and the
    model that are there now, that finished.
    """
    recipe = read_recipe(raw)
    parent = Path(recipe.run.root) / (recipe.run.name or name)
    try:
        return RunDirectory.finished(parent, config=raw, data_files=data_files(recipe))
    except FileNotFoundError:  # the run itself says what is missing
        return None


def _end_with_parent() -> None:
    """A sweep that is killed takes its run along, which can be resumed, instead of leaving it
    beside the next one.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
