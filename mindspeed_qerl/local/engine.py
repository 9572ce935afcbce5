"""The local engine: one GRPO iteration after another, on one page.

prompts -> rollout engine (synced weights, noise on) -> answers and their logprobs -> verifier -> group advantages
-> Megatron ranks (clean weights): reference, loss, update -> merged weights -> rollout engine -> evaluation (noise off)
"""

import os
import signal
import time
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Self

import numpy as np
import ray
import torch

from mindspeed_qerl import private_ray
from mindspeed_qerl.algorithm.losses import group_advantages
from mindspeed_qerl.errors import ConfigError
from mindspeed_qerl.local import checkpoint
from mindspeed_qerl.local.batch import Batch, build_batch, deal
from mindspeed_qerl.local.rollout import join_movement
from mindspeed_qerl.local.settings import RunConfig
from mindspeed_qerl.local.workers import Team, Worker, WorkerError, free_port, memory_in_use
from mindspeed_qerl.recipe.types import Layout
from mindspeed_qerl.runs.directory import RunDirectory
from mindspeed_qerl.runs.metrics import MetricsWriter
from mindspeed_qerl.runs.progress import Progress
from mindspeed_qerl.seeds import derived_seed
from mindspeed_qerl.tasks.evaluation import evaluate_answers
from mindspeed_qerl.tasks.gsm8k.verifier import get_verifier
from mindspeed_qerl.tasks.prompts import Task


