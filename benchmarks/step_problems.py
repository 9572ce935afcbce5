"""Word problems of one to three steps in GSM8K form, with a held-out split that shares no equation
with training.

    {"question": "Tom has 3 apples. Tom loses 2. Tom buys 6. How many apples does Tom have now?",
     "answer": "3-2=1\\n1+6=7\\n#### 7"}

A step adds or takes away, and its result is what the next one starts from. Every number that a step
starts from or brings is 1 to 20, so that its equation is of one of word_problems' 210 unordered
pairs: a training problem has only training pairs, in all of its steps and in every wrong answer to
it, and a test problem only held-out ones.
"""

import random
from collections.abc import Mapping
from dataclasses import replace
from itertools import product

from mindspeed_qerl.demo.word_problems import (
    MAX_OPERAND,
    NAMES,
    OBJECTS,
    OTHER,
    SLIPS,
    Pair,
    Problem,
    answer_kind,
    pair_of,
    wrong_answer,
)

MOST_STEPS = 3
STARTS = ("{name} has {a}.", "There are {a} in the box of {name}.")
STEPS = {
    "+": ("{name} buys {} more.", "{name} finds {}.", "{other} gives {name} {}."),
    "-": ("{name} gives {} to {other}.", "{name} loses {}.", "{name} sells {}."),
}
ASKED = "How many {objects} does {name} have now?"
# Problems of one step: they have every word.
TEMPLATES = {
    op: list(map(" ".join, product(STARTS, sentences, [ASKED]))) for op, sentences in STEPS.items()
}
# Shares of the answers that the starting model is shown; the others are right and in the right
# form.
MIXTURE = {
    "bare": 0.5,  # "The answer is 7": right, but without the `####` that the strict verifier wants
    "wrong_operation": 0.12,  # one step adds where it should take away, or the other way round
    "slipped_number": 0.1,  # one step has a number that is off by one or two
    "stopped_early": 0.1,  # the last step is missing (of one step: right)
}


def random_problem(pairs: list[Pair], rng: random.Random) -> Problem:
    """A problem of one to three steps, as likely each, whose equations all have one of `pairs`."""
    problem = _random_steps(pairs, rng.randint(1, MOST_STEPS), rng)
    name, other = rng.sample(NAMES, 2)
    sentences = [rng.choice(STARTS), *(rng.choice(STEPS[op]) for op, _ in problem.steps), ASKED]
    return problem.worded(" ".join(sentences), name, other, rng.choice(OBJECTS))


def _random_steps(pairs: list[Pair], length: int, rng: random.Random) -> Problem:
    """A problem without a question."""
    allowed = set(pairs)
    problem = Problem("", rng.choice(rng.choice(pairs)), ())
    for _ in range(length):
        total = problem.result
        choices = []
        for number in range(1, MAX_OPERAND + 1):
            if pair_of(total, number) in allowed:
                choices.append(("+", number))
                if number <= total:
                    choices.append(("-", number))
        if not choices:  # no further equation starts from this number: begin again
            return _random_steps(pairs, length, rng)
        problem = replace(problem, steps=(*problem.steps, rng.choice(choices)))
    return problem


def mixed_answer(
    problem: Problem, training_pairs: set[Pair], mixture: Mapping[str, float], rng: random.Random
) -> str:
    """One answer to `problem`, of a kind drawn from `mixture`, which is as MIXTURE. Whatever
    equation it states has a pair in `training_pairs`.
    """
    kind = answer_kind(mixture, rng)
    if kind == "bare":
        return f"The answer is {problem.result}"
    wrong = []  # the steps of wrong answers
    if kind == "stopped_early" and len(problem.steps) > 1:
        wrong.append(problem.steps[:-1])
    for at, (op, number) in enumerate(problem.steps):
        misread = []
        if kind == "wrong_operation":
            misread = [(OTHER[op], number)]
        elif kind == "slipped_number":
            misread = [(op, number + by) for by in SLIPS]
        wrong += [(*problem.steps[:at], step, *problem.steps[at + 1 :]) for step in misread]
    others = [replace(problem, steps=steps) for steps in wrong]
    return wrong_answer(problem, others, training_pairs, rng)
