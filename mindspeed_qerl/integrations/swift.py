"""AQN and the proof of arrival in ms-swift's GRPO with vLLM in its own process:

    swift rlhf --rlhf_type grpo --use_vllm true --vllm_mode colocate ... \\
        --external_plugins examples/grpo/ms_swift_plugin.py

which imports this, and MINDSPEED_QERL_ROLLOUT in the environment. ms-swift's server (`swift
rollout`) is another process: set the variable there (vllm.py, the plugin). For ms-swift 4.6.
"""

from typing import Any

from swift.rlhf_trainers.rollout_mixin import RolloutTrainerMixin

from .settings import VARIABLE, settings_of_environment
from .trainer import Parts, follow, telling, without_noise_in_evaluation
from .vllm import MARK, WorkerRollout

_prepare_vllm_engine = RolloutTrainerMixin._prepare_vllm_engine


def prepare_with_noise(trainer: Any) -> Any:
    """ms-swift's engine of vLLM, with AQN in its worker."""
    settings = settings_of_environment()
    if settings is None:
        raise ValueError(f"{VARIABLE} is not set: this plugin would do nothing (vllm.py)")
    engine = _prepare_vllm_engine(trainer)
    worker = engine.inner_model_executor.driver_worker.worker
    # vLLM's plugin may have been first
    rollout = getattr(worker, MARK, None) or WorkerRollout(worker, settings)
    follow(rollout, trainer)
    trainer._colocate_rollout = without_noise_in_evaluation(
        trainer._colocate_rollout, rollout, trainer, engine.engine
    )
    prepare = trainer._prepare_batch_inputs
    trainer._prepare_batch_inputs = telling(prepare, rollout, trainer, parts_of)
    return engine


def parts_of(batches: list[dict[str, Any]]) -> list[Parts]:
    """Returns the parts of the batches of ms-swift's `_prepare_batch_inputs`."""
    answers = [batch["grpo_batch"] for batch in batches]
    return [
        (each.rollout_per_token_logps, each.old_per_token_logps, each.completion_mask)
        for each in answers
    ]


RolloutTrainerMixin._prepare_vllm_engine = prepare_with_noise
