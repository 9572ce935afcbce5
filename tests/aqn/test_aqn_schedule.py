"""The noise schedule against the paper's formula, written out here in float64 and in exact
fractions.
"""

import math
from fractions import Fraction

import numpy as np
import pytest

from mindspeed_qerl.aqn.schedule import KINDS, NoiseSchedule, skipped_strongest_noise


def qerl_sigmas(num_stages, start, end):
    """QeRL e8c6e79, grpo_trainer.py:1366."""
    return start * (end / start) ** (np.arange(num_stages - 1) / (num_stages - 2))


def qerl_stage(step, total_steps, num_stages):
    """QeRL e8c6e79, noise_scheduler.py:5-20: the division is a float64 one. Stage num_stages is
    held to the last sigma there.
    """
    return min(int(min(step, total_steps) // (total_steps / num_stages)), num_stages - 1)


def test_stages_and_sigmas_equal_qerls_but_where_its_float_division_rounds():
    late = 0
    for num_stages in range(3, 16):
        sigmas = [0.0, *qerl_sigmas(num_stages, 0.05, 5e-4)]
        for total_steps in range(1, 101):
            schedule = NoiseSchedule(
                sigma_start=0.05, sigma_end=5e-4, num_stages=num_stages, total_steps=total_steps
            )
            for step in range(total_steps + 3):
                stage = min(math.floor(step / Fraction(total_steps, num_stages)), num_stages - 1)
                assert schedule.stage(step) == stage
                theirs = qerl_stage(step, total_steps, num_stages)
                if theirs == stage:
                    assert math.isclose(schedule.sigma(step), sigmas[stage], rel_tol=1e-14)
                else:
                    late += 1
                    assert (
                        theirs == stage - 1
                        and Fraction(step * num_stages, total_steps).denominator == 1
                    )
    assert late > 0  # the docstring's example is one of them:
    assert NoiseSchedule(total_steps=22).stage(11) == 5 and qerl_stage(11, 22, 10) == 4


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_stages", [1, 2, 3, 10])
def test_first_stage_is_off_and_ends_are_hit(kind, num_stages):
    schedule = NoiseSchedule(
        schedule=kind, sigma_start=0.1, sigma_end=0.001, num_stages=num_stages, total_steps=60
    )
    first_stage = math.ceil(60 / num_stages)
    assert all(
        schedule.sigma(step) == 0 and schedule.stage(step) == 0 for step in range(first_stage)
    )
    if num_stages > 1:
        assert schedule.sigma(first_stage) == pytest.approx(0.1)
    if num_stages > 2:
        assert schedule.sigma(59) == pytest.approx(0.1 if kind in ("constant", "target") else 0.001)
    assert schedule.sigma(10_000) == schedule.sigma(59)


def test_shapes_of_the_other_kinds():
    def sigmas(kind):
        schedule = NoiseSchedule(
            schedule=kind, sigma_start=3, sigma_end=1, num_stages=6, total_steps=6
        )
        return [schedule.sigma(step) for step in range(6)]

    assert sigmas("linear") == pytest.approx([0, 3, 2.5, 2, 1.5, 1])
    assert sigmas("cosine") == pytest.approx([0, 3, 2 + math.sqrt(0.5), 2, 2 - math.sqrt(0.5), 1])
    assert sigmas("constant") == [0, 3, 3, 3, 3, 3]


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"schedule": "exponental"}, "'exponental'; known: exponential, linear"),
        ({"num_stages": 0}, "num_stages = 0 and .* must be integers >= 1"),
        ({"num_stages": 2.5}, "num_stages = 2.5 and "),
        ({"total_steps": 0}, "total_steps = 0 must be"),
        ({"sigma_start": -0.1}, "sigma_start = -0.1 must be above 0"),
        ({"sigma_start": 0.0}, "aqn=off"),
        ({"sigma_end": math.nan}, "sigma_end = nan at least 0"),
        ({"sigma_end": 0.0}, "never reaches sigma_end = 0"),
    ],
)
def test_bad_fields_are_named(fields, message):
    with pytest.raises(ValueError, match=message):
        NoiseSchedule(**{"total_steps": 10, **fields})


def test_bad_step():
    with pytest.raises(ValueError, match="step must be >= 0, not -1"):
        NoiseSchedule(total_steps=10).sigma(-1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("start, end", [(0.05, 5e-4), (5e-4, 0.05)])
def test_a_run_that_never_has_the_strongest_noise_is_warned_about(kind, start, end):
    for num_stages in range(1, 13):
        for total_steps in range(1, 27):
            schedule = NoiseSchedule(
                schedule=kind,
                sigma_start=start,
                sigma_end=end,
                num_stages=num_stages,
                total_steps=total_steps,
            )
            hit = {step * num_stages // total_steps for step in range(total_steps)} - {0}
            of_stages = {1 if start > end or num_stages == 2 else num_stages - 1}
            if kind in ("constant", "target"):
                of_stages = set(range(1, num_stages))
            warned = skipped_strongest_noise(schedule)
            assert (warned is None) == (num_stages == 1 or bool(hit & of_stages))
