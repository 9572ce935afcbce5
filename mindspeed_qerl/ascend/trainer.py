"""Upstream's GRPO trainer: what is asked, selected and trained, evaluations, metrics, samples."""

import time
from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy as np
import ray
import torch
from mindspeed_rl.datasets.dataloader import PromptDataLoader
from mindspeed_rl.trainer import grpo_trainer_hybrid
from mindspeed_rl.trainer.grpo_trainer_hybrid import RayGRPOTrainer
from mindspeed_rl.trainer.utils.data_strategy import DataStrategy
from mindspeed_rl.trainer.utils.transfer_dock import put_prompts_experience
from mindspeed_rl.utils.pad_process import (
    padding_dict_to_tensor_dict,
    remove_padding_tensor_dict_to_dict,
)
from torch.nn.utils.rnn import pad_sequence

from mindspeed_qerl.algorithm.advantages import group_advantages, rewards_less_kl
from mindspeed_qerl.algorithm.metrics import merge, reward_metrics
from mindspeed_qerl.algorithm.selection import groups_with_signal, overlong_penalty
from mindspeed_qerl.ascend.routing import COLUMN, unpack
from mindspeed_qerl.common.errors import EngineError
from mindspeed_qerl.families import read_shape
from mindspeed_qerl.lora.proof import join
from mindspeed_qerl.quantization.weights import weight_errors
from mindspeed_qerl.routing.replay import routing_metrics, total
from mindspeed_qerl.routing.routes import routes_fault
from mindspeed_qerl.runs.checks import advantages_fault, ends_fault, impossible
from mindspeed_qerl.tasks.prompts import text_of

Answers = dict[
    str, list[torch.Tensor]
]  # column of the transfer dock -> a tensor [length] for each answer

SAMPLED = ("rollout_log_prob", "truncated")  # columns that our worker adds to upstream's
OF_AN_ANSWER = (
    "prompts",
    "prompt_length",
    "responses",
    "response_length",
    "input_ids",
    "rm_scores",
    *SAMPLED,
)


class EndlessPrompts(PromptDataLoader):
    """Upstream's, which starts again where it ends: it holds train_iters batches, and dynamic
    sampling asks more.
    """

    def __iter__(self) -> Iterator[dict[str, list]]:
        while True:
            yield from super().__iter__()


class OurDataStrategy(DataStrategy):
    """Upstream's data strategy with our columns; `experience` is the dock's content at the end of
    the last iteration, which upstream throws away.
    """

    experience: Answers | None = None

    def build_grpo(self, *args: Any, addition_columns: list[str], **kwargs: Any) -> Any:
        return super().build_grpo(
            *args, addition_columns=[*addition_columns, *SAMPLED, "trained", COLUMN], **kwargs
        )

    def clear_main(self, consumer: str | None = None) -> None:
        self.experience = ray.get(self.td.get_experience_data.remote())
        super().clear_main(consumer)


