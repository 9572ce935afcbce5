"""A rule of upstream: a check with its line of upstream."""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

from mindspeed_qerl.layout.plan import Plan
from mindspeed_qerl.recipe.types import Layout

# repository and path of what is cited most
VALIDATION = "MindSpeed-RL mindspeed_rl/config_cls/validate_config.py"
CONTAINER = "MindSpeed-RL mindspeed_rl/workers/resharding/vllm_weight_container.py"
PARALLEL_STATE = "MindSpeed-RL mindspeed_rl/models/rollout/vllm_adapter/vllm_parallel_state.py"
WORKER = "MindSpeed-RL mindspeed_rl/workers/actor_hybrid_worker.py"
ENGINE = "MindSpeed-RL mindspeed_rl/models/base/base_training_engine.py"
TRANSFORMER = "Megatron-LM megatron/core/transformer/transformer_config.py"


@dataclass(frozen=True)
class Rule:
    """What upstream demands of a plan: `check` gives one sentence with the numbers if a plan breaks
    layout.
    """

    name: str
    source: str  # `repository path:line` of upstream; tests/upstream/rule_lines.json has that line
    statement: (
        str  # in words; and what would happen without it, where upstream does not state it itself
    )
    check: Callable[[Layout, Plan], str | int | None]  # of a plan's layout and the plan


def indivisible(what: str, number: int, by: str, *sizes: int) -> str | None:
    """The sentence for a number that is no multiple of the product of `sizes`; `by` names them.

    >>> indivisible("ranks", 10, "TP {} x PP {}", 2, 2)
    '10 ranks cannot be divided by TP 2 x PP 2 = 4'
    >>> indivisible("ranks", 12, "TP {} x PP {}", 2, 2)
    """
    divisor = by.format(*sizes) + (f" = {prod(sizes)}" if len(sizes) > 1 else "")
    return f"{number:,} {what} cannot be divided by {divisor}" if number % prod(sizes) else None


def indivisible_width(plan: Plan, by: str, size: int) -> str | None:
    """`indivisible` for a dense MLP and for a shared expert."""
    return indivisible("columns of the MLP", plan.shape.intermediate_size, by, size) or indivisible(
        "columns of the shared expert", plan.shape.shared_expert_intermediate_size, by, size
    )
