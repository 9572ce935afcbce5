"""A comparison as text and as a picture."""

import json
import re
import textwrap
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes

from mindspeed_qerl.common.files import json_text
from mindspeed_qerl.compare.comparison import SIGNIFICANCE, BySteps, Comparison, Verdict, shared
from mindspeed_qerl.compare.statistics import LEAST_SEEDS, Estimate
from mindspeed_qerl.runs.plots import BLUE, GREEN, ORANGE, RED, STYLE, Panel, draw_series, stack
from mindspeed_qerl.runs.report import markdown_table

COLORS = (BLUE, RED, GREEN, ORANGE, "#CC79A7", "#56B4E9", "#999999", "#000000")
MARKERS = "osD^vPX*"
LEGEND_WIDTH = 110  # characters, at its font size, in the width of the figure
EXPLAINED = (
    "Accuracy on the held-out questions, noise off. In brackets: 95 % intervals over seeds and "
    "questions (of the training reward: over seeds)."
)


def write_comparison(comparison: Comparison, folder: Path) -> list[Path]:
    """Write comparison.md, comparison.json and comparison.png into `folder`; returns them."""
    folder.mkdir(parents=True, exist_ok=True)
    files = list(map(folder.joinpath, ("comparison.md", "comparison.json", "comparison.png")))
    picture = "\n![accuracy, difference and reward by step](comparison.png)\n"
    files[0].write_text(to_markdown(comparison) + picture, encoding="utf-8")
    files[1].write_text(json_text(comparison.to_json()), encoding="utf-8")
    draw(comparison, files[2])
    return files


def sentence(verdict: Verdict, questions: int, step: int) -> str:
    """A verdict in words."""
    difference, seeds = verdict.difference, len(verdict.seeds)
    groups, over = f"**{verdict.group}** beside {verdict.baseline}", _count(seeds, "seed")
    if difference is None or verdict.word == "no verdict":
        return f"{groups}: no verdict, {over} in common; it takes {LEAST_SEEDS}"
    sharing, limit = round(SIGNIFICANCE / verdict.limit), ""
    if sharing > 1:
        limit = f" (below {verdict.limit:.2g} counts: {sharing} groups share the 5 %)"
    text = (
        f"{groups}: **{verdict.word}** after step {step}, {interval(difference, '+')}, "
        f"p = {difference.p:.2g}{limit}, {over} in common, {_count(questions, 'question')}"
    )
    if verdict.word != "not distinguishable":
        return text
    if difference.mean == 0:
        return f"{text}. There is no difference at all"
    if verdict.seeds_needed is None:
        return f"{text}. Detecting this difference needs more questions, or thousands of seeds"
    more = _count(max(verdict.seeds_needed - seeds, 1), "more seed")
    return f"{text}. Detecting this difference with a power of 80 % needs about {more}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def to_markdown(comparison: Comparison) -> str:
    """The comparison as a page. Its tables fit a terminal of 80 columns, unless many groups differ
    in values that are long.
    """
    groups, last = comparison.groups, comparison.steps[-1]
    names = [group.name for group in groups]
    lines = ["# Comparison", "", EXPLAINED, "", "## Verdict", ""]
    for verdict in comparison.verdicts:
        lines.append(f"- {sentence(verdict, len(comparison.questions), last)}")
    if not comparison.verdicts:
        lines.append("- one group only: nothing to compare it with")
    lines += ["", "## Groups", "", *_groups(comparison)]
    if len(groups) > 1:
        lines += ["", "They differ in:", "", *_settings(comparison)]
    if comparison.left_out:
        runs = len(comparison.left_out) + sum(len(group.runs) for group in groups)
        lines += ["", f"## Left out: {len(comparison.left_out)} of {runs} runs", ""]
        lines += [f"- {run.path}: {'; '.join(run.faults)}" for run in comparison.left_out]
    noted = []
    for run in chain.from_iterable(group.runs for group in groups):
        if run.notes:
            noted.append(f"- {run.path}: {'; '.join(run.notes)}")
    if noted:
        lines += ["", "## Notes", "", *noted]
    columns = {"accuracy": comparison.accuracy}
    if len(groups) > 1:
        columns[f"difference to {names[0]}"] = comparison.difference
    lines += ["", "## Accuracy by step", "", *_by_step(columns, comparison.steps, names)]
    if all(comparison.reward.values()):
        steps = shared(comparison.reward.values())
        steps = shared([steps, comparison.steps]) or steps[-1:]
        table = _by_step({"training reward": comparison.reward}, steps, names)
        lines += ["", "## Training reward by step", "", *table]
    # a pattern's star in a name is no emphasis
    return re.sub(r"(?<!\*)\*(?!\*)", r"\\*", "\n".join(lines)) + "\n"


