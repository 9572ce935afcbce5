"""The rule by which a study stops, on synthetic studies whose truth is known."""

import doctest
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from mindspeed_qerl.compare.statistics import estimate

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import sequential
from sequential import grouped, judge, limits, looks, seeds_planned

ALPHA, EFFECT = 0.05, 0.02


def study(generator, truth, seeds=24, questions=300, of_seed=0.02, of_question=0.05, samples=4):
    """Differences [seeds, questions] whose mean over more seeds and questions is `truth`."""
    noise = generator.normal(0, 0.5 / samples**0.5, (seeds, questions))  # of sampled answers
    return (
        truth
        + generator.normal(0, of_seed, (seeds, 1))
        + generator.normal(0, of_question, (1, questions))
        + noise
    )


def words(truth, studies, most=24, **more):
    generator = np.random.default_rng([int(1000 * truth), studies])
    said = []
    for _ in range(studies):
        word, _ = judge(study(generator, truth, seeds=most, **more), most, ALPHA, EFFECT)
        said.append(word)
    return said


def test_of_400_studies_without_an_effect_at_most_5_percent_see_one():
    seen = []
    for of_seed in (0.0, 0.02, 0.05):
        said = words(0.0, 400, of_seed=of_seed)
        seen.append(said.count("better") + said.count("worse"))
    assert np.mean(seen) <= 20
    assert max(seen) <= stats.binom.ppf(0.999, 400, ALPHA), (
        seen
    )  # the chance of any being above it: 0.3 %


def test_an_effect_is_seen_with_the_power_that_was_planned_and_never_called_smaller():
    """As many seeds as the pilot's variance asks for: 80 % of studies see the effect, less what
    early looks cost.
    """
    pilot = study(np.random.default_rng(2), 0.0, seeds=200, of_question=0.02)
    needed = seeds_planned(estimate(pilot), ALPHA, EFFECT)
    assert 12 < needed < 40
    said = words(EFFECT, 300, most=needed, of_question=0.02)
    assert said.count("better") > 0.75 * 300 and said.count("worse") == 0
    assert said.count("smaller") <= 0.05 * 300


def test_a_study_that_is_planned_from_its_own_first_seeds_keeps_5_percent(monkeypatch):
    """Without the least number of seeds that are planned it does not."""

    def share_of_wrong_words(studies=700):
        wrong = 0
        for number in range(studies):
            generator = np.random.default_rng([5, number])
            seeds = iter(generator.normal(0, 0.02, 200))
            pilot = np.array([[next(seeds)] for _ in range(4)])
            most = seeds_planned(estimate(pilot), ALPHA, EFFECT)
            values = np.vstack(
                [pilot, [[next(seeds)] for _ in range(most - 4)]] if most > 4 else [pilot]
            )
            wrong += judge(values, most, ALPHA, 1e-9)[0] in ("better", "worse")
        return wrong / studies

    assert share_of_wrong_words() < ALPHA + 3 * (ALPHA * (1 - ALPHA) / 700) ** 0.5
    monkeypatch.setattr(sequential, "LEAST_PLANNED", 4)
    assert share_of_wrong_words() > ALPHA + 2 * (ALPHA * (1 - ALPHA) / 700) ** 0.5


def test_no_effect_is_told_from_a_small_one_when_there_are_seeds_enough():
    said = words(0.0, 100, most=60, of_question=0.02)
    assert said.count("smaller") > 60


def test_a_large_effect_stops_early():
    generator = np.random.default_rng(3)
    values = study(generator, 0.15, seeds=40)
    first = next(count for count in range(1, 41) if judge(values[:count], 40, ALPHA, EFFECT))
    assert first < 20 and judge(values[:first], 40, ALPHA, EFFECT) == ("better", first)
    # what was seen stays
    assert judge(-values, 40, ALPHA, EFFECT) == ("worse", first)


def test_limits_spend_alpha_on_sums_of_independent_draws():
    """200,000 walks drawn: as many leave the limits as may."""
    generator, counts = np.random.default_rng(4), (6, 9, 13, 19, 24)
    steps = np.diff(counts, prepend=0)
    sums = np.cumsum(generator.normal(0, np.sqrt(steps), (200_000, len(counts))), axis=1)
    p = 2 * stats.norm.sf(np.abs(sums) / np.sqrt(counts))
    crossed = (p < limits(counts, ALPHA)).any(1).mean()
    assert crossed == pytest.approx(ALPHA, abs=0.002)


def test_looks_end_with_the_last_seed():
    for most in (3, 6, 7, 30, 200):
        counts = looks(most)
        assert counts[-1] == most and list(counts) == sorted(set(counts))
        assert judge(np.zeros((counts[0] - 1, 5)), most, ALPHA, EFFECT) is None
    assert limits((7,), ALPHA) == pytest.approx((ALPHA,), abs=1e-4)


def test_questions_that_vary_together_are_judged_as_groups():
    """Groups of very different sizes; a treatment that helps in some and harms in others."""
    generator = np.random.default_rng(7)
    groups = np.repeat(np.arange(32), generator.geometric(1 / 16, 32))
    seen = {"questions": 0, "groups": 0}
    for _ in range(400):
        of_group = generator.normal(0, 0.1, 32)
        values = (
            of_group[groups]
            + generator.normal(0, 0.02, (12, 1))
            + generator.normal(0, 0.3, (12, len(groups)))
        )
        together = grouped(values, groups)
        np.testing.assert_allclose(together.mean(1), values.mean(1))
        seen["questions"] += estimate(values).p < 0.05
        seen["groups"] += estimate(together).p < 0.05
    assert seen["groups"] <= stats.binom.ppf(0.999, 400, 0.05) and seen["questions"] > 80, seen


def test_examples():
    results = doctest.testmod(sequential)
    assert results.attempted and not results.failed
