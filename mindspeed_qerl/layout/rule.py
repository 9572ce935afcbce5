"""A rule of upstream: a check with its line of upstream."""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from operator import attrgetter

from mindspeed_qerl.layout.plan import Plan

# repository and path of what is cited most
VALIDATION = "MindSpeed-RL mindspeed_rl/config_cls/validate_config.py"
CONTAINER = "MindSpeed-RL mindspeed_rl/workers/resharding/vllm_weight_container.py"
PARALLEL_STATE = "MindSpeed-RL mindspeed_rl/models/rollout/vllm_adapter/vllm_parallel_state.py"
WORKER = "MindSpeed-RL mindspeed_rl/workers/actor_hybrid_worker.py"
ENGINE = "MindSpeed-RL mindspeed_rl/models/base/base_training_engine.py"
TRANSFORMER = "Megatron-LM megatron/core/transformer/transformer_config.py"

# of a plan: a sentence with the numbers if the plan breaks the rule
Check = Callable[[Plan], str | int | None]
# how messages write the sizes of a plan
LABELS = {
    "layout.tp": "TP {}",
    "layout.pp": "PP {}",
    "layout.cp": "CP {}",
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
    """What upstream demands of a plan, by the comment at its head; `check` says what breaks it.

    Attributes:
        source: `repository path:line` of upstream; tests/upstream/rule_lines.json has that line.
    """

    name: str
    source: str
    check: Check


def indivisible(what: str, number: int, by: str, size: int) -> str | None:
    """The sentence for a number that is no multiple of `size`, which `by` names.

    >>> indivisible("ranks", 10, "TP 4", 4)
    '10 ranks cannot be divided by TP 4'
    """
    return f"{number:,} {what} cannot be divided by {by}" if number % size else None


def multiple(what: str, number: str, *sizes: str) -> Check:
    """The check that a number of a plan is a multiple of the product of some of its sizes, by the
    names of their attributes.
    """

    def check(plan: Plan) -> str | None:
        values = [max(attrgetter(size)(plan), 1) for size in sizes]
        labels = [LABELS[size].format(value) for size, value in zip(sizes, values)]
        by, product = " x ".join(labels), prod(values)
        if len(sizes) > 1:
            by += f" = {product}"
        return indivisible(what, attrgetter(number)(plan), by, product)

    return check


def multiple_widths(size: str) -> Check:
    """`multiple` for a dense MLP and for a shared expert."""
    mlp = multiple("columns of the MLP", "shape.intermediate_size", size)
    shared = "shape.shared_expert_intermediate_size"
    expert = multiple("columns of the shared expert", shared, size)
    return lambda plan: mlp(plan) or expert(plan)