def prompt_indices(step: int, batch_size: int, count: int, seed: int) -> list[int]:
    """Which rows iteration `step` (from 0) asks: the file is shuffled anew for each pass and read `batch_size` rows at a time."""
    positions = range(step * batch_size, (step + 1) * batch_size)
    orders = {epoch: np.random.default_rng([seed, epoch]).permutation(count) for epoch in {p // count for p in positions}}
    return [int(orders[p // count][p % count]) for p in positions]


def _adapters(config: RunConfig) -> dict:
    return checkpoint.describe(config.shape, config.lora_r, config.lora_alpha, config.lora_targets)


def last_checkpoint(config: RunConfig) -> int:
    """The iteration after which the run in `config.run.resume` can go on; ValueError if it has no checkpoint, a damaged one, or one of another
    model or other adapters."""
    state = checkpoint.read_state(RunDirectory.open(config.run.resume).checkpoints_dir)
    checkpoint.check_fit(state, _adapters(config))
    return state["iteration"]


def data_rank(rank: int, layout: Layout) -> int:
    """The data-parallel rank of a rank: megatron-core counts tensor parallel ranks first, pipeline stages last (parallel_state.py)."""
    return rank // layout.tp % layout.dp


class LocalEngine:
    """Starts the processes, runs the iterations, stops the processes. Use as a context manager."""

    def __init__(self, config: RunConfig, run: RunDirectory, metrics: MetricsWriter, progress: Progress):
        self.config, self.run, self.metrics, self.progress = config, run, metrics, progress
        self.team = Team()
        self.seconds: dict[str, float] = {}
        self.proved = False
        self.peak_memory = 0  # bytes, of all processes together
        self.adapters = _adapters(config)

    def __enter__(self) -> Self:
        from torch._inductor.runtime.cache_dir_utils import default_cache_dir

        os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
        config = self.config
        logs = Path(self.run) / "logs"
        logs.mkdir(exist_ok=True)  # they go on in a run that goes on
        self.rendezvous = logs.resolve() / "rendezvous"
        self.rendezvous.unlink(missing_ok=True)
        world = config.layout.world
        rollouts = config.rollout_tp
        scratch = private_ray.start(num_cpus=world + rollouts)
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # a scheduler's stop is an interrupt; Ray's own handler would abort
        cores = len(os.sched_getaffinity(0))
        cache = Path(default_cache_dir())  # what torch has compiled stays where it always is; other temporary files go with the run
        cache.mkdir(parents=True, exist_ok=True)
        (scratch / cache.name).symlink_to(cache)
        # Ranks and rollouts take turns: threads that wait by spinning would hold the cores of those whose turn it is.
        threads = {name: {"OMP_NUM_THREADS": str(count), "OMP_WAIT_POLICY": "PASSIVE", "TMPDIR": str(scratch)}
                   for name, count in (("rank", max(1, cores // world)), ("rollout", max(1, cores // rollouts)))}
        self.ranks = [
            self.team.start(f"rank {rank}", "mindspeed_qerl.local.rank", "TrainRank", logs / f"rank{rank}.log",
                            threads["rank"], config=config, rank=rank, rendezvous=f"file://{self.rendezvous}")
            for rank in range(world)]
        port = free_port()
        self.rollouts = [
            self.team.start("rollout engine" + (f" {rank}" if rollouts > 1 else ""), "mindspeed_qerl.local.rollout", "RolloutEngine",
                            logs / f"rollout{rank if rollouts > 1 else ''}.log", threads["rollout"], model_dir=config.model_dir,
                            dtype=config.dtype, max_model_len=config.max_model_len, max_num_seqs=config.max_num_seqs,
                            kv_cache_gib=config.local.kv_cache_gib, aqn=self._noise_arguments(), tp_rank=rank, tp_size=rollouts, port=port)
            for rank in range(rollouts)]
        return self

    def __exit__(self, *exception) -> None:
        private_ray.stop()
        self.rendezvous.unlink(missing_ok=True)

    def _noise_arguments(self) -> dict | None:
        aqn = self.config.aqn
        if not aqn.enabled:
            return None
        return dict(schedule=aqn.noise_schedule(self.config.train_iters), targets=aqn.targets, exclude=aqn.exclude,
                    multipliers=aqn.all_multipliers(), seed=self.config.seed if aqn.seed is None else aqn.seed)

    @contextmanager
    def _timed(self, part: str):
        self.progress.phase(part)
        started = time.perf_counter()
        yield
        self.seconds[f"time/{part}"] = self.seconds.get(f"time/{part}", 0.0) + time.perf_counter() - started

    def train(self) -> None:
        """All iterations. Raises WorkerError if a process fails, ConfigError if the data does not fit the model."""
        from transformers import AutoTokenizer

        config = self.config
        self.progress.phase("starting engines")
        started = time.perf_counter()
        try:
            self.tokenizer = AutoTokenizer.from_pretrained(config.model_dir)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{config.model_dir} has no tokenizer that transformers can read: {error}") from error
        train_task = Task(config.gsm8k.train_file, self.tokenizer, config.gsm8k.prompt, config.max_prompt_length)
        eval_task = Task(config.gsm8k.test_file, self.tokenizer, config.gsm8k.prompt, config.max_prompt_length, config.eval.n_problems)
        for name, task in (("training", train_task), ("evaluation", eval_task)):
            if task.dropped:
                self.progress.message(f"{task.dropped} {name} prompts longer than {config.max_prompt_length} tokens are left out")
        self.team.wait_until_ready()
        self.report_targets()
        self.run.record(processes=self.team.pids, engine_start_seconds=time.perf_counter() - started)
        done = self._restore() if config.run.resume else 0
        self.sync()
        if not done:
            self.evaluate(eval_task, 0)
        for step in range(done + 1, config.train_iters + 1):
            self.iteration(step, train_task)
            self.peak_memory = max(self.peak_memory, memory_in_use([os.getpid(), *self.team.pids.values()]))
            if step % config.eval.every == 0 or step == config.train_iters:
                self.evaluate(eval_task, step)
            if step == config.train_iters or config.save_interval and step % config.save_interval == 0:
                self.save(step)
        self.run.record(peak_memory_gib=self.peak_memory / 2**30)
        if not self.proved:
            self.progress.message("Warning: not every LoRA target moved in this run (no reward differed?), so its way into the rollout "
                                  "engine was never proved")

    def report_targets(self) -> None:
        described, parts = zip(*self.team.gather({rank: rank.call("describe") for rank in self.ranks}))
        self.sync_parts = max(parts)
        totals = {target: {key: sum(counted[target][key] for counted in described) for key in ("modules", "parameters")}
                  for target in self.config.lora_targets}
        self.progress.message("LoRA trains " + ", ".join(
            f"{target}: {count['modules']} modules, {count['parameters']:,} parameters" for target, count in totals.items()))
        self.run.record(lora=totals)

    def iteration(self, step: int, task: Task) -> None:
        """Iteration `step`, counted from 1."""
        config, started = self.config, time.perf_counter()
        self.seconds = {}
        with self._timed("rollout"):
            chosen = prompt_indices(step - 1, config.global_batch_size, len(task.rows), config.seed)
            completions, noise = self._generate([task.prompts[i] for i in chosen], config.samples_per_prompt, "rollout", step,
                                                noise_step=step - 1)
        if noise and step == 1:
            self.run.record(aqn_layers=noise.names)
            self.progress.message(f"AQN targets {noise.layers} RMSNorm layers: {', '.join(noise.names)}")
        with self._timed("reward"):
            rows = [task.rows[i] for i in chosen for _ in range(config.samples_per_prompt)]
            answers = [answer for group in completions for answer in group]
            texts = self.tokenizer.batch_decode([answer.token_ids for answer in answers], skip_special_tokens=True)
            rewards, per_verifier = self._rewards(texts, rows)
            advantages = group_advantages(torch.from_numpy(rewards), config.samples_per_prompt).numpy()
            prompts = [task.prompts[i] for i in chosen for _ in range(config.samples_per_prompt)]
            batch = build_batch(prompts, [a.token_ids for a in answers], [a.logprobs for a in answers], advantages)
        self.progress.phase("update")
        trained = self.team.gather({rank: rank.call("train", shards, config.epochs)
                                    for rank, shards in zip(self.ranks, self._deal(batch))})[0]
        self.seconds |= {part: trained.pop(part) for part in ("time/logprobs", "time/update")}
        with self._timed("sync"):
            self.sync()
        groups = rewards.reshape(-1, config.samples_per_prompt)
        values = {
            "reward/mean": rewards.mean(),
            "reward/std": rewards.std(),
            "reward/groups_with_signal": (groups != groups[:, :1]).any(1).mean(),
            **{f"verifier/{name}/mean": score for name, score in per_verifier.items()},
            "response/length_mean": np.mean([len(a.token_ids) for a in answers]),
            "response/truncated_fraction": np.mean([a.truncated for a in answers]),
            **trained,
            **(noise.to_metrics() if noise else {}),
            **self.seconds,
            "time/step": time.perf_counter() - started,
        }
        self.metrics.log(step, values)
        self.metrics.log_rollouts(step, [
            {"question": row["question"], "response": text, "answer": row["answer"], "reward": float(reward)}
            for row, text, reward in list(zip(rows, texts, rewards))[: config.run.rollout_samples]])
        self.progress.step(step, values)

    def _generate(self, prompts, n: int, purpose: str, step: int, noise_step: int | None = None, temperature: float | None = None):
        sampling = asdict(self.config.sampling)
        if temperature is not None:
            sampling["temperature"] = temperature
        eos = self.tokenizer.eos_token_id
        return self.team.gather(self._roll("generate", prompts, n, derived_seed(self.config.seed, purpose, step),
                                           {**sampling, "stop_token_ids": [] if eos is None else [eos]}, noise_step,
                                           self.config.hardware_error.arguments(purpose)))[0]

    def _roll(self, method: str, *arguments) -> dict[Worker, ray.ObjectRef]:
        """Start `method` in all rollout engines, which share the work; the first one's result is that of all."""
        return {rollout: rollout.call(method, *arguments) for rollout in self.rollouts}

    def _rewards(self, texts: list[str], rows: list[dict]) -> tuple[np.ndarray, dict[str, float]]:
        golds = [row["answer"] for row in rows]
        scores = {name: np.array(get_verifier(name)(texts, golds)) for name, _ in self.config.verifiers}
        total = sum(weight * scores[name] for name, weight in self.config.verifiers)
        return total, {name: values.mean() for name, values in scores.items()}

    def _deal(self, batch: Batch) -> list[list[Batch]]:
        """Per rank, its shard of each mini-batch; ranks that share the layers of one data-parallel rank get the same."""
        size = self.config.mini_batch_size * self.config.samples_per_prompt  # answers
        layout = self.config.layout
        shards = [[] for _ in range(layout.dp)]
        for start in range(0, len(batch), size):
            mini = batch.rows(np.arange(start, start + size))
            for shard, index in zip(shards, deal(mini.lengths, layout.dp)):
                shard.append(mini.rows(index))
        return [shards[data_rank(rank, layout)] for rank in range(layout.world)]

    def sync(self) -> None:
        """Merged weights to the rollout engine, a part of each rank's at a time, two parts under way; until every target is seen to have
        moved, proof of what arrived."""
        loading = self._roll("start_sync")
        for part in range(self.sync_parts):
            merged = [rank.call("merged_weights", part) for rank in self.ranks]
            self.team.gather(loading)
            loading = self._roll("load", *merged)
            del merged  # Ray keeps what somebody still names
        self.team.gather(loading)
        self.team.gather(self._roll("finish_sync"))
        if not self.proved:
            factors = [rank.call("adapter_factors") for rank in self.ranks]
            movement = join_movement(self.team.gather(self._roll("movement", *factors)))
            for target, entry in movement.items():
                if entry["max_error"] > 2 * entry["resolution"] or entry["lost"] > 0.1:
                    raise WorkerError(f"{target}: the rollout engine's weights differ from base + (alpha/r) B A by {entry['max_error']:.3g}, "
                                      f"rounding is {entry['resolution']:.3g}; up to {entry['lost']:.0%} of a tensor's move is lost; "
                                      f"|update| should be {entry['expected']:.3g} and is {entry['moved']:.3g}")
            if all(entry["moved"] > 0.5 * entry["expected"] > 0 for entry in movement.values()):  # not a move that rounding swallows
                self.proved = True
                self.run.record(lora_movement=movement)
                self.progress.message("LoRA reached the rollout engine: " + ", ".join(
                    f"{target} moved {entry['moved']:.4g} of {entry['expected']:.4g}, max error {entry['max_error']:.1g}"
                    for target, entry in movement.items()))

    def save(self, step: int) -> None:
        """The checkpoint after `step` iterations."""
        self.progress.phase("checkpoint")
        updates = step * self.config.epochs * self.config.global_batch_size // self.config.mini_batch_size
        folder = self.run.checkpoints_dir
        try:
            checkpoint.save(folder, step, {"updates": updates, **self.adapters}, self._write_checkpoint, self.config.local.keep_checkpoints)
        except (OSError, WorkerError) as error:
            there = checkpoint.iterations(folder)
            before = f"The last one is of step {there[-1]}: make room and go on with run.resume={self.run.path}" if there else "There is none yet"
            raise WorkerError(f"the checkpoint after step {step} in {folder} cannot be written: {error}\n{before}") from error

    def _write_checkpoint(self, folder: Path) -> None:
        self.team.gather({rank: rank.call("save", str(folder)) for rank in self.ranks})

    def _restore(self) -> int:
        """Give every rank its part of the last checkpoint; returns the iteration after which the run goes on."""
        state = checkpoint.read_state(self.run.checkpoints_dir)
        folder = checkpoint.folder(self.run.checkpoints_dir.resolve(), state["iteration"])
        self.team.gather({rank: rank.call("restore", str(folder), state["iteration"], state["updates"]) for rank in self.ranks})
        self.progress.message(f"Goes on after step {state['iteration']}")
        return state["iteration"]

    def evaluate(self, task: Task, step: int) -> None:
        """Accuracy after `step` updates on the held-out rows, noise off, by the first verifier."""
        settings, started = self.config.eval, time.perf_counter()
        self.progress.phase("evaluation")
        n = settings.samples_per_problem
        completions, _ = self._generate(task.prompts, n, "evaluation", step, temperature=settings.temperature)
        completions = [answer for group in completions for answer in group]
        texts = self.tokenizer.batch_decode([answer.token_ids for answer in completions], skip_special_tokens=True)
        result, answers = evaluate_answers(task.rows, texts, [answer.truncated for answer in completions], n, self.config.verifiers[0][0])
        result |= {"temperature": settings.temperature, "seconds": time.perf_counter() - started}
        self.metrics.log_eval(step, result, answers)
        self.progress.evaluated(step, result)


def train(config: RunConfig, run: RunDirectory, metrics: MetricsWriter, progress: Progress) -> None:
    """Run `config` on the local engine; see LocalEngine."""
    with LocalEngine(config, run, metrics, progress) as engine:
        engine.train()
