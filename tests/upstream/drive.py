"""A run of the real engine with the Worker and the Trainer of a module of this folder
(rehearsal.py, run_module).

    python drive.py MODULE CONFIG.yaml
"""

import importlib
import sys
from functools import partial
from pathlib import Path

import ray
import yaml
from ray import cloudpickle

from mindspeed_qerl import train
from mindspeed_qerl.ascend import engine

load_upstream = engine.load_upstream


def load_with_ours(recipe, observer):
    upstream = load_upstream(recipe, observer)
    from mindspeed_rl.workers.scheduler import launcher

    module = importlib.import_module(sys.argv[1])
    # whole: Ray copies inherited methods into the class that it sends, and their super() would be
    # another's
    for each in module.Worker.__mro__:
        if each.__name__ == "Worker":
            cloudpickle.register_pickle_by_value(sys.modules[each.__module__])
    launcher.resource_mapping["Worker"] = lambda config: config.actor_resource
    upstream.IntegratedWorker = ray.remote(resources={"NPU": 0.7})(module.Worker)
    upstream.RayGRPOTrainer = partial(module.Trainer, observer=observer)
    return upstream


if __name__ == "__main__":
    engine.load_upstream = load_with_ours
    sys.exit(train.run(yaml.safe_load(Path(sys.argv[2]).read_text()), "probe"))
