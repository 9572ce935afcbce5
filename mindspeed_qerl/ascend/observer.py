"""What upstream's trainer tells, written into the run directory."""

import time
from collections.abc import Callable
from typing import Any

from mindspeed_qerl.ascend.limits import epoch_steps
from mindspeed_qerl.ascend.resume import write_digests, write_position
from mindspeed_qerl.common.errors import EngineError
from mindspeed_qerl.families import end_tokens, read_shape
from mindspeed_qerl.lora.proof import Movement, in_words
from mindspeed_qerl.recipe.types import Recipe
from mindspeed_qerl.runs.checks import StepChecks, is_sync_shown, sync_faults
from mindspeed_qerl.runs.directory import RunDirectory
from mindspeed_qerl.runs.metrics import MetricsWriter, read_jsonl
from mindspeed_qerl.runs.progress import Progress
from mindspeed_qerl.tasks.evaluation import evaluate_answers
from mindspeed_qerl.tasks.packed import read_packed_rows, rows_of_labels
from mindspeed_qerl.tasks.prompts import Prompts, load_tokenizer
from mindspeed_qerl.tasks.rewards import first_reward


class RunObserver:
    """Writes what upstream's trainer tells (trainer.QeRLTrainer) into the run directory, and
    evaluates when due.
    """

    def __init__(
        self, recipe: Recipe, run: RunDirectory, metrics: MetricsWriter, progress: Progress
    ):
        self.recipe, self.run, self.metrics, self.progress = recipe, run, metrics, progress
        self.step = 0  # the last one
        self.is_proved = False  # that LoRA reaches vLLM
        self.checks = StepChecks(recipe, epoch_steps(recipe), read_shape(recipe.model.path).moe)
        if recipe.run.resume:
            self.checks.resume(read_jsonl(run.metrics_file))
        self.tokenizer = load_tokenizer(recipe.model.path)
        self.task = Prompts(
            recipe.task.test_file,
            self.tokenizer,
            recipe.task.prompt,
            recipe.sampling.max_prompt_length,
            recipe.evaluation.n_problems,
            run.started,
        )
        run.keep(evaluation_prompts=self.task.digest())
        self.packed_rows = read_packed_rows(recipe.task.data_path)
        self.ends = {self.tokenizer.eos_token_id} - {None} | end_tokens(
            recipe.model.path
        )  # of an answer

    def started(self, ranks: list[dict[str, Any]]) -> None:
        """Names what is trained and what gets noise, once. ranks: QeRLWorker.describe() of each."""
        counts = [pair for rank in ranks for pair in rank["lora"].items()]
        totals = {
            target: {
                key: sum(count[key] for name, count in counts if name == target)
                for key in ("modules", "parameters")
            }
            for target, _ in counts
        }
        if missing := [
            target
            for target in self.recipe.lora.targets
            if not totals.get(target, {}).get("modules")
        ]:
            raise EngineError(
                f"LoRA target {', '.join(missing)} trains nothing in this model; it trains {totals}"
            )
        self.run.record(lora=totals, aqn_layers=ranks[0]["aqn"])
        if self.recipe.quantization.enabled and not self.recipe.lora.targets:
            self.progress.message(
                "Warning: without LoRA no sync is proved, nor that vLLM's weights are quantised"
            )
        if self.task.dropped:
            self.progress.message(self.task.left_out("evaluation"))
        for target, total in totals.items():
            self.progress.message(
                f"LoRA trains {target}: {total['modules']} modules, {total['parameters']:,} "
                "parameters over all ranks"
            )
        if ranks[0]["aqn"]:
            self.progress.message(
                f"AQN targets {len(ranks[0]['aqn'])} RMSNorm layers: {', '.join(ranks[0]['aqn'])}"
            )

    def stepped(
        self,
        step: int,
        metrics: dict[str, float],
        values: dict[str, float],
        tokens: int,
        routes: int,
        experience: dict[str, list],
    ) -> None:
        """One row of metrics.jsonl, and samples of this step's answers, after update `step`.
        EngineError for numbers that cannot be true.

        Args:
            metrics: by upstream's names. values: by ours. tokens: that each epoch was to train.
                routes: tokens whose routes each epoch was to replay. experience: the transfer
                dock's columns, one tensor per answer.
        """
        self.step, values = step, to_our_names(metrics) | values
        self.metrics.log(step, values)
        for warning in self.checks.check(step, values, tokens, routes):
            self.progress.message(f"Warning: {warning}")
        if "aqn/sigma" in values and values["aqn/sigma"] > 0:
            self.progress.message(
                f"AQN step {step}: Applied noise to {values['aqn/layers']} RMSNorm layers: "
                f"sigma {values['aqn/sigma']:.3g}, measured std {values['aqn/measured_std']:.3g}"
            )
        kept = slice(self.recipe.run.rollout_samples)
        questions, responses, labels = (
            self.tokenizer.batch_decode(experience[column][kept], skip_special_tokens=True)
            for column in ("prompts", "responses", "labels")
        )
        rewards = map(float, experience["rm_scores"])
        shown = zip(questions, responses, rows_of_labels(labels, self.packed_rows), rewards)
        self.metrics.log_rollouts(
            step,
            [
                {"question": question, "response": response, "answer": row.answer, "reward": reward}
                for question, response, row, reward in shown
            ],
        )
        self.progress.step(step, values)

    def wants_proof(self, step: int) -> bool:
        """Whether to prove after `step` that LoRA reaches vLLM: until every target is seen to have
        moved, every `run.prove_every` steps, and after the last.
        """
        run = self.recipe.run
        return bool(self.recipe.lora.targets) and (
            not self.is_proved or step % run.prove_every == 0 or step == run.train_iters
        )

    def proved(self, step: int, movement: Movement, unlike: list[str]) -> None:
        """What the adapters did to vLLM's weights; EngineError where that is not (alpha / r) B A,
        or where weights are `unlike` the rounding of what was synced (QuantizedModel.unlike).
        """
        faults = sync_faults(movement)
        if unlike:
            faults.append(
                "vLLM's kernels multiply with something else than "
                f"{self.recipe.quantization.format} of what was synced in {len(unlike)} weights: "
                f"{', '.join(unlike[:3])}{', ...' if len(unlike) > 3 else ''}"
            )
        if faults:
            raise EngineError(f"the sync after step {step}: " + "\n".join(faults))
        if is_sync_shown(movement):
            self.run.record(lora_movement=movement, lora_proved_after=step)
            if not self.is_proved:
                self.progress.message(f"LoRA reached the rollout engine: {in_words(movement)}")
            self.is_proved = True

    def saving(self, step: int, batches: int) -> None:
        write_position(self.run, step, batches)

    def saved(self, step: int) -> None:
        write_digests(self.run, step)
        self.progress.message(f"Checkpoint of step {step} saved")

    def evaluate(self, step: int, generate: Callable) -> None:
        """Accuracy on the test file, noise off: before step 1, every eval.every steps, and after
        the last.

        generate(prompts, n, temperature) gives n answers' token ids per prompt.
        """
        evaluation, started = self.recipe.evaluation, time.perf_counter()
        if step % evaluation.every and step != self.recipe.run.train_iters:
            return
        self.progress.phase("evaluation")
        answers = generate(
            self.task.prompts, evaluation.samples_per_problem, evaluation.temperature
        )
        limit = self.recipe.sampling.max_tokens
        texts = self.tokenizer.batch_decode(
            [ids for group in answers for ids in group], skip_special_tokens=True
        )
        cut = [
            len(ids) >= limit and self.tokenizer.eos_token_id not in ids
            for group in answers
            for ids in group
        ]
        result, scored = evaluate_answers(
            self.task.rows,
            texts,
            cut,
            evaluation.samples_per_problem,
            first_reward(self.recipe.task.verifiers),
        )
        result |= {"temperature": evaluation.temperature, "seconds": time.perf_counter() - started}
        self.metrics.log_eval(step, result, scored)
        self.progress.evaluated(step, result)


# Upstream's metric names (trainer/utils/compute_utils.py, workers/*.py) -> runs/metrics.py's.
# Others keep theirs after "upstream/".
OUR_NAMES = {
    "actor/grad_norm": "grad_norm",
    "grad_norm": "grad_norm",
    "actor/lr": "lr",
    "timing/all": "time/step",
    "timing/rollout": "time/rollout",
    "timing/rule_reward": "time/reward",
    "timing/old_log_p": "time/logprobs",
    "timing/update": "time/update",
    "timing/resharding_to_infer": "time/sync",
}


def to_our_names(metrics: dict[str, Any]) -> dict[str, float]:
    """Upstream's metrics of one step by our names; what is no number is left out."""
    named = {}
    for name, value in metrics.items():
        ours = OUR_NAMES.get(name, name if name.startswith("aqn/") else f"upstream/{name}")
        if name.endswith("_rewards/mean"):
            ours = f"verifier/{name.removesuffix('_rewards/mean')}/mean"
        try:
            # upstream averages over the ranks
            named[ours] = int(value) if ours in ("aqn/stage", "aqn/layers") else float(value)
        except (TypeError, ValueError):
            continue
    return named
