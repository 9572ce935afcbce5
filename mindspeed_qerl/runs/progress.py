"""How a run is going: a live view on a terminal, one line per step anywhere else (CI logs, `>
log.txt`).
"""

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

# the ETA follows the pace of these, so that a slow first step does not spoil it for long
RECENT_STEPS = 20


class Progress:
    """Context manager around the training loop, told of each phase, step and evaluation; `metrics`
    and `result` are rows of metrics.jsonl and eval.jsonl (see metrics.py). `clock` returns seconds.
    """

    def __init__(
        self,
        total_steps: int,
        title: str,
        *,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total, self._title, self._clock = total_steps, title, clock
        self._console = console or Console()
        self._started = clock()
        self._step = 0
        self._phase = "starting"
        self._metrics: Mapping[str, float] = {}
        self._accuracy = ""
        self._stamps: deque[float] = deque(maxlen=RECENT_STEPS + 1)  # when the recent steps ended
        self._live = None
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._live = Live(
                get_renderable=self._render, console=self._console, refresh_per_second=4
            )

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, exception_type: type[BaseException] | None, *exception: object) -> None:
        self._phase = f"stopped in: {self._phase}" if exception_type else "done"
        if self._live:
            self._live.stop()

    def message(self, text: str) -> None:
        """A line for the reader, printed above the live view."""
        if self._live:
            self._console.print(text, markup=False, highlight=False)
        else:  # a line stays one line, however narrow rich believes a log file to be
            print(text, file=self._console.file, flush=True)

    def phase(self, text: str) -> None:
        """What is going on now: "starting engines", "rollout", "update", ... Without a terminal:
        only until step 1 is done.
        """
        self._phase = text
        if not self._live and self._step == 0:
            self.message(f"{self._title} | {text} ...")

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Training step `step` (1-based) is done."""
        now = self._clock()
        if not self._stamps and "time/step" in metrics:
            self._stamps.append(now - metrics["time/step"])
        self._stamps.append(now)
        self._step, self._metrics = step, metrics
        if not self._live:
            at = f"step {step:{len(str(self._total))}}/{self._total}"
            self.message(" | ".join([self._title, at, *self._facts(), f"ETA {self._eta()}"]))

    def evaluated(self, step: int, result: dict[str, float]) -> None:
        """An evaluation after `step` updates is done."""
        accuracy = f"accuracy {result['accuracy']:.3f}"
        if math.isfinite(result.get("standard_error", math.nan)):
            accuracy += f" ± {result['standard_error']:.3f}"
        self._accuracy = f"{accuracy} at {step}"
        if not self._live:
            self.message(f"{self._title} | held-out {accuracy} after {step} steps")

    @property
    def seconds_per_step(self) -> float | None:
        """Mean over the recent steps, evaluations and pauses between them included; None before the
        first is measured.
        """
        measured = len(self._stamps) - 1
        return (self._stamps[-1] - self._stamps[0]) / measured if measured > 0 else None

    def _eta(self) -> str:
        pace = self.seconds_per_step
        return "-:--:--" if pace is None else _hours((self._total - self._step) * pace)

    def _facts(self) -> list[str]:
        reward, sigma = self._metrics.get("reward/mean"), self._metrics.get("aqn/sigma")
        facts = []
        if reward is not None:
            facts.append(f"reward {reward:.3f}")
        if self._accuracy:
            facts.append(self._accuracy)
        if sigma is not None:
            facts.append(f"sigma {sigma:.1e}" if sigma else "sigma off")
        if (pace := self.seconds_per_step) is not None:
            facts.append(f"{pace:.2f} s/step")
        return facts

    def _render(self) -> Group:
        bar = Table.grid(
            Column(no_wrap=True, max_width=32),
            Column(ratio=1),
            Column(no_wrap=True),
            padding=(0, 1),
            expand=True,
        )
        passed = _hours(self._clock() - self._started)
        reached = f"{self._step}/{self._total}  {passed}  ETA {self._eta()}"
        bar.add_row(
            Text(self._title, style="bold", overflow="ellipsis"),
            ProgressBar(total=max(self._total, 1), completed=self._step),
            Text(reached, style="cyan"),
        )
        facts = "".join(f"  {fact}" for fact in self._facts())
        phase = (self._phase, "yellow")
        return Group(bar, Text.assemble(phase, facts, no_wrap=True, overflow="ellipsis"))


def _hours(seconds: float) -> str:
    return str(timedelta(seconds=max(0, round(seconds))))
