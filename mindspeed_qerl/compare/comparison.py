"""Runs beside each other: groups that differ in nothing but the seed, and the difference of each to
a baseline.

A run is averaged in only if its numbers mean what they seem to: it finished and its last step was
evaluated, its noise fired as its config says, and it used the same data and code as the others.
Every other run is named with the reason.
"""

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from operator import attrgetter
from statistics import mode
from typing import Any

import numpy as np

from mindspeed_qerl.common.errors import ConfigError

from .run import ComparedRun, is_off
from .statistics import LEAST_SEEDS, Estimate, estimate, seeds_needed

SIGNIFICANCE = 0.05
EVALUATED_OTHERWISE = "it was evaluated otherwise"
COMMON = {  # field of ComparedRun -> what is said of a run that has another than most
    "data": "its data differ",
    "code": "its code differs",
    "evaluation": EVALUATED_OTHERWISE,
}

Groups = dict[str, list[ComparedRun]]  # runs that differ in nothing but the seed, by name
BySteps = dict[str, dict[int, Estimate]]  # by group, by step


@dataclass(frozen=True)
class Verdict:
    """A group beside the baseline, at the last step that was evaluated."""

    group: str
    baseline: str
    seeds: list[int]  # that both have
    # None without such a seed; no verdict with fewer than `LEAST_SEEDS` of them, or no p
    difference: Estimate | None
    word: str  # "better", "worse", "not distinguishable" or "no verdict"
    limit: float  # of p: 5 %, shared by all verdicts of a comparison (Bonferroni)
    # to show a difference of this size, if it is not distinguishable; None: no number would
    seeds_needed: int | None


@dataclass(frozen=True)
class Comparison:
    """Everything a comparison found."""

    groups: Groups  # the baseline first; "aqn on, actor_config.lr=0.0001" says how they differ
    left_out: list[ComparedRun]
    steps: list[int]  # that all runs were evaluated after
    questions: list[str]
    accuracy: BySteps
    difference: BySteps  # of accuracy to the baseline's, over the seeds that both have
    verdicts: list[Verdict]


def compare(runs: Sequence[ComparedRun], baseline: str | None = None) -> Comparison:
    """Group `runs`, leave out those that may not be averaged in, and compare each group with the
    baseline: by its name, or a part of it that no other group has; None: the group without AQN, or
    else the first one.

    ConfigError: nothing is left to compare, no such baseline, or the runs share no evaluated step
    or no question.
    """
    kept, left_out = _judged(runs)
    if not kept:
        reasons = "\n".join(f"{run.path}: {'; '.join(run.faults)}" for run in left_out)
        raise ConfigError(f"none of {len(runs)} runs can be averaged in:\n{reasons}")
    steps = _shared(run.scores for run in kept)
    questions = _shared(chain.from_iterable(run.scores.values() for run in kept))
    if not steps or not questions:
        raise ConfigError("the runs share no step after which all were evaluated, or no question")
    groups = _groups(kept)
    base = _find_baseline(groups, baseline)
    groups = {base: groups.pop(base), **groups}
    scores = {}  # [steps, questions], by group and seed
    accuracy = {}
    difference = {}
    verdicts = []
    for name, members in groups.items():
        scores[name] = {run.seed: _scores(run, steps, questions) for run in members}
        accuracy[name] = _by_step(steps, list(scores[name].values()))
        if name != base:
            seeds = [seed for seed in scores[name] if seed in scores[base]]
            differences = [scores[name][seed] - scores[base][seed] for seed in seeds]
            difference[name] = _by_step(steps, differences)
            last = difference[name].get(steps[-1])
            verdicts.append(_verdict(name, base, seeds, last, len(groups) - 1))
    return Comparison(groups, left_out, steps, questions, accuracy, difference, verdicts)


def _shared(values: Iterable[Iterable[Any]]) -> list[Any]:
    """Returns what all have, in order."""
    return sorted(set.intersection(*map(set, values)))


