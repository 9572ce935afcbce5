"""A rule of upstream's about layouts and batches, and the checks that several of them share."""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from operator import attrgetter
from typing import Literal

from .plan import Plan

Broken = str | Literal[False] | None  # one sentence with the numbers; else nothing is broken
PlanCheck = Callable[[Plan], Broken]
# How sentences write the sizes of a plan.
LABELS = {
    "layout.tp": "TP {}",
    "layout.pp": "PP {}",
    "layout.ep": "EP {}",
    "layout.infer_tp": "infer TP {}",
    "layout.infer_ep": "EP {}",
    "layout.node_width": "{} ranks a node",
    "layout.nodes": "{} nodes",
    "layout.infer_dp": "vLLM's {} replicas",
    "dp": "training DP {}",
    "mini_share": "the {} of its mini-batch",
    "batch.micro_batch_size": "micro_batch_size {}",
}


@dataclass(frozen=True)
class Rule:
    """A demand of upstream's.

    Attributes:
        source: `repository path:line` that makes it; tests/upstream/rule_lines.json has that line.
        check: what a plan that breaks it is told.
    """

    name: str
    source: str
    check: PlanCheck


def indivisible(what: str, number: int, by: str, size: int) -> Broken:
    """The sentence for a number that is no multiple of `size`, which `by` names.

    >>> indivisible("ranks", 10, "TP 4", 4)
    '10 ranks cannot be divided by TP 4'
    """
    return number % size > 0 and f"{number:,} {what} cannot be divided by {by}"


def multiple(what: str, number: str, *sizes: str) -> PlanCheck:
    """The check that a number of the plan is a multiple of the product of its sizes; `what` is
    counted.
    """

    def check(plan: Plan) -> Broken:
        values = [max(attrgetter(size)(plan), 1) for size in sizes]
        by = " x ".join(LABELS[size].format(value) for size, value in zip(sizes, values))
        if len(sizes) > 1:
            by += f" = {prod(values)}"
        return indivisible(what, attrgetter(number)(plan), by, prod(values))

    return check


def width_by(size: str) -> PlanCheck:
    """The check that the width of a dense MLP, or of a shared expert, is a multiple of a TP size."""
    dense = multiple("columns of the MLP", "shape.intermediate_size", size)
    shared = "shape.shared_expert_intermediate_size"
    return lambda plan: dense(plan) or multiple("columns of the shared expert", shared, size)(plan)
