"""How a run is going: one line per step, and on a terminal what it is doing now below them."""

import math
import time
from collections import deque
from collections.abc import Iterable
from datetime import timedelta

from rich.console import Console
from rich.markup import escape
from rich.status import Status

from .metrics import MetricsRow

# the ETA follows the pace of these, so that a slow first step does not spoil it for long
RECENT_STEPS = 20


class Progress(Status):
    """rich's line of what goes on now, around the training loop: a context manager that is told of
    each phase, step and evaluation; `metrics` and `result` are rows of metrics.jsonl and eval.jsonl
    (see metrics.py), `earlier` those of eval.jsonl that a resumed run has already.
    """

    def __init__(self, total_steps: int, title: str, earlier: Iterable[MetricsRow] = ()):
        super().__init__("starting", console=Console())  # without a terminal nothing is shown
        self._total = total_steps
        self._title = title
        self._accuracy = ""
        for result in earlier:
            self._accuracy = f"accuracy {accuracy_words(result)} at {result['step']:g}"
        self._stamps: deque[float] = deque(maxlen=RECENT_STEPS + 1)  # when the recent steps ended

    def message(self, text: str) -> None:
        """A line for the reader."""
        self.console.out(text, highlight=False)

    def phase(self, text: str) -> None:
        """Shows what is going on now: "starting engines", "rollout", "update", ... Without a
        terminal: only until step 1 is done.
        """
        words = f"{self._title} | {text} ..."
        self.update(escape(words))
        if not self._stamps and not self.console.is_terminal:
            self.message(words)

    def step(self, step: int, metrics: MetricsRow) -> None:
        """Training step `step` (1-based) is done."""
        now = time.monotonic()
        total = self._total
        if not self._stamps:
            self._stamps.append(now - metrics.get("time/step", 0.0))
        self._stamps.append(now)
        words = [self._title, f"step {step:{len(str(total))}}/{total}"]
        if "reward/mean" in metrics:
            words.append(f"reward {metrics['reward/mean']:.3f}")
        if self._accuracy:
            words.append(self._accuracy)
        if "aqn/sigma" in metrics:
            sigma = metrics["aqn/sigma"]
            words.append(f"sigma {sigma:.1e}" if sigma else "sigma off")
        pace = (now - self._stamps[0]) / (len(self._stamps) - 1)
        left = timedelta(seconds=round((total - step) * pace))
        words += [f"{pace:.2f} s/step", f"ETA {left}"]
        self.message(" | ".join(words))

    def evaluated(self, step: int, result: MetricsRow) -> None:
        """An evaluation after `step` updates is done."""
        accuracy = f"accuracy {accuracy_words(result)}"
        self._accuracy = f"{accuracy} at {step}"
        self.message(f"{self._title} | held-out {accuracy} after {step} steps")


def accuracy_words(result: MetricsRow) -> str:
    """Returns an accuracy and how sure it is: ± its standard error; its 95 % interval where there
    is none, or it is 0; nothing where that is unknown, too.

    >>> ends = {"interval_low": 0.0, "interval_high": 0.79}
    >>> accuracy_words({"accuracy": 0.0, "standard_error": math.nan, **ends})
    '0.000 [0.000, 0.790]'
    """
    accuracy = f"{result['accuracy']:.3f}"
    error = result["standard_error"]
    if error > 0:
        return f"{accuracy} ± {error:.3f}"
    low = result["interval_low"]
    return accuracy if math.isnan(low) else f"{accuracy} [{low:.3f}, {result['interval_high']:.3f}]"
