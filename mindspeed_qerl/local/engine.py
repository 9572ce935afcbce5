"""The local engine: one GRPO iteration after another, on one page.

sample (synced weights, noise on) -> score -> select and group advantages -> update (Megatron ranks, clean weights)
-> sync (merged weights to the rollout engine) -> evaluate (noise off)
"""

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch

from mindspeed_qerl.algorithm.advantages import group_advantages, rewards_less_kl
from mindspeed_qerl.algorithm.metrics import reward_metrics
from mindspeed_qerl.algorithm.selection import groups_with_signal, overlong_penalty
from mindspeed_qerl.aqn.injector import NoiseReport
from mindspeed_qerl.families import read_shape
from mindspeed_qerl.files import checkpoint_iterations
from mindspeed_qerl.local import checkpoint
from mindspeed_qerl.local.batch import Batch, PromptOrder, build_batch, deal_mini_batches
from mindspeed_qerl.local.data import Data, load_data
from mindspeed_qerl.local.processes import Processes, WorkerError, launch, memory_in_use
from mindspeed_qerl.local.rollout import Completion, join_movement
from mindspeed_qerl.recipe.types import Layout, Recipe
from mindspeed_qerl.runs.directory import RunDirectory
from mindspeed_qerl.runs.metrics import MetricsWriter
from mindspeed_qerl.runs.progress import Progress
from mindspeed_qerl.seeds import derived_seed
from mindspeed_qerl.tasks.evaluation import evaluate_answers
from mindspeed_qerl.tasks.rewards import first_reward, score
from mindspeed_qerl.tasks.rows import Row

# What the proof of a sync (`RolloutEngine.movement`) allows.
ROUNDINGS = 2  # resolutions: the rank rounds base + update to the weights' dtype, and the proof rounds its own
LOST_SHARE = 0.1  # of a tensor's move; in fp32 rounding loses under 1e-3 (tests/local/test_rollout.py), no sync 1
VISIBLE_SHARE = 0.5  # of the expected move; of a smaller one rounding swallowed most, and it proves nothing yet


@dataclass(frozen=True)
class Sampled:
    """Answers to prompts, those to one prompt side by side; one of each for every answer."""

    rows: list[Row]
    prompts: list[list[int]]
    answers: list[Completion]
    texts: list[str]
    rewards: np.ndarray  # float64 [N], of length, too
    scores: dict[str, np.ndarray]  # of each verifier, float64 [N]

    def __add__(self, other: "Sampled") -> "Sampled":
        return Sampled(self.rows + other.rows, self.prompts + other.prompts, self.answers + other.answers,
                       self.texts + other.texts, np.concatenate([self.rewards, other.rewards]),
                       {name: np.concatenate([scores, other.scores[name]]) for name, scores in self.scores.items()})


def check_logprobs(sampled: Sampled) -> None:
    """WorkerError that names the answer, where a log probability of the policy that sampled is no number, or above
    0."""
    for row, answer, text in zip(sampled.rows, sampled.answers, sampled.texts):
        wrong = [value for value in answer.logprobs if not value <= 1e-3 or value == -math.inf]  # NaN is not <= either
        if wrong or len(answer.logprobs) != len(answer.token_ids):
            given = f"{wrong[0]} as a log probability" if wrong else f"{len(answer.logprobs)} log probabilities"
            raise WorkerError(f"vLLM gave {given} for the {len(answer.token_ids)} tokens of the answer {text[:200]!r} "
                              f"to {row.question[:200]!r}: nothing can be trained on it")


