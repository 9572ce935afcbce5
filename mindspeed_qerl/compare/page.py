"""A comparison as text and as a picture."""

import math
import textwrap
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes

from mindspeed_qerl.common.markdown import markdown_table
from mindspeed_qerl.runs.plots import COLORS, STYLE, stack

from .comparison import EVALUATED_OTHERWISE, SIGNIFICANCE, BySteps, Comparison, Verdict
from .statistics import LEAST_SEEDS, Estimate

LONGEST_NAME = 20  # characters of a group's name in a table of 80 columns
EVALUATE_ALIKE = (
    "To compare runs that were evaluated otherwise: tools/evaluate.py --run RUN --name NAME with "
    "the same options for each, then compare_runs.py --evaluation NAME."
)


def write_comparison(comparison: Comparison, folder: Path) -> list[Path]:
    """Write comparison.md and comparison.png into `folder`; returns them."""
    folder.mkdir(parents=True, exist_ok=True)
    page = folder / "comparison.md"
    picture = folder / "comparison.png"
    link = "\n![accuracy and difference by step](comparison.png)\n"
    page.write_text(to_markdown(comparison) + link, encoding="utf-8")
    draw(comparison, picture)
    return [page, picture]


def labels_of(comparison: Comparison) -> dict[str, str]:
    """Returns what each group is called beside the numbers: its name, or a number if one name is
    long.
    """
    names = list(comparison.groups)
    if max(map(len, names)) <= LONGEST_NAME:
        return dict(zip(names, names))
    return {name: f"G{number}" for number, name in enumerate(names, 1)}


def sentence(verdict: Verdict, questions: int, step: int, labels: Mapping[str, str]) -> str:
    """A verdict in words; labels: what the groups are called, by name."""
    difference = verdict.difference
    seeds = len(verdict.seeds)
    groups = f"**{labels[verdict.group]}** beside {labels[verdict.baseline]}"
    if difference is None or seeds < LEAST_SEEDS:
        return f"{groups}: no verdict, {seeds} seeds in common; it takes {LEAST_SEEDS}"
    if verdict.word == "no verdict":
        return (
            f"{groups}: no verdict, {difference.mean:+.3f} for every seed and question, so that "
            "nothing says how large chance is; it takes more questions or answers"
        )
    sharing = round(SIGNIFICANCE / verdict.limit)
    limit = ""
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
    labels = labels_of(comparison)
    seeds = {len(runs) for runs in comparison.groups.values()}
    over = "questions, of one seed"
    if seeds != {1}:
        alone = "; where a group has one seed, over questions alone" if 1 in seeds else ""
        over = f"seeds and questions{alone}"
    explained = (
        f"Accuracy on the held-out questions, noise off. In brackets: 95 % intervals over {over}."
    )
    lines = ["# Comparison", "", explained, ""]
    lines += [f"- **{label}**: {name}" for name, label in labels.items() if name != label]
    lines += ["", "## Verdict", ""]
    for verdict in comparison.verdicts:
        text = sentence(verdict, len(comparison.questions), comparison.steps[-1], labels)
        lines.append(f"- {text}")
    if not comparison.verdicts:
        lines.append("- one group only: nothing to compare it with")
    baseline, *_ = comparison.groups
    header = ["step", "group", "accuracy", f"difference to {labels[baseline]}"]
    rows = []
    for step in comparison.steps:
        for name, accuracy in comparison.accuracy.items():
            cells = [str(step), labels[name], interval(accuracy[step]), ""]
            if difference := comparison.difference.get(name):
                cells[-1] = interval(difference[step], "+")
            rows.append(cells)
    lines += ["", "## Accuracy by step", "", *markdown_table(header, rows)]
    lines += ["", "## Runs", ""]
    for name, runs in comparison.groups.items():
        for run in runs:
            lines.append("; ".join([f"- {labels[name]}: {run.path}", *run.notes]))
    for run in comparison.left_out:
        lines.append(f"- left out: {run.path}: {'; '.join(run.faults)}")
    if EVALUATED_OTHERWISE in "".join(lines):
        lines += ["", EVALUATE_ALIKE]
    return "\n".join(lines) + "\n"


def draw(comparison: Comparison, file: Path) -> None:
    """Accuracy and its difference to the baseline by step, with 95 % intervals."""
    labels = labels_of(comparison)
    baseline, *_ = labels
    # side by side, not on top of each other
    offset = 0.012 * (comparison.steps[-1] - comparison.steps[0] or 1)

    def draw_bars(title: str, ylabel: str, estimates: BySteps, axes: Axes) -> None:
        axes.set(title=title, ylabel=ylabel)
        for number, name in enumerate(labels):
            by_step = estimates.get(name, {})
            steps = np.array(list(by_step)) + number * offset
            means = [value.mean for value in by_step.values()]
            margins = np.nan_to_num([value.high - value.mean for value in by_step.values()])
            axes.errorbar(
                steps,
                means,
                yerr=margins,
                color=COLORS[number % len(COLORS)],
                linestyle="--" if number >= len(COLORS) else "-",
                marker="o",
                markersize=4,
                capsize=3,
            )

    title = "Held-out accuracy (noise off; bars: 95 % interval)"
    panels = [partial(draw_bars, title, "accuracy", comparison.accuracy)]
    if any(comparison.difference.values()):
        title = f"Difference of accuracy to {labels[baseline]}"
        panels.append(partial(draw_bars, title, "difference", comparison.difference))
    in_legend = []
    for name, label in labels.items():
        words = name if name == label else f"{label}: {name}"
        in_legend.append(textwrap.fill(words, 100))
    lines = "\n".join(in_legend).count("\n") + 1
    with mpl.rc_context(STYLE):
        figure = stack(panels, below=0.2 + 0.18 * lines)
        bars = figure.axes[0].containers
        figure.legend(bars, in_legend, loc="outside lower left", fontsize=8, handlelength=3)
        figure.savefig(file, dpi=130)


def interval(value: Estimate, sign: str = "") -> str:
    """Mean and interval, if there is one; `sign` "+" for differences."""
    mean = f"{value.mean:{sign}.3f}"
    if math.isnan(value.low):
        return mean
    return f"{mean} [{value.low:{sign}.3f}, {value.high:{sign}.3f}]"
