"""What TokenObserver makes of token ids."""

from types import SimpleNamespace

import pytest
import torch

from mindspeed_qerl.ascend import observer as module
from mindspeed_qerl.ascend.observer import TokenObserver
from mindspeed_qerl.recipe.types import Evaluation, Sampling

EOS, OTHER_END = 2, 3


@pytest.fixture
def observer():
    """One problem, answers of at most 3 tokens; what is written is kept in `written`."""
    made, written = object.__new__(TokenObserver), []
    sampling, evaluation = Sampling(max_tokens=3), Evaluation(samples_per_problem=4)
    recipe = SimpleNamespace(
        sampling=sampling,
        evaluation=evaluation,
        task=SimpleNamespace(verifier_function=("gsm8k",)),
        run=SimpleNamespace(rollout_samples=2),
    )
    vars(made).update(
        recipe=recipe,
        written=written,
        ends={EOS, OTHER_END},
        packed_rows=None,
        problems=SimpleNamespace(rows=["a row"]),
        tokenizer=SimpleNamespace(
            batch_decode=lambda ids, skip_special_tokens: [str(list(map(int, row))) for row in ids]
        ),
        evaluated=lambda *arguments: written.append(arguments),
        sampled=lambda *arguments: written.append(arguments),
    )
    return made


def test_an_answer_that_stops_at_any_end_token_is_not_cut_off(observer, monkeypatch):
    """A model has several: generation_config.json's beside the tokenizer's."""
    monkeypatch.setattr(
        module, "evaluate_answers", lambda rows, texts, truncated, n, verifier: (truncated, texts)
    )
    answers = [[[7, 8, EOS], [7, 8, OTHER_END], [7, 8, 9], [7, EOS]]]
    observer.evaluated_tokens(5, answers, seconds=1.0)
    [(step, truncated, texts, seconds)] = observer.written
    assert (step, seconds, texts[0]) == (5, 1.0, "[7, 8, 2]")
    assert truncated == [False, False, True, False]


def test_the_first_answers_are_written_with_their_rows(observer):
    answers = {
        name: [torch.tensor([number, column]) for number in range(4)]
        for column, name in enumerate(("prompts", "responses", "labels"))
    }
    observer.sampled_tokens(5, answers | {"rm_scores": torch.tensor([1.0, 0.0, 1.0, 0.0])})
    [(step, rollouts)] = observer.written
    rollouts = list(rollouts)
    assert step == 5 and [rollout["reward"] for rollout in rollouts] == [1.0, 0.0]
    assert list(rollouts[1].values())[:3] == ["[1, 0]", "[1, 1]", "[1, 2]"]
