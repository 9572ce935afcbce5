"""The report of a run, from its files alone, so that a run that was killed gets one too.

    python -m mindspeed_qerl.runs.report RUN_DIR

writes RUN_DIR/summary.md and RUN_DIR/plots/*.png, and prints the summary.
"""

import argparse
import math
import sys
from collections.abc import Iterable, Sequence
from datetime import datetime
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.markdown import Markdown
from rich.text import Text

from mindspeed_qerl.runs.directory import RunDirectory
from mindspeed_qerl.runs.metrics import read_columns, read_jsonl
from mindspeed_qerl.runs.plots import Columns, Rows, finite, seconds_per_part, write_plots

STAGE_HEADER = ("noise stage", "steps", "nominal std", "measured std", "weights changed")
SWALLOWED = 0.8  # of a stage's noise; less of it is left where rounding takes small noise
MISMATCH = (  # label, metric, what is said of its values
    ("k3", "mismatch/k3", "mean {mean:.2e}, largest {max:.2e} nats per token"),
    ("routes replayed", "routing/replayed_tokens", "{sum:,.0f} tokens"),
    (
        "experts not the trainer's own",
        "routing/flipped",
        "mean {mean:.2%}, largest {max:.2%} of the choices",
    ),
    ("relative error of quantised weights", "quantization/weight_error", "mean {mean:.3g}"),
)

Lines = list[tuple[str, str]]  # label, text
Sections = dict[str, Lines]  # by heading


def write_report(run: RunDirectory) -> None:
    """Write summary.md and the plots of a run, and print the summary; ValueError when one of its
    files is damaged.
    """
    title = " / ".join(run.path.absolute().parts[-2:])
    rows, columns = read_jsonl(run.metrics_file), read_columns(run.metrics_file)
    evals, scored = read_columns(run.eval_file), read_jsonl(run.eval_file)
    stages = _stages(rows)
    sections = {
        "Run": _run(run, rows),
        "Learning": _learning(columns, scored),
        "Train/rollout mismatch": _mismatch(columns),
        "AQN noise": _noise(rows),
        "LoRA": _lora(run.facts()),
        "Time": _time(run, columns, evals),
    }
    sections = {heading: lines for heading, lines in sections.items() if lines}
    warnings = _warnings(rows, stages)
    text = f"# {title}\n\n{_markdown(sections, stages, warnings)}\n"
    Console().print(Markdown(text))
    for plot in write_plots(columns, evals, run.plots_dir, title):
        text += f"![{plot.stem}](plots/{plot.name})\n\n"
    run.summary_file.write_text(text, encoding="utf-8")
    Console().print(Text(f"Report: {run.summary_file}"), soft_wrap=True)


def _run(run: RunDirectory, rows: Rows) -> Lines:
    status = run.status()
    state = status["state"]
    if state == "running":
        state = "running, or killed"
    if status["reason"]:
        state += f": {status['reason']}"
    steps = str(rows[-1]["step"] if rows else 0)
    return [("state", state), ("steps", steps), ("wall time", _duration(_wall_seconds(run)))]


def _learning(columns: Columns, scored: Rows) -> Lines:
    lines = []
    if scored:
        best = max(scored, key=itemgetter("accuracy"))
        for which, row in (("first", scored[0]), ("last", scored[-1]), ("best", best)):
            lines.append((f"held-out accuracy, {which}", _accuracy(row)))
    rewards = finite(columns, "reward/mean")[1]
    if len(rewards):
        words = f"{rewards[0]:.3f} in the first step, {rewards[-1]:.3f} in the last"
        lines.append(("training reward", words))
    return lines


def _mismatch(columns: Columns) -> Lines:
    lines = []
    for label, metric, words in MISMATCH:
        values = finite(columns, metric)[1]
        if len(values):
            said = words.format(mean=values.mean(), max=values.max(), sum=values.sum())
            lines.append((label, said))
    return lines


def _noise(rows: Rows) -> Lines:
    syncs, layers = sum("aqn/sigma" in row for row in rows), _noisy_layers(rows)
    if not syncs:
        return []
    extremes = sorted({min(layers, default=0), max(layers, default=0)})
    return [
        ("syncs with noise on", f"{len(layers)} of {syncs}"),
        ("noisy layers per sync", " to ".join(map(str, extremes))),
    ]


def _lora(facts: dict[str, Any]) -> Lines:
    lines = []
    for target, count in facts.get("lora", {}).items():
        words = f"{count['modules']} modules, {count['parameters']:,} parameters"
        lines.append((target, words))
    for target, size in facts.get("lora_movement", {}).items():
        words = f"moved {size['moved']:.3g} of {size['expected']:.3g}"
        lines.append((f"{target} in the rollout engine", words))
    return lines


