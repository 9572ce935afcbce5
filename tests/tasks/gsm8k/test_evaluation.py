"""Accuracy, its interval, pass@k and maj@k against counting by hand and against brute force."""

import itertools
import math
import statistics
import sys
import types

import numpy as np
import pytest

from mindspeed_qerl.tasks.evaluation import evaluate_answers, majority_score, wilson_interval
from mindspeed_qerl.tasks.gsm8k.verifier import RULES, extract_with_rule
from mindspeed_qerl.tasks.rows import row_of

ROWS = [row_of({"prompt": "a", "answer": "72"}), row_of({"prompt": "b", "answer": "1000"})]


def test_numbers_counted_by_hand():
    texts = ["#### 72", "#### 72.0", "so 71", "#### 1,000", "The answer is 3", "I do not know"]
    result, answers = evaluate_answers(
        ROWS, texts, [False, False, True, False, False, True], 3, "gsm8k"
    )
    assert result["accuracy"] == pytest.approx((2 / 3 + 1 / 3) / 2)
    assert result["standard_error"] == pytest.approx(np.std([2 / 3, 1 / 3], ddof=1) / math.sqrt(2))
    assert result["pass@3"] == 1
    assert result["maj@3"] == pytest.approx(
        (1 + 0.5) / 2
    )  # the second problem: one vote for 1000, one for 3
    assert result["truncated_fraction"] == pytest.approx(2 / 6)
    assert {
        name: share for name, share in result.items() if name.startswith("rule/")
    } == pytest.approx(
        {"rule/####": 3 / 6, "rule/answer is": 1 / 6, "rule/last number": 1 / 6, "rule/none": 1 / 6}
    )
    assert answers[0] == {
        "question": "a",
        "answer": "72",
        "responses": texts[:3],
        "extracted": ["72", "72", "71"],
        "rules": ["####", "####", "last number"],
        "scores": [1.0, 1.0, 0.0],
        "truncated": [False, False, True],
    }
    assert answers[1]["extracted"] == ["1000", "3", None]


def test_one_answer_has_no_pass_at_k():
    result, _ = evaluate_answers(ROWS[:1], ["#### 72"], [False], 1, "gsm8k_strict")
    assert result["accuracy"] == 1 and math.isnan(result["standard_error"])
    assert not any("@" in name for name in result)


@pytest.mark.parametrize(
    "text, rule",
    [
        ("#### 7", "####"),
        (r"\boxed{7}", r"\boxed"),
        ("The answer is 7.", "answer is"),
        ("A: 7", "A:"),
        ("it is 7", "last number"),
        ("#### 3+4=7", "last number"),
        ("seven", "none"),
        ("", "none"),
    ],
)
def test_the_rule_that_found_an_answer_is_named(text, rule):
    assert extract_with_rule(text) == (None if rule == "none" else "7", rule)
    assert rule in RULES


def test_strict_knows_one_rule():
    assert extract_with_rule("#### 7", "strict") == ("7", "####")
    assert extract_with_rule("#### 7 #### 8", "strict") == (None, "none")


@pytest.mark.parametrize("right, problems", [(0, 10), (1, 10), (5, 10), (10, 10), (70, 100)])
def test_wilson_interval_is_the_inverted_score_test(right, problems):
    """Every proportion p0 that |p - p0| <= z sqrt(p0 (1 - p0) / n) keeps, by trying them."""
    p = right / problems
    grid = np.linspace(0, 1, 200001)
    kept = grid[np.abs(p - grid) <= 1.959964 * np.sqrt(grid * (1 - grid) / problems) + 1e-12]
    low, high = wilson_interval(np.repeat([1.0, 0.0], [right, problems - right]), 1)
    assert (low, high) == pytest.approx((kept.min(), kept.max()), abs=1e-5)


def test_several_answers_count_between_once_and_n_times():
    """Answers to one problem that are always alike add nothing; those that differ like strangers
    add as much as other problems.
    """
    alike = np.repeat([1.0, 0.0], [70, 30])
    assert wilson_interval(alike, 4) == wilson_interval(alike, 1)
    generator = np.random.default_rng(0)
    strangers = generator.binomial(4, 0.7, size=10000) / 4
    width, same = (
        np.subtract(*wilson_interval(values, k)[::-1])
        for values, k in ((strangers, 4), (generator.binomial(1, 0.7, size=40000), 1))
    )
    assert width == pytest.approx(same, rel=0.03)


def test_interval_covers_the_truth_as_often_as_it_says():
    generator, hits = np.random.default_rng(1), 0
    for _ in range(2000):
        difficulty = generator.beta(2, 1, size=60)
        low, high = wilson_interval(generator.binomial(4, difficulty) / 4, 4)
        hits += low <= 2 / 3 <= high
    assert 0.94 < hits / 2000 < 0.97


def test_majority_is_what_a_random_tie_break_gives_on_average():
    """Against all orders of the answers, where the one that comes first wins a tie."""
    for extracted in (
        ["1", "1", "2"],
        ["1", "2"],
        ["1", "2", "3", "3", "2"],
        [None, None, "1"],
        [None, None],
    ):
        scores = [float(answer == "1") for answer in extracted]

        def first_most_common(order):
            votes = [answer for answer in order if answer is not None]
            return float(max(votes, key=votes.count) == "1") if votes else 0.0

        expected = np.mean(
            [first_most_common(order) for order in itertools.permutations(extracted)]
        )
        assert majority_score(extracted, scores) == pytest.approx(expected), extracted


def lengths(responses, answers, rows):
    return [len(response) * row.get("scale", 1) for response, row in zip(responses, rows)]


def test_a_users_own_reward_is_a_mean_score_with_a_normal_interval(monkeypatch):
    module = types.ModuleType("own_lengths")
    module.lengths, module.empty = (
        lengths,
        lambda responses, answers, rows: [not response for response in responses],
    )
    monkeypatch.setitem(sys.modules, "own_lengths", module)
    rows = [
        row_of({"prompt": "a", "answer": "x"}),
        row_of({"prompt": "b", "answer": "y", "scale": 0.5}),
        ROWS[0],
    ]
    texts = ["ab", "", "abcd", "", "abc", "#### 72"]
    result, answers = evaluate_answers(rows, texts, [False] * 6, 2, "own_lengths:lengths")
    means = [1.0, 1.0, 5.0]
    error = statistics.stdev(means) / math.sqrt(3)
    assert result == pytest.approx(
        {
            "accuracy": 7 / 3,
            "standard_error": error,
            "interval_low": 7 / 3 - 1.959964 * error,
            "interval_high": 7 / 3 + 1.959964 * error,
            "n_problems": 3,
            "samples_per_problem": 2,
            "truncated_fraction": 0,
            "pass@2": (2 + 2 + 7) / 3,
        }
    )
    assert answers[1] == {
        "question": "b",
        "answer": "y",
        "responses": ["abcd", ""],
        "scores": [2.0, 0.0],
        "truncated": [False, False],
    }

    result, _ = evaluate_answers(
        rows, texts, [False] * 6, 2, "own_lengths:empty"
    )  # 0 or 1: fractions, as GSM8K's
    assert (result["interval_low"], result["interval_high"]) == wilson_interval(
        np.array([0.5, 0.5, 0.0]), 2
    )
    assert result["pass@2"] == pytest.approx(2 / 3)