def select(sampled: Sampled, kept: np.ndarray, recipe: Recipe,
           logprobs_before: Callable[[Batch], tuple[np.ndarray, np.ndarray]] | None = None,
           ) -> tuple[Batch, dict[str, float]]:
    """What is trained: the answers of the groups `kept`, each with its advantage within its group; to a multiple of
    the mini-batch with answers that have no token to train. And metrics of the rewards.

    Args:
        kept: numbers of groups, at most as many as are trained in a step.
        logprobs_before: `LocalEngine.logprobs_before`, for KL in the reward: all tokens of an answer count there, also
            of one that is cut off and not trained.
    """
    n, algorithm = recipe.batch.samples_per_prompt, recipe.algorithm
    rows = (kept[:, None] * n + np.arange(n)).reshape(-1)
    answers, missing = [sampled.answers[row] for row in rows], -len(rows) % recipe.batch.mini_answers
    batch = build_batch([sampled.prompts[row] for row in rows], [answer.token_ids for answer in answers],
                        [answer.logprobs for answer in answers], np.zeros(len(rows)))
    rewards, metrics = torch.from_numpy(sampled.rewards[rows]), {}
    if algorithm.use_kl_in_reward:
        old, reference = (values[: len(rows)] for values in logprobs_before(batch.padded(missing)))
        batch = replace(batch, old_logprobs=old)
        rewards, metrics = rewards_less_kl(rewards, *map(torch.from_numpy, (old, reference, batch.mask)), algorithm)
        for row in rows[~np.isfinite(rewards.numpy())]:
            answer, question = sampled.texts[row][:200], sampled.rows[row].question[:200]
            raise WorkerError(f"the KL of the answer {answer!r} to {question!r} is no finite number, and with "
                              "rl_config.use_kl_in_reward its reward neither: nothing can be trained on it")
    batch.advantages[:] = group_advantages(rewards, n, algorithm.adv_estimator, algorithm.norm_adv_by_std_in_grpo)
    if algorithm.mask_truncated_completions:
        batch.mask[[answer.truncated for answer in answers]] = False
    return batch.padded(missing), {name: metric.value() for name, metric in metrics.items()}


def data_rank(rank: int, layout: Layout) -> int:
    """The data-parallel rank of a rank: tensor parallel ranks count first, stages last (Megatron parallel_state)."""
    return rank // layout.tp % layout.dp


def last_checkpoint(recipe: Recipe) -> int:
    """The iteration after which the run in `recipe.run.resume` can resume; ValueError if it has no checkpoint, a
    damaged one, or one of another model or other adapters."""
    state = checkpoint.read_state(RunDirectory.open(recipe.run.resume).checkpoints_dir)
    checkpoint.check_fit(state, checkpoint.describe(read_shape(recipe.model.path), recipe.lora))
    return state["iteration"]


def train(recipe: Recipe, run: RunDirectory, metrics: MetricsWriter, progress: Progress) -> None:
    """Run `recipe` on the local engine. Raises WorkerError if a process fails, ConfigError if the data does not fit
    the model."""
    progress.phase("reading the task")
    data = load_data(recipe, progress)
    epoch = math.ceil(len(data.train.rows) / recipe.batch.global_batch_size)  # the last step may reach beyond
    if recipe.noise.restart_every == "epoch":
        run.record(aqn_restart_every=epoch)
    progress.phase("starting engines")
    with launch(recipe, run, epoch) as processes:
        LocalEngine(recipe, run, metrics, progress, processes, data).train()


