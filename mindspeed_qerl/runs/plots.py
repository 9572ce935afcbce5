"""The pictures of a run, drawn from the rows that it left behind.

`columns` and `evals` are what `columns_of` makes of metrics.jsonl and eval.jsonl. Colours are
Okabe and Ito's, which colour-blind readers can tell apart.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import matplotlib as mpl
import numpy as np
import yaml
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

BLUE, ORANGE, GREEN, RED = "#0072B2", "#E69F00", "#009E73", "#D55E00"
COLORS = (BLUE, RED, GREEN, ORANGE, "#CC79A7", "#56B4E9", "#999999", "#000000")
HERE = Path(__file__)
STYLE = mpl.rc_params_from_file(HERE.with_suffix(".mplstyle"), use_default_template=False)
SMOOTHED_POINTS = 60  # longer series show the values pale, with a moving mean on top

Columns = dict[str, list[float]]


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


def write_plots(columns: Columns, evals: Columns, folder: Path, title: str) -> list[Path]:
    """Write learning.png, exploration.png, noise.png, mismatch.png, arrival.png, routing.png and time.png,
    as far as there is something to draw; returns the files.
    """
    folder.mkdir(exist_ok=True)
    files = []
    for name, panels in PICTURES.items():
        drawn: list[Callable[[Axes], None]] = []
        for panel in panels:
            if panel.labels.keys() & columns.keys():
                drawn.append(partial(_draw_panel, columns=columns, panel=panel))
        if name == "learning" and evals["step"]:
            drawn.append(partial(_draw_accuracy, evals=evals))
        if drawn:
            with mpl.rc_context(STYLE):
                figure = stack(drawn)
                figure.suptitle(title, x=0.01, ha="left", fontsize=8, color="#666666")
                files.append(folder / f"{name}.png")
                figure.savefig(files[-1], dpi=130)
    return files


def _draw_panel(axes: Axes, columns: Columns, panel: Panel) -> None:
    axes.set(title=panel.title, ylabel=panel.ylabel)
    if panel.is_log:
        axes.set_yscale("log")
    for (name, label), color in zip(panel.labels.items(), COLORS):
        if name not in columns:
            continue
        steps, values = finite(columns, name)
        if label.startswith("|"):
            values = abs(values)
        drawn = values > panel.above
        steps, values = steps[drawn], values[drawn]
        if not len(steps):
            continue
        if panel.is_log:  # as it is: a mean would blur the stages of the noise
            axes.plot(steps, values, color=color, marker=".", markersize=3, label=label)
        else:
            draw_series(axes, steps, values, color, label)
    labels = axes.get_legend_handles_labels()[1]
    if len(labels) > 3:
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
    elif labels:
        axes.legend()


def _draw_accuracy(axes: Axes, evals: Columns) -> None:
    names = ("step", "accuracy", "interval_low", "interval_high")
    steps, accuracy, low, high = (np.array(evals[name]) for name in names)
    axes.set(title="Held-out accuracy (noise off; bars: 95% interval)", ylabel="accuracy")
    margins = np.array([accuracy - low, high - accuracy])
    axes.errorbar(steps, accuracy, yerr=margins, color=RED, marker="o", markersize=5, capsize=3)


def stack(panels: Sequence[Callable[[Axes], None]]) -> Figure:
    """One figure with the panels below each other, over one axis of training steps."""
    figure = Figure(figsize=(8, 0.7 + 2.5 * len(panels)), layout="constrained")
    grid = figure.subplots(len(panels), sharex=True, squeeze=False)
    for axes, draw in zip(grid[:, 0], panels):
        draw(axes)
    axes.set_xlabel("training step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure


def finite(columns: Columns, name: str) -> tuple[np.ndarray, np.ndarray]:
    """(steps, values) of one metric where it is a finite number."""
    steps = np.array(columns["step"])
    values = np.array(columns.get(name, [math.nan] * len(steps)), dtype=float)
    keep = np.isfinite(values)
    return steps[keep], values[keep]


def moving_mean(values: np.ndarray, half: int) -> np.ndarray:
    """The mean of each value and `half` neighbours on either side, fewer at both ends.

    >>> moving_mean(np.array([0.0, 3.0, 3.0, 6.0]), 1).tolist()
    [1.5, 2.0, 4.0, 4.5]
    """
    window = np.ones(2 * half + 1)
    return np.convolve(values, window, "same") / np.convolve(np.ones(len(values)), window, "same")


def draw_series(
    axes: Axes, steps: np.ndarray, values: np.ndarray, color: str, label: str = ""
) -> None:
    """A line by step; a long one pale, with the mean over a twentieth of its points on top."""
    marker = "."
    if len(steps) > SMOOTHED_POINTS:
        axes.plot(steps, values, color=color, alpha=0.25, linewidth=0.8)
        values, marker = moving_mean(values, len(steps) // 40), ""
    axes.plot(steps, values, color=color, marker=marker, label=label)
