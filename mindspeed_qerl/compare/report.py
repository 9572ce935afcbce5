"""A comparison as text and as a picture."""

from dataclasses import asdict, replace
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes

from mindspeed_qerl.common.files import json_text
from mindspeed_qerl.compare.comparison import SIGNIFICANCE, BySteps, Comparison, Verdict
from mindspeed_qerl.compare.statistics import LEAST_SEEDS, Estimate
from mindspeed_qerl.runs.plots import COLORS, STYLE, draw_series, stack
from mindspeed_qerl.runs.report import markdown_table

EXPLAINED = (
    "Accuracy on the held-out questions, noise off. In brackets: 95 % intervals over seeds and "
    "questions."
)


def write_comparison(comparison: Comparison, folder: Path) -> list[Path]:
    """Write comparison.md, comparison.json and comparison.png into `folder`; returns them."""
    folder.mkdir(parents=True, exist_ok=True)
    page, data, picture = [folder / f"comparison.{kind}" for kind in ("md", "json", "png")]
    link = "\n![accuracy, difference and reward by step](comparison.png)\n"
    page.write_text(to_markdown(comparison) + link, encoding="utf-8")
    numbers = replace(comparison, groups={}, left_out=[], questions=[])
    data.write_text(json_text(asdict(numbers)), encoding="utf-8")
    draw(comparison, picture)
    return [page, data, picture]


def sentence(verdict: Verdict, questions: int, step: int) -> str:
    """A verdict in words."""
    difference, seeds = verdict.difference, len(verdict.seeds)
    groups = f"**{verdict.group}** beside {verdict.baseline}"
    if difference is None or verdict.word == "no verdict":
        return f"{groups}: no verdict, {seeds} seeds in common; it takes {LEAST_SEEDS}"
    sharing, limit = round(SIGNIFICANCE / verdict.limit), ""
    if sharing > 1:
        limit = f" (below {verdict.limit:.2g} counts: {sharing} groups share the 5 %)"
    text = (
        f"{groups}: **{verdict.word}** after step {step}, {interval(difference, '+')}, "
        f"p = {difference.p:.2g}{limit}, {seeds} seeds in common, {questions} questions"
    )
    if verdict.word != "not distinguishable":
        return text
    if verdict.seeds_needed is None:
        return f"{text}. Detecting this difference needs more questions, or thousands of seeds"
    more = max(verdict.seeds_needed - seeds, 1)
    return f"{text}. Detecting this difference with a power of 80 % needs about {more} more seeds"


def to_markdown(comparison: Comparison) -> str:
    """The comparison as a page."""
    lines = ["# Comparison", "", EXPLAINED, "", "## Verdict", ""]
    for verdict in comparison.verdicts:
        text = sentence(verdict, len(comparison.questions), comparison.steps[-1])
        lines.append(f"- {text}")
    if not comparison.verdicts:
        lines.append("- one group only: nothing to compare it with")
    lines += ["", "## Accuracy by step", "", *_by_step(comparison)]
    lines += ["", "## Runs", ""]
    for name, runs in comparison.groups.items():
        for run in runs:
            lines.append("; ".join([f"- {name}: {run.path}", *run.notes]))
    for run in comparison.left_out:
        lines.append(f"- left out: {run.path}: {'; '.join(run.faults)}")
    return "\n".join(lines) + "\n"


def _by_step(comparison: Comparison) -> list[str]:
    """A table with a row for each step and group."""
    baseline, *_ = comparison.groups
    rows = []
    for step in comparison.steps:
        for name, accuracy in comparison.accuracy.items():
            cells = [str(step), name, interval(accuracy[step]), ""]
            if difference := comparison.difference.get(name):
                cells[-1] = interval(difference[step], "+")
            rows.append(cells)
    return markdown_table(["step", "group", "accuracy", f"difference to {baseline}"], rows)


def draw(comparison: Comparison, file: Path) -> None:
    """Accuracy, its difference to the baseline, and training reward by step; 95 % intervals."""
    names = list(comparison.groups)
    colors = dict(zip(names, COLORS * len(names)))
    # side by side, not on top of each other
    offset = 0.012 * (comparison.steps[-1] - comparison.steps[0])

    def draw_bars(axes: Axes, estimates: BySteps) -> None:
        for number, (name, by_step) in enumerate(estimates.items()):
            steps = np.array(list(by_step)) + number * offset
            means = [value.mean for value in by_step.values()]
            margins = [value.high - value.mean for value in by_step.values()]
            style = dict(color=colors[name], marker="o", markersize=4, capsize=3)
            axes.errorbar(steps, means, yerr=margins, label=name, **style)

    def accuracy(axes: Axes) -> None:
        axes.set(title="Held-out accuracy (noise off; bars: 95% interval over seeds and questions)")
        draw_bars(axes, comparison.accuracy)

    def difference(axes: Axes) -> None:
        axes.set(title=f"Difference of accuracy to {names[0]}, paired by seed and question")
        axes.axhline(0, color="black", linewidth=1)
        draw_bars(axes, comparison.difference)

    def reward(axes: Axes) -> None:
        axes.set(title="Training reward (mean over seeds; of a long run also over steps)")
        for name, rewards in comparison.rewards.items():
            steps, values = np.array(list(rewards.items())).T
            draw_series(axes, steps, values, colors[name])

    panels = [accuracy]
    if any(comparison.difference.values()):
        panels.append(difference)
    if all(comparison.rewards.values()):
        panels.append(reward)
    with mpl.rc_context(STYLE):
        figure = stack(panels)
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", fontsize=8)
        figure.savefig(file, dpi=130)


def interval(value: Estimate, sign: str = "") -> str:
    """Mean and interval; `sign` "+" for differences."""
    return f"{value.mean:{sign}.3f} [{value.low:{sign}.3f}, {value.high:{sign}.3f}]"
