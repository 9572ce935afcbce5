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

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mindspeed_qerl.runs.directory import RunDirectory
from mindspeed_qerl.runs.metrics import read_columns, read_jsonl
from mindspeed_qerl.runs.plots import seconds_per_part, write_plots

NOISE_HEADING = "AQN noise"
WEIGHT_ERROR = "quantization/weight_error"
STAGE_HEADER = ("stage", "steps", "nominal std", "measured std", "weights changed")

Rows = list[dict[str, Any]]
Sections = dict[str, list[tuple[str, str]]]  # heading -> (label, text) lines


def write_report(run: RunDirectory) -> None:
    """Write summary.md and the plots of a run, and print the summary; ValueError when one of its
    files is damaged.
    """
    title = " / ".join(run.path.absolute().parts[-2:])
    rows, columns, evals = (
        read_jsonl(run.metrics_file),
        read_columns(run.metrics_file),
        read_jsonl(run.eval_file),
    )
    seconds = {
        part: float(sum(values)) for part, values in seconds_per_part(columns, evals).items()
    }
    stages, sections = _stages(rows), _sections(run, rows, evals, seconds)
    warnings = _warnings(rows, stages)
    plots = write_plots(columns, evals, run.plots_dir, title)
    run.summary_file.write_text(
        _markdown(title, sections, stages, warnings, plots), encoding="utf-8"
    )
    _print(title, sections, stages, warnings)
    Console().print(Text(f"Report: {run.summary_file}"), soft_wrap=True)


def _sections(run: RunDirectory, rows: Rows, evals: Rows, seconds: dict[str, float]) -> Sections:
    """The outcome of a run under headings, for the terminal and for summary.md; what was not
    measured is left out.
    """
    status, facts, steps = run.status(), run.facts(), rows[-1]["step"] if rows else 0
    state = {"running": "running, or killed before it could say so"}.get(
        status["state"], status["state"]
    )
    wall, scored = _wall_seconds(run, status), [row for row in evals if "accuracy" in row]
    which = (
        {"first": scored[0], "last": scored[-1], "best": max(scored, key=itemgetter("accuracy"))}
        if scored
        else {}
    )
    learning = [(f"held-out accuracy, {name}", _accuracy(row)) for name, row in which.items()]
    if rewards := [row["reward/mean"] for row in rows if "reward/mean" in row]:
        learning.append(
            (
                "training reward",
                f"{rewards[0]:.3f} in the first step, {rewards[-1]:.3f} in the last",
            )
        )
    k3 = [row["mismatch/k3"] for row in rows if math.isfinite(row.get("mismatch/k3", math.nan))]
    mismatch = (
        [("k3", f"mean {sum(k3) / len(k3):.2e}, largest {max(k3):.2e} nats per token")]
        if k3
        else []
    )
    if flipped := [
        row["routing/flipped"]
        for row in rows
        if math.isfinite(row.get("routing/flipped", math.nan))
    ]:
        mismatch += [
            (
                "routes replayed",
                f"{sum(row.get('routing/replayed_tokens', 0) for row in rows):,.0f} tokens",
            ),
            (
                "experts not the trainer's own",
                (
                    f"mean {sum(flipped) / len(flipped):.2%}, largest {max(flipped):.2%} of the "
                    "choices"
                ),
            ),
        ]
    mismatch += _quantization(rows)
    noise, layers = [], _noisy_layers(rows)
    if syncs := sum("aqn/sigma" in row for row in rows):
        extremes = sorted({min(layers), max(layers)}) if layers else [0]
        noise = [
            ("syncs with noise on", f"{len(layers)} of {syncs}"),
            ("noisy layers per sync", " to ".join(map(str, extremes))),
        ]
    lora = [
        (target, f"{counts['modules']} modules, {counts['parameters']:,} parameters")
        for target, counts in facts.get("lora", {}).items()
    ]
    lora += [
        (f"{target} in the rollout engine", f"moved {size['moved']:.3g} of {size['expected']:.3g}")
        for target, size in facts.get("lora_movement", {}).items()
    ]
    time = []
    if total := sum(seconds.values()):
        time = [
            (part, f"{of / steps:.3g} s per step ({of / total:.0%})")
            for part, of in seconds.items()
        ]
        time.append(("a step", f"{total / steps:.3g} s"))
        if "engine_start_seconds" in facts:
            time.append(("engine start", _duration(facts["engine_start_seconds"])))
        time.append(("all outside the steps", _duration(max(0.0, wall - total))))
    sections = {
        "Run": [
            ("state", state if status["reason"] is None else f"{state}: {status['reason']}"),
            ("steps", str(steps)),
            ("wall time", _duration(wall)),
        ],
        "Learning": learning,
        "Train/rollout mismatch": mismatch,
        NOISE_HEADING: noise,
        "LoRA": lora,
        "Time": time,
    }
    return {heading: lines for heading, lines in sections.items() if lines}


