"""One observer for both engines: an engine reports what happens, this writes it and checks it."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import islice

from mindspeed_qerl.aqn.schedule import NoiseLevel
from mindspeed_qerl.common.errors import EngineError
from mindspeed_qerl.families import read_shape
from mindspeed_qerl.recipe.types import Recipe

from .checks import Movement, StepChecks, arrival_faults, sync_faults
from .directory import RunDirectory
from .metrics import MetricsRow, MetricsWriter, Record, read_jsonl
from .progress import Progress

WARN_BATCHES = 10  # of one step, between two warnings of dynamic sampling


class RunObserver:
    """Writes and checks what an engine reports. Everything is written before it is checked, so a
    step that cannot be right leaves its metrics and answers behind.

        observer = RunObserver(recipe, run, metrics, progress)
        observer.begin([rank.describe() for rank in ranks], norms)
        observer.evaluated(0, result, answers, seconds)
        for step in range(1, recipe.run.train_iters + 1):
            observer.sampled(step, answers)            # as soon as they have rewards
            observer.stepped(step, values, tokens)     # after the update and the sync
            if observer.wants_proof(step, gradient):
                observer.proved(step, movement)
            if observer.wants_evaluation(step):
                observer.evaluated(step, result, answers, seconds)
        observer.end()

    Every method that raises, raises EngineError.

    Attributes:
        earlier: metrics of the steps before the run was resumed. is_proved: whether an update was
            seen to reach the rollout engine. checks: of the metrics, over the whole run.
    """

    def __init__(
        self, recipe: Recipe, run: RunDirectory, metrics: MetricsWriter, progress: Progress
    ):
        self.recipe = recipe
        self.run = run
        self.metrics = metrics
        self.progress = progress
        self.earlier = read_jsonl(run.metrics_file)
        self.is_proved = any("sync/arrived" in row for row in self.earlier)
        self.checks = StepChecks(recipe, read_shape(recipe.model.path).moe, self.earlier)
        self._sampled: Counter[int] = Counter()  # answers written, by step

    def warn(self, text: str) -> None:
        """A warning for the reader."""
        self.progress.message(f"Warning: {text}")

    def begin(
        self, ranks: Iterable[Mapping[str, Mapping[str, int]]], norms: Sequence[str] = ()
    ) -> None:
        """Report what LoRA trains, and what gets noise.

        Args:
            ranks: of each one, "modules" and "parameters" by target. norms: module names.
        """
        totals: dict[str, Counter[str]] = {target: Counter() for target in self.recipe.lora.targets}
        for rank in ranks:
            for target, counts in rank.items():
                totals[target].update(counts)
        self.run.record(lora=totals)
        words = [
            f"{target}: {total['modules']} modules, {total['parameters']:,} parameters"
            for target, total in totals.items()
        ]
        if words:
            self.progress.message(f"LoRA trains {', '.join(words)}")
        if missing := [target for target, total in totals.items() if not total["modules"]]:
            raise EngineError(
                f"LoRA target {', '.join(missing)} has no module in this model. "
                "Take it out of megatron_training.lora_target_modules"
            )
        if norms:
            self.run.record(aqn_layers=norms)
            self.progress.message(f"AQN targets {len(norms)} RMSNorm layers: {', '.join(norms)}")

    def still_sampling(self, step: int, batches: int, groups: int, wanted: int) -> None:
        """Dynamic sampling has `groups` of the `wanted` groups with different rewards after so
        many batches of prompts; a step that never gets them all must not look like a hang.
        """
        if batches % WARN_BATCHES == 0:
            self.warn(
                f"step {step} asked {batches} batches, and has {groups} of {wanted} groups with "
                "different rewards; rl_config.filter_groups_max_batches would limit that"
            )

    def sampled(self, step: int, answers: Iterable[Record]) -> None:
        """Write the first `run.rollout_samples` answers of a step, each with "question",
        "response", "answer" (the right one) and "reward". With dynamic sampling each batch is
        reported by itself.
        """
        room = self.recipe.run.rollout_samples - self._sampled[step]
        rows = list(islice(answers, room))
        self.metrics.log_rollouts(step, rows)
        self._sampled[step] += len(rows)

    def trains_nothing(self, step: int, groups: int, all_cut_off: bool) -> None:
        """Warn of a step that none of its `groups` is trained in, and why."""
        why = "every answer was cut off or could not be judged"
        if not all_cut_off:
            why = "no group had answers of different rewards"
        self.warn(f"step {step} trains nothing: {why}, of {groups} groups")

    def stepped(
        self,
        step: int,
        values: MetricsRow,
        tokens: int,
        routes: int = 0,
        noise: NoiseLevel | None = None,
    ) -> None:
        """Write the metrics of a step (1-based), then check them.

        Args:
            values: by the names of metrics.py. tokens: that each epoch was to train, 0 if nothing
                is trained. routes: tokens whose routes each epoch was to replay. noise: what the
                step was to have.
        """
        self.metrics.log(step, values)
        self.progress.step(step, values)
        for warning in self.checks.check(step, values, tokens, routes, noise):
            self.warn(warning)

    def wants_proof(self, step: int, gradient: float) -> bool:
        """Returns True if a proof is due after `step` that LoRA reaches the rollout engine: after
        the first update, every `run.prove_every` steps, and after the last. `stepped` gets the
        shares as metrics (lora/proof.py arrival_metrics), and `proved` what was found.

        Args:
            gradient: norm of the step's; 0 where nothing was learnt, and nothing can be shown.
        """
        run = self.recipe.run
        is_first = not self.is_proved and gradient > 0
        is_due = is_first or step % run.prove_every == 0 or step == run.train_iters
        return is_due and bool(self.recipe.lora.targets)

    def proved(self, step: int, movement: Movement, unlike: Collection[str] = ()) -> None:
        """Write what the adapters did to the rollout engine's weights, then check that it is
        (alpha / r) B A.

        Args:
            movement: by LoRA target (lora/proof.py join). unlike: names of weights that are not the
                rounding of what was synced, where rollouts are quantized.
        """
        recipe = self.recipe
        arrived = {target: entry for target, entry in movement.items() if "arrived" in entry}
        is_quantized = recipe.quantization.enabled
        arithmetic = recipe.quantization.format if is_quantized else recipe.model.dtype
        faults = sync_faults(movement)
        faults += arrival_faults(arrived, recipe.run.min_arrived, arithmetic)
        if unlike:
            first = ", ".join(sorted(unlike)[:3])
            faults.append(
                f"{len(unlike)} weights are not {recipe.quantization.format} of what was "
                f"synced, the first of them: {first}"
            )
        if faults or arrived:
            self.run.record(lora_movement=movement)
        if faults:
            raise EngineError(f"the sync after step {step}: " + "\n".join(faults))
        if not arrived:
            return
        self.run.record(lora_proved_after=step)
        if not self.is_proved:
            self.is_proved = True
            least = min(entry["arrived"] for entry in arrived.values())
            words = [
                f"{target} {100 * entry['arrived']:.1f} ± {100 * entry['arrived_error']:.1f}"
                for target, entry in arrived.items()
            ]
            self.progress.message(
                f"LoRA reached the rollout engine: {100 * least:.1f} % of the update "
                f"({', '.join(words)})"
            )

    def wants_evaluation(self, step: int) -> bool:
        """Returns True if an evaluation is due after `step`: every `eval.every` steps, also before
        the first, and after the last.
        """
        return step % self.recipe.evaluation.every == 0 or step == self.recipe.run.train_iters

    def evaluated(
        self,
        step: int,
        result: MetricsRow,
        answers: Sequence[Record],
        seconds: float,
        sigma: float = 0.0,
    ) -> None:
        """Write an evaluation after `step` updates, then check that it had no noise.

        Args:
            result, answers: of tasks.evaluation.evaluate_answers. sigma: of the noise that was on.
        """
        row = {**result, "temperature": self.recipe.evaluation.temperature, "seconds": seconds}
        self.metrics.log_eval(step, row, answers)
        self.progress.evaluated(step, row)
        if sigma:
            raise EngineError(f"the evaluation after step {step} had noise of sigma {sigma:.3g} on")

    def end(self) -> None:
        """After the last step."""
        if self.recipe.lora.targets and not self.is_proved:
            self.warn(
                "nothing was learnt in this run (no reward differed?), so LoRA's way into the "
                "rollout engine was never proved"
            )
