"""Sigma that follows a target: on models whose response to noise is known, with what real ones have
besides; and what a resumed run reads again.
"""

import math
import random
from itertools import pairwise

import pytest
import torch
from torch import nn

from mindspeed_qerl.algorithm.metrics import merge, mismatch
from mindspeed_qerl.aqn.injector import NoiseInjector
from mindspeed_qerl.aqn.schedule import NoiseSchedule
from mindspeed_qerl.aqn.target import MOST_CHANGE, NoiseController

RIGHT = 0.08  # the sigma that makes the target
STEPS = 40


def schedule(start=RIGHT, target=0.01, end=None, steps=STEPS, **more):
    """One stage without noise, of a tenth of the steps."""
    return NoiseSchedule(
        schedule="target",
        sigma_start=start,
        num_stages=10,
        total_steps=steps,
        target_start=target,
        target_end=end or target,
        **more,
    )


def response(sigma, power=2.0, target=0.01, rounding=0.0, sensitivity=0.3):
    """Metrics of a model whose k3 grows as sigma^power."""
    k3 = target * (sigma / RIGHT) ** power + rounding * sensitivity
    return {"mismatch/k3": k3, "mismatch/sensitivity": sensitivity}


def followed(of, answer):
    """(sigma, metrics) of each step with noise; answer: what a step of this sigma measures."""
    controller, seen = NoiseController(of), []
    for step in range(of.total_steps):
        level = controller.level(step)
        metrics = controller.update(level, answer(step, level.sigma))
        if level.sigma:
            seen.append((level.sigma, metrics))
    return seen


@pytest.mark.parametrize("start", [0.1, 1.0, 10.0], ids="from {} of the right sigma".format)
@pytest.mark.parametrize("power", [2.0, 1.43])
def test_within_fifteen_steps_it_is_within_a_tenth_of_the_target_and_stays(start, power):
    seen = followed(schedule(start * RIGHT), lambda _, sigma: response(sigma, power))
    reached = [0.01 * (sigma / RIGHT) ** power for sigma, _ in seen]
    assert reached[15:] == pytest.approx([0.01] * (len(seen) - 15), rel=0.1)
    # from one side: it never passes the target
    gaps = [math.log(sigma / RIGHT) * (1 if start > 1 else -1) for sigma, _ in seen]
    assert all(before >= after >= -1e-9 for before, after in pairwise(gaps))
    assert [metrics["aqn/reached_k3"] for _, metrics in seen] == pytest.approx(reached)


@pytest.mark.parametrize("power", [3.0, 4.0])
def test_a_steeper_response_does_not_make_it_oscillate(power):
    seen = followed(schedule(10 * RIGHT), lambda _, sigma: response(sigma, power))
    gaps = [abs(math.log(sigma / RIGHT)) for sigma, _ in seen]
    assert all(before >= after - 1e-9 for before, after in pairwise(gaps)) and gaps[15] < 0.01


@pytest.mark.parametrize("rounding", [0.0, 0.2, 1.0, 5.0])
def test_what_is_reached_in_the_mean_is_what_was_asked(rounding):
    """Each step sees noise and rounding, which is so many times the target, with 30 % of scatter."""
    draw, truly = random.Random(0), []

    def answer(_, sigma):
        by_noise = 0.01 * (sigma / RIGHT) ** 2
        if sigma:
            truly.append(by_noise)
        whole = (by_noise + rounding * 0.01) * max(draw.gauss(1, 0.3), 0)
        return {"mismatch/k3": whole, "mismatch/sensitivity": 0.3}

    seen = followed(schedule(steps=4000), answer)
    told = [metrics["aqn/reached_k3"] for _, metrics in seen]
    for reached in (truly, told):
        assert sum(reached) / len(reached) == pytest.approx(0.01, rel=0.1)


def test_what_rounding_does_without_noise_is_not_the_noises():
    """Rounding makes three times the target, and shrinks with what the tokens leave to move."""

    def answer(step, sigma):
        return response(sigma, rounding=0.1, sensitivity=0.3 - 0.005 * step)

    seen = followed(schedule(RIGHT / 2), answer)
    assert [sigma for sigma, _ in seen][20:] == pytest.approx([RIGHT] * (len(seen) - 20), rel=0.05)


def test_what_was_taken_off_is_told_and_that_nothing_was(caplog):
    of = schedule(RIGHT)
    measured = followed(of, lambda _, sigma: response(sigma, rounding=0.1))
    taken_off = [metrics["aqn/without_noise"] for _, metrics in measured]
    assert taken_off == pytest.approx([0.03] * len(measured))
    assert caplog.messages == []
    unknown = followed(of, lambda step, sigma: response(sigma, rounding=0.1) if step >= 4 else {})
    assert {metrics["aqn/without_noise"] for _, metrics in unknown} == {0}
    assert "none of the steps without noise had a signal" in caplog.messages[0]


