"""A weight sync that loses one LoRA target, or with the fault "nearest" rounds merged weights to
nearest, as does the trainer; test_rehearsal.py and test_arrival.py see it stopped.
"""

import driven
from driven import FAULT, Trainer  # noqa: F401

from mindspeed_qerl.ascend import merging
from mindspeed_qerl.ascend.weights import MergedWeights


class Worker(driven.Worker):
    def _build_sharding_manager(self):
        if FAULT == "nearest":
            merging.adapted_layers = lambda chunks: []  # whose weights would get random bits
            return super()._build_sharding_manager()
        merged = MergedWeights.__getitem__
        MergedWeights.__getitem__ = lambda weights, name: (
            weights.data[name] if "linear_proj" in name else merged(weights, name)
        )
        return super()._build_sharding_manager()
