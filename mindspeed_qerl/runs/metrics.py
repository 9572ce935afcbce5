"""Metrics of a run: written while it trains, read back by anything.

`metrics.jsonl` has one row per training step 1..T. Names, all optional; times in seconds, fractions
in 0..1:

    reward/mean, reward/std
    reward/groups_with_signal        fraction of groups whose rewards differ
    reward/not_computed              answers that a verifier could not judge, and that are not
                                     trained; if there are any
    reward/kl                        KL to the base model that is taken off a reward, nats per
                                     answer, before its coefficient
    response/length_mean, _max       tokens
    response/truncated_fraction      cut off at the length limit
    loss/policy, loss/kl, loss/entropy, loss/total
                                     before their coefficients; total: as the optimizer gets it
    grad_norm, lr
    clip_fraction                    of tokens whose ratio was clipped; clip_fraction_low: below,
                                     clip_fraction_high: above
    entropy/mean                     of a token's distribution, nats; entropy/first_tokens: of the
                                     first 8 of each answer
    selection/sampled_groups         prompts asked; selection/trained_groups: those trained
    selection/trained_tokens         in the loss, once in each epoch
    mismatch/k1, mismatch/k3         estimates of KL from rollout to training policy, nats a token;
                                     mismatch/k3_of_answers: nats an answer
    mismatch/mean_abs_prob_diff, mismatch/max_abs_prob_diff
                                     of the sampled tokens
    mismatch/sensitivity             of k3: mean of (1 - p_trained)^2
    mismatch/ratio_mean              of r = p_trained / p_sampled
    mismatch/effective_sample_size   (sum r)^2 / (N sum r^2); ..._of_answers: of the products of r
                                     over an answer
    rollout_correction/truncated_fraction
                                     of tokens or answers whose weight is the cap
    rollout_correction/masked_fraction
                                     of those whose weight is 0
    routing/captured_tokens          whose routes the rollout recorded
    routing/replayed_tokens          in the updates, sent where the rollout sent them;
                                     routing/native_tokens: those that chose for themselves
    routing/flipped                  of the replayed choices, those that the trainer would have made
                                     otherwise; routing/flipped/layer_<number>: of one layer
    aqn/sigma, aqn/stage, aqn/layers nominal noise, its stage, norms that have it
    aqn/expected_std                 sigma, scaled by multipliers
    aqn/measured_std, aqn/changed_fraction
                                     of (noisy - clean) weights
    aqn/target_k3, aqn/reached_k3    what the noise is to do and what it did, nats a token, rounding
                                     taken off
    aqn/without_noise                what was taken off
    aqn/explained_by_draws           share of the variance of rewards in a group, where draws repeat
    sync/arrived                     share of LoRA's update that the rollout engine's weights moved,
                                     of the target with the least; sync/arrived/<target>,
                                     sync/arrived_error/<target>: its standard error
    quantization/weight_error        ||rounded - synced|| / ||synced|| of the rollout's linear
                                     weights; quantization/weight_error/layer_<number>
    time/rollout, time/reward, time/logprobs, time/update, time/sync
    time/step                        the whole step, without evaluation
    verifier/<name>/mean

`eval.jsonl` has one row per evaluation: step (updates done; 0 is before training), the numbers of
tasks/evaluation.py, temperature, seconds. `eval_answers.jsonl` has one row per evaluation and
problem: question, answer, responses, extracted, rules, scores, truncated. `rollouts.jsonl` has one
row per sampled response of training.

JSON has no NaN or infinity. Such a value is written as null and named:
`{"step": 7, "loss/total": null, "nonfinite": {"loss/total": "nan"}}`. `read_jsonl` turns it back
into the number.
"""

import json
import math
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from mindspeed_qerl.common.files import Rows, read_jsonl, write_whole

from .directory import RunDirectory

MetricsRow = Mapping[str, float]  # by name
Record = Mapping[str, Any]  # of a line of JSON

WANDB_SECONDS = 15  # until a server that does not answer ends a run before it starts; W&B waits 90


