"""The statistics of a study (study.py): when it may stop, pass@k, and questions that vary together.

Looks are at fixed numbers of seeds. The chance of a wrong word is spent over them (Lan and DeMets,
Biometrika 70, 1983) by O'Brien and Fleming's function, little at first, so that the last look is
judged by nearly all of it.
"""

import math
from collections.abc import Sequence
from functools import cache

import numpy as np
from scipy.signal import fftconvolve
from scipy.special import ndtr, ndtri

from mindspeed_qerl.compare.statistics import LEAST_SEEDS, Estimate, estimate, seeds_needed

GROWTH = 1.4  # from one look to the next
LEAST_PLANNED = 12  # seeds of a study whose pilot is part of it


def looks(most: int, first: int = 2 * LEAST_SEEDS) -> tuple[int, ...]:
    """The numbers of seeds at which a study of at most `most` seeds is looked at.

    >>> looks(30)
    (6, 9, 13, 19, 27, 30)
    """
    counts = [min(first, most)]
    while counts[-1] < most:
        counts.append(min(math.ceil(counts[-1] * GROWTH), most))
    return tuple(counts)


@cache
def limits(counts: tuple[int, ...], alpha: float) -> tuple[float, ...]:
    """The p-values below which looks at `counts` seeds are significant, so that of studies without
    an effect a share `alpha` ever is: for sums of independent draws of known variance (Armitage,
    McPherson and Rowe, J. R. Stat. Soc. A 132, 1969). What seeds and questions share makes looks
    more alike, and the share smaller.

    >>> # z of 4.88, 3.36, 2.68, 2.29, 2.03
    >>> [round(limit, 4) for limit in limits((1, 2, 3, 4, 5), 0.05)]
    [0.0, 0.0008, 0.0074, 0.022, 0.0422]
    """
    fractions = np.array(counts) / counts[-1]
    spent = np.diff(4 * ndtr(ndtri(alpha / 4) / np.sqrt(fractions)), prepend=0.0)  # of both sides
    grid = np.linspace(-8, 8, 8001)  # of sums, in standard deviations of the last one
    width, found, density, before = grid[1] - grid[0], [], None, 0.0
    for fraction, share in zip(fractions, spent):
        step = np.exp(-(grid**2) / (2 * (fraction - before))) / np.sqrt(
            2 * np.pi * (fraction - before)
        )
        density = step if density is None else fftconvolve(density, step, "same") * width
        tail = np.cumsum(density) * width  # of both sides half
        bound = -np.interp(share / 2, tail, grid + width / 2)
        found.append(float(2 * ndtr(-bound / math.sqrt(fraction))))
        density, before = np.where(np.abs(grid) < bound, density, 0.0), fraction
    return tuple(found)


def seeds_planned(pilot: Estimate, alpha: float, effect: float) -> int | None:
    """How many seeds show `effect` with a power of 80 %, judged at the last look, if seeds vary as
    the pilot's did; at least LEAST_PLANNED, since the pilot is judged with the rest: one that
    varies little by chance would make a study short and sure at once (8 % wrong words instead of 5
    %). None: no number would.
    """
    count = seeds_needed(pilot, alpha, effect)
    if count is None:
        return None
    count = seeds_needed(pilot, limits(looks(count), alpha)[-1], effect)
    return count and max(count, LEAST_PLANNED)


def judge(
    differences: np.ndarray, most: int, alpha: float, effect: float
) -> tuple[str, int] | None:
    """What a study of at most `most` seeds says, with what it has, and after how many seeds that
    was seen.

    Args:
        differences: [seeds, questions], as `estimate` takes them. alpha: the chance of a wrong
            word. effect: the smallest difference that matters.

    Returns:
        "better" or "worse"; "smaller", the difference is between -effect and effect; "not
        distinguishable", where there are all seeds and none of these can be said; None: go on.
    """
    counts = looks(most)
    for count, limit in zip(counts, limits(counts, alpha)):
        if count > len(differences):
            return None
        seen = estimate(differences[:count])
        if seen.p < limit:
            return "better" if seen.mean > 0 else "worse", count
        below, above = (estimate(differences[:count] - bound) for bound in (effect, -effect))
        if below.mean < 0 < above.mean and max(below.p, above.p) < limit:
            return "smaller", count
    return "not distinguishable", most


def pass_at(k: int, right: np.ndarray, samples: int) -> np.ndarray:
    """The chance that one of k answers is right, without bias, from `right` of `samples` (arXiv
    2107.03374).

    >>> pass_at(2, np.array([0, 1, 4]), 4)
    array([0. , 0.5, 1. ])
    """
    wrong = samples - right[..., None] - np.arange(k)
    return 1 - np.prod(np.maximum(wrong, 0) / (samples - np.arange(k)), axis=-1)


def grouped(values: np.ndarray, groups: Sequence[int]) -> np.ndarray:
    """[seeds, groups] of `values` [seeds, questions], with the mean of every seed: questions of one
    group (`groups`: the number of each question's, from 0) vary together, so other groups, not
    other questions, might have been asked.

    A group of n questions has the overall mean plus what it is off, times n over the mean n (the
    linearised mean of clusters of different sizes: Cochran, Sampling Techniques, 1977, chapter 9A).

    >>> grouped(np.array([[0.0, 1.0, 1.0, 1.0]]), [0, 0, 0, 1])
    array([[0.625, 0.875]])
    """
    sizes = np.bincount(groups)
    means = np.stack([np.bincount(groups, weights=row) for row in values]) / sizes
    overall = values.mean()
    return overall + sizes / sizes.mean() * (means - overall)
