"""The local engine: one GRPO iteration after another, on one page.

sample (synced weights, noise on) -> score -> select and group advantages -> update (Megatron ranks,
clean weights) -> sync (merged weights to the rollout engine) -> evaluate (noise off)
"""

import shlex
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from mindspeed_qerl.algorithm.advantages import overlong_penalty
from mindspeed_qerl.algorithm.metrics import groups_with_signal, reward_metrics
from mindspeed_qerl.aqn.injector import NoiseReport
from mindspeed_qerl.aqn.schedule import NoiseLevel
from mindspeed_qerl.common.seeds import derived_seed
from mindspeed_qerl.engines.noise import controller_of
from mindspeed_qerl.families import read_shape
from mindspeed_qerl.lora.proof import Movement, arrival_metrics
from mindspeed_qerl.recipe.types import Recipe
from mindspeed_qerl.runs.observer import RunObserver
from mindspeed_qerl.tasks.evaluation import evaluate_answers
from mindspeed_qerl.tasks.rewards import score

from . import arithmetic, checkpoint
from .batch import Answer, PromptOrder, TrainBatch, decoded, sampling_of
from .engine import Data
from .processes import Processes, WorkerError
from .rank import TrainRank
from .rollout import RolloutEngine, RolloutRequest
from .sampled import answer_metrics, check_answers, select, tokens_to_replay, tokens_to_train