def _quantization(rows: Rows) -> list[tuple[str, str]]:
    """What the rollouts' format did, if they had one."""

    def means(name: str) -> list[float]:
        found = [row[name] for row in rows if math.isfinite(row.get(name, math.nan))]
        return [sum(found) / len(found)] if found else []

    lines = [
        ("relative error of quantised weights", f"mean {error:.3g}")
        for error in means(WEIGHT_ERROR)
    ]
    for name, label in (
        ("", "of the format alone"),
        ("noise_", "of the noise alone"),
        ("together_", "of both"),
    ):
        lines += [
            (f"k3 {label}", f"mean {k3:.2e} nats per token")
            for k3 in means(f"quantization/{name}k3")
        ]
    return lines + [
        ("noise of the format's k3", f"sigma {sigma:.2g}, mean")
        for sigma in means("quantization/equivalent_sigma")
    ]


def _noisy_layers(rows: Rows) -> list[int]:
    """How many layers each noisy step put noise on."""
    return [row.get("aqn/layers", 0) for row in rows if row.get("aqn/sigma", 0) > 0]


def _stages(rows: Rows) -> list[Rows]:
    """Stretches of steps in one stage of the schedule; one that restarts its decay each epoch comes
    back to a stage.
    """
    noise = [row for row in rows if "aqn/sigma" in row]
    return [list(stretch) for _, stretch in groupby(noise, key=lambda row: row.get("aqn/stage", 0))]


def _mean(stage: Rows, name: str, otherwise: str = "") -> float:
    return sum(row.get(name, row.get(otherwise, math.nan)) for row in stage) / len(stage)


def _stage_cells(stage: Rows) -> tuple[str, ...]:
    expected = _mean(stage, "aqn/expected_std", "aqn/sigma")
    return (
        str(stage[0].get("aqn/stage", 0)),
        f"{stage[0]['step']}-{stage[-1]['step']}",
        f"{expected:.2e}" if expected else "off",
        f"{_mean(stage, 'aqn/measured_std'):.2e}",
        f"{_mean(stage, 'aqn/changed_fraction'):.1%}",
    )


def _wall_seconds(run: RunDirectory, status: dict[str, Any]) -> float:
    """From the start to the end, or to the last sign of life of a run that did not write an end."""
    started = datetime.fromisoformat(status["started"]).timestamp()
    files = [file for file in (run.status_file, run.metrics_file, run.eval_file) if file.exists()]
    ended = (
        datetime.fromisoformat(status["ended"]).timestamp()
        if status["ended"]
        else max(file.stat().st_mtime for file in files)
    )
    return max(0.0, ended - started)  # a clock may be set back meanwhile