class MetricsWriter(ExitStack):
    """A context manager that writes the metrics of one run to its jsonl files, to TensorBoard, and
    to Weights & Biases when a project is named; W&B follows its own environment, WANDB_MODE=offline
    included.

    Each row is handed to the operating system before the call returns: a killed process loses
    nothing that was logged (a machine that loses power may lose the last seconds, since nothing is
    forced to the disk).

    With `after`, a run is resumed after that step: rows of later steps, which will be made again,
    move to `discarded/`.

    Raises FileExistsError when the run already has metrics and `after` is None, ImportError when a
    package that was asked for is missing.
    """

    def __init__(
        self,
        run: RunDirectory,
        tensorboard: bool = True,
        wandb: str | None = None,
        after: int | None = None,
    ):
        super().__init__()
        self._run = run
        for file in (run.metrics_file, run.eval_file, run.eval_answers_file, run.rollouts_file):
            if after is not None:
                _discard_after(file, after)
            elif file.exists():
                raise FileExistsError(f"{file} exists: a run is written once. Start a new run")
            file.touch()
        self._wandb = _start_wandb(run, wandb) if wandb else None
        if self._wandb:
            self.callback(self._wandb.finish)
        self._purge_step = None if after is None else after + 1
        self._has_tensorboard = tensorboard
        if tensorboard:
            import_module("tensorboard")  # if there is none, an error now

    @cached_property
    def _tensorboard(self) -> Any:
        """Its writer; made for the first row, since its torch takes seconds."""
        from torch.utils.tensorboard import SummaryWriter

        folder = self._run.path / "tensorboard"
        return self.enter_context(SummaryWriter(folder, purge_step=self._purge_step))

    def log(self, step: int, metrics: MetricsRow) -> None:
        """Write the metrics of training step `step` (1-based, increasing). Values are numbers or
        0-d arrays and tensors.
        """
        row = _as_numbers(metrics)
        append_rows(self._run.metrics_file, step, [row])
        self._run.reached(step)
        self._log_scalars(step, row)

    def log_eval(self, step: int, result: MetricsRow, answers: Iterable[Record] = ()) -> None:
        """Write one evaluation made after `step` updates (0: before training), and its answers, one
        dict per problem.
        """
        row = _as_numbers(result)
        append_rows(self._run.eval_answers_file, step, answers)
        append_rows(self._run.eval_file, step, [row])
        self._log_scalars(step, {f"eval/{name}": value for name, value in row.items()})

    def log_rollouts(self, step: int, rollouts: Iterable[Record]) -> None:
        """Write sampled responses of training step `step`, each a dict of JSON values."""
        append_rows(self._run.rollouts_file, step, rollouts)

    def _log_scalars(self, step: int, row: dict[str, float]) -> None:
        if self._has_tensorboard:
            for name, value in row.items():
                self._tensorboard.add_scalar(name, value, step)
            self._tensorboard.flush()
        if self._wandb:
            # The step is a value of its own: W&B's argument `step` drops rows out of order, such as
            # a late evaluation.
            self._wandb.log({"step": step, **row})


def series(rows: Rows, name: str) -> tuple[np.ndarray, np.ndarray]:
    """(steps, values) of one metric, float64, in the rows where it is a finite number.

    >>> series([{"step": 1, "lr": 0.5}, {"step": 2}, {"step": 3, "lr": math.nan}], "lr")
    (array([1.]), array([0.5]))
    """
    found = [(row["step"], row[name]) for row in rows if math.isfinite(row.get(name, math.nan))]
    steps, values = np.array(found, dtype=float).reshape(-1, 2).T
    return steps, values


def _as_numbers(values: Record) -> dict[str, float]:
    return {name: value if type(value) is int else float(value) for name, value in values.items()}


def append_rows(file: Path, step: int, rows: Iterable[Record]) -> None:
    """Write rows of a step behind those that a file of JSON lines has."""
    with open(file, "a", encoding="utf-8") as lines:
        lines.writelines(_line({"step": step, **row}) for row in rows)


def _line(row: Record) -> str:
    nonfinite = {}
    for name, value in row.items():
        if isinstance(value, float) and not math.isfinite(value):
            nonfinite[name] = str(value)
    if nonfinite:
        row = {**row, **dict.fromkeys(nonfinite), "nonfinite": nonfinite}
    return json.dumps(row, allow_nan=False) + "\n"


def _discard_after(file: Path, step: int) -> None:
    """Move the rows of steps after `step` to discarded/, behind those of earlier resumptions."""
    rows = read_jsonl(file)
    later = [row for row in rows if row["step"] > step]
    if later:
        aside = file.parent / "discarded" / file.name
        aside.parent.mkdir(exist_ok=True)
        append_rows(aside, step, later)  # each with its own step
    write_whole(file, "".join(_line(row) for row in rows if row["step"] <= step))


def _start_wandb(run: RunDirectory, project: str) -> Any:
    import wandb

    try:
        wandb_run = wandb.init(
            project=project,
            id=run.id,
            resume="allow",  # a resumed run goes on in its own
            name=run.path.name,
            group=run.path.parent.name,
            dir=run.path,
            config=run.config(),
            settings=wandb.Settings(init_timeout=WANDB_SECONDS),
        )
    except wandb.errors.Error as error:
        raise ConnectionError(
            f"W&B does not take project {project!r}: {error}. With WANDB_MODE=offline it is "
            "written to the run directory; run.wandb_project=null is a run without it"
        ) from error
    wandb_run.define_metric("*", step_metric="step")
    return wandb_run
