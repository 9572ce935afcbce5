"""The configs of configs/, resolved by Hydra."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mindspeed_qerl.errors import ConfigError, unknown

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


def compose(name: str, overrides: Iterable[str] = ()) -> dict[str, Any]:
    """The resolved config `name` of configs/ with Hydra overrides, as `cli/train_grpo.py --config-name name` sees it.

    Raises:
        ConfigError: no such config, or an override that Hydra refuses.
    """
    from hydra import compose, initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    check_config_name(name)
    try:
        with initialize_config_dir(str(CONFIGS), version_base=None):
            return OmegaConf.to_container(compose(name.removesuffix(".yaml"), list(overrides)), resolve=True)
    except (HydraException, OmegaConfBaseException, ValueError) as error:  # ValueError: Hydra's own, for a group set to a value
        raise ConfigError(f"{name} with {' '.join(overrides)}: {error}") from error


def check_config_name(name: str) -> None:
    """ConfigError with the list of configs if `name` is none of them; Hydra would only show where it looked. The files in folders of
    configs/ are parts of configs."""
    known = {path.stem for path in CONFIGS.glob("*.yaml")}
    if name.removesuffix(".yaml") not in known:
        raise ConfigError(unknown("config name", name, known))
