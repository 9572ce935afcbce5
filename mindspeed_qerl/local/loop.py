"""The local engine: one GRPO iteration after another, on one page.

sample (synced weights, noise on) -> score -> select and group advantages -> update (Megatron ranks,
clean weights) -> sync (merged weights to the rollout engine) -> evaluate (noise off)
"""

import errno
import math
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property

import numpy as np

from mindspeed_qerl.algorithm.metrics import reward_metrics
from mindspeed_qerl.algorithm.selection import groups_with_signal, overlong_penalty
from mindspeed_qerl.aqn.injector import NoiseReport
from mindspeed_qerl.common.errors import EngineError
from mindspeed_qerl.common.files import checkpoint_iterations
from mindspeed_qerl.common.seeds import derived_seed
from mindspeed_qerl.families import end_tokens, read_shape
from mindspeed_qerl.local import checkpoint
from mindspeed_qerl.local.batch import Batch, PromptOrder, deal_mini_batches
from mindspeed_qerl.local.data import Data
from mindspeed_qerl.local.processes import Processes, WorkerError, memory_in_use
from mindspeed_qerl.local.rollout import Completion
from mindspeed_qerl.local.sampled import (
    Sampled,
    check_answers,
    select,
    tokens_to_replay,
    tokens_to_train,
)
from mindspeed_qerl.lora.proof import in_words, join
from mindspeed_qerl.recipe.types import Layout, Recipe
from mindspeed_qerl.routing.routes import Routers
from mindspeed_qerl.runs.checks import StepChecks, is_sync_shown, sync_faults
from mindspeed_qerl.runs.directory import RunDirectory
from mindspeed_qerl.runs.metrics import MetricsWriter, read_jsonl
from mindspeed_qerl.runs.progress import Progress
from mindspeed_qerl.tasks.evaluation import evaluate_answers
from mindspeed_qerl.tasks.rewards import first_reward, score

ASKED = 10  # batches of one step, after which it says that it is still asking


def data_rank(rank: int, layout: Layout) -> int:
    """The data-parallel rank of a rank: tensor parallel ranks count first, stages last (Megatron
    parallel_state).
    """
    return rank // layout.tp % layout.dp


