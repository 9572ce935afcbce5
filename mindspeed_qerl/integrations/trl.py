"""AQN and the proof of arrival around TRL's `GRPOTrainer` with vLLM in its own process:

    trainer = GRPOTrainer(..., args=GRPOConfig(use_vllm=True, vllm_mode="colocate", ...))
    add_noise(trainer, report="build/noise")

TRL's vLLM server is another process: set MINDSPEED_QERL_ROLLOUT there (vllm.py, the plugin).
"""

from typing import Any

from .settings import read_settings
from .trainer import Parts, follow, telling, without_noise_in_evaluation
from .vllm import WorkerRollout


def add_noise(trainer: Any, **settings: Any) -> WorkerRollout:
    """Noise of the trainer's step while it samples, none while it evaluates; each sync is compared
    with what vLLM computes with.

    Args:
        settings: of `Settings`; the schedule's total_steps are the trainer's.

    Raises:
        ValueError: vLLM is not in this process, or a setting is unknown or out of its range.
    """
    generation = getattr(trainer, "vllm_generation", None)
    if generation is None or generation.mode != "colocate":
        raise ValueError(
            "add_noise needs GRPOConfig(use_vllm=True, vllm_mode='colocate'); for a vLLM server "
            "set MINDSPEED_QERL_ROLLOUT where it is started"
        )
    worker = generation.llm.llm_engine.model_executor.driver_worker.worker
    rollout = WorkerRollout(worker, read_settings(settings))
    follow(rollout, trainer)
    if trainer.vllm_importance_sampling_correction:  # else TRL has no log-probs before its update
        score = trainer._generate_and_score_completions
        trainer._generate_and_score_completions = telling(score, rollout, trainer, parts_of)
    generation.generate = without_noise_in_evaluation(
        generation.generate, rollout, trainer, generation.llm
    )
    return rollout


def parts_of(batch: dict[str, Any]) -> list[Parts]:
    """Returns the parts of a batch of TRL's `_generate_and_score_completions`."""
    own = batch["completion_mask"] * batch.get("tool_mask", 1)  # not a tool's tokens
    return [(batch["sampling_per_token_logps"], batch["old_per_token_logps"], own)]
