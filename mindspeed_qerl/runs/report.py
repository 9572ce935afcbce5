"""The report of a run, from its files alone, so that a run that was killed gets one too.

    python -m mindspeed_qerl.runs.report RUN_DIR

writes RUN_DIR/summary.md and RUN_DIR/plots/*.png, and prints the summary.
"""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindspeed_qerl.runs.directory import RunDirectory
from mindspeed_qerl.runs.metrics import missing_steps, read_columns, read_jsonl
from mindspeed_qerl.runs.plots import seconds_per_part, write_plots

if TYPE_CHECKING:
    from rich.console import Console

NOISE_HEADING = "AQN noise"
STAGE_HEADER = ("stage", "steps", "nominal std", "measured std", "weights changed")


@dataclass(frozen=True)
class NoiseStage:
    """A stretch of steps in one stage of the schedule; sigma, stds and fraction are means over it, NaN when not
    logged. The expected std is sigma, unless multipliers scale it."""

    stage: int
    first_step: int
    last_step: int
    sigma: float
    expected_std: float
    measured_std: float
    changed_fraction: float


@dataclass(frozen=True)
class NoiseSummary:
    """What AQN did over a run."""

    syncs: int
    noisy_syncs: int
    layers: tuple[int, int]  # fewest and most layers of a noisy sync
    stages: list[NoiseStage]


@dataclass(frozen=True)
class Summary:
    """The outcome of a run. Evaluations are rows of eval.jsonl; seconds are wall time; None where nothing was
    measured."""

    run: Path
    state: str
    reason: str | None
    steps: int
    wall_seconds: float
    first_eval: dict[str, Any] | None
    last_eval: dict[str, Any] | None
    best_eval: dict[str, Any] | None
    first_reward: float | None
    last_reward: float | None
    part_seconds: dict[str, float]  # total over the run
    noise: NoiseSummary | None
    k3: tuple[float, float] | None  # mean and largest train/rollout KL, nats per token
    facts: dict[str, Any]  # facts.json
    warnings: list[str]


def write_report(run_dir: RunDirectory | Path | str, console: Console | None = None) -> Summary:
    """Write summary.md and the plots of a run, and print the summary.

    Raises FileNotFoundError when `run_dir` is no run directory, ValueError when one of its files is damaged.
    """
    from rich.console import Console

    run = RunDirectory.open(run_dir)
    summary = summarize(run)
    title = f"{run.path.absolute().parent.name} / {run.path.absolute().name}"
    plots = write_plots(read_columns(run.metrics_file), read_jsonl(run.eval_file), run.plots_dir, title)
    run.summary_file.write_text(_markdown(summary, title, plots), encoding="utf-8")
    _print(summary, title, console or Console())
    return summary


def summarize(run: RunDirectory) -> Summary:
    """The outcome of a run, read from its files."""
    rows, columns, status = read_jsonl(run.metrics_file), read_columns(run.metrics_file), run.status()
    evals = read_jsonl(run.eval_file)
    scored = [row for row in evals if "accuracy" in row]
    rewards = [row["reward/mean"] for row in rows if "reward/mean" in row]
    k3 = [row["mismatch/k3"] for row in rows if math.isfinite(row.get("mismatch/k3", math.nan))]
    noise = _summarize_noise(rows)
    return Summary(
        run=run.path,
        state=status["state"],
        reason=status["reason"],
        steps=rows[-1]["step"] if rows else 0,
        wall_seconds=_wall_seconds(run, status),
        first_eval=scored[0] if scored else None,
        last_eval=scored[-1] if scored else None,
        best_eval=max(scored, key=lambda row: row["accuracy"], default=None),
        first_reward=rewards[0] if rewards else None,
        last_reward=rewards[-1] if rewards else None,
        part_seconds={part: sum(seconds) for part, seconds in seconds_per_part(columns, evals).items()},
        noise=noise,
        k3=(sum(k3) / len(k3), max(k3)) if k3 else None,
        facts=run.facts(),
        warnings=_warnings(rows, rewards, noise),
    )


