"""A run whose weight sync loses one LoRA target, or with LYING_SYNC=nearest rounds merged weights to
nearest, as does the trainer; test_rehearsal.py and test_arrival.py see it stopped.

python lying_sync.py CONFIG.yaml FOLDER
"""

import os
import sys

from probe import main


def lying_classes():
    import ray

    from mindspeed_qerl.ascend.trainer import QeRLTrainer
    from mindspeed_qerl.ascend.worker import QeRLWorker

    @ray.remote(resources={"NPU": 0.7})
    class LyingWorker(QeRLWorker.__ray_actor_class__):
        def _build_sharding_manager(self):
            from mindspeed_qerl.ascend import merging
            from mindspeed_qerl.ascend.weights import MergedWeights

            if os.environ.get("LYING_SYNC") == "nearest":
                merging.adapted_layers = lambda chunks: []  # whose weights would get random bits
                return super()._build_sharding_manager()
            merged = MergedWeights.__getitem__
            MergedWeights.__getitem__ = lambda weights, name: (
                weights.parameters[name] if "linear_proj" in name else merged(weights, name)
            )
            return super()._build_sharding_manager()

    return LyingWorker, QeRLTrainer


if __name__ == "__main__":
    sys.exit(main(lying_classes))
