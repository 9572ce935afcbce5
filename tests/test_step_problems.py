"""Problems of several steps, read back with expressions of the test's own, from text alone."""

import random
import re
import sys
from collections import Counter

import pytest

from mindspeed_qerl.demo.word_problems import make_problems, split_pairs
from mindspeed_qerl.tasks.gsm8k.verifier import score
from tests import ROOT
from tests.demo.test_word_problems import STATED, pairs_stated

sys.path.insert(0, str(ROOT / "benchmarks"))
import step_problems
from step_problems import MIXTURE


def asked(question):
    """The first number and the steps that a question tells."""
    first, *steps, last = question.replace("?", ".").rstrip(".").split(". ")
    name = last.split(" does ")[1].split()[0]
    told = []
    for step in steps:
        adds = "buys" in step or "finds" in step or f"gives {name} " in step
        told.append(("+" if adds else "-", int(re.search(r"\d+", step)[0])))
    return int(re.search(r"\d+", first)[0]), told


def pairs_of(first, steps):
    found, total = set(), first
    for op, number in steps:
        found.add((min(total, number), max(total, number)))
        total = total + number if op == "+" else total - number
    return found


@pytest.fixture(scope="module")
def split():
    return split_pairs(0.15, 0)


def test_every_problem_is_answered_step_by_step(split):
    lengths = Counter()
    for problem in make_problems(split[0], 3000, 0, step_problems.random_problem):
        first, steps = asked(problem.question)
        lines = problem.answer.split("\n")
        total = first
        for (op, number), line in zip(steps, lines[:-1], strict=True):
            after = total + number if op == "+" else total - number
            assert (
                line == f"{total}{op}{number}={after}"
                and after >= 0
                and 1 <= number <= 20
                and 1 <= total <= 20
            )
            total = after
        assert lines[-1] == f"#### {total}" and score(problem.answer, str(total), "strict")
        lengths[len(steps)] += 1
    assert lengths.keys() == {1, 2, 3} and min(lengths.values()) > 900


def test_no_training_text_asks_or_states_a_held_out_equation(split):
    training, held_out = split
    tests = make_problems(held_out, 1000, 1, step_problems.random_problem)
    tested = set().union(*(pairs_of(*asked(problem.question)) for problem in tests))
    assert (
        tested == set(held_out)
        and min(Counter(len(problem.steps) for problem in tests).values()) > 250
    )
    rng, shown = random.Random(3), set()
    for kind in ("right", *MIXTURE):
        for _ in range(1000):
            problem = step_problems.random_problem(training, rng)
            answer = step_problems.mixed_answer(problem, set(training), {kind: 1.0}, rng)
            shown |= pairs_of(*asked(problem.question))
            shown |= pairs_stated(answer)
    assert shown == set(training)


@pytest.mark.parametrize("kind", MIXTURE)
def test_wrong_answers_are_wrong_as_they_say(split, kind):
    rng, wrong = random.Random(5), 0
    for _ in range(500):
        problem = step_problems.random_problem(split[0], rng)
        answer = step_problems.mixed_answer(problem, set(split[0]), {kind: 1.0}, rng)
        stated = STATED.findall(answer)
        assert all(
            int(c) == (int(a) + int(b) if op == "+" else int(a) - int(b)) for a, op, b, c in stated
        )
        right = STATED.findall(problem.answer)
        if kind == "bare":
            assert answer == f"The answer is {problem.result}" and not score(
                answer, str(problem.result), "strict"
            )
            wrong += 1
        elif answer != problem.answer:
            wrong += 1
            assert answer.endswith(f"\n#### {stated[-1][3]}")
            if kind == "stopped_early":
                assert stated == right[:-1]
            else:  # the steps as they were but one, and what follows from it
                op_or_number = 1 if kind == "wrong_operation" else 2
                assert (
                    sum(
                        one[op_or_number] != other[op_or_number]
                        for one, other in zip(stated, right)
                    )
                    == 1
                )
    assert wrong > 250