def _summarize_noise(rows: list[dict[str, Any]]) -> NoiseSummary | None:
    rows = [row for row in rows if "aqn/sigma" in row]
    if not rows:
        return None
    noisy = [row for row in rows if row["aqn/sigma"] > 0]
    layers = [row.get("aqn/layers", 0) for row in noisy] or [0]
    # Stretches, not stages: a schedule that restarts its decay each epoch comes back to a stage.
    stretches: list[list[dict[str, Any]]] = []
    for row in rows:
        if stretches and stretches[-1][-1].get("aqn/stage") == row.get("aqn/stage"):
            stretches[-1].append(row)
        else:
            stretches.append([row])

    def mean(stretch: list[dict[str, Any]], name: str, otherwise: str = "") -> float:
        return sum(row.get(name, row.get(otherwise, math.nan)) for row in stretch) / len(stretch)

    stages = [
        NoiseStage(
            stage=stretch[0].get("aqn/stage", 0),
            first_step=stretch[0]["step"],
            last_step=stretch[-1]["step"],
            sigma=mean(stretch, "aqn/sigma"),
            expected_std=mean(stretch, "aqn/expected_std", "aqn/sigma"),
            measured_std=mean(stretch, "aqn/measured_std"),
            changed_fraction=mean(stretch, "aqn/changed_fraction"),
        )
        for stretch in stretches
    ]
    return NoiseSummary(len(rows), len(noisy), (min(layers), max(layers)), stages)


def _wall_seconds(run: RunDirectory, status: dict[str, Any]) -> float:
    """From the start to the end, or to the last sign of life of a run that did not write an end."""
    started = datetime.fromisoformat(status["started"]).timestamp()
    if status["ended"]:
        return datetime.fromisoformat(status["ended"]).timestamp() - started
    files = [file for file in (run.status_file, run.metrics_file, run.eval_file) if file.exists()]
    return max(0.0, max(file.stat().st_mtime for file in files) - started)


def _warnings(rows: list[dict[str, Any]], rewards: list[float], noise: NoiseSummary | None) -> list[str]:
    """Things that look like success from afar and are not."""
    warnings = []
    nonfinite: dict[str, int] = {}
    for row in rows:
        for name, value in row.items():
            if not math.isfinite(value):
                nonfinite.setdefault(name, row["step"])
    warnings += [f"{name} was NaN or infinite, first in step {step}" for name, step in nonfinite.items()]
    last = rows[-1]["step"] if rows else 0
    if lost := missing_steps((row["step"] for row in rows), last):
        warnings.append(f"metrics.jsonl has no row for {len(lost)} of {last} steps: {', '.join(map(str, lost))}")
    if rewards and not any(rewards):
        warnings.append("the reward was 0 at every step: look at rollouts.jsonl, and at the verifier's method")
    if noise and noise.noisy_syncs and noise.layers[0] == 0:
        warnings.append("AQN was on, but a sync put noise on no layer")
    if noise and not noise.noisy_syncs:
        warnings.append("AQN was on, but no step had any noise: this run is a plain baseline")
    warnings += [
        f"AQN stage {stage.stage}: the measured std {stage.measured_std:.1e} is far below the nominal one, "
        f"{stage.expected_std:.1e} (small noise is lost when weights are rounded)"
        for stage in (noise.stages if noise else [])
        if stage.measured_std < 0.8 * stage.expected_std
    ]
    return warnings


