"""What each phase of an iteration would send to an NPU (emulation/counts.py): of each rank the
phases of the last one are found.
"""

from collections.abc import Callable
from typing import Any

import driven
import torch

from mindspeed_qerl.ascend import loss
from mindspeed_qerl.emulation.counts import counting, place


def step_of(scheduled: Any) -> str:
    """Of vLLM's model runner: one token of each sequence, or else."""
    sequences = len(scheduled.num_scheduled_tokens)
    return "decode" if scheduled.total_num_scheduled_tokens == sequences else "prefill"


class Phases:
    """Has what one worker does counted. prefix: of the phases' names."""

    def __init__(self, worker: Any, manager: Any):
        self.prefix = ""
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
        with counting.phase(self.prefix + name, calls):
            return function(*args, **kwargs)

    def _around(self, owner: Any, method: str, name: str) -> None:
        function = getattr(owner, method)
        setattr(owner, method, lambda *args, **kw: self.within(name, 1, function, *args, **kw))

    def _micro_batches(self, function: Callable) -> Callable:
        """Of the pass that it is called in."""

        def call(*args: Any, **kwargs: Any) -> Any:
            name = f"{counting.current}, micro-batches"
            return self.within(name, kwargs["num_microbatches"], function, *args, **kwargs)

        return call

    def take(self) -> dict[str, Any]:
        """The tallies since the last call."""
        taken = {}
        for name, tally in counting.tallies.items():
            collectives = [[*key, number] for key, number in tally.collectives.items()]
            taken[name] = vars(tally) | {"collectives": collectives}
        counting.tallies.clear()
        return taken


class Worker(driven.Worker):
    def _build_sharding_manager(self):
        manager = super()._build_sharding_manager()
        self.manager = manager
        return manager

    def start_counting(self):
        from counts import Phases  # the module's own, not a copy that was sent

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

    def found(self):
        return self.phases.take()


class Trainer(driven.Trainer):
    def fit(self, data_iters):
        self.on_ranks("start_counting")
        super().fit(data_iters)