def _warnings(rows: Rows, stages: Sequence[Rows]) -> list[str]:
    """Things that look like success from afar and are not."""
    nonfinite: dict[str, int] = {}
    for row in rows:
        for name in (name for name, value in row.items() if not math.isfinite(value)):
            nonfinite.setdefault(name, row["step"])
    warnings = [
        f"{name} was NaN or infinite, first in step {step}" for name, step in nonfinite.items()
    ]
    last = rows[-1]["step"] if rows else 0
    if lost := sorted(set(range(1, last + 1)) - {row["step"] for row in rows}):
        warnings.append(
            f"metrics.jsonl has no row for {len(lost)} of {last} steps: {', '.join(map(str, lost))}"
        )
    rewards, layers = (
        [row["reward/mean"] for row in rows if "reward/mean" in row],
        _noisy_layers(rows),
    )
    if rewards and not any(rewards):
        warnings.append(
            "the reward was 0 at every step: look at rollouts.jsonl, and at the verifier's method"
        )
    if 0 in layers:
        warnings.append("AQN was on, but a sync put noise on no layer")
    if stages and not layers:
        warnings.append("AQN was on, but no step had any noise: this run is a plain baseline")
    for stage in stages:
        measured, expected = (
            _mean(stage, "aqn/measured_std"),
            _mean(stage, "aqn/expected_std", "aqn/sigma"),
        )
        if measured < 0.8 * expected:
            warnings.append(
                f"AQN stage {stage[0].get('aqn/stage', 0)}: the measured std {measured:.1e} is far "
                f"below the nominal one, {expected:.1e} (small noise is lost when weights are "
                "rounded)"
            )
    return warnings


def markdown_table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    """The lines of a table.

    >>> markdown_table(("a", "b"), [("1|2", "3")])
    ['| a | b |', '| --- | --- |', '| 1\\\\|2 | 3 |']
    """
    cells = [
        [cell.replace("|", "\\|").replace("\n", "<br>") for cell in row] for row in (header, *rows)
    ]
    return [f"| {' | '.join(row)} |" for row in (cells[0], ["---"] * len(cells[0]), *cells[1:])]


def _markdown(
    title: str, sections: Sections, stages: list[Rows], warnings: list[str], plots: list[Path]
) -> str:
    lines = [
        f"# {title}",
        "",
        *(line for warning in warnings for line in (f"> **Warning:** {warning}", "")),
    ]
    for heading, entries in sections.items():
        lines += [f"## {heading}", "", *markdown_table(("", ""), entries), ""]
        if heading == NOISE_HEADING:
            lines += [*markdown_table(STAGE_HEADER, map(_stage_cells, stages)), ""]
    return "\n".join(
        lines + [line for plot in plots for line in (f"![{plot.stem}](plots/{plot.name})", "")]
    )


def _print(title: str, sections: Sections, stages: list[Rows], warnings: list[str]) -> None:
    console, table = (
        Console(),
        Table(title=title, title_justify="left", show_header=False, title_style="bold"),
    )
    table.add_column(style="cyan", no_wrap=True)
    table.add_column()
    for heading, entries in sections.items():
        table.add_section()
        table.add_row(Text(heading, style="bold"), "")
        for label, text in entries:
            table.add_row(f"  {label}", Text(text))
    console.print(table)
    if stages:
        table = Table(
            *STAGE_HEADER,
            title=f"{NOISE_HEADING} by stage",
            title_justify="left",
            title_style="bold",
        )
        for stage in stages:
            table.add_row(*_stage_cells(stage))
        console.print(table)
    for warning in warnings:
        console.print(Text(f"Warning: {warning}", style="yellow"))


def _accuracy(row: dict[str, Any]) -> str:
    has_error = math.isfinite(row.get("standard_error", math.nan))
    error = f" ± {row['standard_error']:.3f} (standard error)" if has_error else ""
    return f"{row['accuracy']:.3f}{error} at step {row['step']}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return (
        f"{hours} h {minutes} min"
        if hours
        else f"{minutes} min {rest} s"
        if minutes
        else f"{seconds:.1f} s"
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m mindspeed_qerl.runs.report",
        description="Write summary.md and plots/*.png of a run again, from its files, "
        "and print the summary. Works for runs that were killed.",
    )
    parser.add_argument(
        "run_dir", type=Path, help="a run directory, <root>/<name>/<date>_<time>_seed<seed>"
    )
    try:
        write_report(RunDirectory.open(parser.parse_args().run_dir))
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
