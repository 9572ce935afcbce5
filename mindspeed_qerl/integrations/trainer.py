"""What a transformers `Trainer` knows of a rollout: its step, and whether it evaluates."""

from collections.abc import Callable
from typing import Any

from mindspeed_qerl.integrations.vllm import WorkerRollout


def follow(rollout: WorkerRollout, trainer: Any) -> None:
    """The noise is that of the trainer's step and run."""
    rollout.step = lambda: trainer.state.global_step
    rollout.total_steps = lambda: trainer.state.max_steps


def without_noise_in_evaluation(
    generate: Callable[..., Any], rollout: WorkerRollout, trainer: Any, engine: Any
) -> Callable[..., Any]:
    """`generate`, but without noise while `trainer` evaluates. engine: vLLM's, whose cached
    prompts hold what the norms made of them.
    """

    def generate_in_mode(*args: Any, **kwargs: Any) -> Any:
        if trainer.model.training:
            return generate(*args, **kwargs)
        with rollout.clean():
            engine.reset_prefix_cache()
            result = generate(*args, **kwargs)
        engine.reset_prefix_cache()
        return result

    return generate_in_mode
