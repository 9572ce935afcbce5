"""Upstream's GRPO trainer: what is asked, selected and trained, evaluations, metrics, samples."""

import time
from contextlib import suppress
from typing import Any

import numpy as np
import ray
import torch
from mindspeed_rl.datasets.dataloader import PromptDataLoader
from mindspeed_rl.trainer.grpo_trainer_hybrid import RayGRPOTrainer
from mindspeed_rl.trainer.utils.transfer_dock import put_prompts_experience
from mindspeed_rl.utils.pad_process import (
    padding_dict_to_tensor_dict,
    remove_padding_tensor_dict_to_dict,
)
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mindspeed_qerl.algorithm.advantages import group_advantages, overlong_penalty, rewards_less_kl
from mindspeed_qerl.algorithm.metrics import groups_with_signal, merge, reward_metrics
from mindspeed_qerl.common.errors import EngineError
from mindspeed_qerl.engines.noise import controller_of
from mindspeed_qerl.families import read_shape
from mindspeed_qerl.lora.proof import arrival_metrics, join
from mindspeed_qerl.quantization.weights import weight_errors
from mindspeed_qerl.routing.replay import routing_metrics, total
from mindspeed_qerl.runs.checks import advantages_fault, ends_fault, impossible

from .observer import TokenObserver
from .resume import write_position
from .routing import COLUMN, row_fault

# column of the transfer dock -> a tensor [length] for each answer
Answers = dict[str, list[Tensor]]

SAMPLED = ("rollout_log_prob", "truncated")  # columns that our worker adds to upstream's
SCORED = (
    "prompts",
    "prompt_length",
    "responses",
    "response_length",
    "input_ids",
    "rm_scores",
    *SAMPLED,
)
# Upstream's metric names (trainer/utils/compute_utils.py, workers/*.py) -> runs/metrics.py's.
# Others keep theirs after "upstream/".
OUR_NAMES = {
    "actor/grad_norm": "grad_norm",
    "actor/lr": "lr",
    "timing/all": "time/step",
    "timing/rollout": "time/rollout",
    "timing/rule_reward": "time/reward",
    "timing/old_log_p": "time/logprobs",
    "timing/update": "time/update",
    "timing/resharding_to_infer": "time/sync",
}


class EndlessPrompts(PromptDataLoader):
    """Upstream's, which starts again where it ends: it holds train_iters batches, and dynamic
    sampling asks more.
    """

    def __iter__(self):
        while True:
            yield from super().__iter__()


