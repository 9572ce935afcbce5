"""Our rewards, and a user's own, inside upstream's RuleReward process.

Upstream's `verifier` looks its functions up in a dict local to itself and skips a name it does not
know (MindSpeed-RL models/rule_verifier.py:155-178): a misspelt one means reward 0 for ever.
`compute_verifier_score` calls the module global (:112), so replacing that global is enough.
"""

import contextlib
from functools import cache, partial
from typing import Any

import numpy as np
import ray
from mindspeed_rl.models import rule_verifier
from mindspeed_rl.utils.utils import get_current_dp_range_indexes
from mindspeed_rl.workers.rule_reward import RuleReward

from mindspeed_qerl.common.errors import ConfigError
from mindspeed_qerl.tasks.packed import read_packed_rows, rows_of_labels
from mindspeed_qerl.tasks.rewards import score

_packed_rows = cache(read_packed_rows)


def verifier(
    responses: list[str], data: dict[str, list[str]], config: Any, data_path: str
) -> tuple[list[float], dict[str, list[float]]]:
    """Scores of `responses`: the sum over `config.verifier_function` of weight times score, NaN where
    one could not be computed; and `verifier/{name}/mean` with the unweighted scores of each
    function, of which upstream takes it.

    Args:
        responses: decoded answers, padding and special tokens already gone.
        data: "labels", decoded, one per response: the gold answers, or the numbers of the rows that
            are packed beside `data_path` (tasks/packed.py).
        config: upstream's RLConfig. data_path: upstream's, of the training data.

    Raises:
        ConfigError: an unknown name, no labels, an empty one, or one that is not the number of a
            row. RewardError: a reward failed.
    """
    labels = data.get("labels", [])
    if len(labels) != len(responses):
        raise ConfigError(
            f"{len(responses)} responses with {len(labels)} labels: the data needs the column "
            "`labels` (tools/convert_gsm8k.py --format mindspeed writes it, and "
            "tools/pack_task.py) and dataset_additional_keys [labels]"
        )
    rows = rows_of_labels(labels, _packed_rows(data_path))
    weights = list(zip(config.verifier_function, config.verifier_weight))
    total, scores = score(weights, responses, rows)
    metrics = {}
    for name, values in scores.items():
        if computed := values[~np.isnan(values)].tolist():
            metrics[f"verifier/{name}/mean"] = computed
    return total.tolist(), metrics


class ShareOver(Exception):
    """A reward process has scored its share of the answers."""


class Share(list):
    """Which answers a reward process scores, by dispatch."""

    def pop(self, place: int = -1) -> list[int]:
        """list's; ShareOver if there is none left."""
        if not self:
            raise ShareOver
        return super().pop(place)


@ray.remote
class QeRLRuleReward(RuleReward.__ray_actor_class__):
    """A RuleReward of upstream with `verifier` above, one in each node. What can fail waits for the
    first call: nobody awaits `initialize` (cli/train_grpo.py:166).
    """

    def initialize(self, megatron_config, *args, **kwargs):
        rule_verifier.verifier = partial(verifier, data_path=megatron_config.data_path)
        super().initialize(megatron_config, *args, **kwargs)

    def compute_rm_score(self) -> None:
        """Upstream's, which goes on until the answers of *all* processes are taken: with two nodes
        the first one to be done asks its own empty share for more, `IndexError: pop from empty
        list` (rule_reward.py:81,87).
        """
        scored = super().compute_rm_score
        # not in upstream's module: Ray sends the class by value, whose functions have globals of
        # their own
        scored.__globals__["get_current_dp_range_indexes"] = lambda **arguments: Share(
            get_current_dp_range_indexes(**arguments)
        )
        with contextlib.suppress(ShareOver):
            scored()
