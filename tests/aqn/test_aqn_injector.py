"""The noise itself: its statistics, what bf16 leaves of it, that it comes off bit for bit, and who
draws the same.
"""

import math

import pytest
import torch
from scipy import stats
from torch import nn

from mindspeed_qerl.aqn.injector import NoiseInjector, standard_normal
from mindspeed_qerl.aqn.schedule import NoiseLevel
from mindspeed_qerl.engines.noise import LEAST_SIGMA

OFF = NoiseLevel(step=0, stage=0, sigma=0.0)


def on(step=1, sigma=0.05):
    return NoiseLevel(step, stage=1, sigma=sigma)


def norms(count=4, dtype=torch.float32, value=None):
    """`count` RMSNorms named 0, 1, ..; weights random unless `value` says otherwise."""
    model = nn.Sequential(*(nn.RMSNorm(4096, dtype=dtype) for _ in range(count)))
    for index, module in enumerate(model):
        nn.init.normal_(module.weight, generator=torch.Generator().manual_seed(index))
        if value is not None:
            nn.init.constant_(module.weight, value)
    return model


def injector_of(model, seed=0, **more):
    return NoiseInjector(model, "*", seed=seed, **more)


def weights(model):
    return torch.cat([module.weight.detach().clone() for module in model])


def bits(tensor):
    return tensor.view(torch.uint8).clone()


def test_noise_is_gaussian_with_the_nominal_sigma():
    model = norms(16)
    before = weights(model).double()
    report = injector_of(model, seed=3).apply(on())
    difference = weights(model).double() - before
    assert report.measured_std == pytest.approx(difference.std(correction=0).item(), rel=1e-12)
    assert report.changed_fraction == (difference != 0).double().mean().item() > 0.999
    n = difference.numel()  # standard errors: of the std sigma / sqrt(2n), of the mean / sqrt(n)
    assert abs(report.measured_std - 0.05) < 4 * 0.05 / math.sqrt(2 * n)
    assert abs(difference.mean()) < 4 * 0.05 / math.sqrt(n)
    assert stats.kstest(difference.numpy() / 0.05, "norm").pvalue > 1e-3


def bf16_change_probability(weight, sigma):
    """P(round_bf16(weight + sigma z) != weight) in float64, for a power of two: bf16 has 8 bits of
    significand, so the neighbours are weight * (1 + 2**-7) and weight * (1 - 2**-8), and the sum
    must pass half-way to one of them.
    """
    up, down = weight * 2**-8, weight * 2**-9
    return stats.norm.sf(up / sigma) + stats.norm.cdf(-down / sigma)


@pytest.mark.parametrize(
    "weight, sigma, fact",
    [
        (1.0, 1e-2, 0.77),
        (1.0, 1e-3, 0.025),
        (1.0, 5e-4, 5e-5),
        (1.0, 1e-4, 0.0),
        (0.25, 1e-2, 0.94),
        (0.25, 1e-3, 0.48),
        (0.25, 5e-4, 0.19),
        (0.25, 1e-4, 0.0),
    ],
)
def test_bf16_swallows_small_noise_as_computed(weight, sigma, fact, caplog):
    report = injector_of(norms(64, dtype=torch.bfloat16, value=weight)).apply(on(sigma=sigma))
    expected = bf16_change_probability(weight, sigma)
    assert expected == pytest.approx(fact, rel=0.1, abs=1e-6)
    n = 64 * 4096
    assert abs(report.changed_fraction - expected) <= 4 * math.sqrt(expected / n) + 1e-12
    assert report.sigma == sigma
    swallowed = report.measured_std < sigma / 2
    # noise that is mostly swallowed is a warning
    assert swallowed == (caplog.text.count("WARNING") == 1)
    assert swallowed == (expected < 0.02)


def test_noise_is_added_in_float32_and_rounded_once():
    model = norms(dtype=torch.bfloat16)
    before = weights(model)
    injector_of(model, seed=5).apply(on(sigma=0.01))
    noise = torch.cat([standard_normal(5, 1, f"{index}.weight", [4096]) for index in range(4)])
    once = (before.double() + 0.01 * noise.double()).to(torch.bfloat16)
    assert (weights(model) != once).double().mean() < 1e-3  # float32 before bf16: ties only
    twice = before + (0.01 * noise).to(torch.bfloat16)
    assert (weights(model) != twice).double().mean() > 0.01  # what QeRL does


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_remove_restores_every_bit_in_the_same_storage(dtype):
    model = norms(dtype=dtype)
    with torch.no_grad():
        # a broken model must not confuse the check
        model[0].weight[:3] = torch.tensor([-0.0, math.nan, math.inf])
    clean, pointers = bits(weights(model)), [module.weight.data_ptr() for module in model]
    injector = injector_of(model)
    for level in (on(1), on(2), on(3), OFF, on(4)):
        injector.apply(level)
    assert not torch.equal(bits(weights(model)), clean)
    injector.remove()
    injector.remove()
    assert torch.equal(bits(weights(model)), clean)
    assert [module.weight.data_ptr() for module in model] == pointers


