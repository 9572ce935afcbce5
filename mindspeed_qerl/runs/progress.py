"""How a run is going: a live view on a terminal, one line per step anywhere else (CI logs, `> log.txt`)."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

RECENT_STEPS = 20  # the ETA follows the pace of these, so that a slow first step does not spoil it for long


class Progress:
    """Context manager around the training loop.

        with Progress(60, "grpo_tiny_moe_cpu") as progress:
            progress.phase("starting engines")
            progress.evaluated(0, {"accuracy": 0.25, "standard_error": 0.02})
            for step in range(1, 61):
                progress.phase("rollout")
                progress.step(step, {"reward/mean": 0.31, "aqn/sigma": 0.05, "time/step": 0.8})

    `metrics` and `result` are rows of metrics.jsonl and eval.jsonl (see metrics.py). `clock` returns seconds.
    """

    def __init__(
        self, total_steps: int, title: str, *, console: Console | None = None,
        clock: Callable[[], float] = time.monotonic
    ) -> None:
        from rich.console import Console

        self._total = total_steps
        self._title = title
        self._console = console or Console()
        self._is_live = self._console.is_terminal and not self._console.is_dumb_terminal
        self._live: Any = None
        self._clock = clock
        self._started = clock()
        self._step = 0
        self._phase = "starting"
        self._metrics: dict[str, float] = {}
        self._accuracy = ""
        self._stamps: deque[float] = deque(maxlen=RECENT_STEPS + 1)  # when the recent steps ended

    def __enter__(self) -> Self:
        if self._is_live:
            from rich.live import Live

            self._live = Live(get_renderable=self._render, console=self._console, refresh_per_second=4)
            self._live.start()
        return self

    def __exit__(self, exception_type: type[BaseException] | None, *exception: object) -> None:
        self._phase = f"stopped in: {self._phase}" if exception_type else "done"
        if self._live:
            self._live.stop()

    def phase(self, text: str) -> None:
        """What is going on now: "starting engines", "rollout", "update", ... Without a terminal: only until step 1 is
        done."""
        self._phase = text
        if not self._live and self._step == 0:
            self._print(f"{self._title} | {text} ...")

    def step(self, step: int, metrics: dict[str, float]) -> None:
        """Training step `step` (1-based) is done."""
        now = self._clock()
        if not self._stamps and "time/step" in metrics:
            self._stamps.append(now - metrics["time/step"])
        self._stamps.append(now)
        self._step = step
        self._metrics = metrics
        if not self._live:
            width = len(str(self._total))
            shown = [self._title, f"step {step:{width}}/{self._total}", *self._facts(), f"ETA {self._eta()}"]
            self._print(" | ".join(shown))

    def evaluated(self, step: int, result: dict[str, float]) -> None:
        """An evaluation after `step` updates is done."""
        error = f" ± {result['standard_error']:.3f}" if math.isfinite(result.get("standard_error", math.nan)) else ""
        self._accuracy = f"accuracy {result['accuracy']:.3f}{error} at {step}"
        if not self._live:
            self._print(f"{self._title} | held-out accuracy {result['accuracy']:.3f}{error} after {step} steps")

    def message(self, text: str) -> None:
        """A line for the reader, printed above the live view."""
        self._print(text)

    @property
    def seconds_per_step(self) -> float | None:
        """Mean over the recent steps, evaluations and pauses between them included; None before the first is
        measured."""
        if len(self._stamps) < 2:
            return None
        return (self._stamps[-1] - self._stamps[0]) / (len(self._stamps) - 1)

    def _eta(self) -> str:
        if self.seconds_per_step is None:
            return "-:--:--"
        return _hours((self._total - self._step) * self.seconds_per_step)

    def _facts(self) -> list[str]:
        facts = []
        if "reward/mean" in self._metrics:
            facts.append(f"reward {self._metrics['reward/mean']:.3f}")
        if self._accuracy:
            facts.append(self._accuracy)
        if "aqn/sigma" in self._metrics:
            sigma = self._metrics["aqn/sigma"]
            facts.append(f"sigma {sigma:.1e}" if sigma else "sigma off")
        if self.seconds_per_step is not None:
            facts.append(f"{self.seconds_per_step:.2f} s/step")
        return facts

    def _render(self) -> RenderableType:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        bar = Table.grid(padding=(0, 1), expand=True)
        bar.add_column(no_wrap=True, max_width=32)
        bar.add_column(ratio=1)
        bar.add_column(no_wrap=True)
        bar.add_row(
            Text(self._title, style="bold", overflow="ellipsis"),
            ProgressBar(total=max(self._total, 1), completed=self._step),
            Text(f"{self._step}/{self._total}  {_hours(self._clock() - self._started)}  ETA {self._eta()}",
                 style="cyan"),
        )
        facts = Text(no_wrap=True, overflow="ellipsis")
        facts.append(self._phase, style="yellow")
        for fact in self._facts():
            facts.append(f"  {fact}")
        return Group(bar, facts)

    def _print(self, text: str) -> None:
        if self._live:
            self._console.print(text, markup=False, highlight=False)
        else:  # a line stays one line, however narrow rich believes a log file to be
            print(text, file=self._console.file, flush=True)


def _hours(seconds: float) -> str:
    return str(timedelta(seconds=max(0, round(seconds))))
