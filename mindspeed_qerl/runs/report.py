"""The report of a run, from its files alone, so that a run that was killed gets one too.

    python -m mindspeed_qerl.runs.report RUN_DIR

writes RUN_DIR/summary.md and RUN_DIR/plots/*.png, and prints the summary.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.markdown import Markdown

from mindspeed_qerl.common.entry import quietly
from mindspeed_qerl.common.markdown import markdown_table

from .description import Content
from .directory import RunDirectory
from .metrics import Rows, read_jsonl, series
from .plots import write_plots
from .progress import accuracy_words

METRICS = (
    "reward/mean",
    "mismatch/k3",
    "sync/arrived",
    "routing/replayed_tokens",
    "routing/flipped",
    "quantization/weight_error",
    "time/rollout",
    "time/reward",
    "time/logprobs",
    "time/update",
    "time/sync",
    "time/step",
)
NOISE = {
    "aqn/layers": "layers",
    "aqn/expected_std": "expected std",
    "aqn/measured_std": "measured std",
    "aqn/changed_fraction": "changed",
}
Table = Sequence[Sequence[str]]


def write_report(run: RunDirectory) -> None:
    """Write summary.md and the plots of a run, and print the summary; ValueError when one of its
    files is damaged.
    """
    title = " / ".join(run.path.absolute().parts[-2:])
    rows = read_jsonl(run.metrics_file)
    evals = read_jsonl(run.eval_file)
    lines = [f"# {title}", ""]
    for warning in _warnings(rows):
        lines += [f"> **Warning:** {warning}", ""]
    tables = {
        ("run", ""): _run(run),
        ("held-out accuracy", "after step", "accuracy"): _accuracy(evals),
        ("metric", "first", "last", "mean", "largest"): _metrics(rows),
        ("noise stage", "steps", *NOISE.values()): _noise(rows),
        ("LoRA target", "modules", "parameters", "of its update in vLLM"): _lora(run.facts()),
    }
    for header, table in tables.items():
        if table:
            lines += [*markdown_table(header, table), ""]
    Console().print(Markdown("\n".join(lines)))
    plots, missing = write_plots(rows, evals, run.plots_dir, title)
    lines += [f"![{plot.stem}](plots/{plot.name})\n" for plot in plots]
    lines += [f"> **Missing:** {reason}\n" for reason in missing]
    run.summary_file.write_text("\n".join(lines), encoding="utf-8")
    for reason in missing:
        print(f"warning: {reason}", file=sys.stderr)
    print(f"Report: {run.summary_file}")


def _run(run: RunDirectory) -> Table:
    status = run.status()
    facts = run.facts()
    state = status["state"]
    if state == "running":
        state = "running, or killed"
    if status["reason"]:
        state += f": {status['reason']}"
    table = [("state", state), ("steps", str(status["step"]))]
    seconds = {
        "seconds to start": facts.get("engine_start_seconds"),
        "seconds in all": status.get("seconds"),  # of every process that wrote the run
    }
    return table + [(label, f"{value:.3g}") for label, value in seconds.items() if value]


def _accuracy(evals: Rows) -> Table:
    if not evals:
        return []
    best = max(evals, key=itemgetter("accuracy"))
    chosen = {"first": evals[0], "best": best, "last": evals[-1]}
    return [(which, str(row["step"]), accuracy_words(row)) for which, row in chosen.items()]


def _metrics(rows: Rows) -> Table:
    table = []
    for name in METRICS:
        _, values = series(rows, name)
        if len(values):
            numbers = (values[0], values[-1], values.mean(), values.max())
            table.append((name, *map("{:.3g}".format, numbers)))
    return table


def _noise(rows: Rows) -> Table:
    """Means over consecutive steps in one stage of the schedule; a schedule that restarts returns
    to a stage.
    """
    noisy = [row for row in rows if "aqn/sigma" in row]
    table = []
    for stage, group in groupby(noisy, key=itemgetter("aqn/stage")):
        steps = list(group)
        cells = [str(stage), f"{steps[0]['step']}-{steps[-1]['step']}"]
        for name in NOISE:
            mean = np.mean([row.get(name, math.nan) for row in steps])
            cells.append(f"{mean:.3g}")
        table.append(cells)
    return table


def _lora(facts: Content) -> Table:
    table = []
    for target, count in facts.get("lora", {}).items():
        cells = [target, str(count["modules"]), f"{count['parameters']:,}", "not seen"]
        movement = facts.get("lora_movement", {}).get(target, {})
        if "arrived" in movement:
            cells[-1] = f"{movement['arrived']:.3f} ± {movement['arrived_error']:.3f}"
        table.append(cells)
    return table


def _warnings(rows: Rows) -> list[str]:
    """Returns what a look at the final accuracy would miss."""
    first: dict[str, int] = {}
    for row in rows:
        for name, value in row.items():
            if not math.isfinite(value):
                first.setdefault(name, row["step"])
    warnings = [f"{name} was NaN or infinite, first in step {step}" for name, step in first.items()]
    rewards = [row["reward/mean"] for row in rows if "reward/mean" in row]
    if rewards and not any(rewards):
        warnings.append(
            "the reward was 0 at every step: look at rollouts.jsonl, and at the verifier's method"
        )
    return warnings


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
    sys.exit(quietly(main))
