"""Train with GRPO: python cli/train_grpo.py --config-name grpo_tiny_moe_cpu [key=value ...]

The configs are configs/*.yaml; any key of theirs can be overridden. With --cfg job the resolved config is printed and nothing runs.
With --multirun a key may have several values, and each combination is run: aqn=off,qerl seed=1,2,3. Runs that are finished are not run
again, one that stopped goes on, one that fails is reported in the end.
"""

import re
import sys

import hydra
import hydra.types
from omegaconf import DictConfig, OmegaConf

from mindspeed_qerl.errors import ConfigError
from mindspeed_qerl.recipe.compose import CONFIGS, check_config_name

outcomes = []  # of a sweep


@hydra.main(version_base=None, config_path=str(CONFIGS), config_name="grpo_tiny_moe_cpu")
def main(config: DictConfig) -> None:
    from mindspeed_qerl import sweep
    from mindspeed_qerl.train import run

    started = hydra.core.hydra_config.HydraConfig.get()
    raw, name = OmegaConf.to_container(config, resolve=True), started.job.config_name
    if started.mode == hydra.types.RunMode.MULTIRUN:
        try:
            outcomes.append(sweep.run_one(raw, name, list(started.overrides.task), sys.argv))
        except ConfigError as error:
            sys.exit(f"error: {error}")
    else:
        sys.exit(run(raw, name))


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
    try:
        main()
    except KeyboardInterrupt:
        print("error: interrupted; started again with the same command, the sweep goes on", file=sys.stderr)
        sys.exit(130)
    if outcomes:
        from mindspeed_qerl.sweep import report

        sys.exit(report(outcomes))
