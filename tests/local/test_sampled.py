"""Sampled answers, and the batch that is trained of them."""

import math
from dataclasses import replace
from itertools import chain
from types import SimpleNamespace

import numpy as np
import pytest

from mindspeed_qerl.local.batch import Answer
from mindspeed_qerl.local.processes import WorkerError
from mindspeed_qerl.local.sampled import (
    answer_metrics,
    check_answers,
    select,
    tokens_to_replay,
    tokens_to_train,
)
from mindspeed_qerl.recipe.types import Algorithm, Batch, Selection
from mindspeed_qerl.routing.routes import Routers

PROMPTS = ([5, 6], [5, 6], [7], [7])
IDS = ([1, 2], [3], [4], [1, 1, 1])
LOGPROBS = ([-0.1, -0.2], [-0.3], [-0.4], [-0.5, -0.6, -0.7])


def sampled(rewards, ids=IDS):
    """Answers to two prompts, the second one's cut off."""
    answers = []
    for reward, prompt, tokens, logprobs in zip(rewards, PROMPTS, ids, LOGPROBS):
        answer = Answer(prompt, tokens, logprobs, is_truncated=prompt == [7])
        answer.question, answer.text, answer.reward = "2+2?", "?", float(reward)
        answer.scores = {"gsm8k": reward if math.isnan(reward) else float(reward > 1)}
        answers.append(answer)
    return answers


def selected(rewards, logprobs_before=None, **options):
    return select(sampled(rewards), recipe(**options), logprobs_before)


def recipe(mini_batch_size=1, **options):
    algorithm, selection = (
        {name: value for name, value in options.items() if name in part.__pydantic_fields__}
        for part in (Algorithm, Selection)
    )
    return SimpleNamespace(
        batch=Batch(samples_per_prompt=2, mini_batch_size=mini_batch_size, global_batch_size=2),
        algorithm=Algorithm(**algorithm),
        selection=Selection(**selection),
    )


def test_every_answer_is_trained_with_its_groups_advantage():
    batch, _ = selected([1, 0, 2, 2])
    assert batch.advantages.tolist() == pytest.approx([0.5**0.5, -(0.5**0.5), 0, 0], abs=1e-5)
    assert batch.tokens.tolist() == [[5, 6, 1, 2], [5, 6, 3, 0], [7, 4, 0, 0], [7, 1, 1, 1]]
    assert batch.mask.sum() == 7
    assert batch.rollout_logprobs[batch.mask].tolist() == pytest.approx([*chain(*LOGPROBS)])
    masked, _ = selected([1, 0, 0, 3], mask_truncated_completions=True)
    assert masked.mask.any(1).tolist() == [True, True, False, False]


@pytest.mark.parametrize(
    "options, advantages",
    [
        ({"norm_adv_by_std_in_grpo": False}, [0.5, -0.5, -1.5, 1.5]),
        ({"adv_estimator": "rloo"}, [1, -1, -3, 3]),
    ],
)
def test_advantages_go_by_their_options(options, advantages):
    assert selected([1, 0, 0, 3], **options)[0].advantages.tolist() == advantages


def before(old, reference):
    """Stands for `LocalEngine.logprobs_before`: the same number for each token, also where there is
    none.
    """
    return lambda batch: np.stack(
        [np.full(batch.mask.shape, value, np.float32) for value in (old, reference)]
    )


@pytest.mark.parametrize(
    "options", [{}, {"mask_truncated_completions": True}, {"mini_batch_size": 3}]
)
def test_kl_in_the_reward_costs_every_answer_its_tokens_before_the_group_is_compared(options):
    """0.5 nats a token by k1: answers of 2, 1, 1 and 3 tokens, the last two cut off."""
    batch, metrics = selected(
        [1, 0, 2, 2],
        logprobs_before=before(-1.0, -1.5),
        kl_coefficient=0.2,
        kl_penalty="kl",
        use_kl_in_reward=True,
        norm_adv_by_std_in_grpo=False,
        **options,
    )
    assert batch.advantages[:4].tolist() == pytest.approx([0.45, -0.45, 0.1, -0.1])
    assert metrics == {"reward/kl": pytest.approx(0.5 * 7 / 4)}
    assert (batch.old_logprobs == -1).all() and batch.old_logprobs.shape == batch.mask.shape
    assert batch.mask.any(1)[2:4].all() == ("mask_truncated_completions" not in options)
    assert len(batch) == (6 if "mini_batch_size" in options else 4) and not batch.mask[4:].any()
    assert selected([1, 0, 2, 2], kl_coefficient=0.2)[1] == {}


