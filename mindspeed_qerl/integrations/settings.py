"""What to do in a rollout worker of somebody else's trainer: read from one variable, or given."""

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from mindspeed_qerl.aqn.schedule import DRAWS, NoiseSchedule
from mindspeed_qerl.aqn.targets import check_multipliers
from mindspeed_qerl.common.errors import unknown

VARIABLE = "MINDSPEED_QERL_ROLLOUT"
ROUNDINGS = ("nearest", "unbiased")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """
    Attributes:
        report: folder of a line for each sync and worker (report.py).
        noise: keyword arguments of `NoiseSchedule`, besides total_steps where the trainer tells
            it; None: no noise.
        targets, exclude, multipliers, seed: of `NoiseInjector`, as `aqn` has them in configs/.
        draws: who has a draw of its own, "step", "group" or "answer" (draws.py).
        first_step: training step of the first sync, where the trainer does not tell it; of a
            resumed run the step that it resumes after.
        arrival_every: syncs from one proof of arrival to the next; 0: none.
        elements: of each tensor that a proof compares; 0: all.
        stop: whether a sync that did not arrive is an error; else it is logged and reported.
        rounding: of weights that come in float32 into bfloat16: "nearest", as vLLM does, or
            "unbiased", which keeps small updates in the mean (lora/rounding.py).
        min_arrived: share of the update, 0..1, below which a sync did not arrive.
        replicas: engines of vLLM that sample for the run, each of which has to report; None: those
            of vLLM's own data parallelism.
        steps_behind: by which sampled weights may be older than the trainer's step, as in pipelines
            that sample while they train.
        evaluates_base: whether requests without an adapter are evaluations of the base model, no
            fault as long as others use the adapter.
    """

    report: str
    noise: dict[str, Any] | None = field(default_factory=dict)
    targets: str | tuple[str, ...] = "auto"
    exclude: tuple[str, ...] = ()
    multipliers: Mapping[str | int, float] = field(default_factory=dict)
    seed: int = 1
    draws: str = "step"
    first_step: int = 0
    arrival_every: int = 1
    elements: int = 64
    stop: bool = True
    rounding: str = "nearest"
    min_arrived: float = 0.9
    replicas: int | None = None
    steps_behind: int = 0
    evaluates_base: bool = False

    def __post_init__(self):
        if self.rounding not in ROUNDINGS:
            raise ValueError(unknown("rounding", self.rounding, ROUNDINGS))
        if self.draws not in DRAWS:
            raise ValueError(unknown("value of draws", self.draws, DRAWS))
        if not 0 <= self.min_arrived <= 1:
            raise ValueError(f"min_arrived = {self.min_arrived!r} must be in 0..1")
        for name in ("replicas", "steps_behind"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, int) and value >= 0):
                raise ValueError(f"{name} = {value!r} must be an integer of at least 0")
        check_multipliers(self.multipliers)
        if self.noise is not None:
            refuse_unknown("key of noise", self.noise, NoiseSchedule)
            NoiseSchedule(**{"total_steps": 1, **self.noise})  # raises for what it cannot be

    def schedule(self, total_steps: int | None = None) -> NoiseSchedule:
        """The noise's, where there is some; total_steps: the trainer's.

        Raises:
            ValueError: both name a number of steps, and another one; or none does.
        """
        assert self.noise is not None, "noise is configured"
        named = self.noise.get("total_steps", total_steps)
        if named is None:
            raise ValueError("noise.total_steps: the training steps of the run are needed")
        if total_steps is not None and named != total_steps:
            raise ValueError(
                f"noise.total_steps is {named}, and the run has {total_steps} training steps: the "
                "noise would not end with it. Leave total_steps out, or give the run's"
            )
        return NoiseSchedule(**{**self.noise, "total_steps": named})


def refuse_unknown(kind: str, names: Iterable[str], owner: type) -> None:
    """ValueError: some of `names` are no field of the dataclass `owner`."""
    known = [field.name for field in fields(owner)]
    sentences = [unknown(kind, name, known) for name in names if name not in known]
    if sentences:
        raise ValueError("; ".join(sentences))


def read_settings(values: Mapping[str, Any]) -> Settings:
    """Raises ValueError, naming an unknown key or what is out of its range."""
    refuse_unknown(f"key of {VARIABLE}", values, Settings)
    return Settings(**values)


def settings_of_environment() -> Settings | None:
    """Reads the JSON in MINDSPEED_QERL_ROLLOUT, or in the file that it names; None: not set."""
    text = os.environ.get(VARIABLE)
    if not text:
        return None
    if not text.lstrip().startswith("{"):
        text = Path(text).read_text()
    return read_settings(json.loads(text))
