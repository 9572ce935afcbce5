"""What upstream demands of a layout and a batch: every rule, and which of them a plan breaks."""

from collections.abc import Iterable
from dataclasses import dataclass

from mindspeed_qerl.common.errors import Fault
from mindspeed_qerl.layout.batch_rules import BATCH
from mindspeed_qerl.layout.plan import Plan
from mindspeed_qerl.layout.rollout_rules import ROLLOUT
from mindspeed_qerl.layout.rule import Rule
from mindspeed_qerl.layout.training_rules import TRAINING

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
        if message := rule.check(plan):
            violations.append(Violation(rule.name, str(message), rule.source))
    return violations


def layout_faults(plan: Plan, rules: Iterable[Rule] = RULES) -> list[Fault]:
    """`broken` as faults of a config."""
    return [
        Fault("layout", f"{violation.message} ({violation.rule}: {violation.source})")
        for violation in broken(plan, rules)
    ]