class LocalEngine:
    """The loop, and what it keeps between iterations: the position in the data, and whether the
    sync is proved.
    """

    def __init__(
        self,
        recipe: Recipe,
        run: RunDirectory,
        metrics: MetricsWriter,
        progress: Progress,
        processes: Processes,
        data: Data,
    ):
        self.recipe, self.run, self.metrics, self.progress = recipe, run, metrics, progress
        self.processes, self.data = processes, data
        self.order = PromptOrder(len(data.train.rows), recipe.run.seed)
        self.updates = 0  # of the optimizer
        self.seconds: dict[str, float] = {}  # of the parts of this iteration
        self.proved = False
        self.weight_errors: dict[str, float] = {}  # metrics of the last sync

    @cached_property
    def epoch(self) -> int:
        """Iterations of one pass over the training rows; the last may reach beyond it."""
        return math.ceil(len(self.data.train.rows) / self.recipe.batch.global_batch_size)

    @cached_property
    def checks(self) -> StepChecks:
        """Of every step's numbers."""
        return StepChecks(self.recipe, self.epoch, read_shape(self.recipe.model.path).moe)

    @cached_property
    def ends(self) -> set[int]:
        """Ids of the tokens that end an answer."""
        return {self.data.tokenizer.eos_token_id} - {None} | end_tokens(self.recipe.model.path)

    @cached_property
    def routers(self) -> Routers | None:
        """Those whose choices the rollout records; None if they are not replayed."""
        replayed = self.recipe.algorithm.routing_replay == "rollout"
        return read_shape(self.recipe.model.path).routers if replayed else None

    def train(self) -> None:
        """All iterations."""
        recipe = self.recipe
        self.processes.wait_until_ready()
        if recipe.noise.enabled:
            self.processes.on_rollouts("add_noise", recipe.noise_arguments(self.epoch))
        if recipe.noise.restart_every == "epoch":
            self.run.record(aqn_restart_every=self.epoch)
        self.report_targets()
        self.run.record(
            processes=self.processes.pids,
            engine_start_seconds=time.perf_counter() - self.processes.started,
        )
        done = self.restore() if recipe.run.resume else 0
        self.sync()
        if not done:
            self.evaluate(0)
        peak_memory = (
            self.run.facts().get("peak_memory_gib", 0.0) * 2**30
        )  # bytes, of all processes together
        for step in range(done + 1, recipe.run.train_iters + 1):
            self.iteration(step)
            peak_memory = max(
                peak_memory, memory_in_use([os.getpid(), *self.processes.pids.values()])
            )
            if step % recipe.evaluation.every == 0 or step == recipe.run.train_iters:
                self.evaluate(step)
            if (
                step == recipe.run.train_iters
                or recipe.run.save_interval
                and step % recipe.run.save_interval == 0
            ):
                self.save(step)
        self.run.record(peak_memory_gib=peak_memory / 2**30)
        if not self.proved:
            self.progress.message(
                "Warning: not every LoRA target moved in this run (no reward differed?), so its "
                "way into the rollout engine was never proved"
            )

    def iteration(self, step: int) -> None:
        """Iteration `step`, counted from 1."""
        recipe, n, started = self.recipe, self.recipe.batch.samples_per_prompt, time.perf_counter()
        self.seconds = {}
        sampled, kept, noise = self.gather(step)
        quantization = self.weight_errors | self.probe(step, sampled)
        with self._timed("reward"):
            batch, of_rewards = (
                select(sampled, kept, recipe, self.logprobs_before) if len(kept) else (None, {})
            )
            tokens = tokens_to_train(sampled, kept, recipe, batch, self.ends) if len(kept) else 0
        routes = (
            tokens_to_replay(batch, recipe)
            if tokens and recipe.algorithm.routing_replay != "none"
            else 0
        )
        if tokens:
            self.progress.phase("update")
            trained = self.update(batch)
        else:
            trained = {}
            self.processes.on_ranks("skip")
            why = (
                "no group had answers of different rewards"
                if batch is None
                else "every answer was cut off"
            )
            self.progress.message(
                f"Warning: step {step} trains nothing: {why}, of {len(sampled.rewards) // n} groups"
            )
        with self._timed("sync"):
            self.sync(step)
        values = {
            **reward_metrics(sampled.rewards, n),
            **of_rewards,
            **{
                f"verifier/{name}/mean": of_verifier.mean()
                for name, of_verifier in sampled.scores.items()
            },
            "response/length_mean": np.mean([len(answer.token_ids) for answer in sampled.answers]),
            "response/truncated_fraction": np.mean(
                [answer.truncated for answer in sampled.answers]
            ),
            "selection/sampled_groups": len(sampled.rewards) // n,
            "selection/trained_groups": len(kept),
            **(
                {"routing/captured_tokens": sum(len(answer.routes) for answer in sampled.answers)}
                if self.routers
                else {}
            ),
            **trained,
            **(noise.to_metrics() if noise else {}),
            **quantization,
            **self.seconds,
            "time/step": time.perf_counter() - started,
        }
        self.metrics.log(step, values)
        for warning in self.checks.check(step, values, tokens, routes):
            self.progress.message(f"Warning: {warning}")
        shown = zip(sampled.rows[: recipe.run.rollout_samples], sampled.texts, sampled.rewards)
        self.metrics.log_rollouts(
            step,
            [
                {
                    "question": row.question,
                    "response": text,
                    "answer": row.answer,
                    "reward": float(reward),
                }
                for row, text, reward in shown
            ],
        )
        self.progress.step(step, values)

    def gather(self, step: int) -> tuple[Sampled, np.ndarray, NoiseReport | None]:
        """Scored answers, the numbers of the groups that are trained, and what the noise did. With
        dynamic sampling batches are asked until enough groups have answers of different rewards
        (upstream's trainer/dapo_trainer_hybrid.py; what it ends the run for, too few groups, is
        trained here).
        """
        selection, n = self.recipe.selection, self.recipe.batch.samples_per_prompt
        sampled, noise = self.sample(step)
        if not selection.filter_groups_enable:
            return sampled, np.arange(len(sampled.rewards) // n), noise
        batches, limit = 1, selection.filter_groups_max_batches
        while True:
            scores = sampled.scores.get(selection.filter_groups_metric, sampled.rewards)
            kept = np.flatnonzero(groups_with_signal(scores, n))[
                : selection.filter_groups_train_batch_size
            ]
            if len(kept) == selection.filter_groups_train_batch_size or batches == limit:
                return sampled, kept, noise
            sampled += self.sample(step, batches)[0]
            batches += 1
            if batches % ASKED == 0:
                self.progress.message(
                    f"Warning: step {step} asked {batches} batches, and has {len(kept)} of "
                    f"{selection.filter_groups_train_batch_size} groups with different rewards; "
                    "rl_config.filter_groups_max_batches would limit that"
                )

    def sample(self, step: int, batch: int = 0) -> tuple[Sampled, NoiseReport | None]:
        """Answers to the next prompts, by the synced weights with the noise of this step on, and
        their rewards; `batch` counts those that one step asks.
        """
        recipe, task, n = self.recipe, self.data.train, self.recipe.batch.samples_per_prompt
        with self._timed("rollout"):
            chosen = self.order.take(recipe.batch.global_batch_size)
            answers, noise = self._generate(
                [task.prompts[i] for i in chosen],
                n,
                "rollout",
                step,
                noise_step=step - 1,
                batch=batch,
            )
        if noise and step == 1 and not batch:
            self.run.record(aqn_layers=noise.names)
            self.progress.message(
                f"AQN targets {noise.layers} RMSNorm layers: {', '.join(noise.names)}"
            )
        with self._timed("reward"):
            asked = [i for i in chosen for _ in range(n)]
            rows, texts, selection = (
                [task.rows[i] for i in asked],
                self._decode(answers),
                recipe.selection,
            )
            rewards, scores = score(recipe.task.verifiers, texts, rows)
            if selection.overlong_buffer_enable:
                lengths = np.array([len(answer.token_ids) for answer in answers])
                rewards = rewards + overlong_penalty(
                    lengths,
                    selection.rollout_max_tokens,
                    selection.overlong_buffer,
                    selection.overlong_buffer_penalty_factor,
                )
            sampled = Sampled(
                rows, [task.prompts[i] for i in asked], answers, texts, rewards, scores
            )
            check_answers(sampled, self.routers)
        return sampled, noise

    def probe(self, step: int, sampled: Sampled) -> dict[str, float]:
        """What the rollouts' format and the noise do to the log-probs of the first answers, each
        alone and together; empty if that is not asked for.
        """
        if not (
            count := self.recipe.quantization.enabled and self.recipe.quantization.probe_answers
        ):
            return {}
        with self._timed("probe"):
            return self.processes.on_rollouts(
                "probe",
                sampled.prompts[:count],
                [answer.token_ids for answer in sampled.answers[:count]],
                step - 1 if self.recipe.noise.enabled else None,
            )[0]

    def logprobs_before(self, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        """Before the update, by the policy and by the base model, float32 [N, L-1]."""
        layout, result = self.recipe.layout, np.zeros((2, *batch.mask.shape), dtype=np.float32)
        with self._timed("logprobs"):
            found = self.processes.gather(
                {
                    rank: rank.call("logprobs_before", shards)
                    for rank, shards in zip(self.processes.ranks, self._deal(batch))
                }
            )
        for rank in range(
            layout.world - layout.tp * layout.dp, layout.world
        ):  # of the last pipeline stage
            for index, both in zip(self._shares(batch)[data_rank(rank, layout)], found[rank]):
                for of_whole, values in zip(result, both):
                    of_whole[index, : values.shape[1]] = values
        return result[0], result[1]

    def update(self, batch: Batch) -> dict[str, float]:
        """Train the ranks on `batch`; returns their metrics."""
        trained = self.processes.gather(
            {
                rank: rank.call("train", shards, self.recipe.batch.epochs)
                for rank, shards in zip(self.processes.ranks, self._deal(batch))
            }
        )[0]
        for part in ("time/logprobs", "time/update"):
            self.seconds[part] = self.seconds.get(part, 0.0) + trained.pop(part)
        self.updates += trained.pop("updates")
        return trained

    def sync(self, step: int = 0) -> None:
        """Merged weights to the rollout engine, a part of each rank's at a time, two parts under
        way; with a proof of what arrived until every target is seen to have moved, every
        `run.prove_every` steps, and after the last.
        """
        loading, loaded = self.processes.start_on_rollouts("start_sync"), {}
        for part in range(self.sync_parts):
            merged = {rank: rank.call("merged_weights", part) for rank in self.processes.ranks}
            self.processes.gather(loading, loaded)
            loading, loaded = self.processes.start_on_rollouts("load", *merged.values()), merged
        self.processes.gather(loading, loaded)
        self.weight_errors = self.processes.on_rollouts("finish_sync")[0]
        run = self.recipe.run
        if not self.proved or (step and (step % run.prove_every == 0 or step == run.train_iters)):
            self.prove(step)

    def prove(self, step: int) -> None:
        """Compare what the rollout engine holds with base + (alpha / r) B A; WorkerError where they
        differ.
        """
        factors = {rank: rank.call("adapter_factors") for rank in self.processes.ranks}
        moved = self.processes.start_on_rollouts("movement", *factors.values())
        movement = join(self.processes.gather(moved, factors))
        if faults := sync_faults(movement):
            raise WorkerError(f"the sync after step {step}: " + "\n".join(faults))
        if is_sync_shown(movement):
            self.run.record(lora_movement=movement, lora_proved_after=step)
            if not self.proved:
                self.progress.message(f"LoRA reached the rollout engine: {in_words(movement)}")
            self.proved = True

    def evaluate(self, step: int) -> None:
        """Accuracy after `step` updates on the held-out rows, noise off, by the first verifier."""
        settings, task, started = self.recipe.evaluation, self.data.test, time.perf_counter()
        self.progress.phase("evaluation")
        n = settings.samples_per_problem
        answers, noise = self._generate(
            task.prompts, n, "evaluation", step, temperature=settings.temperature
        )
        if noise:
            raise EngineError(
                f"the evaluation after step {step} had noise of sigma {noise.sigma:.3g} on"
            )
        result, written = evaluate_answers(
            task.rows,
            self._decode(answers),
            [answer.truncated for answer in answers],
            n,
            first_reward(self.recipe.task.verifiers),
        )
        result |= {"temperature": settings.temperature, "seconds": time.perf_counter() - started}
        self.metrics.log_eval(step, result, written)
        self.progress.evaluated(step, result)

    def report_targets(self) -> None:
        """Say and record how many parameters LoRA trains, by target."""
        described, parts = zip(*self.processes.on_ranks("describe"))
        self.sync_parts = max(parts)
        totals = {
            target: {
                key: sum(of_rank[target][key] for of_rank in described)
                for key in ("modules", "parameters")
            }
            for target in self.recipe.lora.targets
        }
        self.progress.message(
            "LoRA trains "
            + ", ".join(
                f"{target}: {count['modules']} modules, {count['parameters']:,} parameters"
                for target, count in totals.items()
            )
        )
        self.run.record(lora=totals)

    def save(self, step: int) -> None:
        """The checkpoint after `step` iterations."""
        self.progress.phase("checkpoint")
        folder = self.run.checkpoints_dir
        state = {
            "updates": self.updates,
            "prompts_asked": self.order.position,
            **self.run.identity(),
            **checkpoint.describe(read_shape(self.recipe.model.path), self.recipe.lora),
        }
        try:
            checkpoint.save(
                folder,
                step,
                state,
                lambda making: self.processes.on_ranks("save", str(making)),
                self.recipe.local.keep_checkpoints,
            )
        except (OSError, WorkerError) as error:
            there = checkpoint_iterations(folder)
            room = "make room and " if os.strerror(errno.ENOSPC) in str(error) else ""
            before = (
                f"The last one is of step {there[-1]}: {room}resume with run.resume={self.run.path}"
                if there
                else "There is none yet"
            )
            raise WorkerError(
                f"the checkpoint after step {step} in {folder} was not written: {error}\n{before}"
            ) from error

    def restore(self) -> int:
        """Give every rank its part of the last checkpoint, and the data its position; returns the
        iteration after which the run resumes.
        """
        state = checkpoint.read_state(self.run.checkpoints_dir)
        iteration = state["iteration"]
        folder = checkpoint.folder(self.run.checkpoints_dir.resolve(), iteration)
        self.updates = state["updates"]
        self.processes.on_ranks("restore", str(folder), iteration, self.updates)
        # before it was written there, each iteration asked one batch
        self.order.position = state.get(
            "prompts_asked", iteration * self.recipe.batch.global_batch_size
        )
        self.checks.resume(read_jsonl(self.run.metrics_file))
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

    def _generate(
        self,
        prompts: Sequence[list[int]],
        n: int,
        purpose: str,
        step: int,
        noise_step: int | None = None,
        temperature: float | None = None,
        batch: int = 0,
    ) -> tuple[list[Completion], NoiseReport | None]:
        """`n` answers to each prompt, side by side, drawn with the seed of this purpose, step and
        batch.
        """
        recipe, eos = self.recipe, self.data.tokenizer.eos_token_id
        sampling = {
            "max_tokens": recipe.sampling.max_tokens,
            "stop_token_ids": [] if eos is None else [eos],
            "temperature": recipe.sampling.temperature if temperature is None else temperature,
            "logprobs": 0 if purpose == "rollout" else None,
        }
        drawn = f"{purpose} {batch}" if batch else purpose
        seed, hardware_error = (
            derived_seed(recipe.run.seed, drawn, step),
            recipe.hardware_error.arguments(purpose),
        )
        record_routes = purpose == "rollout" and self.routers is not None
        quantized = purpose == "rollout" or recipe.quantization.evaluation
        groups, noise = self.processes.on_rollouts(
            "generate",
            prompts,
            n,
            seed,
            sampling,
            noise_step,
            hardware_error,
            record_routes,
            quantized,
        )[0]
        return [answer for group in groups for answer in group], noise

    def _decode(self, answers: Sequence[Completion]) -> list[str]:
        return self.data.tokenizer.batch_decode(
            [answer.token_ids for answer in answers], skip_special_tokens=True
        )

    def _shares(self, batch: Batch) -> list[list[np.ndarray]]:
        return deal_mini_batches(
            batch.lengths, self.recipe.batch.mini_answers, self.recipe.layout.dp
        )

    def _deal(self, batch: Batch) -> list[list[Batch]]:
        """Per rank, its shard of each mini-batch; ranks that share one data-parallel rank's layers
        get the same.
        """
        layout, shares = self.recipe.layout, self._shares(batch)
        return [
            [batch.rows(index) for index in shares[data_rank(rank, layout)]]
            for rank in range(layout.world)
        ]
