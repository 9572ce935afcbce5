"""configs/aqn: what the recipe is with each of its files."""

import pytest

from mindspeed_qerl.recipe.compose import compose
from mindspeed_qerl.recipe.features import Noise
from mindspeed_qerl.recipe.reader import read_recipe


@pytest.mark.parametrize(
    "name, expected",
    [
        ("off", Noise(enabled=False)),
        ("qerl", Noise(enabled=True, sigma_start=0.05, sigma_end=5e-4)),
        ("qerl_paper", Noise(enabled=True, sigma_start=0.01, sigma_end=5e-4)),
        ("qerl_scripts", Noise(enabled=True, sigma_start=0.01, sigma_end=1e-4)),
        ("strong", Noise(enabled=True, sigma_start=0.1, sigma_end=1e-3)),
        ("mild", Noise(enabled=True, sigma_start=0.01, sigma_end=1e-3)),
        ("target", Noise(enabled=True, schedule="target", sigma_start=0.01)),
    ],
)
def test_a_preset(name, expected):
    noise = read_recipe(compose("grpo_tiny_moe_cpu", [f"aqn={name}"])).noise
    assert noise == expected and (noise.targets, noise.num_stages) == ("auto", 10)
