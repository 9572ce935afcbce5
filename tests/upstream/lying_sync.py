"""A run whose weight sync loses one LoRA target; test_rehearsal.py sees it stopped.

python lying_sync.py CONFIG.yaml FOLDER
"""

import sys

from probe import main


def lying_classes():
    import ray

    from mindspeed_qerl.ascend.trainer import QeRLTrainer
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

    return LyingWorker, QeRLTrainer


if __name__ == "__main__":
    sys.exit(main(lying_classes))