def test_it_follows_a_target_that_decays():
    seen = followed(schedule(target=0.01, end=0.001), lambda _, sigma: response(sigma))
    targets = [metrics["aqn/target_k3"] for _, metrics in seen]
    assert targets[0] == 0.01 and targets[-1] == pytest.approx(0.001)
    ends_of_stages = seen[3::4]
    for sigma, metrics in ends_of_stages:
        assert 0.01 * (sigma / RIGHT) ** 2 == pytest.approx(metrics["aqn/target_k3"], rel=0.1)


def test_steps_without_a_signal_change_nothing():
    def answer(step, sigma):
        if step % 3 == 0:
            return {"reward/mean": 0.0}
        if step % 3 == 1:
            return {name: math.nan for name in response(sigma)}
        return response(sigma)

    controller, sigmas = NoiseController(schedule(RIGHT / 3)), []
    for step in range(STEPS):
        level = controller.level(step)
        before = level.sigma
        metrics = controller.update(level, answer(step, before))
        assert ("aqn/reached_k3" in metrics) == (step % 3 == 2 and before > 0)
        sigmas.append(before)
    assert all(sigmas[step] == sigmas[step + 1] for step in range(4, STEPS - 1) if step % 3 < 2)
    assert sigmas[-1] == pytest.approx(RIGHT, rel=0.05)


def test_noise_that_nothing_shows_grows_to_its_bound():
    seen = followed(schedule(1e-3, sigma_max=0.5), lambda *_: response(0.0) | {"mismatch/k3": 0.0})
    sigmas = [sigma for sigma, _ in seen]
    assert sigmas[1] == MOST_CHANGE * sigmas[0] and sigmas[-1] == 0.5
    seen = followed(schedule(0.1, sigma_min=0.09), lambda _, sigma: response(10 * sigma))
    assert seen[-1][0] == 0.09


def test_a_resumed_run_goes_on_as_if_it_had_not_stopped():
    of = schedule(RIGHT / 3, steps=10)
    unbroken, rows, sigmas = NoiseController(of), {}, set()
    for step in range(10):
        level = unbroken.level(step)
        seen = response(level.sigma, rounding=0.1 * step)
        rows[step] = seen | unbroken.update(level, seen)
        sigmas.add(level.sigma)
        assert NoiseController(of, rows).level(step + 1) == unbroken.level(step + 1)
    assert len(sigmas) > 5


def test_a_schedule_that_is_never_on_is_a_warning(caplog):
    NoiseController(NoiseSchedule(num_stages=1, total_steps=10))
    assert "never adds noise: with num_stages=1 and total_steps=10" in caplog.text


def test_other_schedules_go_their_own_way():
    plain = NoiseSchedule(total_steps=STEPS)
    controller = NoiseController(plain)
    for step in range(STEPS):
        assert controller.level(step) == plain.level(step)
        assert controller.update(plain.level(step), response(1.0)) == {}


@pytest.mark.parametrize(
    "more, words",
    [
        ({"target": 0.0}, "target_start = 0.0 of k3 must be above 0 and finite"),
        ({"start": 2.0}, "sigma_start = 2.0 must lie between sigma_min = 0.0001"),
        ({"sigma_min": 0.0}, "which is above 0"),
    ],
)
def test_what_cannot_be_followed_is_refused(more, words):
    with pytest.raises(ValueError, match=words):
        schedule(**more)


# ---- on a model ----


class Block(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(size), nn.RMSNorm(size)
        self.linear = nn.Linear(size, size)

    def forward(self, x):
        x = x + self.linear(self.input_layernorm(x)).tanh()
        return x + self.linear(self.post_attention_layernorm(x)).tanh()


class Policy(nn.Module):
    """Logits of one token; nothing is trained."""

    def __init__(self, size=64, vocabulary=32):
        super().__init__()
        self.layers = nn.ModuleList(Block(size) for _ in range(3))
        self.norm, self.head = nn.RMSNorm(size), nn.Linear(size, vocabulary)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)).log_softmax(-1)


@torch.no_grad()
def test_noise_on_a_model_does_what_was_asked():
    """Tokens drawn by the noisy policy, log-probs of the clean one: means of many steps."""
    torch.manual_seed(0)
    model, generator = Policy(), torch.Generator().manual_seed(1)
    of = schedule(1e-3, target=3e-3)
    injector, controller = NoiseInjector(model, "all", seed=3), NoiseController(of)
    reached = []
    for step in range(80):
        x = torch.randn(1500, 64, generator=generator)
        level = controller.level(step)
        report = injector.apply(level)
        noisy = model(x)
        injector.remove()
        tokens = noisy.exp().multinomial(1, generator=generator)
        each = mismatch(noisy.gather(1, tokens), model(x).gather(1, tokens), tokens >= 0)
        values = {name: float(metric.value()) for name, metric in merge([each]).items()}
        metrics = controller.update(level, values)
        if level.sigma:
            assert report.measured_std == pytest.approx(level.sigma, rel=0.3)
            assert report.layers == 7
        if step >= 30:
            reached.append(metrics["aqn/reached_k3"])
    assert sum(reached) / len(reached) == pytest.approx(3e-3, rel=0.1), reached
