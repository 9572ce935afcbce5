"""Steps of the loop that need no process."""

from types import SimpleNamespace

import numpy as np
import pytest

from mindspeed_qerl.local import checkpoint
from mindspeed_qerl.local.batch import PromptOrder
from mindspeed_qerl.local.engine import LocalEngine, Samples, Scores, sample_metrics, select
from mindspeed_qerl.local.rollout import Completion

SAMPLES = Samples(rows=[{}] * 4, prompts=[[5, 6], [5, 6], [7], [7]],
                  answers=[Completion([1, 2], [-0.1, -0.2], False), Completion([3], [-0.3], False), Completion([4], [-0.4], True),
                           Completion([1, 1, 1], [-0.5, -0.6, -0.7], True)])


def test_every_answer_is_trained_with_its_groups_advantage():
    batch = select(SAMPLES, np.array([1.0, 0.0, 2.0, 2.0]), 2)
    assert batch.advantages.tolist() == pytest.approx([0.5**0.5, -(0.5**0.5), 0, 0], abs=1e-5)
    assert batch.tokens.tolist() == [[5, 6, 1, 2], [5, 6, 3, 0], [7, 4, 0, 0], [7, 1, 1, 1]]
    assert batch.mask.sum() == sum(len(answer.token_ids) for answer in SAMPLES.answers)
    assert batch.rollout_logprobs[batch.mask].tolist() == pytest.approx([-0.1, -0.2, -0.3, -0.4, -0.5, -0.6, -0.7])


def test_metrics_of_the_answers():
    scores = Scores(texts=[""] * 4, rewards=np.array([1.0, 0.0, 2.0, 2.0]), per_verifier={"gsm8k": 0.5})
    assert sample_metrics(SAMPLES, scores, 2) == {
        "reward/mean": 1.25, "reward/std": pytest.approx(np.std([1, 0, 2, 2])), "reward/groups_with_signal": 0.5, "verifier/gsm8k/mean": 0.5,
        "response/length_mean": 7 / 4, "response/truncated_fraction": 0.5}


@pytest.mark.parametrize("state, position", [({"prompts_asked": 23}, 23), ({}, 5 * 4)])
def test_a_run_that_resumes_goes_on_from_the_position_of_its_checkpoint(tmp_path, state, position):
    """A checkpoint from before the position was kept: each iteration had asked one batch."""
    checkpoint.save(tmp_path, 5, {"updates": 10, **state}, lambda folder: None, keep=1)
    calls = []
    processes = SimpleNamespace(on_ranks=lambda *call: calls.append(call))
    engine = LocalEngine(SimpleNamespace(global_batch_size=4), SimpleNamespace(checkpoints_dir=tmp_path), None, SimpleNamespace(message=print),
                         processes)
    engine.order, unbroken = PromptOrder(10, seed=1), PromptOrder(10, seed=1)
    assert engine.restore() == 5 and calls == [("restore", f"{tmp_path}/iter_0000005", 5, 10)]
    unbroken.take(position)
    assert engine.order.take(4) == unbroken.take(4)
