"""One-step word problems in GSM8K form, with a held-out split that shares no equation with
training.

A row, as `write_problems` writes it (raw GSM8K: the canonical number stands after `####`):

    {"question": "Tom has 3 apples. Tom buys 4 more. How many apples does Tom have now?",
     "answer": "3+4=7\\n#### 7"}

Operands are 1 to 20 and the operation is + or -. What is held out is the UNORDERED operand pair,
across both operations: if {3, 4} is held out, then none of 3+4, 4+3 and 4-3 is stated, asked or
answered anywhere in training, neither in a right answer nor in a wrong one. (Splitting by problem
text or by equation would not do: an answer with the wrong operation turns 3+4 into 4-3, and 4+3 is
3+4 again.) What is not held out is the inverse fact: 7-3=4 has the pair {3, 7} and may be trained
while 3+4=7 is held out, and so may other sums of the same digits.
"""

import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import combinations_with_replacement, product
from pathlib import Path

MAX_OPERAND = 20
OTHER = {"+": "-", "-": "+"}
SLIPS = (-2, -1, 1, 2)  # what a misread number is off by
NAMES = ("Tom", "Anna", "Ben", "Lily", "Sam", "Mia", "Max", "Ella")
OBJECTS = ("apples", "books", "coins", "pens", "cards", "shells", "stamps", "marbles")
# `{a}` is the first number with its noun, `{}` the number of the next step.
TEMPLATES = {
    "+": (
        "{name} has {a}. {name} buys {} more. How many {objects} does {name} have now?",
        (
            "{name} finds {a} in the morning and {} in the evening. "
            "How many {objects} does {name} find in all?"
        ),
        "{name} has {a} and {other} has {}. How many {objects} do they have together?",
        "There are {a} in a box. {name} puts in {} more. How many {objects} are in the box now?",
    ),
    "-": (
        "{name} has {a}. {name} gives {} to {other}. How many {objects} does {name} have now?",
        "{name} has {a} in the morning and loses {} in the evening. How many {objects} are left?",
        (
            "{name} has {a} and {other} has {}. How many more {objects} does {name} have than "
            "{other}?"
        ),
        "There are {a} in a box. {name} takes out {}. How many {objects} are in the box now?",
    ),
}
# Shares of the answers that the starting model is shown; the others are right and in the right
# form.
MIXTURE = {
    "bare": 0.48,  # "The answer is 7": right, but without the `####` that the strict verifier wants
    "wrong_operation": 0.11,  # 3+4 answered as 4-3
    "slipped_number": 0.08,  # 3+4 answered as 3+5
}

Pair = tuple[int, int]  # unordered operand pair, smaller operand first


@dataclass(frozen=True)
class Problem:
    """A question, the number that it starts from, and the (operation, number) of each step; the
    result of a step is what the next one starts from.
    """

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
        totals = self.totals
        lines = []
        for before, (op, number), after in zip(totals, self.steps, totals[1:]):
            lines.append(f"{before}{op}{number}={after}")
        return "\n".join([*lines, f"#### {self.result}"])

    def worded(self, template: str, name: str, other: str, objects: str) -> "Problem":
        """The problem with a question in words. The first number carries the noun ("1 apple",
        "3 apples"), the others stand alone ("and Ben has 4").
        """
        noun = objects.removesuffix("s") if self.first == 1 else objects
        numbers = [number for _, number in self.steps]
        first = f"{self.first} {noun}"
        question = template.format(*numbers, a=first, name=name, other=other, objects=objects)
        return replace(self, question=question)

    def is_allowed(self, pairs: set[Pair]) -> bool:
        """Returns True if every equation has one of `pairs`, and no result is negative."""
        totals = self.totals
        stated = {pair_of(total, number) for total, (_, number) in zip(totals, self.steps)}
        return min(totals) >= 0 and stated <= pairs


def pair_of(a: int, b: int) -> Pair:
    return min(a, b), max(a, b)


