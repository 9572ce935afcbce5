"""Batches against plain loops."""

import numpy as np

from mindspeed_qerl.local.batch import PromptOrder, deal

from .conftest import batch_of

PROMPTS = [[5, 6, 7], [8], [9, 10]]
COMPLETIONS = [[1], [2, 3, 4], [5, 6]]
LOGPROBS = [[-0.1], [-0.2, -0.3, -0.4], [-0.5, -0.6]]


def test_each_completion_token_is_marked_where_it_is_predicted():
    batch = batch_of(PROMPTS, COMPLETIONS, LOGPROBS)
    for row, (prompt, completion, logprobs) in enumerate(zip(PROMPTS, COMPLETIONS, LOGPROBS)):
        predicted = [t for t in range(batch.mask.shape[1]) if batch.mask[row, t]]
        assert [batch.tokens[row, t + 1] for t in predicted] == completion
        np.testing.assert_allclose(
            [batch.rollout_logprobs[row, t] for t in predicted], logprobs, rtol=1e-6
        )
        assert batch.tokens[row, : batch.lengths[row]].tolist() == prompt + completion


def test_rows_are_trimmed_to_the_longest():
    batch = batch_of(PROMPTS, COMPLETIONS, LOGPROBS).rows(np.array([1]))
    assert (
        batch.tokens.tolist() == [[8, 2, 3, 4]] and batch.mask.shape == (1, 3) and batch.mask.all()
    )


def test_dealing_loses_nothing_and_pairs_like_with_like():
    lengths = np.random.default_rng(0).integers(1, 50, 12)
    shares = [deal(lengths, 12, 2, rank)[0] for rank in range(2)]
    assert sorted(np.concatenate(shares)) == list(range(12))
    dealt = np.sort(np.stack([lengths[share] for share in shares]), axis=0)
    assert (dealt[:, :-1] >= dealt[:, 1:]).all()
    assert (
        dealt[1, 1:] <= dealt[0, :-1]
    ).all()  # what stands second is no longer than anything in the round before


def test_every_row_is_asked_once_in_each_pass():
    order = PromptOrder(10, seed=3)
    asked = [
        i for count in (6, 6, 1, 7, 10) for i in order.take(count)
    ]  # however many are taken at a time
    assert sorted(asked[:10]) == sorted(asked[10:20]) == sorted(asked[20:]) == list(range(10))
    assert asked[:10] != asked[10:20]
    assert PromptOrder(10, seed=3).take(30) == asked != PromptOrder(10, seed=4).take(30)


def test_an_order_goes_on_from_its_position():
    order = PromptOrder(10, seed=3)
    order.take(13)
    resumed = PromptOrder(10, seed=3)
    resumed.position = order.position
    assert resumed.take(9) == order.take(9)
