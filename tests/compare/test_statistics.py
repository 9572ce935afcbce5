"""Intervals and verdicts against draws where the truth is known."""

import math
from itertools import product

import numpy as np
import pytest
from scipy import stats

from mindspeed_qerl.compare.statistics import Estimate, estimate, seeds_needed


def differences(
    generator, seeds, questions=200, samples=4, effect=0.0, of_seed=0.3, of_question=0.5
):
    """Scores with the treatment minus without, [seeds, questions]: sampled answers to questions of
    various difficulty, of models that vary with the seed, and a treatment that helps on some
    questions and harms on others. All in logits.
    """
    difficulty = generator.normal(0, 1.5, questions)
    helps = generator.normal(0, of_question, questions)

    def scores(shift):
        logits = (
            difficulty
            + shift
            + generator.normal(0, of_seed, (seeds, 1))
            + generator.normal(0, 0.3, (seeds, questions))
        )
        return generator.binomial(samples, 1 / (1 + np.exp(-logits))) / samples

    return scores(effect + helps) - scores(0.0)


def false_verdicts(seeds, of_seed, of_question, draws=250):
    """How often of 1 a difference is seen where there is none."""
    generator = np.random.default_rng([seeds, int(100 * of_seed), int(100 * of_question)])
    wrong = 0
    for _ in range(draws):
        values = differences(generator, seeds, of_seed=of_seed, of_question=of_question)
        wrong += estimate(values).p < 0.05
    return wrong / draws


CASES = [*product((3, 5), (0.0, 0.1, 0.3, 0.8), (0.0, 0.8))]


def test_a_difference_is_seen_where_there_is_none_in_at_most_5_percent():
    rates = {}
    for case in CASES:
        rates[case] = false_verdicts(*case)
    assert np.mean(list(rates.values())) <= 0.05
    # the chance of any draw being above it: 2 %
    assert max(rates.values()) <= stats.binom.ppf(0.999, 250, 0.05) / 250, rates


def test_with_noise_of_seeds_alone_it_is_students_interval_of_the_seeds_means():
    generator = np.random.default_rng(0)
    values = generator.normal(0.1, 0.2, (5, 1)) + np.zeros((5, 300))
    expected = stats.t.interval(0.95, 4, values.mean(), stats.sem(values[:, 0]))
    found = estimate(values)
    assert (found.low, found.high) == pytest.approx(expected)
    assert found.p == pytest.approx(stats.ttest_1samp(values[:, 0], 0).pvalue)


def test_with_one_seed_it_is_students_interval_of_the_questions():
    values = np.random.default_rng(0).normal(0.1, 0.2, (1, 300))
    assert (estimate(values).low, estimate(values).high) == pytest.approx(
        stats.t.interval(0.95, 299, values.mean(), stats.sem(values[0]))
    )


@pytest.mark.parametrize(
    "values, p",
    [
        (np.zeros((3, 4)), 1.0),
        (np.ones((3, 4)), math.nan),
        (np.full((3, 4), 0.1), math.nan),
        (np.full((3, 1), 0.1), math.nan),
        (np.full((1, 2), 0.5), math.nan),
        (np.full((1, 1), 1.0), math.nan),
    ],
)
def test_where_nothing_varies_there_is_no_interval(values, p):
    found = estimate(values)
    assert found.p == pytest.approx(p, nan_ok=True) and math.isnan(found.low + found.high)


def test_seeds_whose_means_are_alike_by_chance_are_not_certain():
    """0/1 answers, none of which says that the mean is not 0.25."""
    for questions in (4, 40):
        values = np.tile(np.eye(4)[:3], questions // 4) / 3 + 1 / 12
        found = estimate(values - values.mean() + 0.01)
        assert 0.05 < found.p < 1 and found.low < 0 < found.high


def test_variances_are_taken_apart():
    """Against the variances that the values were made with."""
    generator = np.random.default_rng(0)
    seeds, questions = 400, 400
    values = (
        generator.normal(0, 0.3, (seeds, 1))
        + generator.normal(0, 0.5, questions)
        + generator.normal(0, 2, (seeds, questions))
    )
    found = estimate(values)
    assert found.of_seeds == pytest.approx(0.09 / seeds + 4 / values.size, rel=0.2)
    assert found.of_questions == pytest.approx(0.25 / questions, rel=0.2)
    assert (found.high - found.mean) == pytest.approx(
        1.96 * math.sqrt(found.of_seeds + found.of_questions), rel=0.01
    )


def test_the_number_of_seeds_gives_the_power_it_says():
    """As many seeds as it says see the difference in about 80 % of draws, and a quarter of them in
    far fewer.
    """
    generator = np.random.default_rng(0)
    truth = dict(of_seed=0.4, of_question=0.0, effect=0.4, questions=100)
    seen = estimate(differences(generator, 300, **truth))
    needed = seeds_needed(seen)

    def power(seeds):
        return np.mean(
            [estimate(differences(generator, seeds, **truth)).p < 0.05 for _ in range(300)]
        )

    assert 0.7 < power(needed) < 0.95
    assert power(max(needed // 4, 3)) < 0.5


def test_no_number_of_seeds_helps_where_the_questions_are_too_few():
    seen = estimate(
        np.random.default_rng(0).normal(0, 1, 20)
        + np.random.default_rng(1).normal(0, 0.001, (3, 20))
    )
    assert seen.p > 0.05 and seeds_needed(seen) is None


def test_a_tiny_difference_takes_more_seeds_than_anyone_has():
    assert seeds_needed(Estimate(1e-9, -1, 1, 1.0, 0.1, 0.0, 3)) is None
    textbook = 400  # n = (z_0.975 + z_0.8)^2 variance / difference^2
    assert seeds_needed(
        Estimate(2.8016 * math.sqrt(0.3 / textbook), -1, 1, 1.0, 0.1, 0.0, 3)
    ) == pytest.approx(textbook, rel=0.01)
