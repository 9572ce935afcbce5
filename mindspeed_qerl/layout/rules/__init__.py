"""What upstream demands of a layout and a batch: rules, each a function of a plan, with its line of upstream."""

from collections.abc import Iterable
from dataclasses import dataclass
from types import ModuleType

from mindspeed_qerl.layout.plan import Plan
from mindspeed_qerl.layout.rules import batch, rollout, training
from mindspeed_qerl.layout.rules.rule import Rule, vllm_vocabulary

__all__ = ["BATCH", "ROLLOUT", "RULES", "TRAINING", "Rule", "Violation", "broken", "vllm_vocabulary"]


def _rules_of(module: ModuleType) -> tuple[Rule, ...]:
    """In the order in which the module defines them."""
    return tuple(value for value in vars(module).values() if isinstance(value, Rule))


TRAINING, ROLLOUT, BATCH = map(_rules_of, (training, rollout, batch))
RULES = TRAINING + ROLLOUT + BATCH


@dataclass(frozen=True)
class Violation:
    """A rule that a plan breaks: its name, one sentence with the numbers, and `repository path:line` of upstream."""

    rule: str
    message: str
    source: str


def broken(plan: Plan, rules: Iterable[Rule] = RULES) -> list[Violation]:
    """Every rule of `rules` that the plan breaks; [] for a plan that upstream would run."""
    return [Violation(rule.name, message, f"{rule.repository} {rule.path}:{rule.line}")
            for rule in rules if (message := rule(plan))]
