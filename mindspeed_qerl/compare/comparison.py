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
from itertools import chain, product
from pathlib import Path
from string import ascii_uppercase
from typing import Any

import numpy as np

from mindspeed_qerl.common.errors import ConfigError
from mindspeed_qerl.compare.run import ComparedRun, is_off
from mindspeed_qerl.compare.statistics import LEAST_SEEDS, Estimate, estimate, seeds_needed

SIGNIFICANCE = 0.05
# characters; with a longer name beside two intervals a table is wider than 80 columns
LONGEST_NAME = 24
COMMON = {  # field of ComparedRun -> what is said of a run that has another than most
    "data": "its data differ",
    "code": "its code differs",
    "evaluation": "it was evaluated otherwise",
}

BySteps = dict[str, dict[int, Estimate]]  # by group, by step


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

    def scores(
        self, steps: Sequence[int], questions: Sequence[str], seeds: Sequence[int]
    ) -> np.ndarray:
        """Float64 [seeds, steps, questions], after so many updates."""
        by_seed = {run.seed: run.scores for run in self.runs}
        places = product(seeds, steps, questions)
        scores = [by_seed[seed][step][question] for seed, step, question in places]
        return np.reshape(scores, (len(seeds), len(steps), len(questions)))

    def reward(self) -> dict[int, Estimate]:
        """The training reward by step, of the steps that all runs have."""
        steps = shared(run.rewards for run in self.runs)
        rewards = [run.rewards[step] for run, step in product(self.runs, steps)]
        return by_step(steps, np.reshape(rewards, (len(self.runs), len(steps), 1)))


def shared(values: Iterable[Iterable[int]]) -> list[int]:
    """What all have, in order."""
    return sorted(set.intersection(*map(set, values)))


def by_step(steps: Sequence[int], values: np.ndarray) -> dict[int, Estimate]:
    """The mean over seeds and questions at each step. values: [seeds, steps, questions]."""
    return {step: estimate(values[:, number]) for number, step in enumerate(steps)}


@dataclass(frozen=True)
class Verdict:
    """A group beside the baseline, at the last step that was evaluated."""

    group: str
    baseline: str
    seeds: list[int]  # that both have
    # None without such a seed; no verdict with fewer than `LEAST_SEEDS` of them
    difference: Estimate | None
    word: str  # "better", "worse", "not distinguishable" or "no verdict"
    limit: float  # of p: 5 %, shared by all verdicts of a comparison (Bonferroni)
    # to show a difference of this size, if it is not distinguishable; None: no number would
    seeds_needed: int | None


@dataclass(frozen=True)
class Comparison:
    """Everything a comparison found."""

    groups: list[Group]
    differing: list[str]  # the config keys that tell the groups apart
    left_out: list[ComparedRun]
    steps: list[int]  # that all runs were evaluated after
    questions: list[str]
    accuracy: BySteps
    reward: BySteps
    difference: BySteps  # of accuracy to the baseline's, over the seeds that both have
    verdicts: list[Verdict]

    def to_json(self) -> dict[str, Any]:
        groups: list[dict[str, Any]] = []
        notes: dict[str, tuple[str, ...]] = {}
        for group in self.groups:
            entry = {
                "name": group.name,
                "settings": group.settings,
                "seeds": group.seeds,
                "runs": [str(run.path) for run in group.runs],
                "differs_in": {key: group.config.get(key) for key in self.differing},
            }
            groups.append(entry)
            notes |= {str(run.path): run.notes for run in group.runs if run.notes}
        numbers = asdict(replace(self, groups=[], left_out=[], questions=[]))
        for name in ("steps", "differing"):
            del numbers[name]
        left_out = [{"run": str(run.path), "reasons": run.faults} for run in self.left_out]
        own = dict(groups=groups, left_out=left_out, notes=notes, questions=len(self.questions))
        return numbers | own


def compare(runs: Sequence[ComparedRun], baseline: str | None = None) -> Comparison:
    """Group `runs`, leave out those that may not be averaged in, and compare each group with the
    baseline: by its name or settings, or a part of them that no other group has; None: the group
    without AQN, or else the first one.

    ConfigError: nothing is left to compare, no such baseline, or the runs share no evaluated step
    or no question.
    """
    faults = _all_faults(runs)
    by_config: dict[str, list[ComparedRun]] = {}
    left_out, kept = [], []
    for run in runs:
        if faults[run.path]:
            left_out.append(replace(run, faults=faults[run.path]))
        else:
            kept.append(run)
            by_config.setdefault(_key(run), []).append(run)
    if not kept:
        reasons = "\n".join(f"{run.path}: {'; '.join(run.faults)}" for run in left_out)
        raise ConfigError(f"none of {len(runs)} runs can be averaged in:\n{reasons}")
    steps = shared(run.scores for run in kept)
    if not steps:
        raise ConfigError("the runs share no step after which all were evaluated")
    evaluations = chain.from_iterable(run.scores.values() for run in kept)
    common = set.intersection(*map(set, evaluations))
    questions = [question for question in kept[0].scores[steps[-1]] if question in common]
    if not questions:
        raise ConfigError("the runs were not asked the same questions: none is common to all")
    differing = _differing([members[0].config for members in by_config.values()])
    groups = _named([*by_config.values()], differing)
    base = _find_baseline(groups, baseline)
    groups.remove(base)
    accuracy: BySteps = {}
    difference: BySteps = {}
    verdicts = []
    for group in (base, *groups):
        scores = group.scores(steps, questions, group.seeds)
        accuracy[group.name] = by_step(steps, scores)
    for group in groups:
        seeds = [seed for seed in group.seeds if seed in base.seeds]
        values = difference[group.name] = {}
        if seeds:
            scores = group.scores(steps, questions, seeds) - base.scores(steps, questions, seeds)
            values |= by_step(steps, scores)
        last = values.get(steps[-1])
        verdicts.append(_verdict(group.name, base.name, seeds, last, len(groups)))
    groups.insert(0, base)
    reward = {group.name: group.reward() for group in groups}
    return Comparison(
        groups, differing, left_out, steps, questions, accuracy, reward, difference, verdicts
    )