def split_pairs(held_out: float, seed: int) -> tuple[list[Pair], list[Pair]]:
    """Split the 210 unordered pairs of operands 1..20 into (training pairs, held-out pairs), both
    sorted; `held_out` is the share of pairs held out.
    """
    pairs = list(combinations_with_replacement(range(1, MAX_OPERAND + 1), 2))
    count = round(held_out * len(pairs))
    chosen = set(random.Random(f"split {seed}").sample(pairs, count))
    return [pair for pair in pairs if pair not in chosen], sorted(chosen)


def random_problem(pairs: list[Pair], rng: random.Random) -> Problem:
    """A problem whose operands are one of `pairs`; both operations are equally likely."""
    op = rng.choice("+-")
    low, high = rng.choice(pairs)
    a, b = (high, low) if op == "-" or rng.random() < 0.5 else (low, high)
    problem = Problem("", a, ((op, b),))
    name, other = rng.sample(NAMES, 2)
    template = rng.choice(TEMPLATES[op])
    return problem.worded(template, name, other, rng.choice(OBJECTS))


def make_problems(
    pairs: list[Pair], count: int, seed: int | str, draw: Callable = random_problem
) -> list[Problem]:
    """`count` problems with distinct questions, each from `draw`; the same for the same `pairs` and
    `seed`.
    """
    rng = random.Random(f"problems {seed}")
    problems: dict[str, Problem] = {}
    for _ in range(20 * count):
        problem = draw(pairs, rng)
        problems.setdefault(problem.question, problem)
        if len(problems) == count:
            return list(problems.values())
    raise ValueError(
        f"only {len(problems)} distinct questions found for {len(pairs)} operand pairs, {count} "
        "asked for: ask for fewer or hold out more pairs"
    )


def mixed_answer(
    problem: Problem, training_pairs: set[Pair], mixture: Mapping[str, float], rng: random.Random
) -> str:
    """One answer to `problem`, of a kind drawn from `mixture`, which is as MIXTURE. Whatever
    equation it states has a pair in `training_pairs`.
    """
    kind = answer_kind(mixture, rng)
    if kind == "bare":
        return f"The answer is {problem.result}"
    [(op, number)] = problem.steps
    if kind == "wrong_operation":
        low, high = pair_of(problem.first, number)
        return replace(problem, first=high, steps=((OTHER[op], low),)).answer
    slips = []
    if kind == "slipped_number":  # one operand is off by one or two
        for offset in SLIPS:
            slips.append(replace(problem, first=problem.first + offset))
            slips.append(replace(problem, steps=((op, number + offset),)))
    return wrong_answer(problem, slips, training_pairs, rng)


def answer_kind(mixture: Mapping[str, float], rng: random.Random) -> str:
    """A key of `mixture`, or "right"."""
    right = 1 - sum(mixture.values())
    return rng.choices([*mixture, "right"], [*mixture.values(), right])[0]


def wrong_answer(
    problem: Problem, wrong: Iterable[Problem], pairs: set[Pair], rng: random.Random
) -> str:
    """The answer to one of the problems `wrong` that may be stated, or the right one."""
    allowed = [other for other in wrong if other.is_allowed(pairs)]
    return rng.choice(allowed).answer if allowed else problem.answer


def write_problems(path: Path, problems: Iterable[Problem]) -> None:
    """Write raw GSM8K jsonl: one `{"question", "answer"}` a line."""
    rows = ({"question": problem.question, "answer": problem.answer} for problem in problems)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def all_wordings(templates: Mapping[str, Iterable[str]]) -> Iterator[str]:
    """Texts that hold every word a question or an answer can hold (the tokenizer's vocabulary is
    read from them). `templates` are those of problems of one step, by its operation.
    """
    for op, name, objects, number in product(templates, NAMES, OBJECTS, (1, MAX_OPERAND)):
        for template in templates[op]:
            problem = Problem("", number, ((op, number),)).worded(template, name, name, objects)
            yield f"{problem.question}\n{problem.answer}"
    yield "The answer is 0123456789"