def _scores(run: ComparedRun, steps: Sequence[int], questions: Sequence[str]) -> np.ndarray:
    """Float64 [steps, questions], after so many updates."""
    return np.array([[run.scores[step][question] for question in questions] for step in steps])


def _by_step(steps: Sequence[int], scores: Sequence[np.ndarray]) -> dict[int, Estimate]:
    """The mean over seeds and questions at each step; scores: of each seed [steps, questions]."""
    if not scores:
        return {}
    return dict(zip(steps, map(estimate, np.stack(scores, axis=1))))


def _judged(runs: Sequence[ComparedRun]) -> tuple[list[ComparedRun], list[ComparedRun]]:
    """The runs that may be averaged in, and those that may not with all reasons: a run's own
    faults, what differs from most, and a seed that a newer run has.
    """
    judged_by = [_conditions(run) for run in runs if not run.faults]
    usual = {}  # what most have under each name; if there is no most, what the first one has
    for name in dict.fromkeys(chain.from_iterable(judged_by)):
        usual[name] = json.loads(mode(_text(each.get(name)) for each in judged_by))
    newest: dict[tuple[str, int], ComparedRun] = {}
    left_out = []
    for run in sorted(runs, key=attrgetter("started", "path"), reverse=True):
        faults = list(run.faults)
        conditions = _conditions(run)
        for name, most in usual.items():
            value = conditions.get(name)
            if not run.faults and value != most:
                faults.append(f"{name} {value} where most have {most}")
        key = (_text(run.config), run.seed)
        if not faults and key in newest:
            faults.append(f"it repeats seed {run.seed}, and {newest[key].path.name} is newer")
        if faults:
            left_out.append(replace(run, faults=tuple(faults)))
        else:
            newest[key] = run
    return sorted(newest.values(), key=runs.index), left_out


def _conditions(run: ComparedRun) -> dict[str, Any]:
    """Returns in what a run must be like the others, by the words for one that is not."""
    conditions = {}
    for field, words in COMMON.items():
        for key, value in getattr(run, field).items():
            conditions[f"{words}: {key}"] = value
    return conditions


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _groups(runs: Sequence[ComparedRun]) -> Groups:
    """The runs by their configs, under names that say in what these differ; what a section has
    that is switched off says nothing.
    """
    by_config = defaultdict(list)
    for run in sorted(runs, key=attrgetter("seed")):
        by_config[_text(run.config)].append(run)
    configs = [members[0].config for members in by_config.values()]
    differing = []
    for key in dict.fromkeys(chain.from_iterable(configs)):
        values = {_text(config.get(key)) for config in configs if not is_off(config, key)}
        if len(values) > 1:
            differing.append(key)
    groups: Groups = {}
    for config, members in zip(configs, by_config.values()):
        words = []
        for key in differing:
            if key == "aqn.enabled":
                words.append("aqn on" if config[key] else "aqn off")
            elif key in config:
                words.append(f"{key}={json.dumps(config[key])}")
        groups[", ".join(words) or "all runs"] = members
    return groups


def _find_baseline(groups: Groups, name: str | None) -> str:
    if name is None:
        return min(groups, key=lambda group: groups[group][0].config["aqn.enabled"])
    if name in groups:
        return name
    matching = [group for group in groups if name in group]
    if len(matching) != 1:
        raise ConfigError(
            f"--baseline {name!r} names {len(matching)} groups; the groups are: {'; '.join(groups)}"
        )
    return matching[0]


def _verdict(
    group: str, baseline: str, seeds: list[int], difference: Estimate | None, comparisons: int
) -> Verdict:
    """The verdict on `difference`; the limit of p is divided by the number of groups
    (Bonferroni).
    """
    word = "not distinguishable"
    needed = None
    limit = SIGNIFICANCE / comparisons
    if difference is None or len(seeds) < LEAST_SEEDS or math.isnan(difference.p):
        word = "no verdict"
    elif difference.p < limit:
        word = "better" if difference.mean > 0 else "worse"
    elif difference.mean:
        needed = seeds_needed(difference, limit)
    return Verdict(group, baseline, seeds, difference, word, limit, needed)
