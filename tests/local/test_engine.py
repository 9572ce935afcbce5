"""Steps of the loop that need no process."""

import math
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from mindspeed_qerl.local import checkpoint
from mindspeed_qerl.local.batch import PromptOrder
from mindspeed_qerl.local.engine import LocalEngine
from mindspeed_qerl.local.processes import WorkerError
from mindspeed_qerl.local.rollout import Completion
from mindspeed_qerl.local.sampled import Sampled, check_logprobs, select
from mindspeed_qerl.recipe.types import Algorithm, Batch, Correction, Selection
from mindspeed_qerl.tasks.rows import row_of

ANSWERS = [Completion([1, 2], [-0.1, -0.2], False), Completion([3], [-0.3], False), Completion([4], [-0.4], True),
           Completion([1, 1, 1], [-0.5, -0.6, -0.7], True)]
ROW = row_of({"prompt": "2+2?", "answer": "4"})


def sampled(rewards, answers=ANSWERS, prompts=((5, 6), (5, 6), (7,), (7,))):
    rewards = np.array(rewards, dtype=float)
    return Sampled([ROW] * len(answers), [list(prompt) for prompt in prompts], list(answers), ["?"] * len(answers),
                   rewards, {"gsm8k": rewards > 1})


def recipe(mini_batch_size=1, **options):
    algorithm, selection = ({name: value for name, value in options.items() if name in part.__pydantic_fields__}
                            for part in (Algorithm, Selection))
    return SimpleNamespace(batch=Batch(samples_per_prompt=2, mini_batch_size=mini_batch_size, global_batch_size=2),
                           algorithm=Algorithm(**algorithm), selection=Selection(**selection))


def test_every_answer_is_trained_with_its_groups_advantage():
    batch = select(sampled([1, 0, 2, 2]), np.arange(2), recipe())
    assert batch.advantages.tolist() == pytest.approx([0.5**0.5, -(0.5**0.5), 0, 0], abs=1e-5)
    assert batch.tokens.tolist() == [[5, 6, 1, 2], [5, 6, 3, 0], [7, 4, 0, 0], [7, 1, 1, 1]]
    assert batch.mask.sum() == sum(len(answer.token_ids) for answer in ANSWERS)
    assert batch.rollout_logprobs[batch.mask].tolist() == pytest.approx([-0.1, -0.2, -0.3, -0.4, -0.5, -0.6, -0.7])


@pytest.mark.parametrize("options, advantages", [
    ({"norm_adv_by_std_in_grpo": False}, [0.5, -0.5, -1.5, 1.5]), ({"adv_estimator": "rloo"}, [1, -1, -3, 3])])
def test_advantages_go_by_their_options(options, advantages):
    assert select(sampled([1, 0, 0, 3]), np.arange(2), recipe(**options)).advantages.tolist() == advantages


def test_answers_that_were_cut_off_are_not_trained_where_that_is_asked():
    batch = select(sampled([1, 0, 0, 3]), np.arange(2), recipe(mask_truncated_completions=True))
    assert batch.mask.any(1).tolist() == [True, True, False, False]


def test_few_groups_fill_a_mini_batch_with_answers_that_have_nothing_to_train():
    batch = select(sampled([1, 0, 0, 3]), np.array([1]), recipe(mini_batch_size=3))
    assert len(batch) == 6 and batch.tokens[:2].tolist() == [[7, 4, 0, 0], [7, 1, 1, 1]]
    assert batch.mask.sum(1).tolist() == [1, 3, 0, 0, 0, 0]


@pytest.mark.parametrize("metric, limit, batches, kept", [
    (None, 9, 3, [1, 2, 4]),        # enough after three batches; the fourth group with signal is left
    (None, 2, 2, [1, 2]),           # too few within the limit: those are trained
    (None, 0, 3, [1, 2, 4]),        # no limit
    ("gsm8k", 4, 4, [4])])          # of the verifier alone
def test_dynamic_sampling_asks_until_enough_groups_have_a_signal(metric, limit, batches, kept):
    drawn = [[1, 1, 1, 0], [0, 1, 0, 0], [2, 0, 0, 1], [1, 1, 0, 0]]
    asked = []

    def sample(step, batch=0):
        asked.append((step, batch))
        return sampled(drawn[batch]), f"noise of batch {batch}"

    options = dict(filter_groups_enable=True, filter_groups_train_batch_size=3, filter_groups_max_batches=limit,
                   filter_groups_metric=metric)
    engine = SimpleNamespace(recipe=recipe(**options), sample=sample)
    found, groups, noise = LocalEngine.gather(engine, 7)
    assert groups.tolist() == kept and asked == [(7, batch) for batch in range(batches)]
    assert noise == "noise of batch 0" and found.rewards.tolist() == np.concatenate(drawn[:batches]).tolist()


@pytest.mark.parametrize("logprobs, given", [
    ([-0.1, math.nan], "nan as a log probability"), ([-math.inf, 0.0], "-inf as a log probability"),
    ([0.5, 0.0], "0.5 as a log probability"), ([-0.1], "1 log probabilities")])
def test_a_log_probability_that_is_none_names_the_answer(logprobs, given):
    answers = [ANSWERS[0], Completion([3, 4], logprobs, False)]
    with pytest.raises(WorkerError, match=rf"vLLM gave {given} for the 2 tokens of the answer '\?' to '2\+2\?'"):
        check_logprobs(sampled([0, 1], answers, [[5], [5]]))
    check_logprobs(sampled([0, 1], ANSWERS[:2], [[5], [5]]))


def test_the_warning_of_uneven_weights_comes_once():
    said = []
    engine = SimpleNamespace(recipe=SimpleNamespace(correction=Correction()), warned=set(),
                             progress=SimpleNamespace(message=said.append))
    engine.warn = partial(LocalEngine.warn, engine)
    for sigma, size in ((0.0, 0.1), (0.01, 0.9), (0.01, 0.4), (0.01, 0.3)):
        LocalEngine.warn_of_mismatch(engine, {"aqn/sigma": sigma, "mismatch/effective_sample_size": size})
    assert len(said) == 1 and "effective sample size is 40% of the tokens" in said[0]
    engine.recipe, engine.warned = SimpleNamespace(correction=Correction("token_tis")), set()
    LocalEngine.warn_of_mismatch(engine, {"aqn/sigma": 0.01, "mismatch/effective_sample_size": 0.1})
    assert len(said) == 1


@pytest.mark.parametrize("state, position", [({"prompts_asked": 23}, 23), ({}, 5 * 4)])
def test_a_run_that_resumes_goes_on_from_the_position_of_its_checkpoint(tmp_path, state, position):
    """A checkpoint from before the position was kept: each iteration had asked one batch."""
    checkpoint.save(tmp_path, 5, {"updates": 10, **state}, lambda folder: None, keep=1)
    calls = []
    processes = SimpleNamespace(on_ranks=lambda *call: calls.append(call))
    recipe = SimpleNamespace(batch=SimpleNamespace(global_batch_size=4), run=SimpleNamespace(seed=1))
    run = SimpleNamespace(checkpoints_dir=tmp_path, metrics_file=tmp_path / "metrics.jsonl")
    progress = SimpleNamespace(message=print)
    data = SimpleNamespace(train=SimpleNamespace(rows=range(10)))
    engine, unbroken = LocalEngine(recipe, run, None, progress, processes, data), PromptOrder(10, seed=1)
    assert engine.restore() == 5 and calls == [("restore", f"{tmp_path}/iter_0000005", 5, 10)]
    unbroken.take(position)
    assert engine.order.take(4) == unbroken.take(4)