def test_noise_does_not_accumulate_nor_touch_the_global_generator():
    model, fresh = norms(), norms()
    state = torch.get_rng_state()
    injector = injector_of(model)
    reports = [injector.apply(on(step)) for step in (1, 2, 3)]
    injector_of(fresh).apply(on(3))
    assert torch.equal(weights(model), weights(fresh))
    assert max(report.measured_std for report in reports) < 0.052
    injector.remove()
    assert torch.equal(torch.get_rng_state(), state)


def test_same_noise_on_every_holder_and_another_for_another_key():
    def noisy(model, step=1, seed=0, targets="*"):
        NoiseInjector(model, targets, seed=seed).apply(on(step))
        return model

    reference = noisy(norms())
    torch.rand(7)  # whatever else the process drew
    assert torch.equal(weights(noisy(norms())), weights(reference))
    # A rank that holds other layers as well, or noises only one, draws the same for the layer both
    # have.
    assert torch.equal(noisy(norms(count=9))[3].weight, reference[3].weight)
    assert torch.equal(noisy(norms(), targets="[3]")[3].weight, reference[3].weight)
    draws = [
        standard_normal(*key, [64])
        for key in ((0, 1, "a"), (0, 2, "a"), (1, 1, "a"), (0, 1, "b"), (0, 11, "a"))
    ]
    assert all(not torch.equal(a, b) for i, a in enumerate(draws) for b in draws[:i])
    assert not torch.equal(weights(noisy(norms(), step=2)), weights(reference))


def test_key_is_stable_across_processes_and_versions():
    """`printf 0/1/model.norm.weight | sha256sum` starts with e49c4449; Python's hash() would be
    salted by each process.
    """
    generator = torch.Generator().manual_seed(0xE49C4449)
    assert torch.equal(
        standard_normal(0, 1, "model.norm.weight", [32]), torch.randn(32, generator=generator)
    )


def test_stage_zero_leaves_weights_alone_and_says_so():
    model = norms()
    clean = bits(weights(model))
    injector = injector_of(model)
    injector.apply(on())
    report = injector.apply(OFF)
    assert torch.equal(bits(weights(model)), clean)
    assert report.to_metrics() == {
        "aqn/sigma": 0.0,
        "aqn/stage": 0,
        "aqn/layers": 4,
        "aqn/expected_std": 0.0,
        "aqn/measured_std": 0.0,
        "aqn/changed_fraction": 0.0,
    }


def test_multipliers_scale_the_noise_of_their_norms():
    model, plain = norms(), norms()
    before = [module.weight.detach().clone() for module in model]
    injector_of(plain, seed=3).apply(on())
    injector = injector_of(model, multipliers=[("0-1", 2.0), ("1@1-2", 3.0), ("3", 0.0)], seed=3)
    report = injector.apply(on())
    for module, unscaled, clean, factor in zip(model, plain, before, (2, 6, 1, 0)):
        torch.testing.assert_close(
            module.weight - clean, factor * (unscaled.weight - clean), rtol=0, atol=1e-6
        )
    # the one that is multiplied with 0 gets none
    assert injector.names == ["0", "1", "2"] and report.layers == 3
    difference = weights(model[:3]).double() - torch.cat(before[:3]).double()
    assert report.measured_std == pytest.approx(difference.std(correction=0).item())
    assert report.expected_std == pytest.approx(0.05 * math.sqrt((4 + 36 + 1) / 3))
    assert abs(report.measured_std / report.expected_std - 1) < 0.03
    injector.remove()
    assert all(torch.equal(module.weight, clean) for module, clean in zip(model, before))


def test_multipliers_of_nothing_are_refused():
    with pytest.raises(ValueError, match="0 for all 4 norms; to run without noise, use aqn=off"):
        injector_of(norms(), multipliers=[("0-3", 0.0)])


def test_of_what_noise_bfloat16_keeps_half():
    report = injector_of(norms(64, torch.bfloat16, 1.0)).apply(on(sigma=LEAST_SIGMA))
    assert report.measured_std / LEAST_SIGMA == pytest.approx(0.5, abs=0.02)


def test_weights_overwritten_under_the_noise_are_an_error_not_a_stale_restore():
    model = norms()
    injector = injector_of(model)
    injector.apply(on())
    with torch.no_grad():
        model[2].weight[5] = 7.0
    synced = weights(model)
    for use in (injector.remove, lambda: injector.apply(on(2))):
        with pytest.raises(
            RuntimeError,
            match=r"1 of 4 noisy weights were overwritten, first 2\.weight.*remove\(\) before",
        ):
            use()
    assert torch.equal(weights(model), synced)
    model[2].weight = nn.Parameter(
        torch.ones(4096, dtype=torch.bfloat16)
    )  # replaced altogether, as a loader may do
    with pytest.raises(RuntimeError, match="overwritten"):
        injector.remove()


@pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason="needs a GPU: the noise is drawn on the CPU for a weight elsewhere",
)
def test_weights_on_another_device_get_the_cpus_noise():
    model, reference = norms(dtype=torch.bfloat16).cuda(), norms(dtype=torch.bfloat16)
    clean = weights(model)
    injector = injector_of(model)
    assert injector.apply(on()) == injector_of(reference).apply(on())
    assert torch.equal(weights(model).cpu(), weights(reference))
    injector.remove()
    assert torch.equal(weights(model), clean)
