"""Upstream's own train on a config's upstream sections, with nothing of ours but the emulated NPU.
Prints what becomes of it.
"""

import importlib.util
import os
import sys
from pathlib import Path

import yaml


def main() -> int:
    from mindspeed_qerl import emulation

    config = yaml.safe_load(Path(sys.argv[1]).read_text())
    npus = config["rl_config"]["actor_resource"]["num_npus"]
    os.environ.update(emulation.environment(npus))
    sys.path.insert(0, str(emulation.STAND_INS))

    import ray
    from omegaconf import OmegaConf

    variables = {name: os.environ[name] for name in emulation.environment(npus)} | {
        "VLLM_DP_SIZE": str(config["generate_config"]["infer_expert_parallel_size"]),
        "IS_MULTIMODAL": "False",
    }
    os.environ.update(variables)
    ray.init(
        address="local",
        num_cpus=32,
        resources={"NPU": npus},
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": variables},
    )
    import mindspeed_rl

    spec = importlib.util.spec_from_file_location(
        "cli_train_grpo", Path(mindspeed_rl.__path__[0]).parent / "cli" / "train_grpo.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    names = ("model", "megatron_training", "actor_config", "rl_config", "generate_config")
    try:
        module.train._function(OmegaConf.create({name: config[name] for name in names}))
    except ray.exceptions.RayTaskError as error:
        print(
            "FAILED:",
            repr(error.cause),
            [line.strip() for line in str(error).splitlines() if "resharding" in line][-1],
        )
        return 1
    print("FINISHED")
    return 0


if __name__ == "__main__":
    sys.exit(main())