def _time(run: RunDirectory, columns: Columns, evals: Columns) -> Lines:
    parts = seconds_per_part(columns, evals)
    seconds = {part: float(sum(values)) for part, values in parts.items()}
    steps, total, facts = len(columns["step"]), sum(seconds.values()), run.facts()
    if not total:
        return []
    lines = []
    for part, spent in seconds.items():
        lines.append((part, f"{spent / steps:.3g} s per step ({spent / total:.0%})"))
    lines.append(("a step", f"{total / steps:.3g} s"))
    if "engine_start_seconds" in facts:
        lines.append(("engine start", _duration(facts["engine_start_seconds"])))
    return [*lines, ("all outside the steps", _duration(max(0.0, _wall_seconds(run) - total)))]


def _noisy_layers(rows: Rows) -> list[int]:
    """How many layers each noisy step put noise on."""
    return [row.get("aqn/layers", 0) for row in rows if row.get("aqn/sigma", 0) > 0]


def _stages(rows: Rows) -> list[Rows]:
    """Consecutive steps in one stage of the schedule; a schedule that restarts its decay each epoch
    returns to a stage.
    """
    noisy = [row for row in rows if "aqn/sigma" in row]
    return [list(stretch) for _, stretch in groupby(noisy, key=itemgetter("aqn/stage"))]


def _mean(stage: Rows, name: str) -> float:
    return float(np.mean([row.get(name, math.nan) for row in stage]))


def _stage_cells(stage: Rows) -> tuple[str, ...]:
    expected = _mean(stage, "aqn/expected_std")
    return (
        str(stage[0]["aqn/stage"]),
        f"{stage[0]['step']}-{stage[-1]['step']}",
        f"{expected:.2e}" if expected else "off",
        f"{_mean(stage, 'aqn/measured_std'):.2e}",
        f"{_mean(stage, 'aqn/changed_fraction'):.1%}",
    )


def _wall_seconds(run: RunDirectory) -> float:
    """From the start to the end, or to the last file that a killed run wrote."""
    status = run.status()
    started = datetime.fromisoformat(status["started"]).timestamp()
    if status["ended"]:
        ended = datetime.fromisoformat(status["ended"]).timestamp()
    else:
        files = (run.status_file, run.metrics_file, run.eval_file)
        ended = max(file.stat().st_mtime for file in files if file.exists())
    return max(0.0, ended - started)  # a clock may be set back meanwhile


def _warnings(rows: Rows, stages: Sequence[Rows]) -> list[str]:
    """What a look at the final accuracy would miss."""
    first: dict[str, int] = {}
    for row in rows:
        for name, value in row.items():
            if not math.isfinite(value):
                first.setdefault(name, row["step"])
    warnings = [f"{name} was NaN or infinite, first in step {step}" for name, step in first.items()]
    last = rows[-1]["step"] if rows else 0
    if lost := sorted(set(range(1, last + 1)) - {row["step"] for row in rows}):
        numbers = ", ".join(map(str, lost))
        warnings.append(f"metrics.jsonl has no row for {len(lost)} of {last} steps: {numbers}")
    rewards = [row["reward/mean"] for row in rows if "reward/mean" in row]
    if rewards and not any(rewards):
        warnings.append(
            "the reward was 0 at every step: look at rollouts.jsonl, and at the verifier's method"
        )
    layers = _noisy_layers(rows)
    if 0 in layers:
        warnings.append("AQN was on, but a sync put noise on no layer")
    if stages and not layers:
        warnings.append("AQN was on, but no step had any noise: this run is a plain baseline")
    for stage in stages:
        measured, expected = _mean(stage, "aqn/measured_std"), _mean(stage, "aqn/expected_std")
        if measured < SWALLOWED * expected:
            warnings.append(
                f"AQN stage {stage[0]['aqn/stage']}: the measured std {measured:.1e} is far below "
                f"the nominal one, {expected:.1e} (small noise is lost when weights are rounded)"
            )
    return warnings


def markdown_table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    """The lines of a table.

    >>> markdown_table(("a", "b"), [("1|2", "3")])
    ['| a | b |', '| --- | --- |', '| 1\\\\|2 | 3 |']
    """
    table = []
    for row in (header, *rows):
        cells = [cell.replace("|", "\\|").replace("\n", "<br>") for cell in row]
        table.append(f"| {' | '.join(cells)} |")
    table.insert(1, f"| {' | '.join(['---'] * len(cells))} |")
    return table


def _markdown(sections: Sections, stages: list[Rows], warnings: list[str]) -> str:
    lines = [line for warning in warnings for line in (f"> **Warning:** {warning}", "")]
    for heading, entries in sections.items():
        lines += [*markdown_table((heading, ""), entries), ""]
    if stages:
        lines += [*markdown_table(STAGE_HEADER, map(_stage_cells, stages)), ""]
    return "\n".join(lines)


def _accuracy(row: dict[str, Any]) -> str:
    error = row.get("standard_error", math.nan)
    words = f" ± {error:.3f} (standard error)" if math.isfinite(error) else ""
    return f"{row['accuracy']:.3f}{words} at step {row['step']}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m mindspeed_qerl.runs.report",
        description="Write summary.md and plots/*.png of a run again, from its files, and print "
        "the summary. Works for runs that were killed.",
    )
    parser.add_argument("run_dir", type=Path, help="a run directory, named <date>_<time>_seed<n>")
    try:
        write_report(RunDirectory.open(parser.parse_args().run_dir))
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
