"""Train with GRPO: python cli/train_grpo.py --config-name grpo_tiny_moe_cpu [key=value ...]

The configs are configs/*.yaml; any key of theirs can be overridden. With --cfg job the resolved config is printed and nothing runs.
"""

import re
import sys
from pathlib import Path

import hydra
from omegaconf import DictConfig, OmegaConf

CONFIGS = Path(__file__).resolve().parents[1] / "configs"


@hydra.main(version_base=None, config_path=str(CONFIGS), config_name="grpo_tiny_moe_cpu")
def main(config: DictConfig) -> None:
    from mindspeed_qerl.train import run

    sys.exit(run(OmegaConf.to_container(config, resolve=True), hydra.core.hydra_config.HydraConfig.get().job.config_name))


def check_config_name(arguments: list[str]) -> None:
    """Exit with the list of configs if --config-name names none of them; Hydra would only show where it looked."""
    asked = re.search(r"(?:^|\n)(?:--config-name|-cn)[=\n]([^\n]+)", "\n".join(arguments))
    elsewhere = any(argument.startswith(("--config-dir", "-cd", "--config-path", "-cp")) for argument in arguments)
    if asked and not elsewhere and not (CONFIGS / f"{asked[1].removesuffix('.yaml')}.yaml").is_file():
        from mindspeed_qerl.config import unknown

        sys.exit("error: " + unknown("config name", asked[1], (path.stem for path in CONFIGS.glob("*.yaml"))))


if __name__ == "__main__":
    check_config_name(sys.argv[1:])
    main()
