"""Train with GRPO: python cli/train_grpo.py --config-name grpo_tiny_moe_cpu [key=value ...]"""

import sys

import hydra
from omegaconf import DictConfig, OmegaConf


@hydra.main(version_base=None, config_path="../configs", config_name="grpo_tiny_moe_cpu")
def main(config: DictConfig) -> None:
    from mindspeed_qerl.train import run

    name = hydra.core.hydra_config.HydraConfig.get().job.config_name
    sys.exit(run(OmegaConf.to_container(config, resolve=True), name))


if __name__ == "__main__":
    main()
