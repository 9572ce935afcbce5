"""AQN and the proof of arrival in verl's rollout workers, by config alone:

    +actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls=
        mindspeed_qerl.integrations.verl.VerlNoiseExtension

and MINDSPEED_QERL_ROLLOUT in the environment of Ray's workers. verl samples its validation from
the same workers, with the noise of the step. Written for verl 0.9.1.
"""

from typing import Any

from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

from .vllm import attach_when_loaded


class VerlNoiseExtension(vLLMColocateWorkerExtension):
    """verl's own extension of vLLM's worker (0.9.1), and the noise."""

    def __new__(cls, **kwargs: Any) -> Any:
        worker = super().__new__(cls, **kwargs)
        attach_when_loaded(worker)
        return worker
