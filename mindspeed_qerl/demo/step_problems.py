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

from .word_problems import (
    MAX_OPERAND,
    NAMES,
    OBJECTS,
    OTHER,
    Pair,
    Problem,
    answer_kind,
    pair_of,
    worded,
    wrong_answer,
)

MOST_STEPS = 3
STARTS = ("{name} has {a}.", "There are {a} in the box of {name}.")
STEPS = {
    "+": ("{name} buys {b} more.", "{name} finds {b}.", "{other} gives {name} {b}."),
    "-": ("{name} gives {b} to {other}.", "{name} loses {b}.", "{name} sells {b}."),
}
ASKED = "How many {objects} does {name} have now?"
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
    length = rng.randint(1, MOST_STEPS)
    problem = None
    while problem is None:
        problem = _random_steps(pairs, length, rng)
    name, other = rng.sample(NAMES, 2)
    sentences = [rng.choice(STARTS), *(rng.choice(STEPS[op]) for op, _ in problem.steps)]
    question = _tell(sentences, name, other, rng.choice(OBJECTS), problem)
    return replace(problem, question=question)


def _random_steps(pairs: list[Pair], length: int, rng: random.Random) -> Problem | None:
    """Without a question; None if a step led to a number that no further equation starts from."""
    allowed = set(pairs)
    total = rng.choice(rng.choice(pairs))
    first = total
    steps = []
    for _ in range(length):
        choices = []
        for number in range(1, MAX_OPERAND + 1):
            if pair_of(total, number) in allowed:
                choices.append(("+", number))
                if number <= total:
                    choices.append(("-", number))
        if not choices:
            return None
        steps.append(rng.choice(choices))
        total = Problem("", total, (steps[-1],)).result
    return Problem("", first, tuple(steps))


def mixed_answer(
    problem: Problem,
    training_pairs: set[Pair],
    mixture: Mapping[str, float],
    rng: random.Random,
) -> str:
    """One answer to `problem`, of a kind drawn from `mixture`, which is as MIXTURE. Whatever
    equation it states has a pair in `training_pairs`.
    """
    kind = answer_kind(mixture, rng)
    if kind == "bare":
        return f"The answer is {problem.result}"
    # the steps of wrong answers
    steps = problem.steps
    wrong = []
    for at, (op, number) in enumerate(steps):
        before = steps[:at]
        after = steps[at + 1 :]
        if kind == "wrong_operation":
            wrong.append((*before, (OTHER[op], number), *after))
        elif kind == "slipped_number":
            wrong += [(*before, (op, number + by), *after) for by in (-2, -1, 1, 2)]
    if kind == "stopped_early" and len(steps) > 1:
        wrong = [steps[:-1]]
    others = [replace(problem, steps=steps) for steps in wrong]
    return wrong_answer(problem, others, training_pairs, rng)


def all_wordings() -> list[str]:
    """Texts that hold every word a question or an answer can hold."""
    texts = ["The answer is 0123456789"]
    for op, name, objects, number in product(STEPS, NAMES, OBJECTS, (1, MAX_OPERAND)):
        problem = Problem("", number, ((op, number),))
        texts += [
            f"{_tell([start, step], name, name, objects, problem)}\n{problem.answer}"
            for start, step in product(STARTS, STEPS[op])
        ]
    return texts


def _tell(sentences: list[str], name: str, other: str, objects: str, problem: Problem) -> str:
    numbers = [number for _, number in problem.steps]
    told = []
    for sentence, number in zip([*sentences, ASKED], [0, *numbers, 0]):  # no number but in a step
        told.append(worded(sentence, name, other, objects, problem.first, number))
    return " ".join(told)