def _groups(comparison: Comparison) -> list[str]:
    steps = sorted({comparison.steps[0], comparison.steps[-1]})
    header, rows = ["group", "seeds"], []
    for step in steps:
        header.append(f"accuracy after step {step}")
    for group in comparison.groups:
        accuracies = [interval(comparison.accuracy[group.name][step]) for step in steps]
        rows.append([group.name, ", ".join(map(str, group.seeds)), *accuracies])
    return markdown_table(header, rows)


def _settings(comparison: Comparison) -> list[str]:
    rows = [["key"]] + [[key] for key in comparison.differing]
    for group in comparison.groups:
        rows[0].append(group.name)
        for row in rows[1:]:
            key = row[0]
            row.append(json.dumps(group.config[key]) if key in group.config else "-")
    return markdown_table(rows[0], rows[1:])


def _by_step(columns: dict[str, BySteps], steps: Sequence[int], names: list[str]) -> list[str]:
    """A table with a row for each step and group; a group that a column lacks has an empty cell."""
    rows = []
    for step in steps:
        for name in names:
            cells = []
            for title, estimates in columns.items():
                value = estimates.get(name, {}).get(step)
                sign = "+" if title.startswith("difference") else ""
                cells.append(interval(value, sign) if value else "")
            rows.append([str(step) if name == names[0] else "", name, *cells])
    return markdown_table(["step", "group", *columns], rows)


def _ends(by_step: dict[int, Estimate]) -> np.ndarray:
    """[3, steps]: means, and the lower and upper ends of their intervals."""
    return np.array([(value.mean, value.low, value.high) for value in by_step.values()]).T


def draw(comparison: Comparison, file: Path) -> None:
    """Accuracy, its difference to the baseline, and training reward by step; 95 % intervals."""
    names = [group.name for group in comparison.groups]
    colors = dict(zip(names, COLORS * len(names)))
    markers = dict(zip(names, MARKERS * len(names)))
    # side by side, not on top of each other
    offset = 0.012 * (comparison.steps[-1] - comparison.steps[0])

    def draw_bars(axes: Axes, title: str, estimates: BySteps) -> None:
        axes.set(title=title)
        for number, (name, by_step) in enumerate(estimates.items()):
            shift = offset * (number - (len(estimates) - 1) / 2)
            means, low, high = _ends(by_step)
            style = dict(color=colors[name], marker=markers[name], markersize=4)
            bars = dict(yerr=np.array([means - low, high - means]), capsize=3, elinewidth=1.2)
            axes.errorbar(np.array([*by_step]) + shift, means, **bars, **style, label=name)

    def accuracy(axes: Axes) -> None:
        title = "Held-out accuracy (noise off; bars: 95% interval over seeds and questions)"
        draw_bars(axes, title, comparison.accuracy)

    def difference(axes: Axes) -> None:
        axes.axhline(0, color="black", linewidth=1)
        title = f"Difference of accuracy to {names[0]}, paired by seed and question"
        draw_bars(axes, title, comparison.difference)

    def reward(axes: Axes) -> None:
        axes.set(title="Training reward (mean over seeds; of a long run also over steps)")
        for name, values in comparison.reward.items():
            draw_series(axes, np.array([*values]), _ends(values)[0], colors[name])

    panels: list[Panel] = [accuracy]
    if any(comparison.difference.values()):
        panels.append(difference)
    if all(comparison.reward.values()):
        panels.append(reward)
    with mpl.rc_context(STYLE):
        figure = stack(panels, comparison.steps, panel_height=2.8)
        assert figure, "there are panels"
        legends = []
        for group in comparison.groups:
            legends.append(textwrap.fill(group.legend.replace("$", r"\$"), LEGEND_WIDTH))
        handles = figure.axes[0].get_legend_handles_labels()[0]
        figure.legend(handles, legends, loc="outside lower center", fontsize=8)
        figure.savefig(file, dpi=130)


def interval(value: Estimate, sign: str = "") -> str:
    """Mean and interval; `sign` "+" for differences."""
    return f"{value.mean:{sign}.3f} [{value.low:{sign}.3f}, {value.high:{sign}.3f}]"
