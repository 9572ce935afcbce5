"""What a few seeds and a few hundred questions say about a difference, and how many seeds would say
more.
"""

import math
from bisect import bisect_left
from dataclasses import dataclass
from functools import partial

import numpy as np
from scipy.optimize import brentq
from scipy.special import stdtrit

# fewer give no verdict: the interval of two is 12.7 standard errors wide on either side
LEAST_SEEDS = 3
POWER = 0.8
MOST_SEEDS = 10_000
ALIKE = 1e-24  # variance of what differs by rounding alone
MANY = 10**9  # questions, where Student's quantiles are the normal's

Variance = tuple[float, float]  # and of how many it is


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds and questions: its 95% interval, two-sided p-value against 0, and the
    variance that other seeds and other questions would each bring (single answers vary with the
    seed).
    """

    mean: float
    low: float
    high: float
    p: float
    of_seeds: float
    of_questions: float
    seeds: int


def estimate(values: np.ndarray) -> Estimate:
    """The mean of `values` [seeds, questions], where both the seeds and the questions are a sample
    of more.

    half^2 = t(seeds - 1)^2 V_s + t(questions - 1)^2 V_q, with Student's 97.5% quantiles (Cochran,
    Biometrics 20, 1964), where V_s is the variance between the seeds' means over their number, and
    V_q that between the questions' means over theirs, less the part that is noise of single
    answers, which V_s holds already. Never narrower than Student's interval of the seeds' means, so
    it keeps that one's promise; a bootstrap over a handful of seeds does not keep it (Owen, Annals
    of Applied Statistics 1, 2007).

    With one seed the interval speaks of other questions only. Where the seeds' means are all alike
    by chance, as those of few answers may be, V_s is the part of single answers. Where nothing
    varies there is nothing to judge by: the interval is NaN, and so is p, unless the mean is 0.
    """
    seeds, questions = values.shape
    mean = float(values.mean())
    of_seeds = values.mean(1).var(ddof=1) / seeds if seeds > 1 else 0.0
    of_questions = values.mean(0).var(ddof=1) / questions if questions > 1 else 0.0
    if seeds > 1 and questions > 1:
        rest = values - values.mean(1, keepdims=True) - values.mean(0) + mean
        of_answers = (rest**2).sum() / ((seeds - 1) * (questions - 1)) / values.size
        of_questions = max(of_questions - of_answers, 0.0)
        if of_seeds < 1e-9 * of_answers:
            of_seeds = of_answers
    if of_seeds + of_questions < ALIKE:
        p = 1.0 if abs(mean) < ALIKE else math.nan
        return Estimate(mean, math.nan, math.nan, p, 0.0, 0.0, seeds)

    half = partial(_half_width, (of_seeds, seeds), (of_questions, questions))
    least = 1e-12
    if half(least) <= abs(mean):
        p = least
    else:  # at a p of 1 the interval has no width
        p = brentq(lambda p: half(p) - abs(mean), least, 1.0)
    return Estimate(
        mean, mean - half(0.05), mean + half(0.05), p, float(of_seeds), float(of_questions), seeds
    )


def _half_width(seeds: Variance, questions: Variance, p: float) -> float:
    """Half the width of the interval that 1 - p of the cases are in."""
    squares = 0.0
    for variance, count in (seeds, questions):
        if variance:
            squares += variance * stdtrit(count - 1, p / 2) ** 2
    return math.sqrt(squares)


def effect_shown(seen: Estimate, seeds: float, limit: float) -> float:
    """The smallest difference that `seeds` seeds would show, p below `limit`, with a power of 80%,
    if seeds and questions vary as they were seen to.
    """
    of_seeds = seen.of_seeds * seen.seeds / seeds
    half = partial(_half_width, (of_seeds, seeds), (seen.of_questions, MANY))
    return half(limit) + half(2 * (1 - POWER))


def seeds_needed(seen: Estimate, limit: float = 0.05, effect: float | None = None) -> int | None:
    """Returns how many seeds would show a difference as large as `effect`, or as the one seen, as
    `effect_shown` has it. None if no number would, since the questions are too few, or more than
    `MOST_SEEDS`.
    """
    wanted = abs(seen.mean if effect is None else effect)
    counts = range(LEAST_SEEDS, MOST_SEEDS + 1)
    shows = partial(effect_shown, seen, limit=limit)
    first = bisect_left(counts, True, key=lambda count: shows(count) <= wanted)
    return counts[first] if first < len(counts) else None
