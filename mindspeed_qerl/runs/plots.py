"""The pictures of a run, drawn from the rows that it left behind.

Colours are Okabe and Ito's, which colour-blind readers can tell apart.
"""

import math
import textwrap
from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

import matplotlib as mpl
import numpy as np
import yaml
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from .metrics import Rows, series

BLUE = "#0072B2"
ORANGE = "#E69F00"
GREEN = "#009E73"
RED = "#D55E00"
COLORS = (BLUE, RED, GREEN, ORANGE, "#CC79A7", "#56B4E9", "#999999", "#000000")
HERE = Path(__file__)
STYLE = mpl.rc_params_from_file(HERE.with_suffix(".mplstyle"), use_default_template=False)
LEAST_SPAN = 0.1  # of the largest value on an axis


class Panel(NamedTuple):
    """Metrics by step, on axes of their own."""

    title: str
    ylabel: str
    labels: dict[str, str]  # of the legend, by metric
    is_log: bool = False  # a log axis; of a metric whose label is |...| absolute values
    above: float = -math.inf  # what is not is left out; on a log axis 0 has no place


# each picture's panels, from above
_ROWS = yaml.safe_load(HERE.with_suffix(".yaml").read_text(encoding="utf-8"))
PICTURES = {name: [Panel(**row) for row in rows] for name, rows in _ROWS.items()}


def write_plots(rows: Rows, evals: Rows, folder: Path, title: str) -> tuple[list[Path], list[str]]:
    """Write learning.png, exploration.png, noise.png, mismatch.png, arrival.png, routing.png and
    time.png, as far as there is something to draw; returns the files, and a sentence for each that
    could not be drawn. rows, evals: of metrics.jsonl and eval.jsonl.
    """
    folder.mkdir(exist_ok=True)
    known = {name for row in rows for name in row}
    files = []
    missing = []
    for name, panels in PICTURES.items():
        logged = [panel for panel in panels if panel.labels.keys() & known]
        drawn = [partial(_draw_panel, rows=rows, panel=panel) for panel in logged]
        if name == "learning" and evals:
            drawn.append(partial(_draw_accuracy, evals=evals))
        if not drawn:
            continue
        file = folder / f"{name}.png"
        try:
            with mpl.rc_context(STYLE):
                figure = stack(drawn)
                heading = textwrap.fill(title, 120)
                figure.suptitle(heading, x=0.01, ha="left", fontsize=8, color="#666666")
                figure.savefig(file, dpi=130)
            files.append(file)
        except Exception as error:  # noqa: BLE001  # a picture is not worth a report
            file.unlink(missing_ok=True)
            missing.append(f"{file.name} cannot be drawn: {type(error).__name__}: {error}")
    return files, missing


def _draw_panel(axes: Axes, rows: Rows, panel: Panel) -> None:
    axes.set(title=panel.title, ylabel=panel.ylabel)
    if panel.is_log:
        axes.set_yscale("log")
    for (name, label), color in zip(panel.labels.items(), COLORS):
        steps, values = series(rows, name)
        if label.startswith("|"):
            values = abs(values)
        drawn = values > panel.above
        steps = steps[drawn]
        values = values[drawn]
        if not len(steps):
            continue
        axes.plot(steps, values, color=color, marker=".", markersize=3, label=label)
    if axes.get_legend_handles_labels()[1]:
        axes.legend()


def _draw_accuracy(axes: Axes, evals: Rows) -> None:
    numbers = itemgetter("step", "accuracy", "interval_low", "interval_high")
    steps, accuracy, low, high = np.array([numbers(row) for row in evals], dtype=float).T
    axes.set(title="Held-out accuracy (noise off; bars: 95% interval)", ylabel="accuracy")
    # rounding may leave an end on the wrong side of an accuracy of 0 or 1; NaN: of one question
    margins = np.clip(np.nan_to_num([accuracy - low, high - accuracy]), 0, None)
    axes.errorbar(steps, accuracy, yerr=margins, color=RED, marker="o", markersize=5, capsize=3)


def stack(panels: Sequence[Callable[[Axes], None]], below: float = 0.0) -> Figure:
    """One figure with the panels below each other, over one axis of training steps; below: inches
    for a legend. A linear axis shows at least LEAST_SPAN of its values, so that equal ones are seen
    to be.
    """
    figure = Figure(figsize=(8, 0.7 + 2.5 * len(panels) + below), layout="constrained")
    grid = figure.subplots(len(panels), sharex=True, squeeze=False)
    for axes, draw in zip(grid[:, 0], panels):
        draw(axes)
        low, high = axes.get_ylim()
        least = LEAST_SPAN * max(abs(low), abs(high))
        if axes.get_yscale() == "linear" and high - low < least:
            middle = (low + high) / 2
            axes.set_ylim(middle - least / 2, middle + least / 2)
    axes.set_xlabel("training step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    return figure