class LocalEngine:
    """The loop, and what it keeps between iterations.

    Args:
        observer: is told of all that happens, writes it and checks it.
    """

    def __init__(self, recipe: Recipe, observer: RunObserver, processes: Processes, data: Data):
        self.recipe = recipe
        self.observer = observer
        self.processes = processes
        self.data = data
        self.order = PromptOrder(len(data.train.rows), recipe.run.seed)
        self.noise = controller_of(recipe, observer.earlier)
        self.shape = read_shape(recipe.model.path)
        replays = recipe.algorithm.routing_replay == "rollout"
        self.routers = self.shape.routers if replays else None  # whose choices are recorded
        self.updates = 0  # of the optimizer
        self.seconds: dict[str, float] = defaultdict(float)  # of the parts of this iteration
        self.weight_errors: dict[str, float] = {}  # metrics of the last sync
        arithmetic.settle()

    def train(self) -> None:
        """All iterations."""
        recipe = self.recipe
        observer = self.observer
        processes = self.processes
        processes.wait_until_ready()
        norms = processes.on_rollout(RolloutEngine.noisy_norms)
        observer.begin(processes.on_ranks(TrainRank.describe), norms)
        seconds = time.perf_counter() - processes.started
        observer.run.record(processes=processes.pids, engine_start_seconds=seconds)
        done = self.restore() if recipe.run.resume else 0
        self.sync()
        observer.proved(done, self.movement())
        if not done:
            self.evaluate(0)
        for step in range(done + 1, recipe.run.train_iters + 1):
            self.iteration(step)
            if observer.wants_evaluation(step):
                self.evaluate(step)
            interval = recipe.run.save_interval
            if step == recipe.run.train_iters or interval and step % interval == 0:
                self.save(step)
        observer.end()

    def iteration(self, step: int) -> None:
        """Iteration `step`, counted from 1."""
        recipe = self.recipe
        observer = self.observer
        started = time.perf_counter()
        self.seconds.clear()
        level = self.noise.level(step - 1) if self.noise else None
        answers, kept, report = self.gather(step, level)
        n = recipe.batch.samples_per_prompt
        groups = len(answers) // n

        rewards = np.array([answer.reward for answer in answers])
        metrics = reward_metrics(rewards, n, recipe.noise.repeats(level))
        metrics |= self.weight_errors
        batch = None
        tokens = 0
        routes = 0
        if kept:
            batch, kl_metrics = select(kept, recipe, self.logprobs_before)
            metrics |= kl_metrics
            tokens = tokens_to_train(kept, recipe, batch, self.data.ends)
        metrics |= answer_metrics(answers)
        metrics["selection/sampled_groups"] = groups
        metrics["selection/trained_groups"] = len(kept) // n
        if self.routers:
            metrics["routing/captured_tokens"] = sum(len(answer.routes) for answer in answers)
        if batch is not None and tokens:
            if self.routers:
                routes = tokens_to_replay(batch, recipe)
            observer.progress.phase("update")
            metrics |= self.update(batch)
        else:
            self.processes.on_ranks(TrainRank.skip)
            observer.trains_nothing(step, groups, all_cut_off=batch is not None)

        movement = None
        with self._timed("sync"):
            self.sync()
            if observer.wants_proof(step, metrics.get("grad_norm", 0.0)):
                movement = self.movement()
                metrics |= arrival_metrics(movement)
        if report:
            metrics |= report.to_metrics()
        metrics |= self.seconds
        metrics["time/step"] = time.perf_counter() - started
        if self.noise and level:
            metrics |= self.noise.update(level, metrics)
        observer.stepped(step, metrics, tokens, routes, level)
        if movement is not None:
            observer.proved(step, movement)

    def gather(
        self, step: int, noise: NoiseLevel | None
    ) -> tuple[list[Answer], list[Answer], NoiseReport | None]:
        """Scored answers, those that are trained, and what the noise did. With dynamic sampling
        batches are sampled until enough groups have answers of different rewards (upstream's
        trainer/dapo_trainer_hybrid.py; where it ends the run, too few groups, those are trained
        here).
        """
        selection = self.recipe.selection
        n = self.recipe.batch.samples_per_prompt
        answers, report = self.sample(step, noise)
        if not selection.filter_groups_enable:
            return answers, answers, report
        batches = 1
        wanted = selection.filter_groups_train_batch_size
        metric = selection.filter_groups_metric or ""
        while True:
            scores = np.array([answer.scores.get(metric, answer.reward) for answer in answers])
            groups = np.flatnonzero(groups_with_signal(scores, n))[:wanted]
            if len(groups) == wanted or batches == selection.filter_groups_max_batches:
                rows = (groups[:, None] * n + np.arange(n)).flatten()
                return answers, [answers[row] for row in rows], report
            self.observer.still_sampling(step, batches, len(groups), wanted)
            answers += self.sample(step, noise, batches)[0]
            batches += 1

    def sample(
        self, step: int, noise: NoiseLevel | None, batch: int = 0
    ) -> tuple[list[Answer], NoiseReport | None]:
        """Answers to the next prompts, by the synced weights with `noise` on, and their rewards;
        `batch` counts those of one step.
        """
        recipe = self.recipe
        task = self.data.train
        selection = recipe.selection
        sampling = recipe.sampling
        with self._timed("rollout"):
            chosen = self.order.take(recipe.batch.global_batch_size)
            n = recipe.batch.samples_per_prompt
            draws = recipe.noise.draws_of(noise, len(chosen), n, first=batch * recipe.batch.answers)
            purpose = f"rollout {batch}" if batch else "rollout"
            request = RolloutRequest(
                [task.prompts[i] for i in chosen],
                n,
                derived_seed(recipe.run.seed, purpose, step),
                sampling_of(self.data.tokenizer, sampling.max_tokens, sampling.temperature),
                noise,
                draws,
                recipe.hardware_error.arguments("rollout"),
            )
            answers, report = self.processes.on_rollout(RolloutEngine.generate, request)
        with self._timed("reward"):
            rows = [task.rows[i] for i in np.repeat(chosen, n)]
            texts = decoded(self.data.tokenizer, answers)
            rewards, scores = score(recipe.task.verifiers, texts, rows)
            if selection.overlong_buffer_enable:
                lengths = np.array([len(answer.token_ids) for answer in answers])
                rewards = rewards + overlong_penalty(lengths, selection)
            for i, (answer, row) in enumerate(zip(answers, rows)):
                answer.question = row.question
                answer.text = texts[i]
                answer.expected = row.answer
                answer.reward = float(rewards[i])
                answer.scores = {name: values[i] for name, values in scores.items()}
            self.observer.sampled(step, map(_row, answers))
            check_answers(answers, self.routers)
        return answers, report

    def logprobs_before(self, batch: TrainBatch) -> np.ndarray:
        """Before the update, by the policy and by the base model, float32 [2, N, L-1]."""
        logprobs = np.zeros((2, *batch.mask.shape), dtype=np.float32)
        with self._timed("logprobs"):
            results = self.processes.on_ranks(TrainRank.logprobs_before, batch)
        # the last pipeline stage has them, whose ranks are the last
        for found in results:
            for rows, pair in found:
                logprobs[:, rows, : pair.shape[2]] = pair
        return logprobs

    def update(self, batch: TrainBatch) -> dict[str, float]:
        """Train the ranks on `batch`; returns their metrics."""
        metrics = self.processes.on_ranks(TrainRank.train, batch)[0]
        for part in ("time/logprobs", "time/update"):
            self.seconds[part] += metrics.pop(part)
        self.updates += int(metrics.pop("updates"))
        return metrics

    def sync(self) -> None:
        """Merged weights to the rollout engine, a layer of each stage at a time, two under way."""
        processes = self.processes
        rollout = processes.rollout
        loading = {rollout: rollout.call(RolloutEngine.start_sync)}
        for layer in range(self.shape.num_hidden_layers):
            merged = {rank: rank.call(TrainRank.merged_weights, layer) for rank in processes.ranks}
            processes.gather(merged)
            processes.gather(loading)
            loading = {rollout: rollout.call(RolloutEngine.load, *merged.values())}
        processes.gather(loading)
        self.weight_errors = processes.on_rollout(RolloutEngine.finish_sync)

    def movement(self) -> Movement:
        """Returns what the rollout engine holds beside base + (alpha / r) B A: the proof of a sync."""
        factors = self.processes.on_ranks(TrainRank.adapter_factors)
        return self.processes.on_rollout(RolloutEngine.movement, *factors)

    def evaluate(self, step: int) -> None:
        """Accuracy after `step` updates on the held-out rows, noise off, by the first verifier."""
        started = time.perf_counter()
        recipe = self.recipe
        evaluation = recipe.evaluation
        task = self.data.test
        self.observer.progress.phase("evaluation")
        verifier = recipe.task.verifier_function[0]
        request = RolloutRequest(
            task.prompts,
            evaluation.samples_per_problem,
            derived_seed(recipe.run.seed, "evaluation", step),
            sampling_of(self.data.tokenizer, recipe.sampling.max_tokens, evaluation.temperature),
            hardware_error=recipe.hardware_error.arguments("evaluation"),
            trained=False,
            quantized=recipe.quantization.evaluation,
        )
        answers, report = self.processes.on_rollout(RolloutEngine.generate, request)
        truncated = [answer.is_truncated for answer in answers]
        texts = decoded(self.data.tokenizer, answers)
        result, written = evaluate_answers(task.rows, texts, truncated, request.n, verifier)
        seconds = time.perf_counter() - started
        sigma = report.sigma if report else 0.0
        self.observer.evaluated(step, result, written, seconds, sigma)

    def save(self, step: int) -> None:
        """The checkpoint after `step` iterations."""
        self.observer.progress.phase("checkpoint")
        run = self.observer.run
        state = {
            "updates": self.updates,
            "prompts_asked": self.order.position,
            **run.identity(),
            **checkpoint.describe(self.shape, self.recipe.lora),
        }
        write = partial(self.processes.on_ranks, TrainRank.save)
        try:
            checkpoint.save(
                run.checkpoints_dir, step, state, write, self.recipe.local.keep_checkpoints
            )
        except (OSError, WorkerError) as error:
            raise WorkerError(
                f"the checkpoint after step {step} in {run.checkpoints_dir} was not written: "
                f"{error}\nThose before it are whole: make room if the disk is full, and resume "
                f"with {shlex.quote(f'run.resume={run.path}')}"
            ) from error

    def restore(self) -> int:
        """Give every rank its part of the last checkpoint, and the data its position; returns the
        iteration after which the run resumes.
        """
        checkpoints = self.observer.run.checkpoints_dir
        state = checkpoint.read_state(checkpoints)
        iteration = state["iteration"]
        self.updates = state["updates"]
        self.order.position = state["prompts_asked"]
        folder = checkpoint.folder(checkpoints.resolve(), iteration)
        self.processes.on_ranks(TrainRank.restore, str(folder), self.updates, iteration)
        self.observer.progress.message(f"Resumes after step {iteration}")
        return iteration

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        """The seconds of a part; parts are not within each other."""
        self.observer.progress.phase(part)
        started = time.perf_counter()
        yield
        self.seconds[f"time/{part}"] += time.perf_counter() - started


def _row(answer: Answer) -> dict[str, Any]:
    """Returns what the report keeps of it: a row of rollouts.jsonl."""
    return {
        "question": answer.question,
        "response": answer.text,
        "answer": answer.expected,
        "reward": answer.reward,
    }