def _sections(summary: Summary) -> dict[str, list[tuple[str, str]]]:
    """The summary as (label, text) lines under headings, for the terminal and for summary.md."""
    state = {"running": "running, or killed before it could say so"}.get(summary.state, summary.state)
    run = [
        ("state", state if summary.reason is None else f"{state}: {summary.reason}"),
        ("steps", str(summary.steps)),
        ("wall time", _duration(summary.wall_seconds)),
    ]
    evals = {"first": summary.first_eval, "last": summary.last_eval, "best": summary.best_eval}
    learning = [(f"held-out accuracy, {which}", _accuracy(row)) for which, row in evals.items() if row]
    if summary.first_reward is not None:
        reward = f"{summary.first_reward:.3f} in the first step, {summary.last_reward:.3f} in the last"
        learning.append(("training reward", reward))
    mismatch, noise, time = [], [], []
    if summary.k3:
        mismatch = [("k3", "mean {:.2e}, largest {:.2e} nats per token".format(*summary.k3))]
    if summary.noise:
        fewest, most = summary.noise.layers
        noise = [
            ("syncs with noise on", f"{summary.noise.noisy_syncs} of {summary.noise.syncs}"),
            ("noisy layers per sync", str(most) if fewest == most else f"{fewest} to {most}"),
        ]
    if total := sum(summary.part_seconds.values()):
        time = [
            (part, f"{seconds / summary.steps:.3g} s per step ({seconds / total:.0%})")
            for part, seconds in summary.part_seconds.items()
        ]
        time.append(("a step", f"{total / summary.steps:.3g} s"))
        if "engine_start_seconds" in summary.facts:
            time.append(("engine start", _duration(summary.facts["engine_start_seconds"])))
        time.append(("all outside the steps", _duration(max(0.0, summary.wall_seconds - total))))
    lora = [
        (target, f"{counts['modules']} modules, {counts['parameters']:,} parameters")
        for target, counts in summary.facts.get("lora", {}).items()
    ] + [
        (f"{target} in the rollout engine", f"moved {size['moved']:.3g} of {size['expected']:.3g}")
        for target, size in summary.facts.get("lora_movement", {}).items()
    ]
    sections = {
        "Run": run,
        "Learning": learning,
        "Train/rollout mismatch": mismatch,
        NOISE_HEADING: noise,
        "LoRA": lora,
        "Time": time,
    }
    return {heading: lines for heading, lines in sections.items() if lines}


def _stage_rows(noise: NoiseSummary) -> list[tuple[str, ...]]:
    return [
        (
            str(stage.stage),
            f"{stage.first_step}-{stage.last_step}",
            f"{stage.expected_std:.2e}" if stage.sigma else "off",
            f"{stage.measured_std:.2e}",
            f"{stage.changed_fraction:.1%}",
        )
        for stage in noise.stages
    ]


def _markdown(summary: Summary, title: str, plots: list[Path]) -> str:
    lines = [f"# {title}", ""]
    lines += [line for warning in summary.warnings for line in (f"> **Warning:** {warning}", "")]
    for heading, entries in _sections(summary).items():
        lines += [f"## {heading}", "", "| | |", "|---|---|"]
        lines += [f"| {label} | {_cell(text)} |" for label, text in entries]
        lines.append("")
        if heading == NOISE_HEADING and summary.noise:
            lines += [f"| {' | '.join(STAGE_HEADER)} |", "|---" * len(STAGE_HEADER) + "|"]
            lines += [f"| {' | '.join(row)} |" for row in _stage_rows(summary.noise)] + [""]
    lines += [line for plot in plots for line in (f"![{plot.stem}](plots/{plot.name})", "")]
    return "\n".join(lines)


def _print(summary: Summary, title: str, console: Console) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", show_header=False, title_style="bold")
    table.add_column(style="cyan", no_wrap=True)
    table.add_column()
    for heading, entries in _sections(summary).items():
        table.add_section()
        table.add_row(Text(heading, style="bold"), "")
        for label, text in entries:
            table.add_row(f"  {label}", Text(text))
    console.print(table)
    if summary.noise:
        stages = Table(*STAGE_HEADER, title=f"{NOISE_HEADING} by stage", title_justify="left", title_style="bold")
        for row in _stage_rows(summary.noise):
            stages.add_row(*row)
        console.print(stages)
    for warning in summary.warnings:
        console.print(Text(f"Warning: {warning}", style="yellow"))
    console.print(Text(f"Report: {summary.run / 'summary.md'}"), soft_wrap=True)


def _accuracy(row: dict[str, Any]) -> str:
    has_error = math.isfinite(row.get("standard_error", math.nan))
    error = f" ± {row['standard_error']:.3f} (standard error)" if has_error else ""
    return f"{row['accuracy']:.3f}{error} at step {row['step']}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", "<br>")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m mindspeed_qerl.runs.report",
                                     description="Write summary.md and plots/*.png of a run again, from its files, "
                                                 "and print the summary. Works for runs that were killed.")
    parser.add_argument("run_dir", type=Path, help="a run directory, <root>/<name>/<date>_<time>_seed<seed>")
    try:
        write_report(parser.parse_args().run_dir)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
