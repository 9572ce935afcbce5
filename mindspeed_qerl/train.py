"""A run on one page: check the config, make the run directory, call the engine, report."""

import sys
import time
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

from mindspeed_qerl.errors import ConfigError, EngineError, unknown
from mindspeed_qerl.runs.directory import RunDirectory

# Each is a package with settings.check(raw), settings.MAY_CHANGE (keys that may be another when a run is gone on with),
# engine.train(settings, directory, metrics, progress) and engine.last_checkpoint(settings), the step that a run can go on after.
ENGINES = {"local": "mindspeed_qerl.local", "mindspeed_rl": "mindspeed_qerl.ascend"}


def run(raw: dict[str, Any], name: str) -> int:
    """Run one experiment.

    Args:
        raw: the resolved config as plain dicts and lists (see mindspeed_qerl.recipe.config).
        name: the config's name, which names the run unless `run.name` does.

    Returns:
        process exit code: 0 finished, 1 stopped by a failure (the run directory stays, with the reason in status.json),
        2 refused before a run directory was made, 130 interrupted.
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
    from mindspeed_qerl.tasks.rows import read_rows

    try:
        for file in config.data_files.values():
            if file.endswith((".parquet", ".jsonl")):
                read_rows(file)
        after = None
        if config.run.resume:
            after = engine.last_checkpoint(config)
            directory = RunDirectory.reopen(config.run.resume, config=raw, command=sys.argv, may_change=settings.MAY_CHANGE)
        else:
            directory = RunDirectory.create(config.run.root, config.run.name or name, config=raw, command=sys.argv, seed=config.seed,
                                            data_files=config.data_files)
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
            for warning in config.warnings:
                progress.message(f"Warning: {warning}")
            if config.ignored_keys and not rehearsed:  # a rehearsal's report names them
                progress.message(f"Warning: the {raw['engine']} engine does not use {', '.join(config.ignored_keys)}")
            if config.aqn.restart_every:
                directory.record(aqn_restart_every=config.aqn.restart_every)
            engine.train(config, directory, metrics, progress)
    except KeyboardInterrupt:
        return _stop(directory, "interrupted", code=130)
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
    """`raw` with, for `run.resume: auto`, the newest run of this config that has a checkpoint and did not finish, or null if there is none."""
    run = raw.get("run")
    if not isinstance(run, dict) or run.get("resume") != "auto":
        return raw
    found = RunDirectory.unfinished(Path(run.get("root", "runs")) / (run.get("name") or name), config=raw, may_change=may_change)
    print(f"run.resume=auto: {f'goes on with {found.path}' if found else 'no run of this config stopped with a checkpoint; a new one begins'}",
          flush=True)
    return {**raw, "run": {**run, "resume": found and str(found.path)}}


def _stop(directory: RunDirectory, reason: Exception | str, code: int = 1) -> int:
    from mindspeed_qerl.runs.report import write_report

    directory.fail(str(reason))
    if directory.status()["step"] > 0:
        write_report(directory)
    print(f"\nerror: {reason}\nWhat was done until then is in {directory.path}", file=sys.stderr)
    return code


def _refuse(error: Exception) -> int:
    for line in str(error).splitlines():
        print(f"error: {line}", file=sys.stderr)
    return 2
