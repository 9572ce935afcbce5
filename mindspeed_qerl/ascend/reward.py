"""Our verifiers inside upstream's RuleReward process.

Upstream's `verifier` looks its functions up in a dict local to itself and skips a name it does not know (MindSpeed-RL
models/rule_verifier.py:155-178): a misspelt one means reward 0 for ever. `compute_verifier_score` calls the module global (:112),
so replacing that global is enough.
"""

from types import SimpleNamespace
from typing import Any

import ray
from mindspeed_rl.models import rule_verifier
from mindspeed_rl.workers.rule_reward import RuleReward

from mindspeed_qerl.ascend.contract import UPSTREAM_VERIFIERS
from mindspeed_qerl.errors import unknown
from mindspeed_qerl.tasks.gsm8k.verifier import VERIFIERS, get_verifier

_upstream_verifier = rule_verifier.verifier


def verifier(responses: list[str], data: dict[str, list[str]], config: Any, **kwargs: Any) -> tuple[list[float], dict[str, list[float]]]:
    """Scores of `responses`: the sum over `config.verifier_function` of weight times score, ours and upstream's alike.

    Args:
        responses: decoded answers, padding and special tokens already gone.
        data: "labels", the decoded gold answers, one per response; more columns for upstream's own functions.
        config: upstream's RLConfig: verifier_function, verifier_weight.

    Returns:
        one score per response, and `{name}_rewards/mean` with the unweighted scores of each function.

    Raises:
        ValueError: an unknown name, no labels, or an empty one.
    """
    labels = [label.strip() for label in data.get("labels", [])]
    if len(labels) != len(responses) or not all(labels):
        missing = next((i for i, label in enumerate(labels) if not label), len(labels))
        raise ValueError(f"{len(responses)} responses with {len(labels)} labels, first missing or empty at {missing}: the data needs the "
                         "column `labels` (tools/convert_gsm8k.py --format mindspeed writes it) and dataset_additional_keys [labels]")
    total, metrics = [0.0] * len(responses), {}
    for name, weight in zip(config.verifier_function, config.verifier_weight, strict=True):
        if name in VERIFIERS:
            scores = get_verifier(name)(responses, labels)
        elif name in UPSTREAM_VERIFIERS:
            one = SimpleNamespace(verifier_function=[name], verifier_weight=[1.0])
            scores = _upstream_verifier(responses, {**data, "labels": labels}, one, **kwargs)[0]
        else:
            raise ValueError("rl_config.verifier_function: " + unknown("verifier", name, [*VERIFIERS, *UPSTREAM_VERIFIERS]))
        metrics[f"{name}_rewards/mean"] = list(scores)
        total = [sum_so_far + weight * score for sum_so_far, score in zip(total, scores)]
    return total, metrics


@ray.remote
class QeRLRuleReward(RuleReward.__ray_actor_class__):
    """Upstream's RuleReward with `verifier` above."""

    def initialize(self, *args: Any, **kwargs: Any) -> None:
        rule_verifier.verifier = verifier
        super().initialize(*args, **kwargs)
