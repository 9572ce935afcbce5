"""A run on one page: check the config, make the run directory, call the engine, report."""

import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mindspeed_qerl.common.errors import ConfigError, EngineError
from mindspeed_qerl.common.files import whole_checkpoints
from mindspeed_qerl.engines import data_files, engine_of, trainer_of
from mindspeed_qerl.engines.noise import lost_noise
from mindspeed_qerl.recipe.reader import Found, read
from mindspeed_qerl.recipe.types import LOSS_MODES, Recipe
from mindspeed_qerl.recipe.writer import to_config
from mindspeed_qerl.runs.description import label_of
from mindspeed_qerl.runs.directory import RunDirectory
from mindspeed_qerl.runs.metrics import MetricsWriter, read_jsonl
from mindspeed_qerl.runs.progress import Progress
from mindspeed_qerl.tasks.checks import check_task
from mindspeed_qerl.tasks.packed import read_packed_rows
from mindspeed_qerl.tasks.prompts import check_template, load_tokenizer
from mindspeed_qerl.tasks.rows import read_rows


def run(raw: dict[str, Any], name: str, overrides: Sequence[str] = ()) -> int:
    """Run one experiment: the process exit code is 0 finished, 1 stopped by a failure (the run
    directory stays, with the reason in status.json), 2 refused before a run directory was made, 130
    interrupted.

    Args:
        raw: the resolved config as plain dicts and lists (recipe/types.py has its keys).
        name: the config's name, which names the run unless `run.name` does.
        overrides: those of the command line, "key=value", which the run's folder is labelled with.
    """
    try:
        recipe, found = read(raw)
        rehearsed = None
        config = raw
        if recipe.rehearsal.enabled:
            from mindspeed_qerl.rehearsal.prepare import prepare

            rehearsed = recipe
            recipe = prepare(recipe, found)
            config = to_config(recipe)
        recipe = _with_run_to_resume(recipe, name, config)
        if not rehearsed:
            found.faults += engine_of(recipe).validate(recipe)
        found.raise_faults()
        if recipe.algorithm.loss_mode not in LOSS_MODES:
            from mindspeed_qerl.algorithm.losses import try_policy_loss  # torch: seconds

            try_policy_loss(recipe.algorithm)
        if engine_of(recipe).UPSTREAM:
            rows = read_packed_rows(recipe.task.data_path)
        else:
            rows = read_rows(recipe.task.train_file)
        if recipe.task.chat_template_kwargs:
            check_template(load_tokenizer(recipe.model.path), recipe.task.chat_template_kwargs)
        found_in_data = check_task(recipe.task, rows)
        found_in_data.raise_faults()
        found.warnings += [*found_in_data.warnings, *lost_noise(rehearsed or recipe)]
        directory, after = _directory(recipe, config, name, label_of(overrides))
    except (ValueError, OSError) as error:  # ConfigError is a ValueError
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        return 2
    return _train(recipe, found, name, directory, after, rehearsed)


def _directory(
    recipe: Recipe, config: dict[str, Any], name: str, label: str
) -> tuple[RunDirectory, int | None]:
    """The run's directory, and the step that it resumes after (None: a new run); ValueError or
    OSError if refused.
    """
    run = recipe.run
    engine = engine_of(recipe)
    contents: dict[str, Any] = {
        "config": config,
        "command": sys.argv,
        "data_files": data_files(recipe),
        "versions": engine.versions(),
    }
    if not run.resume:
        name = run.name or name
        return RunDirectory.create(run.root, name, seed=run.seed, label=label, **contents), None
    try:
        directory = RunDirectory.take(run.resume)
    except OSError as error:
        raise ConfigError(f"run.resume = {run.resume!r}: {error}") from error
    after = trainer_of(recipe).last_checkpoint(recipe)
    return directory.resume(may_change=engine.MAY_CHANGE, **contents), after


def _train(
    recipe: Recipe,
    found: Found,
    name: str,
    directory: RunDirectory,
    after: int | None,
    rehearsed: Recipe | None,
) -> int:
    """Train in `directory` and report; the exit code of `run`."""
    if directory.other_versions:
        found.warnings.append(
            f"the run was started with other versions: {'; '.join(directory.other_versions)}"
        )
    if found.unused and not rehearsed:  # a rehearsal's report names them
        found.warnings.append(
            f"the {recipe.engine} engine does not use {', '.join(found.unused)} (`python -m "
            "mindspeed_qerl.recipe.keys` says why)"
        )
    settings = recipe.run
    try:
        writer = MetricsWriter(directory, settings.tensorboard, settings.wandb_project, after)
        evaluations = read_jsonl(directory.eval_file)
        progress = Progress(settings.train_iters, name, evaluations)
        with writer as metrics, progress:
            progress.message(f"Run directory: {directory.path}")
            for warning in found.warnings:
                progress.message(f"Warning: {warning}")
            trainer_of(recipe).train(recipe, directory, metrics, progress)
        directory.finish()
    except KeyboardInterrupt:
        return _stop(directory, how_to_resume(directory), code=130)
    except (ConfigError, EngineError, OSError, ImportError) as error:  # a full disk, no package
        return _stop(directory, str(error))
    except BaseException as error:
        _fail(directory, f"{type(error).__name__}: {error}")
        raise
    _report(directory)
    if rehearsed:
        from mindspeed_qerl.rehearsal.report import report

        print("\n" + report(directory, rehearsed, found.unused))
    return 0


def _with_run_to_resume(recipe: Recipe, name: str, config: dict[str, Any]) -> Recipe:
    """`recipe` with, for `run.resume: auto`, the newest run of this config that has a checkpoint
    and did not finish, or none if there is none.
    """
    if recipe.run.resume != "auto":
        return recipe
    run = RunDirectory.unfinished(
        Path(recipe.run.root) / (recipe.run.name or name),
        config=config,
        may_change=engine_of(recipe).MAY_CHANGE,
    )
    path = str(run.path) if run else None
    print(f"run.resume=auto: {path or 'nothing to resume, a new run begins'}", flush=True)
    return replace(recipe, run=replace(recipe.run, resume=path))


def how_to_resume(directory: RunDirectory) -> str:
    """Returns what an interrupted run says: the step that it reached, and how it goes on after
    which.
    """
    step = directory.status()["step"]
    checkpoints = whole_checkpoints(directory.checkpoints_dir)
    if not checkpoints:
        return (
            f"interrupted after step {step}, before the first checkpoint "
            "(megatron_training.save_interval): the same command starts anew"
        )
    return (
        f"interrupted after step {step}. The same command with run.resume=auto continues after "
        f"step {checkpoints[-1]}, the last checkpoint"
    )


def _report(directory: RunDirectory) -> None:
    # with Matplotlib, which a refusal need not wait for
    from mindspeed_qerl.runs.report import write_report

    try:
        write_report(directory)
    except (OSError, ValueError) as error:  # a full disk, a damaged row of metrics.jsonl
        print(
            f"\nwarning: the report cannot be written: {error}. Later:\n"
            f"  python -m mindspeed_qerl.runs.report {shlex.quote(str(directory.path))}",
            file=sys.stderr,
        )


def _fail(directory: RunDirectory, reason: str) -> None:
    try:
        directory.fail(reason)
    except OSError as error:
        print(f"\nwarning: status.json cannot be written: {error}", file=sys.stderr)


def _stop(directory: RunDirectory, reason: str, code: int = 1) -> int:
    _fail(directory, reason)
    if directory.status()["step"] > 0:
        _report(directory)
    print(f"\nerror: {reason}\nWhat was done until then is in {directory.path}", file=sys.stderr)
    return code
