"""Upstream's GRPO trainer, watched: evaluation, metrics, samples."""

from collections.abc import Iterator
from typing import Any

import ray
from mindspeed_rl.trainer import grpo_trainer_hybrid
from mindspeed_rl.trainer.grpo_trainer_hybrid import RayGRPOTrainer
from mindspeed_rl.trainer.utils.data_strategy import DataStrategy


class KeptDataStrategy(DataStrategy):
    """Upstream's data strategy; `experience` is the dock's content at the end of the last iteration, which upstream
    throws away."""

    experience: dict[str, list] | None = None

    def clear_main(self, consumer: str | None = None) -> None:
        self.experience = ray.get(self.td.get_experience_data.remote())
        super().clear_main(consumer)


class QeRLTrainer(RayGRPOTrainer):
    """Upstream's trainer; `observer` (engine.RunObserver) hears of each step.

    `fit` ends each iteration with `self.wandb.log_metrics(metrics, iteration)` (grpo_trainer_hybrid.py:289), before it
    saves: that is where we listen. Weights & Biases itself is written from the run directory (run.wandb_project).
    """

    def __init__(self, *args: Any, observer: Any, **kwargs: Any):
        grpo_trainer_hybrid.DataStrategy = KeptDataStrategy
        super().__init__(*args, **kwargs)
        self.observer = observer
        self.wandb = self

    def fit(self, data_iters: Iterator) -> None:
        """Upstream's loop, with an evaluation before the first step."""
        iteration = self.actor_worker.get_iteration()
        self.observer.started(self.actor_worker.execute_sync_command("describe"))
        if iteration == 0:
            self._evaluate(0)
        super().fit(data_iters)

    def log_metrics(self, metrics: dict[str, float], iteration: int) -> None:
        """Called by `fit` after update `iteration`."""
        self.observer.stepped(iteration, metrics, self.data_strategy.experience)
        self._evaluate(iteration)

    def save_checkpoint(self, iteration: int) -> None:
        super().save_checkpoint(iteration)
        self.observer.progress.message(f"Checkpoint of step {iteration} saved")

    def _evaluate(self, step: int) -> None:
        def generate(prompts: list[list[int]], n: int, temperature: float) -> list[list[list[int]]]:
            shares = self.actor_worker.execute_sync_command("evaluate", prompts, n, temperature, step)
            answers = dict(pair for share in shares if share for pair in share)
            return [answers[index] for index in range(len(prompts))]

        self.observer.evaluate(step, generate)
