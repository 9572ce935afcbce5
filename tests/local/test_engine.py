"""Steps of the loop that need no process."""

from types import SimpleNamespace

import numpy as np
import pytest

from mindspeed_qerl.local import checkpoint
from mindspeed_qerl.local.batch import PromptOrder
from mindspeed_qerl.local.engine import LocalEngine, select
from mindspeed_qerl.local.rollout import Completion

ANSWERS = [Completion([1, 2], [-0.1, -0.2], False), Completion([3], [-0.3], False), Completion([4], [-0.4], True),
           Completion([1, 1, 1], [-0.5, -0.6, -0.7], True)]


def test_every_answer_is_trained_with_its_groups_advantage():
    batch = select([[5, 6], [5, 6], [7], [7]], ANSWERS, np.array([1.0, 0.0, 2.0, 2.0]), 2)
    assert batch.advantages.tolist() == pytest.approx([0.5**0.5, -(0.5**0.5), 0, 0], abs=1e-5)
    assert batch.tokens.tolist() == [[5, 6, 1, 2], [5, 6, 3, 0], [7, 4, 0, 0], [7, 1, 1, 1]]
    assert batch.mask.sum() == sum(len(answer.token_ids) for answer in ANSWERS)
    assert batch.rollout_logprobs[batch.mask].tolist() == pytest.approx([-0.1, -0.2, -0.3, -0.4, -0.5, -0.6, -0.7])


@pytest.mark.parametrize("state, position", [({"prompts_asked": 23}, 23), ({}, 5 * 4)])
def test_a_run_that_resumes_goes_on_from_the_position_of_its_checkpoint(tmp_path, state, position):
    """A checkpoint from before the position was kept: each iteration had asked one batch."""
    checkpoint.save(tmp_path, 5, {"updates": 10, **state}, lambda folder: None, keep=1)
    calls = []
    processes = SimpleNamespace(on_ranks=lambda *call: calls.append(call))
    recipe = SimpleNamespace(batch=SimpleNamespace(global_batch_size=4), run=SimpleNamespace(seed=1))
    run, progress = SimpleNamespace(checkpoints_dir=tmp_path), SimpleNamespace(message=print)
    data = SimpleNamespace(train=SimpleNamespace(rows=range(10)))
    engine, unbroken = LocalEngine(recipe, run, None, progress, processes, data), PromptOrder(10, seed=1)
    assert engine.restore() == 5 and calls == [("restore", f"{tmp_path}/iter_0000005", 5, 10)]
    unbroken.take(position)
    assert engine.order.take(4) == unbroken.take(4)
