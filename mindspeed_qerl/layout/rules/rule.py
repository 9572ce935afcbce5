"""What a rule is: a function of a plan, the rule in words, and the line of upstream that it comes from."""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

from mindspeed_qerl.layout.plan import Plan

VLLM_VOCABULARY_MULTIPLE = 64  # vLLM pads the embedding to it (vocab_parallel_embedding.py:23)
Check = Callable[[Plan], str | None]


@dataclass(frozen=True)
class Rule:
    """What upstream demands of a plan. Called with one, it returns None, or one sentence with the numbers."""

    check: Check
    statement: str  # in words; and what would happen without it, where upstream does not state it itself
    repository: str
    path: str
    line: int
    text: str  # of that line; tests/upstream compares it with the checkouts

    def __call__(self, plan: Plan) -> str | None:
        return self.check(plan)

    @property
    def name(self) -> str:
        return self.check.__name__


def rule(statement: str, file: str, line: int, text: str) -> Callable[[Check], Rule]:
    """Makes a Rule of a function; `file` is `repository path`."""
    repository, path = file.split(" ")
    return lambda check: Rule(check, statement, repository, path, line, text)


def indivisible(what: str, number: int, by: str, *sizes: int) -> str | None:
    """The sentence for a number that is no multiple of the product of `sizes`; `by` names them.

    >>> indivisible("ranks", 10, "TP {} x PP {}", 2, 2)
    '10 ranks cannot be divided by TP 2 x PP 2 = 4'
    >>> indivisible("ranks", 12, "TP {} x PP {}", 2, 2)
    """
    divisor = by.format(*sizes) + (f" = {prod(sizes)}" if len(sizes) > 1 else "")
    return f"{number:,} {what} cannot be divided by {divisor}" if number % prod(sizes) else None


def vllm_vocabulary(plan: Plan) -> int:
    """Rows of vLLM's embedding, all ranks together."""
    return -(-plan.shape.vocab_size // VLLM_VOCABULARY_MULTIPLE) * VLLM_VOCABULARY_MULTIPLE
