"""A run whose weight sync loses one LoRA target; test_rehearsal.py sees it stopped.

python lying_sync.py CONFIG.yaml
"""

import sys
from pathlib import Path

import ray
import yaml

from mindspeed_qerl import train
from mindspeed_qerl.ascend import engine

load_upstream = engine.load_upstream


def load_with_a_lie(recipe, observer):
    module = load_upstream(recipe, observer)
    from mindspeed_rl.workers.scheduler import launcher

    from mindspeed_qerl.ascend.worker import QeRLWorker

    @ray.remote(resources={"NPU": 0.7})
    class LyingWorker(QeRLWorker.__ray_actor_class__):
        def _build_sharding_manager(self):
            from mindspeed_qerl.ascend.weights import MergedWeights

            merged = MergedWeights.__getitem__
            MergedWeights.__getitem__ = lambda weights, name: (
                dict.__getitem__(weights, name) if "linear_proj" in name else merged(weights, name)
            )
            return super()._build_sharding_manager()

    launcher.resource_mapping[LyingWorker.__ray_actor_class__.__name__] = lambda config: (
        config.actor_resource
    )
    module.IntegratedWorker = LyingWorker
    return module


if __name__ == "__main__":
    engine.load_upstream = load_with_a_lie
    sys.exit(train.run(yaml.safe_load(Path(sys.argv[1]).read_text()), "lie"))
