"""AQN and the proof of arrival in verl's rollout workers, by config alone:

    +actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls=
        mindspeed_qerl.integrations.verl.VerlNoiseExtension

and in the environment of Ray's workers MINDSPEED_QERL_ROLLOUT, and
VERL_USE_EXTERNAL_MODULES=mindspeed_qerl.integrations.verl_step, without which syncs are counted,
and validations, which verl samples by the same calls as its training, have the noise of the step.
Written for verl 0.9.1.
"""

from typing import Any

from verl.workers.rollout.vllm_rollout import ServerAdapter
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

from .vllm import MARK, attach_when_loaded


class VerlNoiseExtension(vLLMColocateWorkerExtension):
    """verl's own extension of vLLM's worker (0.9.1), and the noise."""

    def __new__(cls, **kwargs: Any) -> Any:
        worker = super().__new__(cls, **kwargs)
        attach_when_loaded(worker)
        return worker

    def set_training_step(self, step: int) -> None:
        """The weights that came last are those after `step` training steps."""
        if rollout := getattr(self, MARK, None):
            rollout.step = lambda: step

    def set_validation(self, is_on: bool) -> None:
        """A validation begins, which has no noise, or ends."""
        if rollout := getattr(self, MARK, None):
            rollout.evaluate(is_on)


class SteppingAdapter(ServerAdapter):
    """verl's sender of weights (vllm_rollout.py:213), which tells its workers the training step."""

    async def update_weights(
        self, weights: Any, global_steps: int | None = None, **kwargs: Any
    ) -> None:
        await super().update_weights(weights, global_steps=global_steps, **kwargs)
        if global_steps is not None:
            await self._execute_method("set_training_step", args=(global_steps,))
