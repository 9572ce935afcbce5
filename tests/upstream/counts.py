"""What each phase of an iteration would send to an NPU (emulation/counts.py), of a rehearsal.

    python counts.py CONFIG.yaml FOLDER

runs a config and writes FOLDER/counts.json: for each rank the phases of the last iteration.
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def step_of(scheduled: Any) -> str:
    """Of vLLM's model runner: one token of each sequence, or else."""
    sequences = len(scheduled.num_scheduled_tokens)
    return "decode" if scheduled.total_num_scheduled_tokens == sequences else "prefill"


class Phases:
    """Has what one worker does counted. prefix: of the phases' names."""

    def __init__(self, worker: Any, manager: Any):
        from mindspeed_qerl.ascend import loss
        from mindspeed_qerl.emulation.counts import counting, place

        self.counting, self.prefix = counting, ""
        rollout, actor = worker.inference_model, worker.actor_hybrid.train_actor
        for model in (rollout.runner.model, *worker.model):
            modules = list(model.modules())
            kinds = ("DecoderLayer", "TransformerLayer")
            counting.follow_layers(each for each in modules if type(each).__name__.endswith(kinds))
            # Megatron has another `buffers`
            place([*model.parameters(), *torch.nn.Module.buffers(model)])
        self._around(manager, "enter_infer_mode", "sync")
        self._around(manager, "exit_infer_mode", "offload")
        self._around(rollout, "sample", "rollout")
        execute = rollout.runner.execute_model
        rollout.runner.execute_model = lambda scheduled, *rest, **more: self.within(
            step_of(scheduled), 1, execute, scheduled, *rest, **more
        )
        self._around(loss, "merge_adapters", "merge")
        for engine in (actor, worker.reference):
            engine.forward_backward_func = self._micro_batches(engine.forward_backward_func)

    def within(self, name: str, calls: int, function: Callable, *args: Any, **kwargs: Any) -> Any:
        """Call a function, which is a phase of that many calls."""
        with self.counting.phase(self.prefix + name, calls):
            return function(*args, **kwargs)

    def _around(self, owner: Any, method: str, name: str) -> None:
        function = getattr(owner, method)
        setattr(owner, method, lambda *args, **kw: self.within(name, 1, function, *args, **kw))

    def _micro_batches(self, function: Callable) -> Callable:
        """Of the pass that it is called in."""

        def call(*args: Any, **kwargs: Any) -> Any:
            name = f"{self.counting.current}, micro-batches"
            return self.within(name, kwargs["num_microbatches"], function, *args, **kwargs)

        return call

    def take(self) -> dict[str, Any]:
        """The tallies since the last call."""
        taken = {}
        for name, tally in self.counting.tallies.items():
            collectives = [[*key, number] for key, number in tally.collectives.items()]
            taken[name] = vars(tally) | {"collectives": collectives}
        self.counting.tallies.clear()
        return taken


def counting_classes():
    import ray

    # the module's, not __main__'s: workers import it
    from counts import Phases
    from probe import FOLDER

    from mindspeed_qerl.ascend.trainer import QeRLTrainer
    from mindspeed_qerl.ascend.worker import QeRLWorker

    @ray.remote(resources={"NPU": 0.7})
    class CountingWorker(QeRLWorker.__ray_actor_class__):
        def _build_sharding_manager(self):
            manager = super()._build_sharding_manager()
            self.manager = manager
            return manager

        def start_counting(self):
            self.phases = Phases(self, self.manager)

        def compute_log_prob(self):
            self.phases.within("log-probs", 1, super().compute_log_prob)

        def compute_ref_log_prob(self):
            self.phases.within("reference", 1, super().compute_ref_log_prob)

        def update(self, *args, **kwargs):
            return self.phases.within("update", 1, super().update, *args, **kwargs)

        def evaluate(self, *args, **kwargs):
            self.phases.prefix = "evaluation: "
            answers = super().evaluate(*args, **kwargs)
            self.phases.prefix = ""
            return answers

        def take_counts(self):
            return self.phases.take()

    class CountingTrainer(QeRLTrainer):
        def fit(self, data_iters):
            self.actor_worker.execute_sync_command("start_counting")
            super().fit(data_iters)

        def log_metrics(self, metrics, iteration):
            super().log_metrics(metrics, iteration)
            counts = self.actor_worker.execute_sync_command("take_counts")
            (FOLDER / "counts.json").write_text(json.dumps(counts))

    return CountingWorker, CountingTrainer


if __name__ == "__main__":
    os.environ["MINDSPEED_QERL_EMULATED_COUNTS"] = "1"
    sys.path.insert(0, str(Path(__file__).parent))
    from probe import main

    sys.exit(main(counting_classes))