def _key(run: ComparedRun) -> str:
    return json.dumps(run.config, sort_keys=True)


def _all_faults(runs: Sequence[ComparedRun]) -> dict[Path, tuple[str, ...]]:
    """Why a run may not be averaged in, by path: its own faults, and what differs from most."""
    faults = {run.path: run.faults for run in runs}
    usable = [run for run in runs if not run.faults]
    for what, words in COMMON.items() if usable else ():
        counts = Counter(json.dumps(getattr(run, what), sort_keys=True) for run in usable)
        usual = json.loads(counts.most_common(1)[0][0])  # if there is no most, of the first
        for run in usable:
            values, other = getattr(run, what), []
            for key in dict.fromkeys([*usual, *values]):
                value, most = values.get(key), usual.get(key)
                if value != most:
                    other.append(f"{key} {_short(value)} where most have {_short(most)}")
            if other:
                faults[run.path] += (f"{words}: {', '.join(other)}",)
    newest: dict[tuple[str, int], ComparedRun] = {}
    for run in sorted(usable, key=lambda run: (run.started, run.path)):
        if faults[run.path]:
            continue
        key = _key(run), run.seed
        if older := newest.get(key):
            faults[older.path] = (f"it repeats seed {run.seed}, and {run.path.name} is newer",)
        newest[key] = run
    return faults


def _short(value: str | None) -> str:
    """A hash by its beginning, anything else as it is."""
    if value is None:
        return "none"
    return value[:12] if re.fullmatch(r"[0-9a-f]{40,}", value) else value


def _differing(configs: Sequence[dict[str, Any]]) -> list[str]:
    """The keys that tell `configs` apart; those of a section that is switched off say nothing."""
    differing = []
    for key in dict.fromkeys(chain.from_iterable(configs)):
        values = {json.dumps(config.get(key)) for config in configs if not is_off(config, key)}
        if len(values) > 1:
            differing.append(key)
    return differing


def _named(groups: list[list[ComparedRun]], differing: list[str]) -> list[Group]:
    """The groups under names that say in what they differ; all under letters where that would be
    long, the default baseline first.
    """
    named: list[Group] = []
    for runs in groups:
        config, parts = runs[0].config, []
        for key in differing:
            if key == "aqn.enabled" and key in config:
                parts.append("aqn on" if config[key] else "aqn off")
            elif key in config:
                parts.append(f"{key}={json.dumps(config[key])}")
        settings = ", ".join(parts).replace('"', "") or "all runs"
        # 1 and "1" look alike
        taken = [group for group in named if group.settings.partition(" (")[0] == settings]
        if taken:
            settings += f" ({len(taken) + 1})"
        named.append(Group(settings, settings, config, sorted(runs, key=lambda run: run.seed)))
    if max(len(group.name) for group in named) <= LONGEST_NAME:
        return named
    base = _find_baseline(named, None)
    lettered = []
    for number, group in enumerate(sorted(named, key=lambda group: group is not base)):
        turn, place = divmod(number, len(ascii_uppercase))
        lettered.append(
            replace(group, name=ascii_uppercase[place] + (str(turn + 1) if turn else ""))
        )
    return lettered


def _find_baseline(groups: list[Group], asked: str | None) -> Group:
    if asked is None:
        return min(groups, key=lambda group: group.config.get("aqn.enabled") is not False)
    matching = [group for group in groups if asked in (group.name, group.settings)]
    matching = matching or [group for group in groups if asked in group.settings]
    if len(matching) != 1:
        known = "; ".join(group.legend for group in groups)
        raise ConfigError(
            f"--baseline {asked!r} names {len(matching)} groups; the groups are: {known}"
        )
    return matching[0]


def _verdict(
    group: str, baseline: str, seeds: list[int], difference: Estimate | None, comparisons: int
) -> Verdict:
    """The verdict on `difference`; the limit of p is divided by the number of groups
    (Bonferroni).
    """
    word, needed, limit = "not distinguishable", None, SIGNIFICANCE / comparisons
    if difference is None or len(seeds) < LEAST_SEEDS:
        word = "no verdict"
    elif difference.p < limit:
        word = "better" if difference.mean > 0 else "worse"
    elif difference.mean:
        needed = seeds_needed(difference, limit)
    return Verdict(group, baseline, seeds, difference, word, limit, needed)
