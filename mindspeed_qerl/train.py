"""A run on one page: check the config, make the run directory, call the engine, report."""

import re
import shlex
import sys
import time
from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import Any

from mindspeed_qerl.errors import ConfigError, EngineError, unknown
from mindspeed_qerl.files import checkpoint_iterations
from mindspeed_qerl.runs.directory import RunDirectory, label_of, runs_folder

# Each is a package with settings.check(raw), settings.MAY_CHANGE (keys that may change when a run is resumed),
# engine.train(settings, directory, metrics, progress) and engine.last_checkpoint(settings), the step to resume after.
ENGINES = {"local": "mindspeed_qerl.local", "mindspeed_rl": "mindspeed_qerl.ascend"}


def run(raw: dict[str, Any], name: str, overrides: Sequence[str] = ()) -> int:
    """Run one experiment.

    Args:
        raw: the resolved config as plain dicts and lists (see mindspeed_qerl.recipe.config).
        name: the config's name, which names the run unless `run.name` does.
        overrides: those of the command line, "key=value", which the run's folder is labelled with.

    Returns:
        process exit code: 0 finished, 1 stopped by a failure (the run directory stays, with the reason in
        status.json), 2 refused before a run directory was made, 130 interrupted.
    """
    try:
        if raw.get("engine") not in ENGINES:
            raise ConfigError(unknown("engine", raw.get("engine"), ENGINES))
        package = ENGINES[raw["engine"]]
        rehearsed = raw if isinstance(raw.get("rehearsal"), dict) and raw["rehearsal"].get("enabled") else None
        if rehearsed:
            from mindspeed_qerl import rehearsal

            raw = rehearsal.prepare(rehearsed)
        settings = import_module(f"{package}.settings")
        raw = _find_run_to_resume(raw, name, settings.MAY_CHANGE)
        config = settings.check(raw)
        engine = import_module(f"{package}.engine")
    except ConfigError as error:
        return _refuse(error)

    from mindspeed_qerl.runs.metrics import MetricsWriter
    from mindspeed_qerl.runs.progress import Progress
    from mindspeed_qerl.runs.report import write_report
    from mindspeed_qerl.tasks.gsm8k.dataset import read_converted

    try:
        for file in config.data_files.values():
            if file.endswith((".parquet", ".jsonl")):
                read_converted(file)
        if config.run.resume:
            after = engine.last_checkpoint(config)
            directory = RunDirectory.reopen(config.run.resume, config=raw, command=sys.argv,
                                            data_files=config.data_files, may_change=settings.MAY_CHANGE)
        else:
            after = None
            directory = RunDirectory.create(config.run.root, config.run.name or name, config=raw, command=sys.argv,
                                            seed=config.seed, data_files=config.data_files, label=label_of(overrides))
    except (ValueError, OSError) as error:
        return _refuse(error)

    try:
        metrics = MetricsWriter(directory, config.run.tensorboard, config.run.wandb_project, after)
    except Exception as error:  # noqa: BLE001  a missing package, or W&B's own refusal: its message says what to do
        return _stop(directory, error)

    started = time.perf_counter()
    try:
        with metrics, Progress(config.train_iters, name) as progress:
            progress.message(f"Run directory: {directory.path}")
            if metrics.missing_steps:
                steps = ", ".join(map(str, metrics.missing_steps))
                progress.message(f"Warning: metrics.jsonl has lost the rows of steps {steps}; the training is whole, "
                                 "tables and pictures lack these steps")
            for warning in config.warnings:
                progress.message(f"Warning: {warning}")
            if config.ignored_keys and not rehearsed:  # a rehearsal's report names them
                progress.message(f"Warning: the {raw['engine']} engine does not use {', '.join(config.ignored_keys)}")
            if config.aqn.restart_every:
                directory.record(aqn_restart_every=config.aqn.restart_every)
            engine.train(config, directory, metrics, progress)
    except KeyboardInterrupt:
        return _stop(directory, "interrupted", code=130, message=how_to_resume(directory))
    except (ConfigError, EngineError) as error:
        return _stop(directory, error)
    except BaseException as error:
        directory.fail(f"{type(error).__name__}: {error}")
        raise
    directory.record(train_seconds=time.perf_counter() - started)
    directory.finish()
    write_report(directory)
    if rehearsed:
        print("\n" + rehearsal.report(directory, rehearsed, config.ignored_keys))
    return 0


def _find_run_to_resume(raw: dict[str, Any], name: str, may_change: Iterable[str]) -> dict[str, Any]:
    """`raw` with, for `run.resume: auto`, the newest run of this config that has a checkpoint and did not finish, or
    null if there is none."""
    run = raw.get("run")
    if not isinstance(run, dict) or run.get("resume") != "auto":
        return raw
    found = RunDirectory.unfinished(runs_folder(raw, name), config=raw, may_change=may_change)
    word = f"resumes {found.path}" if found else "no run of this config stopped with a checkpoint; a new one begins"
    print(f"run.resume=auto: {word}", flush=True)
    return {**raw, "run": {**run, "resume": found and str(found.path)}}


def how_to_resume(directory: RunDirectory) -> str:
    """What an interrupted run says: the step that it reached, the command that resumes it, and the step that it
    resumes after."""
    step, checkpoints = directory.status()["step"], checkpoint_iterations(directory.checkpoints_dir)
    if not checkpoints:
        return (f"interrupted after step {step}, before the first checkpoint (megatron_training.save_interval): the "
                "same command starts anew")
    command = [part for part in sys.orig_argv if not re.match(r"\+{0,2}run\.resume=", part)]
    return (f"interrupted after step {step}; resume with\n  {shlex.join([*command, 'run.resume=auto'])}\n"
            f"It continues after step {checkpoints[-1]}, the last checkpoint")


def _stop(directory: RunDirectory, reason: Exception | str, code: int = 1, message: str | None = None) -> int:
    from mindspeed_qerl.runs.report import write_report

    directory.fail(str(reason))
    if directory.status()["step"] > 0:
        write_report(directory)
    print(f"\nerror: {message or reason}\nWhat was done until then is in {directory.path}", file=sys.stderr)
    return code


def _refuse(error: Exception) -> int:
    for line in str(error).splitlines():
        print(f"error: {line}", file=sys.stderr)
    return 2
