"""Train with GRPO: python cli/train_grpo.py --config-name grpo_tiny_moe_cpu [key=value ...]

The configs are configs/*.yaml; any key of theirs can be overridden. With --cfg job the resolved config is printed and nothing runs.
"""

import re
import sys

import hydra
from omegaconf import DictConfig, OmegaConf

from mindspeed_qerl.config import CONFIGS, ConfigError, check_config_name


@hydra.main(version_base=None, config_path=str(CONFIGS), config_name="grpo_tiny_moe_cpu")
def main(config: DictConfig) -> None:
    from mindspeed_qerl.train import run

    sys.exit(run(OmegaConf.to_container(config, resolve=True), hydra.core.hydra_config.HydraConfig.get().job.config_name))


def config_name(arguments: list[str]) -> str | None:
    """The config of configs/ that the command line names, if it names one."""
    asked = re.search(r"(?:^|\n)(?:--config-name|-cn)[=\n]([^\n]+)", "\n".join(arguments))
    elsewhere = any(argument.startswith(("--config-dir", "-cd", "--config-path", "-cp")) for argument in arguments)
    return asked[1] if asked and not elsewhere else None


if __name__ == "__main__":
    try:
        if name := config_name(sys.argv[1:]):
            check_config_name(name)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    main()
