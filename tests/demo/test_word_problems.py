import json
import random
import re

import pytest

from mindspeed_qerl.demo import word_problems
from mindspeed_qerl.demo.word_problems import MIXTURE, Problem

# Read back with expressions of the test's own, from text alone.
STATED = re.compile(r"(\d+)([+-])(\d+)=(\d+)")
NUMBERS = re.compile(r"\d+")


def pairs_stated(answer):
    """Unordered operand pairs."""
    return {tuple(sorted((int(a), int(b)))) for a, _, b, _ in STATED.findall(answer)}


def pairs_in(question, answer):
    """Those that a text asks about or states."""
    return pairs_stated(answer) | {
        tuple(sorted(int(number) for number in NUMBERS.findall(question)))
    }


@pytest.fixture(scope="module", params=[0, 7])
def split(request):
    return word_problems.split_pairs(held_out=0.15, seed=request.param)


def test_no_training_text_asks_or_states_a_held_out_pair(split):
    training_pairs, held_out_pairs = split
    held_out = {
        pair
        for problem in word_problems.make_problems(held_out_pairs, 1500, seed=1)
        for pair in pairs_in(problem.question, problem.answer)
    }
    assert len(held_out) == 32  # 1,500 problems show every held-out pair
    rng = random.Random(3)
    shown = set()
    for problem in word_problems.make_problems(training_pairs, 2000, seed=2):
        shown |= pairs_in(problem.question, problem.answer)
    for kind in ("bare", "wrong_operation", "slipped_number"):
        for _ in range(4000):
            problem = word_problems.random_problem(training_pairs, rng)
            answer = word_problems.mixed_answer(problem, set(training_pairs), {kind: 1.0}, rng)
            shown |= pairs_in(problem.question, answer)
    assert len(shown) == 178  # every training pair turned up, so a leak would have had its chance
    assert not shown & held_out


def test_every_problem_is_answered_by_its_own_numbers(split):
    for problem in word_problems.make_problems(split[0], 1000, seed=0):
        a, op, b, result = STATED.match(problem.answer).groups()
        assert [a, b] == NUMBERS.findall(problem.question)
        assert int(result) == eval(f"{a}{op}{b}") >= 0
        assert problem.answer == f"{a}{op}{b}={result}\n#### {result}"
        adding = any(
            word in problem.question for word in ("buys", " in all", "together", "puts in")
        )
        assert (op == "+") == adding


def test_the_generator_repeats_itself(split):
    def make(seed):
        return word_problems.make_problems(split[0], 200, seed)

    assert make(5) == make(5)
    assert make(5) != make(6)
    assert len({problem.question for problem in make(5)}) == 200
    assert (
        word_problems.split_pairs(0.15, 7)
        == word_problems.split_pairs(0.15, 7)
        != word_problems.split_pairs(0.15, 8)
    )


def test_answers_follow_the_mixture(split):
    training_pairs, rng, total = split[0], random.Random(0), 20000
    counts = dict.fromkeys(("bare", "wrong_operation", "slipped_number", "right"), 0)
    for _ in range(total):
        problem = word_problems.random_problem(training_pairs, rng)
        answer = word_problems.mixed_answer(problem, set(training_pairs), MIXTURE, rng)
        if answer == problem.answer:
            kind = "right"
        elif answer == f"The answer is {problem.result}":
            kind = "bare"
        else:
            a, op, b, result = STATED.match(answer).groups()
            assert (
                int(result) == eval(f"{a}{op}{b}") >= 0
            )  # noise is in the reading, the arithmetic is always true
            kind = "slipped_number" if op == problem.steps[0][0] else "wrong_operation"
        counts[kind] += 1
    # Four standard deviations of a share of 20,000 are at most 0.014.
    assert {kind: count / total for kind, count in counts.items()} == pytest.approx(
        {"bare": 0.48, "wrong_operation": 0.11, "slipped_number": 0.08, "right": 0.33}, abs=0.014
    )


def test_jsonl_is_raw_gsm8k(tmp_path):
    question = "Tom has 3 apples. Tom buys 4 more. How many apples does Tom have now?"
    problems = [Problem(question, 3, (("+", 4),))]
    word_problems.write_problems(tmp_path / "train.jsonl", problems)
    rows = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    assert rows == [{"question": problems[0].question, "answer": "3+4=7\n#### 7"}]


def test_more_distinct_questions_than_there_are_is_refused():
    with pytest.raises(ValueError, match="distinct questions"):
        word_problems.make_problems([(3, 4)], 5000, seed=0)