class LocalEngine:
    """The loop, and what it keeps between iterations: the position in the data, and whether the sync is proved."""

    def __init__(self, recipe: Recipe, run: RunDirectory, metrics: MetricsWriter, progress: Progress,
                 processes: Processes, data: Data):
        self.recipe, self.run, self.metrics, self.progress = recipe, run, metrics, progress
        self.processes, self.data = processes, data
        self.order = PromptOrder(len(data.train.rows), recipe.run.seed)
        self.updates = 0  # of the optimizer
        self.seconds: dict[str, float] = {}  # of the parts of this iteration
        self.proved = self.warned = False

    def train(self) -> None:
        """All iterations."""
        recipe, started = self.recipe, time.perf_counter()
        self.processes.wait_until_ready()
        self.report_targets()
        self.run.record(processes=self.processes.pids, engine_start_seconds=time.perf_counter() - started)
        done = self.restore() if recipe.run.resume else 0
        self.sync()
        if not done:
            self.evaluate(0)
        peak_memory = 0  # bytes, of all processes together
        for step in range(done + 1, recipe.run.train_iters + 1):
            self.iteration(step)
            peak_memory = max(peak_memory, memory_in_use([os.getpid(), *self.processes.pids.values()]))
            if step % recipe.evaluation.every == 0 or step == recipe.run.train_iters:
                self.evaluate(step)
            if step == recipe.run.train_iters or recipe.run.save_interval and step % recipe.run.save_interval == 0:
                self.save(step)
        self.run.record(peak_memory_gib=peak_memory / 2**30)
        if not self.proved:
            self.progress.message("Warning: not every LoRA target moved in this run (no reward differed?), so its way "
                                  "into the rollout engine was never proved")

    def iteration(self, step: int) -> None:
        """Iteration `step`, counted from 1."""
        recipe, n, started = self.recipe, self.recipe.batch.samples_per_prompt, time.perf_counter()
        self.seconds = {}
        sampled, kept, noise = self.gather(step)
        with self._timed("reward"):
            batch, of_rewards = select(sampled, kept, recipe, self.logprobs_before) if len(kept) else (None, {})
        if batch is not None and batch.mask.any():
            self.progress.phase("update")
            trained = self.update(batch)
        else:
            trained = {}
            self.processes.on_ranks("skip")
            why = "no group had answers of different rewards" if batch is None else "every answer was cut off"
            self.progress.message(f"Warning: step {step} trains nothing: {why}, of {len(sampled.rewards) // n} groups")
        with self._timed("sync"):
            self.sync()
        values = {**reward_metrics(sampled.rewards, n), **of_rewards,
                  **{f"verifier/{name}/mean": of_verifier.mean() for name, of_verifier in sampled.scores.items()},
                  "response/length_mean": np.mean([len(answer.token_ids) for answer in sampled.answers]),
                  "response/truncated_fraction": np.mean([answer.truncated for answer in sampled.answers]),
                  "selection/sampled_groups": len(sampled.rewards) // n, "selection/trained_groups": len(kept),
                  **trained, **(noise.to_metrics() if noise else {}), **self.seconds,
                  "time/step": time.perf_counter() - started}
        self.metrics.log(step, values)
        self.warn_of_mismatch(values)
        shown = zip(sampled.rows[: recipe.run.rollout_samples], sampled.texts, sampled.rewards)
        self.metrics.log_rollouts(step, [{"question": row.question, "response": text, "answer": row.answer,
                                          "reward": float(reward)} for row, text, reward in shown])
        self.progress.step(step, values)

    def warn_of_mismatch(self, values: dict[str, float]) -> None:
        """Once a run: with noise on and no correction, the importance weights that nobody applies are uneven."""
        correction, size = self.recipe.correction, values.get("mismatch/effective_sample_size", 1.0)
        sigma, is_corrected = values.get("aqn/sigma"), correction.method != "none"
        if sigma and not is_corrected and not self.warned and size < correction.warn_below:
            self.warned = True
            self.progress.message(
                f"Warning: with noise of sigma {sigma:.3g} the effective sample size is {size:.0%} of the tokens "
                f"(below rollout_correction.warn_below = {correction.warn_below:g}): the policy that samples is far "
                "from the one that is trained. rollout_correction=token_tis weighs the tokens (docs/algorithms.md)")

    def gather(self, step: int) -> tuple[Sampled, np.ndarray, NoiseReport | None]:
        """Scored answers, the numbers of the groups that are trained, and what the noise did. With dynamic sampling
        batches are asked until enough groups have answers of different rewards (upstream's
        trainer/dapo_trainer_hybrid.py; what it ends the run for, too few groups, is trained here)."""
        selection, n = self.recipe.selection, self.recipe.batch.samples_per_prompt
        sampled, noise = self.sample(step)
        if not selection.filter_groups_enable:
            return sampled, np.arange(len(sampled.rewards) // n), noise
        batches, limit = 1, selection.filter_groups_max_batches
        while True:
            scores = sampled.scores.get(selection.filter_groups_metric, sampled.rewards)
            kept = np.flatnonzero(groups_with_signal(scores, n))[: selection.filter_groups_train_batch_size]
            if len(kept) == selection.filter_groups_train_batch_size or batches == limit:
                return sampled, kept, noise
            sampled += self.sample(step, batches)[0]
            batches += 1

    def sample(self, step: int, batch: int = 0) -> tuple[Sampled, NoiseReport | None]:
        """Answers to the next prompts, by the synced weights with the noise of this step on, and their rewards;
        `batch` counts those that one step asks."""
        recipe, task, n = self.recipe, self.data.train, self.recipe.batch.samples_per_prompt
        with self._timed("rollout"):
            chosen = self.order.take(recipe.batch.global_batch_size)
            answers, noise = self._generate([task.prompts[i] for i in chosen], n, "rollout", step, noise_step=step - 1,
                                            batch=batch)
        if noise and step == 1 and not batch:
            self.run.record(aqn_layers=noise.names)
            self.progress.message(f"AQN targets {noise.layers} RMSNorm layers: {', '.join(noise.names)}")
        with self._timed("reward"):
            asked = [i for i in chosen for _ in range(n)]
            rows, texts, selection = [task.rows[i] for i in asked], self._decode(answers), recipe.selection
            rewards, scores = score(recipe.task.verifiers, texts, rows)
            if selection.overlong_buffer_enable:
                lengths = np.array([len(answer.token_ids) for answer in answers])
                rewards = rewards + overlong_penalty(lengths, selection.rollout_max_tokens, selection.overlong_buffer,
                                                     selection.overlong_buffer_penalty_factor)
            sampled = Sampled(rows, [task.prompts[i] for i in asked], answers, texts, rewards, scores)
            check_logprobs(sampled)
        return sampled, noise

    def logprobs_before(self, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        """Before the update, by the policy and by the base model, float32 [N, L-1]."""
        layout, result = self.recipe.layout, np.zeros((2, *batch.mask.shape), dtype=np.float32)
        with self._timed("logprobs"):
            found = self.processes.gather({rank: rank.call("logprobs_before", shards) for rank, shards
                                           in zip(self.processes.ranks, self._deal(batch))})
        for rank in range(layout.world - layout.tp * layout.dp, layout.world):  # of the last pipeline stage
            for index, both in zip(self._shares(batch)[data_rank(rank, layout)], found[rank]):
                for of_whole, values in zip(result, both):
                    of_whole[index, : values.shape[1]] = values
        return result[0], result[1]

    def update(self, batch: Batch) -> dict[str, float]:
        """Train the ranks on `batch`; returns their metrics."""
        trained = self.processes.gather({rank: rank.call("train", shards, self.recipe.batch.epochs) for rank, shards
                                         in zip(self.processes.ranks, self._deal(batch))})[0]
        for part in ("time/logprobs", "time/update"):
            self.seconds[part] = self.seconds.get(part, 0.0) + trained.pop(part)
        self.updates += trained.pop("updates")
        return trained

    def sync(self) -> None:
        """Merged weights to the rollout engine, a part of each rank's at a time, two parts under way; until every
        target is seen to have moved, with a proof of what arrived."""
        loading = self.processes.start_on_rollouts("start_sync")
        for part in range(self.sync_parts):
            merged = [rank.call("merged_weights", part) for rank in self.processes.ranks]
            self.processes.gather(loading)
            loading = self.processes.start_on_rollouts("load", *merged)
            del merged  # Ray keeps what somebody still names
        self.processes.gather(loading)
        self.processes.on_rollouts("finish_sync")
        if not self.proved:
            self.prove()

    def prove(self) -> None:
        """Compare what the rollout engine holds with base + (alpha / r) B A; WorkerError where they differ."""
        factors = [rank.call("adapter_factors") for rank in self.processes.ranks]
        movement = join_movement(self.processes.on_rollouts("movement", *factors))
        for target, entry in movement.items():
            if entry["max_error"] > ROUNDINGS * entry["resolution"] or entry["lost"] > LOST_SHARE:
                raise WorkerError(f"{target}: the rollout engine's weights differ from base + (alpha/r) B A by "
                                  f"{entry['max_error']:.3g}, rounding is {entry['resolution']:.3g}; up to "
                                  f"{entry['lost']:.0%} of a tensor's move is lost; |update| should be "
                                  f"{entry['expected']:.3g} and is {entry['moved']:.3g}")
        if all(entry["moved"] > VISIBLE_SHARE * entry["expected"] > 0 for entry in movement.values()):
            self.proved = True
            self.run.record(lora_movement=movement)
            self.progress.message("LoRA reached the rollout engine: " + ", ".join(
                f"{target} moved {entry['moved']:.4g} of {entry['expected']:.4g}, max error {entry['max_error']:.1g}"
                for target, entry in movement.items()))

    def evaluate(self, step: int) -> None:
        """Accuracy after `step` updates on the held-out rows, noise off, by the first verifier."""
        settings, task, started = self.recipe.evaluation, self.data.test, time.perf_counter()
        self.progress.phase("evaluation")
        n = settings.samples_per_problem
        answers, _ = self._generate(task.prompts, n, "evaluation", step, temperature=settings.temperature)
        result, written = evaluate_answers(task.rows, self._decode(answers), [answer.truncated for answer in answers],
                                           n, first_reward(self.recipe.task.verifiers))
        result |= {"temperature": settings.temperature, "seconds": time.perf_counter() - started}
        self.metrics.log_eval(step, result, written)
        self.progress.evaluated(step, result)

    def report_targets(self) -> None:
        """Say and record how many parameters LoRA trains, by target."""
        described, parts = zip(*self.processes.on_ranks("describe"))
        self.sync_parts = max(parts)
        totals = {target: {key: sum(of_rank[target][key] for of_rank in described)
                           for key in ("modules", "parameters")} for target in self.recipe.lora.targets}
        self.progress.message("LoRA trains " + ", ".join(
            f"{target}: {count['modules']} modules, {count['parameters']:,} parameters"
            for target, count in totals.items()))
        self.run.record(lora=totals)

    def save(self, step: int) -> None:
        """The checkpoint after `step` iterations."""
        self.progress.phase("checkpoint")
        folder = self.run.checkpoints_dir
        state = {"updates": self.updates, "prompts_asked": self.order.position,
                 **checkpoint.describe(read_shape(self.recipe.model.path), self.recipe.lora)}
        try:
            checkpoint.save(folder, step, state, lambda making: self.processes.on_ranks("save", str(making)),
                            self.recipe.local.keep_checkpoints)
        except (OSError, WorkerError) as error:
            there = checkpoint_iterations(folder)
            before = (f"The last one is of step {there[-1]}: make room and resume with run.resume={self.run.path}"
                      if there else "There is none yet")
            raise WorkerError(
                f"the checkpoint after step {step} in {folder} cannot be written: {error}\n{before}") from error

    def restore(self) -> int:
        """Give every rank its part of the last checkpoint, and the data its position; returns the iteration after
        which the run resumes."""
        state = checkpoint.read_state(self.run.checkpoints_dir)
        iteration = state["iteration"]
        folder = checkpoint.folder(self.run.checkpoints_dir.resolve(), iteration)
        self.updates = state["updates"]
        self.processes.on_ranks("restore", str(folder), iteration, self.updates)
        # before it was written there, each iteration asked one batch
        self.order.position = state.get("prompts_asked", iteration * self.recipe.batch.global_batch_size)
        self.progress.message(f"Resumes after step {iteration}")
        return iteration

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        """The seconds of a part, without those of parts within it."""
        self.progress.phase(part)
        started, others = time.perf_counter(), sum(self.seconds.values())
        yield
        name, within = f"time/{part}", sum(self.seconds.values()) - others
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started - within

    def _generate(self, prompts: Sequence[list[int]], n: int, purpose: str, step: int, noise_step: int | None = None,
                  temperature: float | None = None, batch: int = 0) -> tuple[list[Completion], NoiseReport | None]:
        """`n` answers to each prompt, side by side, drawn with the seed of this purpose, step and batch."""
        recipe, eos = self.recipe, self.data.tokenizer.eos_token_id
        sampling = {"max_tokens": recipe.sampling.max_tokens, "stop_token_ids": [] if eos is None else [eos],
                    "temperature": recipe.sampling.temperature if temperature is None else temperature}
        drawn = f"{purpose} {batch}" if batch else purpose
        seed, hardware_error = derived_seed(recipe.run.seed, drawn, step), recipe.hardware_error.arguments(purpose)
        groups, noise = self.processes.on_rollouts(
            "generate", prompts, n, seed, sampling, noise_step, hardware_error)[0]
        return [answer for group in groups for answer in group], noise

    def _decode(self, answers: Sequence[Completion]) -> list[str]:
        return self.data.tokenizer.batch_decode([answer.token_ids for answer in answers], skip_special_tokens=True)

    def _shares(self, batch: Batch) -> list[list[np.ndarray]]:
        return deal_mini_batches(batch.lengths, self.recipe.batch.mini_answers, self.recipe.layout.dp)

    def _deal(self, batch: Batch) -> list[list[Batch]]:
        """Per rank, its shard of each mini-batch; ranks that share one data-parallel rank's layers get the same."""
        layout, shares = self.recipe.layout, self._shares(batch)
        return [[batch.rows(index) for index in shares[data_rank(rank, layout)]] for rank in range(layout.world)]
