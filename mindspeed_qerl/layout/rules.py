"""What upstream demands of a layout and a batch: every rule, and which of them a plan breaks."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from operator import attrgetter
from pathlib import Path

import yaml

from mindspeed_qerl.common.errors import Fault
from mindspeed_qerl.layout import breaches
from mindspeed_qerl.layout.plan import Plan

TABLE = yaml.safe_load(Path(__file__).with_name("rules.yaml").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Rule:
    """A row of rules.yaml, which has the meaning of each field."""

    name: str
    demand: str
    source: str
    message: str = ""
    multiple: Sequence[Sequence[str]] = ()
    needs: Sequence[str] = ()
    at_most: Sequence[str] = ()

    def broken_by(self, plan: Plan) -> str | None:
        """One sentence with the numbers if the plan breaks it."""
        breach = getattr(breaches, self.name, None)
        says = breach is None or breach(plan)
        if not says or isinstance(says, str):
            return says or None
        for what, number, *sizes in self.multiple:
            if sentence := _no_multiple(plan, what, number, sizes):
                return sentence
        if self.needs:
            first, second = attrgetter(*self.needs)(plan)
            if second or not first:
                return None
        if self.at_most:
            number, most = attrgetter(*self.at_most)(plan)
            if number <= most:
                return None
        return self.message.format(plan=plan)


def _no_multiple(plan: Plan, what: str, number: str, sizes: list[str]) -> str | None:
    """The sentence for a number of the plan that is no multiple of the product of its sizes."""
    values = [max(attrgetter(size)(plan), 1) for size in sizes]
    labels = [TABLE["labels"][size].format(value) for size, value in zip(sizes, values)]
    by, product = " x ".join(labels), prod(values)
    if len(sizes) > 1:
        by += f" = {product}"
    return breaches.indivisible(what, attrgetter(number)(plan), by, product)


TRAINING, ROLLOUT, BATCH = (
    [Rule(name, **row) for name, row in TABLE[group].items()]
    for group in ("training", "rollout", "batch")
)
RULES = TRAINING + ROLLOUT + BATCH


@dataclass(frozen=True)
class Violation:
    """A rule that a plan breaks: its name, one sentence with the numbers, and `repository
    path:line` of upstream.
    """

    rule: str
    message: str
    source: str


def broken(plan: Plan, rules: Iterable[Rule] = RULES) -> list[Violation]:
    """Every rule of `rules` that the plan breaks; [] for a plan that upstream would run."""
    violations = []
    for rule in rules:
        if message := rule.broken_by(plan):
            violations.append(Violation(rule.name, message, rule.source))
    return violations


def layout_faults(plan: Plan, rules: Iterable[Rule] = RULES) -> list[Fault]:
    """`broken` as faults of a config."""
    return [
        Fault("layout", f"{violation.message} ({violation.rule}: {violation.source})")
        for violation in broken(plan, rules)
    ]
