"""Word problems of one to three steps in GSM8K form, with a held-out split that shares no equation
with training.

    {"question": "Tom has 3 apples. Tom buys 4 more. Tom loses 2. How many apples does Tom have
     now?", "answer": "3+4=7\\n7-2=5\\n#### 5"}

A step adds or takes away, and its result is what the next one starts from. Every number that a step
starts from or brings is 1 to 20, so that its equation is of one of word_problems' 210 unordered
pairs: a training problem has only training pairs, in all of its steps and in every wrong answer to
it, and a test problem only held-out ones.
"""

import random
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from itertools import product

from mindspeed_qerl.demo.word_problems import MAX_OPERAND, NAMES, OBJECTS, Pair
from mindspeed_qerl.tasks.gsm8k.verifier import score

MOST_STEPS = 3
LONGEST_ANSWER = 48  # tokens of demo/tiny_model.py's tokenizer, and room for answers that ramble
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


@dataclass(frozen=True)
class Problem:
    """A question, the number that it starts from, and the (operation, number) of each step."""

    question: str
    first: int
    steps: tuple[tuple[str, int], ...]

    @property
    def totals(self) -> list[int]:
        """The first number, and the result of each step.

        >>> Problem("", 3, (("+", 4), ("-", 2))).totals
        [3, 7, 5]
        """
        totals = [self.first]
        for op, number in self.steps:
            totals.append(totals[-1] + number if op == "+" else totals[-1] - number)
        return totals

    @property
    def result(self) -> int:
        return self.totals[-1]

    @property
    def answer(self) -> str:
        """In GSM8K form: the equations, and the result after `####`."""
        lines = [
            f"{before}{op}{number}={after}"
            for before, (op, number), after in zip(self.totals, self.steps, self.totals[1:])
        ]
        return "\n".join([*lines, f"#### {self.result}"])

    @property
    def pairs(self) -> list[Pair]:
        """Of each step the unordered operands."""
        return [
            (min(before, number), max(before, number))
            for before, (_, number) in zip(self.totals, self.steps)
        ]


def is_allowed(problem: Problem, pairs: Collection[Pair]) -> bool:
    """Whether every equation of `problem` has one of `pairs`, and no result is negative."""
    return min(problem.totals) >= 0 and all(pair in pairs for pair in problem.pairs)


def random_problem(pairs: list[Pair], rng: random.Random) -> Problem:
    """A problem of one to three steps, as likely each, whose equations all have one of `pairs`."""
    allowed, length = set(pairs), rng.randint(1, MOST_STEPS)
    while True:  # until no step leads to a number that no further equation starts from
        total = first = rng.choice(rng.choice(pairs))
        steps: list[tuple[str, int]] = []
        while len(steps) < length:
            numbers = [
                number
                for number in range(1, MAX_OPERAND + 1)
                if (min(total, number), max(total, number)) in allowed
            ]
            choices = [
                (op, number) for number in numbers for op in "+-" if op == "+" or number <= total
            ]
            if not choices:
                break
            steps.append(rng.choice(choices))
            total = Problem("", total, (steps[-1],)).result
        if len(steps) == length:
            problem, (name, other) = Problem("", first, tuple(steps)), rng.sample(NAMES, 2)
            sentences = [rng.choice(STARTS), *(rng.choice(STEPS[op]) for op, _ in steps)]
            return replace(
                problem, question=_word(sentences, name, other, rng.choice(OBJECTS), problem)
            )


def grade_parts(problems: list[Problem], responses: list[str]) -> dict[str, float]:
    """What the responses get right, as shares: `correct` (strict verifier) of all and by number of
    steps, `hash_form` (has `#### n`), and `right_result`, a last number that is the gold one,
    whatever the form.
    """
    found = [
        (
            len(problem.steps),
            score(response, str(problem.result), "strict"),
            re.search(r"#### \d", response) is not None,
            re.findall(r"\d+", response)[-1:] == [str(problem.result)],
        )
        for problem, response in zip(problems, responses, strict=True)
    ]
    parts = {
        "correct": [right for _, right, _, _ in found],
        "hash_form": [form for _, _, form, _ in found],
        "right_result": [result for *_, result in found],
    }
    parts |= {
        f"correct_{steps}": [right for length, right, _, _ in found if length == steps]
        for steps in range(1, MOST_STEPS + 1)
    }
    return {name: sum(right) / max(len(right), 1) for name, right in parts.items()}


def mixed_answer(
    problem: Problem,
    training_pairs: Collection[Pair],
    mixture: Mapping[str, float],
    rng: random.Random,
) -> str:
    """One answer to `problem`, of a kind drawn from `mixture`, which is as MIXTURE. Whatever
    equation it states has a pair in `training_pairs`.
    """
    kind = rng.choices([*mixture, "right"], [*mixture.values(), 1 - sum(mixture.values())])[0]
    if kind == "bare":
        return f"The answer is {problem.result}"
    wrong = []
    for at, (op, number) in enumerate(problem.steps):
        if kind == "wrong_operation":
            wrong.append((at, ("-" if op == "+" else "+", number)))
        elif kind == "slipped_number":
            wrong += [(at, (op, number + offset)) for offset in (-2, -1, 1, 2)]
    answers = [
        replace(problem, steps=(*problem.steps[:at], step, *problem.steps[at + 1 :]))
        for at, step in wrong
    ]
    if kind == "stopped_early" and len(problem.steps) > 1:
        answers = [replace(problem, steps=problem.steps[:-1])]
    answers = [answer for answer in answers if is_allowed(answer, training_pairs)]
    return rng.choice(answers).answer if answers else problem.answer


def all_wordings() -> list[str]:
    """Texts that hold every word a question or an answer can hold."""
    texts = ["The answer is 0123456789"]
    for op, name, objects, number in product(STEPS, NAMES, OBJECTS, (1, MAX_OPERAND)):
        problem = Problem("", number, ((op, number),))
        texts += [
            f"{_word([start, step], name, name, objects, problem)}\n{problem.answer}"
            for start, step in product(STARTS, STEPS[op])
        ]
    return texts


def _word(sentences: list[str], name: str, other: str, objects: str, problem: Problem) -> str:
    # The first number carries the noun ("1 apple", "3 apples"), the others stand alone.
    noun = objects.removesuffix("s") if problem.first == 1 else objects
    start, *steps = sentences
    told = [start.format(name=name, a=f"{problem.first} {noun}")]
    told += [
        step.format(name=name, other=other, b=number)
        for step, (_, number) in zip(steps, problem.steps)
    ]
    return " ".join([*told, ASKED.format(objects=objects, name=name)])