class QeRLTrainer(RayGRPOTrainer):
    """A trainer of upstream that reports to `observer`.

    `fit` calls `compute_advantage` once all answers are scored, and ends each iteration with
    `self.wandb.log_metrics(metrics, iteration)` (grpo_trainer_hybrid.py:289), before it saves:
    there we take over. (Dynamic sampling is here and not in upstream's DAPO trainer, which has no
    reference, starts its data anew when it is resumed, and ends the run where too few groups have a
    signal.) Weights & Biases itself is written from the run directory (run.wandb_project).

    Attributes:
        on_ranks: on_ranks(method, *arguments), what a method of the worker returns on each rank.
        rows: of the dock, one for each answer of a batch.
        step: updates so far. noise, level: of the run, and NoiseLevel of the step under way;
            None: a run without. tokens, routes: of this step, that each epoch is to train, and to
            replay routes of. values: metrics of this step. batches_asked: of prompts, in the whole
            run.
    """

    def __init__(self, *args, observer: TokenObserver, **kwargs):
        self.observer = observer
        self.recipe = observer.recipe
        self.noise = controller_of(self.recipe, observer.earlier)
        self.replays = self.recipe.algorithm.routing_replay != "none"
        self.routers = read_shape(self.recipe.model.path).routers
        super().__init__(*args, **kwargs)
        self.on_ranks = self.actor_worker.execute_sync_command
        self.rows = list(range(self.global_batch_size * self.n_samples_per_prompt))
        self.batches_asked = self.actor_worker.rl_config.batches_asked
        self.values = {}
        self.step = self.tokens = self.routes = 0
        self.level = None
        self.wandb = self

    def transfer_dock_init(self):
        """Upstream's, which makes a dock with the additional columns of the data; ours are more."""
        of_data = self.dataset_additional_keys
        self.dataset_additional_keys = [*of_data, *SAMPLED, "trained", COLUMN]
        super().transfer_dock_init()
        self.dataset_additional_keys = of_data

    def fit(self, data_iters):
        """Runs upstream's loop, after an evaluation before the first step."""
        self.step = self.actor_worker.get_iteration()
        self.batches = data_iters
        adapters, norms = zip(*self.on_ranks("describe"))
        self.observer.begin(adapters, norms[0])
        self._set_noise()
        if self.step == 0:
            self._evaluate()
        super().fit(data_iters)
        self.observer.end()

    def _set_noise(self) -> None:
        """Tells the ranks how much noise the next step has."""
        if self.noise:
            self.level = self.noise.level(self.step)
            self.on_ranks("set_noise", self.level)

    def compute_advantage(self, blocking=False, guarantee_order=False):
        """Which of the scored answers are trained, and their advantages, into the dock's columns
        `trained`, `advantages` and `returns`. EngineError for answers that cannot be trained on.
        """
        started = time.time()
        algorithm = self.recipe.algorithm
        n = self.n_samples_per_prompt
        answers, is_kept = self._gather()
        self.observer.sampled_tokens(self.step + 1, answers)
        trained = is_kept.repeat(n)
        truncated = _numbers(answers["truncated"]).astype(bool)
        if algorithm.mask_truncated_completions:
            trained &= ~truncated
        rewards = torch.from_numpy(self._rewards(answers))
        trained &= ~rewards.isnan().numpy()
        self._check(answers, trained & ~truncated)
        if algorithm.use_kl_in_reward:
            rewards = self._less_kl(rewards)
        advantages = group_advantages(rewards, n, algorithm)
        if fault := advantages_fault(advantages.numpy(), n):
            raise EngineError(fault)
        lengths = _numbers(answers["response_length"])
        self.tokens = int(lengths[trained].sum())
        if self.replays:  # an answer's last token goes through no model
            self.routes = sum(len(ids) - 1 for ids in answers["input_ids"])
        if not self.tokens:
            groups = self.values["selection/sampled_groups"]
            self.observer.trains_nothing(self.step + 1, groups, all_cut_off=is_kept.any())
        pairs = zip(advantages, answers["responses"])
        per_token = [advantage.repeat(len(response)) for advantage, response in pairs]
        self._put(
            {
                "advantages": per_token,
                "returns": per_token,
                "trained": list(torch.from_numpy(trained).long().unsqueeze(1)),
            }
        )
        ended = time.time()
        times = {"timing/adv": ended - started, "end_time/end_adv_time": ended}
        self.data_strategy.update_metrics("", value=times)

    def _check(self, answers: Answers, ended: np.ndarray) -> None:
        """EngineError for answers that cannot be trained on. ended: bool [answers], those to train
        that were not cut off.
        """
        texts = [self.observer.tokenizer.decode(ids)[:200] for ids in answers["responses"]]
        for text, column in zip(texts, answers["rollout_log_prob"]):
            logprobs = column.numpy()
            wrong = logprobs[impossible(logprobs)]
            if len(wrong):
                raise EngineError(
                    f"vLLM gave {wrong[0]} as the log probability of a token of the answer {text!r}"
                )
        for text, ids, row in zip(texts, answers["input_ids"], answers.get(COLUMN, ())):
            if fault := row_fault(row, len(ids) - 1, self.routers):
                raise EngineError(
                    f"the answer {text!r}: {fault}. Nothing can be replayed "
                    "(algorithm.routing_replay)"
                )
        # `ends_fault` takes sequences whose first token is no answer's
        last = np.array([[0, int(response[-1])] for response in answers["responses"]])
        if fault := ends_fault(last, ended[:, None], ended, self.observer.ends):
            raise EngineError(fault)

    def _less_kl(self, rewards: Tensor) -> Tensor:
        """`rewards` of the answers in the dock, each less its KL to the reference. `fit` asks for
        the log-probs once more, and finds them there.
        """
        self.ref_worker.compute_ref_log_prob(blocking=True)
        self.actor_worker.compute_log_prob(blocking=True)
        columns = self._columns(["old_log_prob", "ref_log_prob"]).values()
        old, reference = (pad_sequence(column, batch_first=True) for column in columns)
        tokens = torch.ones_like(old, dtype=torch.bool)  # padding is 0 in both
        rewards, kl = rewards_less_kl(rewards, old, reference, tokens, self.recipe.algorithm)
        self.values["reward/kl"] = float(kl)
        return rewards

    def _gather(self) -> tuple[Answers, np.ndarray]:
        """A batch of scored answers, which are those in the dock, and which of its groups are
        trained, bool [prompts]. With dynamic sampling more batches are asked until there are enough
        groups whose answers' rewards differ; others fill up.
        """
        selection = self.recipe.selection
        n = self.n_samples_per_prompt
        wanted = self.global_batch_size
        batches = 1
        answers = self._scored()
        if not selection.filter_groups_enable:
            self.batches_asked += 1
            self.values = self._values(answers, wanted)
            return answers, np.ones(wanted, bool)
        while True:
            scores = self._rewards(answers)
            if selection.filter_groups_metric:  # the verifier's alone
                scores = _numbers(answers["rm_scores"])
            signal = groups_with_signal(scores, n)
            if signal.sum() >= wanted or batches == selection.filter_groups_max_batches:
                break
            self.observer.still_sampling(self.step + 1, batches, signal.sum(), wanted)
            self._ask()
            for column, values in self._scored().items():
                answers[column] += values
            batches += 1
        self.batches_asked += batches
        chosen = np.argsort(~signal, kind="stable")[:wanted]
        self.values = self._values(answers, signal[chosen].sum())
        rows = (chosen[:, None] * n + np.arange(n)).flatten()
        answers = {column: [values[row] for row in rows] for column, values in answers.items()}
        self._clear()
        self._put(answers)
        return answers, signal[chosen]

    def _scored(self) -> Answers:
        """The answers in the dock, once all are scored."""
        routes = [COLUMN] if self.replays else []
        return self._columns([*SCORED, *routes, *self.dataset_additional_keys])

    def _columns(self, names: list[str]) -> Answers:
        """Returns columns of all answers in the dock, once they are there."""
        asked = self.transfer_dock.get_experience.remote(
            "compute_advantage", names, len(self.rows), indexes=self.rows
        )
        padded, _ = ray.get(asked)
        return remove_padding_tensor_dict_to_dict(padded)

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
        self.data_strategy.clear_main()
        self.data_strategy.update_metrics("", value=metrics)

    def _put(self, columns: Answers) -> None:
        self.data_strategy.put_experience(padding_dict_to_tensor_dict(columns), self.rows)

    def _rewards(self, answers: Answers) -> np.ndarray:
        """Returns what is learnt from, float64 [answers]: verifiers' sum less what length costs; NaN
        where it could not be computed.
        """
        selection = self.recipe.selection
        rewards = _numbers(answers["rm_scores"])
        if not selection.overlong_buffer_enable:
            return rewards
        return rewards + overlong_penalty(_numbers(answers["response_length"]), selection)

    def _values(self, answers: Answers, trained_groups: int) -> dict[str, float]:
        """Metrics of all answers of a step, trained or not."""
        lengths = _numbers(answers["response_length"])
        rewards = self._rewards(answers)
        repeats = self.recipe.noise.repeats(self.level)
        values = reward_metrics(rewards, self.n_samples_per_prompt, repeats)
        values |= {
            "response/length_mean": lengths.mean(),
            "response/length_max": lengths.max(),
            "response/truncated_fraction": _numbers(answers["truncated"]).mean(),
            "selection/sampled_groups": len(answers["responses"]) // self.n_samples_per_prompt,
            "selection/trained_groups": int(trained_groups),
        }
        if COLUMN in answers:
            values["routing/captured_tokens"] = sum(int(row[0]) for row in answers[COLUMN])
        return values

    def log_metrics(self, metrics, iteration):
        """Called by `fit` after update `iteration`."""
        self.step = iteration
        trained, replayed, squares, noise = zip(*self.on_ranks("take_report"))
        values = to_our_names(metrics) | noise[0] | self.values
        if self.tokens:
            of_updates = merge(trained)
            values |= {name: metric.value() for name, metric in of_updates.items()}
            values["selection/trained_tokens"] = of_updates["mismatch/k1"].count
            if self.replays:
                values |= routing_metrics(total(replayed), self.routers)
        if self.recipe.quantization.enabled:
            parts = {}
            for of_rank in squares:
                parts |= of_rank  # several ranks hold the same part
            values |= weight_errors((name, pair) for (name, _), pair in parts.items())
        movement = {}
        if self.observer.wants_proof(iteration, values.get("grad_norm", 0.0)):
            movements, unlike = zip(*self.on_ranks("prove"))
            movement = join(movements)
            values |= arrival_metrics(movement)
        if self.level:
            values |= self.noise.update(self.level, values)
        self.observer.stepped(iteration, values, self.tokens, self.routes, self.level)
        if movement:
            self.observer.proved(iteration, movement, set().union(*unlike))
        self._set_noise()
        self._evaluate()

    def save_checkpoint(self, iteration):
        """Upstream's, with the position in the data and digests beside it."""
        run = self.observer.run
        write_position(run, iteration, self.batches_asked, is_saved=False)
        super().save_checkpoint(iteration)
        write_position(run, iteration, self.batches_asked, is_saved=True)
        self.observer.progress.message(f"Checkpoint of step {iteration} saved")

    def _evaluate(self) -> None:
        """Noise off, if an evaluation is due: each rank answers its share of the problems."""
        if not self.observer.wants_evaluation(self.step):
            return
        started = time.perf_counter()
        self.observer.progress.phase("evaluation")
        prompts = self.observer.problems.prompts
        answers = {}
        for share in self.on_ranks("evaluate", prompts):
            answers |= share
        in_order = [answers[index] for index in range(len(prompts))]
        self.observer.evaluated_tokens(self.step, in_order, time.perf_counter() - started)


def to_our_names(metrics: dict[str, Any]) -> dict[str, float]:
    """Returns upstream's metrics of one step by our names, without what is no number."""
    named = {}
    for name, value in metrics.items():
        ours = OUR_NAMES.get(name, f"upstream/{name}")
        if name.startswith("verifier/"):  # ascend/reward.py
            ours = name
        with suppress(TypeError, ValueError):
            named[ours] = float(value)
    return named


def _numbers(column: list[Tensor]) -> np.ndarray:
    """float64 [answers], of a column with one number for each."""
    return torch.cat(column).double().numpy()
