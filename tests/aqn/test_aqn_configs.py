"""configs/aqn: what Hydra makes of each file is a schedule and a target the code accepts."""

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from mindspeed_qerl.aqn.schedule import NoiseSchedule
from mindspeed_qerl.aqn.targets import check_targets
from mindspeed_qerl.recipe.compose import CONFIGS
from mindspeed_qerl.recipe.features import Noise


@pytest.mark.parametrize(
    "name, enabled, start, end",
    [
        ("off", False, 0.05, 5e-4),
        ("qerl", True, 0.05, 5e-4),
        ("qerl_paper", True, 0.01, 5e-4),
        ("qerl_scripts", True, 0.01, 1e-4),
        ("strong", True, 0.1, 1e-3),
        ("mild", True, 0.01, 1e-3),
    ],
)
def test_a_preset_of_sigmas(name, enabled, start, end):
    with initialize_config_dir(str(CONFIGS), version_base=None):
        aqn = OmegaConf.to_container(compose(overrides=[f"+aqn={name}"]))["aqn"]
    assert aqn.pop("enabled") is enabled
    assert check_targets(aqn.pop("targets")) == ["auto"] and check_targets(aqn.pop("exclude")) == []
    assert [aqn.pop(key) for key in ("seed", "restart_every", "multipliers")] == [None] * 3
    schedule = NoiseSchedule(kind=aqn.pop("schedule"), total_steps=100, **aqn)
    assert [schedule.sigma(step) for step in (0, 10, 99)] == pytest.approx([0, start, end])
    assert schedule.num_stages == 10


def test_the_preset_of_a_target_is_the_recipes_defaults_but_for_where_sigma_starts():
    with initialize_config_dir(str(CONFIGS), version_base=None):
        aqn = OmegaConf.to_container(compose(overrides=["+aqn=target"]))["aqn"]
    assert aqn.pop("sigma_start") == 0.01
    noise = Noise(**{**aqn, "exclude": ()})
    assert noise == Noise(enabled=True, schedule="target")