@pytest.mark.parametrize("options", [{}, {"adv_estimator": "rloo"}])
def test_an_answer_whose_reward_could_not_be_computed_leaves_the_update(options):
    rewards = [1, math.nan, 2, 0]
    batch, _ = selected(rewards, **options)
    assert batch.advantages[:2].tolist() == [0, 0]  # nothing to compare the other one with
    assert batch.advantages.tolist() == selected([1, 1, 2, 0], **options)[0].advantages.tolist()
    assert batch.mask.sum(1).tolist() == [2, 0, 1, 3]
    assert tokens_to_train(sampled(rewards), recipe(**options), batch, ends=()) == 6
    metrics = answer_metrics(sampled(rewards))
    assert metrics["verifier/gsm8k/mean"] == pytest.approx(1 / 3)


def test_few_groups_fill_a_mini_batch_with_answers_that_have_nothing_to_train():
    batch, _ = select(sampled([1, 0, 0, 3])[2:], recipe(mini_batch_size=3), None)
    assert len(batch) == 6 and batch.tokens[:2].tolist() == [[7, 4, 0, 0], [7, 1, 1, 1]]
    assert batch.mask.sum(1).tolist() == [1, 3, 0, 0, 0, 0]


@pytest.mark.parametrize(
    "logprobs, given",
    [
        ([-0.1, math.nan], "nan as the log probability of a token"),
        ([-math.inf, 0.0], "-inf as the log probability of a token"),
        ([0.5, 0.0], "0.5 as the log probability of a token"),
        ([-0.1], "1 log probabilities for 2"),
    ],
)
def test_a_log_probability_that_is_none_names_the_answer(logprobs, given):
    answers = sampled([0, 1])
    check_answers(answers, None)
    answers[0].logprobs = logprobs
    with pytest.raises(WorkerError, match=rf"vLLM gave {given} of the answer '\?' to '2\+2\?'"):
        check_answers(answers, None)


def test_routes_that_cannot_be_name_the_answer():
    routers = Routers((0, 1), experts=8, top_k=2)
    good = Answer([5], [3, 4], [-0.1, -0.2], routes=np.full((2, 2, 2), (3, 1), dtype=np.uint8))
    check_answers([good], routers)
    bad = replace(good, text="?", question="2+2?", routes=None)
    with pytest.raises(
        WorkerError,
        match=r"the answer '\?' to '2\+2\?': it has no routes.*algorithm.routing_replay",
    ):
        check_answers([good, bad], routers)


def test_routes_of_a_batch_are_padded_with_its_rows_and_counted_where_they_are_trained():
    answers = sampled([1, 0, 2, 2])
    for row, (answer, tokens) in enumerate(zip(answers, (3, 2, 1, 3))):
        answer.routes = np.full((tokens, 2, 2), (row, 7), dtype=np.uint8)
    batch, _ = select(answers, recipe(), None)
    width = batch.tokens.shape[1] - 1
    assert batch.routes.shape == (4, width, 2, 2) and batch.routes.dtype == np.uint8
    for row, answer in enumerate(answers):
        assert np.array_equal(batch.routes[row, : batch.lengths[row] - 1], answer.routes)
    assert tokens_to_replay(batch, recipe()) == (batch.lengths - 1).sum()
    batch.mask[:2] = False  # of the first of two mini-batches, which is not trained then
    assert tokens_to_replay(batch, recipe()) == 4


def with_batch(ids=IDS, **options):
    answers = sampled([1, 0, 2, 2], ids)
    return answers, recipe(**options), select(answers, recipe(**options), None)[0]


def test_the_tokens_to_train_are_counted_on_the_answers():
    finished = ([1, 2], [2], *IDS[2:])
    assert tokens_to_train(*with_batch(finished), ends={2}) == 7
    assert tokens_to_train(*with_batch(finished, mask_truncated_completions=True), ends={2}) == 3
    assert tokens_to_train(*with_batch(), ends=()) == 7  # of a model that names no end token
    with pytest.raises(
        WorkerError, match=r"1 of 2 answers .* none of the end tokens \[2\]: the first one's is 3"
    ):
        tokens_to_train(*with_batch(), ends={2})
    answers, asked, batch = with_batch()
    batch.mask[3, -1] = False
    with pytest.raises(WorkerError, match=r"^6 tokens were trained, and 7 were sampled and kept"):
        tokens_to_train(answers, asked, batch, ends=())
    wrong = replace(batch, advantages=np.float32([1, 0, 1, -1]))
    with pytest.raises(WorkerError, match=r"the advantages of 1 of 2 groups do not add up to 0"):
        tokens_to_train(answers, asked, wrong, ends=())
