r"""Mathematical answers, judged by Math-Verify (github.com/huggingface/Math-Verify) with its own
defaults.

    >>> score_batch([r"so it is $\boxed{\frac12}$", "Answer: 0.3"], ["0.5", "0.5"])
    [1.0, 0.0]

It reads the last answer of a text (a \boxed one first) into SymPy and compares. What SymPy is given
may never end, 9^{9^{9^{9}}}, and Math-Verify's own time-outs are signals, which only a main thread
gets. So processes of their own judge (math_process.py), each one pair at a time.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from mindspeed_qerl.common.errors import ConfigError

SECONDS = 5  # of processor time, for a pair; Math-Verify's own, for each half of the work
_idle: list[Any] = []  # they wait for a pair, 60 MB each
_threads = ThreadPoolExecutor(min(8, len(os.sched_getaffinity(0))))  # each with a process, at work


def score_batch(
    responses: Sequence[str], answers: Sequence[str], rows: Sequence[dict] = ()
) -> list[float | None]:
    """1.0 for each response that is equal to the gold answer beside it, else 0.0; None where that
    could not be computed. `rows` is unused, every reward is called with them. ConfigError without
    Math-Verify.
    """
    return list(_threads.map(_verdict, [f"${answer}$" for answer in answers], responses))


def equal_answers(problems: Iterable[Sequence[str]]) -> list[list[int | None]]:
    r"""Sorts the responses to each problem: the number of the first that each is equal to, from 0;
    None where no answer is read. Two that cannot be compared in time are not equal.

    >>> equal_answers([["Answer: 0.5", "I do not know", "Answer: 3", r"\boxed{\frac12}"]])
    [[0, None, 2, 0]]
    """
    return list(_threads.map(_equal_answers, problems))


def _equal_answers(responses: Sequence[str]) -> list[int | None]:
    found: list[int | None] = []
    for place, response in enumerate(responses):
        firsts = [other for other in range(place) if found[other] == other]
        # a response is equal to itself if an answer is read in it
        equal = (each for each in [*firsts, place] if _verdict(responses[each], response))
        found.append(next(equal, None))
    return found


def last_boxed(solution: str) -> str | None:
    r"""Returns what the last \boxed or \fbox of a published solution holds; None without one.

    >>> last_boxed(r"or $\boxed{1}$, so $x = \boxed{\frac{1}{2}}$."), last_boxed(r"$\boxed 2$.")
    ('\\frac{1}{2}', '2')
    """
    _, box, rest = solution.replace("\\fbox", "\\boxed").rpartition("\\boxed")
    if not box:
        return None
    rest = rest.lstrip()
    depth = 0
    for end, character in enumerate(rest):
        depth += (character == "{") - (character == "}")
        if not depth:
            return rest[1:end] if end else rest.partition("$")[0]
    return None


def _verdict(gold: str, response: str) -> float | None:
    """Returns what a process says of a pair; None if it died of it."""
    try:
        process = _idle.pop()  # of several threads
    except IndexError:
        process = _start()
    try:
        process.stdin.write(json.dumps([gold, response]) + "\n")
        process.stdin.flush()
        line = process.stdout.readline()
    except BrokenPipeError:
        line = ""
    if not line:
        process.wait()
        return None
    _idle.append(process)
    return float(line)


def _start() -> Any:
    """A process that has imported Math-Verify; ConfigError if it could not."""
    process: Any = subprocess.Popen(
        [sys.executable, "-P", Path(__file__).with_name("math_process.py"), str(SECONDS)],
        env={**os.environ, "PYTHONHASHSEED": "0"},  # SymPy's order of terms follows it
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    if not process.stdout.readline():
        raise ConfigError(
            "verifier 'math' needs Math-Verify, which did not start (its last words are above): "
            "pip install 'math-verify[antlr4-9-3]==0.9.0'"
        )
    return process
