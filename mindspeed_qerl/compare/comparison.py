"""Runs beside each other: groups that differ in nothing but the seed, and the difference of each to
a baseline.

A run is averaged in only if its numbers mean what they seem to: it finished and its last step was
evaluated, its noise fired as its config says, and it used the same data and code as the others.
Every other run is named with the reason.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from string import ascii_uppercase
from typing import Any

import numpy as np

from mindspeed_qerl.common.errors import ConfigError
from mindspeed_qerl.compare.run import ComparedRun, is_off
from mindspeed_qerl.compare.statistics import LEAST_SEEDS, Estimate, estimate, seeds_needed

SIGNIFICANCE = 0.05
LONGEST_NAME = (
    24  # characters; with a longer one beside two intervals a table is wider than 80 columns
)


@dataclass(frozen=True)
class Group:
    """Runs that differ in nothing but the seed."""

    name: str  # `settings`, or a letter where some group's settings are long
    settings: str  # in what it differs from other groups: "aqn on, actor_config.lr=0.0001"
    config: dict[str, Any]
    runs: list[ComparedRun]

    @property
    def legend(self) -> str:
        return self.name if self.name == self.settings else f"{self.name}: {self.settings}"

    @property
    def seeds(self) -> list[int]:
        return [run.seed for run in self.runs]

    def matrix(self, step: int, questions: Sequence[str], seeds: Iterable[int]) -> np.ndarray:
        """Scores [seeds, questions] after `step` updates."""
        by_seed = {run.seed: run.scores[step] for run in self.runs}
        return np.array([[by_seed[seed][question] for question in questions] for seed in seeds])

    def reward(self) -> dict[int, Estimate]:
        """The training reward by step, of the steps that all runs have."""
        shared = sorted(set.intersection(*(set(run.rewards) for run in self.runs)))
        return {
            step: estimate(np.array([[run.rewards[step]] for run in self.runs])) for step in shared
        }


@dataclass(frozen=True)
class Verdict:
    """A group beside the baseline, at the last step that was evaluated."""

    group: str
    baseline: str
    seeds: list[int]  # that both have
    difference: (
        Estimate | None
    )  # None without such a seed; no verdict with fewer than `LEAST_SEEDS` of them
    word: str  # "better", "worse", "not distinguishable" or "no verdict"
    limit: float  # of p: 5 %, shared by all verdicts of a comparison (Bonferroni)
    seeds_needed: (
        int | None
    )  # to show a difference of this size, if it is not distinguishable; None: no number would


@dataclass(frozen=True)
class Comparison:
    """Everything a comparison found."""

    groups: list[Group]
    differing: list[str]  # the config keys that tell the groups apart
    left_out: list[ComparedRun]
    steps: list[int]  # that all runs were evaluated after
    questions: list[str]
    accuracy: dict[str, dict[int, Estimate]]  # group -> step ->
    reward: dict[str, dict[int, Estimate]]
    difference: dict[
        str, dict[int, Estimate]
    ]  # of accuracy to the baseline's, over the seeds that both have
    verdicts: list[Verdict]

    def to_json(self) -> dict[str, Any]:
        numbers = asdict(self)
        return {
            "groups": [
                {
                    "name": group.name,
                    "settings": group.settings,
                    "seeds": group.seeds,
                    "runs": [str(run.path) for run in group.runs],
                    "differs_in": {key: group.config.get(key) for key in self.differing},
                }
                for group in self.groups
            ],
            "left_out": [{"run": str(run.path), "reasons": run.faults} for run in self.left_out],
            "notes": {
                str(run.path): run.notes for group in self.groups for run in group.runs if run.notes
            },
            "questions": len(self.questions),
            **{name: numbers[name] for name in ("accuracy", "reward", "difference", "verdicts")},
        }


def compare(runs: Sequence[ComparedRun], baseline: str | None = None) -> Comparison:
    """Group `runs`, leave out those that may not be averaged in, and compare each group with the
    baseline: by its name or settings, or a part of them that no other group has; None: the group
    without AQN, or else the first one.

    ConfigError: nothing is left to compare, no such baseline, or the runs share no evaluated step
    or no question.
    """
    faults = _all_faults(runs)
    left_out = [replace(run, faults=found) for run in runs if (found := faults[run.path])]
    by_config: dict[str, list[ComparedRun]] = {}
    for run in runs:
        if not faults[run.path]:
            by_config.setdefault(json.dumps(run.config, sort_keys=True), []).append(run)
    if not by_config:
        reasons = "\n".join(f"{run.path}: {'; '.join(run.faults)}" for run in left_out)
        raise ConfigError(f"none of {len(runs)} runs can be averaged in:\n{reasons}")
    kept = [run for members in by_config.values() for run in members]
    steps = sorted(set.intersection(*(set(run.scores) for run in kept)))
    if not steps:
        raise ConfigError("the runs share no step after which all were evaluated")
    questions = [
        question
        for question in kept[0].scores[steps[-1]]
        if all(question in run.scores[step] for run in kept for step in steps)
    ]
    if not questions:
        raise ConfigError("the runs were not asked the same questions: none is common to all")
    differing = _differing([members[0].config for members in by_config.values()])
    groups = _named(list(by_config.values()), differing)
    base = _find_baseline(groups, baseline)
    others = [group for group in groups if group is not base]
    groups = [base, *others]
    accuracy = {
        group.name: {step: estimate(group.matrix(step, questions, group.seeds)) for step in steps}
        for group in groups
    }
    reward = {group.name: group.reward() for group in groups}
    difference, verdicts = {}, []
    for group in others:
        seeds = [seed for seed in group.seeds if seed in base.seeds]
        by_step = difference[group.name] = {
            step: estimate(
                group.matrix(step, questions, seeds) - base.matrix(step, questions, seeds)
            )
            for step in steps
            if seeds
        }
        verdicts.append(_verdict(group.name, base.name, seeds, by_step.get(steps[-1]), len(others)))
    return Comparison(
        groups, differing, left_out, steps, questions, accuracy, reward, difference, verdicts
    )


def _all_faults(runs: Sequence[ComparedRun]) -> dict[Path, tuple[str, ...]]:
    """Path -> why a run may not be averaged in: what it says itself, and what the others make of
    it.
    """
    faults = {run.path: run.faults for run in runs}
    usable = [run for run in runs if not run.faults]
    told = {
        "data": "its data differ",
        "code": "its code differs",
        "evaluation": "it was evaluated otherwise",
    }
    for what, words in told.items() if usable else ():
        (usual, _), *_ = Counter(
            json.dumps(getattr(run, what), sort_keys=True) for run in usable
        ).most_common(1)
        usual = json.loads(usual)  # of most runs, or if there is no most, of the first
        for run in usable:
            found = getattr(run, what)
            if other := [
                key for key in dict.fromkeys([*usual, *found]) if found.get(key) != usual.get(key)
            ]:
                faults[run.path] += (
                    f"{words}: "
                    + ", ".join(
                        f"{key} {_short(found.get(key))} where most have {_short(usual.get(key))}"
                        for key in other
                    ),
                )
    newest: dict[tuple[str, int], ComparedRun] = {}
    for run in sorted(usable, key=lambda run: (run.started, run.path)):
        if not faults[run.path]:
            key = json.dumps(run.config, sort_keys=True), run.seed
            if older := newest.get(key):
                faults[older.path] = (f"it repeats seed {run.seed}, and {run.path.name} is newer",)
            newest[key] = run
    return faults


def _short(value: str | None) -> str:
    """A hash by its beginning, anything else as it is."""
    return (
        "none" if value is None else value[:12] if re.fullmatch(r"[0-9a-f]{40,}", value) else value
    )


def _differing(configs: Sequence[dict[str, Any]]) -> list[str]:
    """The keys that tell `configs` apart; those of a section that is switched off say nothing."""
    return [
        key
        for key in dict.fromkeys(key for config in configs for key in config)
        if len({json.dumps(config.get(key)) for config in configs if not is_off(config, key)}) > 1
    ]


def _named(groups: list[list[ComparedRun]], differing: list[str]) -> list[Group]:
    """The groups under names that say in what they differ; all under letters where that would be
    long, the default baseline first.
    """
    named: list[Group] = []
    for runs in groups:
        config = runs[0].config
        parts = [f"{key}={json.dumps(config[key])}" for key in differing if key in config]
        if "aqn.enabled" in differing:
            parts = [
                {"aqn.enabled=true": "aqn on", "aqn.enabled=false": "aqn off"}.get(part, part)
                for part in parts
            ]
        settings = ", ".join(parts).replace('"', "") or "all runs"
        # 1 and "1" look alike:
        taken = sum(
            other.settings == settings or other.settings.startswith(f"{settings} (")
            for other in named
        )
        unique = f"{settings} ({taken + 1})" if taken else settings
        named.append(Group(unique, unique, config, sorted(runs, key=lambda run: run.seed)))
    if max(len(group.name) for group in named) <= LONGEST_NAME:
        return named
    base = _find_baseline(named, None)
    letters = (
        f"{letter}{turn}" for turn in ("", *range(2, len(named))) for letter in ascii_uppercase
    )  # ..., Z, A2
    return [
        replace(group, name=name)
        for name, group in zip(letters, sorted(named, key=lambda group: group is not base))
    ]


def _find_baseline(groups: list[Group], asked: str | None) -> Group:
    if asked is None:
        return next(
            (group for group in groups if group.config.get("aqn.enabled") is False), groups[0]
        )
    exact = [group for group in groups if asked in (group.name, group.settings)]
    found = exact or [group for group in groups if asked in group.settings]
    if len(found) != 1:
        known = "; ".join(group.legend for group in groups)
        raise ConfigError(
            f"--baseline {asked!r} names {len(found)} groups; the groups are: {known}"
        )
    return found[0]


def _verdict(
    group: str, baseline: str, seeds: list[int], difference: Estimate | None, comparisons: int
) -> Verdict:
    """What `difference` says; with several groups the limit of p is divided by their number
    (Bonferroni).
    """
    word, needed, limit = "not distinguishable", None, SIGNIFICANCE / comparisons
    if len(seeds) < LEAST_SEEDS:
        word = "no verdict"
    elif difference.p < limit:
        word = "better" if difference.mean > 0 else "worse"
    elif difference.mean:
        needed = seeds_needed(difference, limit)
    return Verdict(group, baseline, seeds, difference, word, limit, needed)