class QeRLTrainer(RayGRPOTrainer):
    """Upstream's trainer; `observer` (engine.RunObserver) hears of each step.

    `fit` calls `compute_advantage` once all answers are scored, and ends each iteration with
    `self.wandb.log_metrics(metrics, iteration)` (grpo_trainer_hybrid.py:289), before it saves:
    there we take over. (Dynamic sampling is here and not in upstream's DAPO trainer, which has no
    reference, starts its data anew when it is resumed, and ends the run where too few groups have a
    signal.) Weights & Biases itself is written from the run directory (run.wandb_project).
    """

    def __init__(self, *args: Any, observer: Any, **kwargs: Any):
        grpo_trainer_hybrid.DataStrategy = OurDataStrategy
        self.observer, self.recipe = observer, observer.recipe
        self.routers = read_shape(self.recipe.model.path).routers
        super().__init__(*args, **kwargs)
        self.batches_asked = self.actor_worker.rl_config.batches_asked
        self.values: dict[str, float] = {}  # of this step
        self.tokens = self.routes = (
            0  # of this step, that each epoch is to train, and to replay routes of
        )
        self.wandb = self

    def fit(self, data_iters: Iterator) -> None:
        """Upstream's loop, with an evaluation before the first step."""
        iteration, self.batches = self.actor_worker.get_iteration(), data_iters
        self.observer.started(self.actor_worker.execute_sync_command("describe"))
        if iteration == 0:
            self._evaluate(0)
        super().fit(data_iters)

    def set_actor_log_prob_skip_flag(self) -> None:
        """Upstream's; a pass that is to record routes is not left out."""
        super().set_actor_log_prob_skip_flag()
        if self.recipe.algorithm.routing_replay == "record":
            self.skip_actor_log_prob = self.actor_worker.skip_actor_log_prob = False

    def compute_advantage(self, blocking: bool = False, guarantee_order: bool = False) -> None:
        """Which of the scored answers are trained, and their advantages, into the dock's columns
        `trained`, `advantages` and `returns`.
        """
        started, recipe, n = time.time(), self.recipe, self.n_samples_per_prompt
        answers, kept = self._gather()
        trained, truncated = kept.repeat(n), _numbers(answers["truncated"]).astype(bool)
        if recipe.algorithm.mask_truncated_completions:
            trained &= ~truncated
        rewards = torch.from_numpy(self._rewards(answers))
        if recipe.algorithm.use_kl_in_reward:
            rewards = self._less_kl(rewards)
        advantages = group_advantages(
            rewards, n, recipe.algorithm.adv_estimator, recipe.algorithm.norm_adv_by_std_in_grpo
        )
        self._check(answers, trained, truncated, advantages.numpy())
        if not trained.any():
            why = (
                "every answer was cut off"
                if kept.any()
                else "no group had answers of different rewards"
            )
            self.observer.progress.message(
                f"Warning: step {self.observer.step + 1} trains nothing: {why}, of "
                f"{self.values['selection/sampled_groups']} groups"
            )
        per_token = [
            advantage.expand(len(response)).clone()
            for advantage, response in zip(advantages, answers["responses"])
        ]
        self._put(
            {
                "trained": [torch.tensor([int(one)]) for one in trained],
                "advantages": per_token,
                "returns": per_token,
            }
        )
        ended = time.time()
        self.data_strategy.update_metrics("timing/adv", value=[ended, started], cumulate=True)
        self.data_strategy.update_metrics("end_time/end_adv_time", value=[ended], cumulate=True)

    def _check(
        self, answers: Answers, trained: np.ndarray, truncated: np.ndarray, advantages: np.ndarray
    ) -> None:
        """EngineError for answers that cannot be trained on; counts the tokens that are to be.
        trained, truncated: bool [answers]. advantages: [answers].
        """
        logprobs = pad_sequence(answers["rollout_log_prob"], batch_first=True).numpy()
        if impossible(logprobs).any():
            row, place = np.argwhere(impossible(logprobs))[0]
            text = text_of(self.recipe.model.path, answers["responses"][row])[:200]
            raise EngineError(
                f"vLLM gave {logprobs[row, place]} as a log probability for token {place + 1} of "
                f"the answer {text!r}: nothing can be trained on it"
            )
        tokens = pad_sequence(answers["responses"], batch_first=True).numpy()
        lengths = _numbers(answers["response_length"]).astype(int)
        self.tokens = int(lengths[trained].sum())
        mask = (np.arange(tokens.shape[1]) < lengths[:, None]) & trained[:, None]
        self.routes = int(lengths.sum() + _numbers(answers["prompt_length"]).sum()) - len(tokens)
        for row, (response, routes) in enumerate(
            zip(answers["responses"], answers.get(COLUMN, ()))
        ):
            try:
                seen = int(answers["prompt_length"][row]) + len(response) - 1
                fault = routes_fault(unpack(routes, self.routers), seen, self.routers)
            except ValueError as error:
                fault = str(error)
            if fault:
                raise EngineError(
                    f"answer {row + 1}, {text_of(self.recipe.model.path, response)[:200]!r}: "
                    f"{fault}. Nothing can be replayed (algorithm.routing_replay)"
                )
        before = np.zeros(
            (len(tokens), 1), dtype=int
        )  # `ends_fault` knows sequences whose first token is no answer's
        if fault := "\n".join(
            filter(
                None,
                (
                    advantages_fault(advantages, self.n_samples_per_prompt),
                    ends_fault(np.hstack([before, tokens]), mask, ~truncated, self.observer.ends),
                ),
            )
        ):
            raise EngineError(fault)

    def _less_kl(self, rewards: torch.Tensor) -> torch.Tensor:
        """`rewards` of the answers in the dock, each less its KL to the reference. `fit` asks for
        the log-probs once more, and finds them there.
        """
        self.ref_worker.compute_ref_log_prob(blocking=True)
        self.actor_worker.compute_log_prob(blocking=True)
        found = self._columns(["old_log_prob", "ref_log_prob"])
        old, reference = (pad_sequence(column, batch_first=True) for column in found.values())
        lengths = torch.tensor([len(logprobs) for logprobs in found["old_log_prob"]])
        mask = torch.arange(old.shape[1]) < lengths.unsqueeze(1)
        rewards, metrics = rewards_less_kl(rewards, old, reference, mask, self.recipe.algorithm)
        self.values |= {name: metric.value() for name, metric in metrics.items()}
        return rewards

    def _gather(self) -> tuple[Answers, np.ndarray]:
        """A batch of scored answers, which are those in the dock, and which of its groups are
        trained. With dynamic sampling more batches are asked until there are enough groups whose
        answers' rewards differ; others fill up.
        """
        selection, n, batches = self.recipe.selection, self.n_samples_per_prompt, 1
        answers = self._scored()
        wanted = len(answers["responses"]) // n
        while True:
            signal = groups_with_signal(self._scores(answers), n)
            enough = not selection.filter_groups_enable or signal.sum() >= wanted
            if enough or batches == selection.filter_groups_max_batches:
                break
            self._ask()
            more, batches = self._scored(), batches + 1
            answers = {column: answers[column] + more[column] for column in answers}
        self.batches_asked += batches
        self.values = self._values_of(answers)
        if not selection.filter_groups_enable:
            return answers, np.ones(wanted, bool)
        chosen = np.argsort(~signal, kind="stable")[:wanted]
        self.values["selection/trained_groups"] = int(signal[chosen].sum())
        rows = (chosen[:, None] * n + np.arange(n)).reshape(-1)
        answers = {column: [values[row] for row in rows] for column, values in answers.items()}
        self._clear()
        self._put(answers)
        return answers, signal[chosen]

    def _scored(self) -> Answers:
        """The answers in the dock, once all are scored."""
        routes = [COLUMN] if self.recipe.algorithm.routing_replay == "rollout" else []
        return self._columns([*OF_AN_ANSWER, *routes, *self.dataset_additional_keys])

    def _columns(self, names: list[str]) -> Answers:
        """Of all answers in the dock, once they are there."""
        rows = list(range(self.global_batch_size * self.n_samples_per_prompt))
        found, _ = ray.get(
            self.transfer_dock.get_experience.remote(
                "compute_advantage", names, len(rows), indexes=rows
            )
        )
        return {
            column: list(values)
            for column, values in remove_padding_tensor_dict_to_dict(found).items()
        }

    def _ask(self) -> None:
        """Answers to the next prompts instead of those in the dock, scored, as `fit` asks for the
        first ones.
        """
        self._clear()
        prompts, rows = put_prompts_experience(
            next(self.batches), self.n_samples_per_prompt, self.dataset_additional_keys
        )
        self.data_strategy.put_experience(prompts, rows, is_prompt=True)
        self.actor_worker.generate_sequences(blocking=True)
        ray.get([reward.compute_rm_score.remote() for reward in self.reward_list])

    def _clear(self) -> None:
        """The dock without answers; its metrics stay."""
        metrics = self.data_strategy.get_metrics().metric
        ray.get(self.transfer_dock.clear.remote())
        self.data_strategy.update_metrics("", value=metrics)

    def _put(self, columns: Answers) -> None:
        rows = list(range(self.global_batch_size * self.n_samples_per_prompt))
        self.data_strategy.put_experience(padding_dict_to_tensor_dict(columns), rows)

    def _scores(self, answers: Answers) -> np.ndarray:
        """What decides whether a group is trained: the reward, or with `filter_groups_metric` the
        verifier's.
        """
        return (
            _numbers(answers["rm_scores"])
            if self.recipe.selection.filter_groups_metric
            else self._rewards(answers)
        )

    def _rewards(self, answers: Answers) -> np.ndarray:
        """What is learnt from, float64 [answers]: the verifiers' sum, and what the length costs."""
        selection, rewards = self.recipe.selection, _numbers(answers["rm_scores"])
        if selection.overlong_buffer_enable:
            rewards = rewards + overlong_penalty(
                _numbers(answers["response_length"]),
                selection.rollout_max_tokens,
                selection.overlong_buffer,
                selection.overlong_buffer_penalty_factor,
            )
        return rewards

    def _values_of(self, answers: Answers) -> dict[str, float]:
        """Metrics of all answers of a step, trained or not."""
        groups = len(answers["responses"]) // self.n_samples_per_prompt
        return {
            **reward_metrics(self._rewards(answers), self.n_samples_per_prompt),
            "response/length_mean": _numbers(answers["response_length"]).mean(),
            "response/truncated_fraction": _numbers(answers["truncated"]).mean(),
            "selection/sampled_groups": groups,
            "selection/trained_groups": groups,
            **(
                {"routing/captured_tokens": sum(int(routes[0]) for routes in answers[COLUMN])}
                if COLUMN in answers
                else {}
            ),
        }

    def log_metrics(self, metrics: dict[str, float], iteration: int) -> None:
        """Called by `fit` after update `iteration`."""
        trained = merge(self.actor_worker.execute_sync_command("take_metrics"))
        values = self.values
        if self.tokens:
            values |= {name: metric.value() for name, metric in trained.items()}
            values["selection/trained_tokens"] = trained["mismatch/k1"].count
        if self.recipe.algorithm.routing_replay != "none":
            counts = total(self.actor_worker.execute_sync_command("take_routing"))
            values |= routing_metrics(counts, self.routers) if self.tokens else {}
        if self.recipe.quantization.enabled:
            parts = dict(
                chain.from_iterable(
                    found.items()
                    for found in self.actor_worker.execute_sync_command("take_weight_squares")
                )
            )
            values |= weight_errors((name, of_part) for (name, _), of_part in parts.items())
        routes = self.routes if self.recipe.algorithm.routing_replay != "none" else 0
        self.observer.stepped(
            iteration, metrics, values, self.tokens, routes, self.data_strategy.experience
        )
        if self.observer.wants_proof(iteration):
            movements, unlike = zip(*self.actor_worker.execute_sync_command("prove"))
            self.observer.proved(iteration, join(movements), sorted({*chain(*unlike)}))
        self._evaluate(iteration)

    def save_checkpoint(self, iteration: int) -> None:
        self.observer.saving(iteration, self.batches_asked)
        super().save_checkpoint(iteration)
        self.observer.saved(iteration)

    def _evaluate(self, step: int) -> None:
        def generate(prompts: list[list[int]], n: int, temperature: float) -> list[list[list[int]]]:
            shares = self.actor_worker.execute_sync_command(
                "evaluate", prompts, n, temperature, step
            )
            answers = dict(pair for share in shares if share for pair in share)
            return [answers[index] for index in range(len(prompts))]

        self.observer.evaluate(step, generate)


def _numbers(column: list[torch.Tensor]) -> np.ndarray:
    """float64 [answers], of a column with one number for each."""
    return torch.cat(column).double().numpy()
