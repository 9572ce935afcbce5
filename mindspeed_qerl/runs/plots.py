"""The pictures of a run, drawn from the rows that it left behind; None where nothing was logged.

`columns` and `evals` are what `read_columns` returns of metrics.jsonl and eval.jsonl. Colours are
Okabe and Ito's, which colour-blind readers can tell apart; lines that share axes also differ in
style or marker.
"""

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from mindspeed_qerl.runs.metrics import TIME_PARTS

BLUE, ORANGE, GREEN, RED = "#0072B2", "#E69F00", "#009E73", "#D55E00"
COLORS = (BLUE, "#F0E442", "#56B4E9", RED, GREEN, "#999999", "#CC79A7")
PART_COLORS = dict(zip((*TIME_PARTS, "other", "eval"), COLORS, strict=True))
STYLE = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e4e4e4",
    "legend.edgecolor": "none",
    "legend.framealpha": 0.8,
    "legend.fontsize": 9,
    "lines.linewidth": 1.8,
}
MARKED_POINTS = 40  # series up to this length show each value as a dot
SMOOTHED_POINTS = 60  # longer series show the values pale, with a moving mean on top
LAYER_LABELS = 12  # at most, beside the rows of the picture by layer

Columns = dict[str, list[float]]
Rows = list[dict[str, Any]]
Panel = Callable[[Axes], None]


def write_plots(columns: Columns, evals: Columns, folder: Path, title: str) -> list[Path]:
    """Write learning.png, exploration.png, noise.png, mismatch.png, routing.png and time.png, as
    far as there is something to draw; returns the files.
    """
    folder.mkdir(exist_ok=True)
    written = []
    with mpl.rc_context(STYLE):
        figures = {
            "learning": learning(columns, evals),
            "exploration": exploration(columns),
            "noise": noise(columns),
            "mismatch": mismatch(columns),
            "routing": routing(columns),
            "time": time_per_part(columns, evals),
        }
        for name, figure in figures.items():
            file = folder / f"{name}.png"
            file.unlink(missing_ok=True)
            if figure:
                figure.suptitle(title, x=0.01, ha="left", fontsize=8, color="#666666")
                figure.savefig(file, dpi=130)
                written.append(file)
    return written


def learning(columns: Columns, evals: Columns) -> Figure | None:
    """Training reward by step, above held-out accuracy by updates done, with 95% intervals."""
    steps, rewards = finite(columns, "reward/mean")
    evaluated, accuracy = finite(evals, "accuracy")

    def draw_reward(axes: Axes) -> None:
        axes.set(title="Training reward", ylabel="mean reward")
        draw_series(axes, steps, rewards, BLUE)
        _legend(axes)
        _limit_fractions(axes, rewards)

    def draw_accuracy(axes: Axes) -> None:
        axes.set(title="Held-out accuracy (noise off; bars: 95% interval)", ylabel="accuracy")
        low = np.array(evals.get("interval_low", accuracy))
        high = np.array(evals.get("interval_high", accuracy))
        bars = dict(marker="o", markersize=5, capsize=3, elinewidth=1.2)
        margins = np.array([accuracy - low, high - accuracy])
        axes.errorbar(evaluated, accuracy, yerr=margins, color=RED, **bars)
        above = dict(xytext=(0, 5), textcoords="offset points", ha="center", color=RED, fontsize=9)
        for k in {0, len(accuracy) - 1}:
            place = evaluated[k], np.fmax(high[k], accuracy[k])
            axes.annotate(f"{accuracy[k]:.3f}", place, **above)
        _limit_fractions(axes, accuracy)

    panels: list[Panel] = [draw_reward] if len(steps) else []
    if len(evaluated):
        panels.append(draw_accuracy)
    return stack(panels, [*steps, *evaluated])


def exploration(columns: Columns) -> Figure | None:
    """Noise, what it does to the entropy, and what comes of that: groups whose answers' rewards
    differ, the gradient they give, and the length of the answers.
    """
    entropies = {"entropy/mean": "all tokens", "entropy/first_tokens": "first tokens of an answer"}
    panels = [
        *_lines(columns, "Entropy of the trained policy's tokens", "nats", entropies, beside=True),
        *_lines(
            columns,
            "Groups whose answers' rewards differ",
            "fraction",
            {"reward/groups_with_signal": ""},
        ),
        *_lines(columns, "Gradient norm, before clipping", "norm", {"grad_norm": ""}),
        *_lines(columns, "Length of an answer", "tokens", {"response/length_mean": ""}),
    ]
    return stack(panels, columns["step"], panel_height=2.1)


def mismatch(columns: Columns) -> Figure | None:
    """Distance between rollout and training policy: KL estimates, above differences of token
    probabilities; log axes.
    """
    estimates = {"mismatch/k1": "|k1|", "mismatch/k3": "k3"}
    differences = {"mismatch/max_abs_prob_diff": "max", "mismatch/mean_abs_prob_diff": "mean"}
    title = "|rollout - training| probability of the sampled token"
    panels = [
        *_lines(
            columns, "KL between rollout and training policy", "nats per token", estimates, log=True
        ),
        *_lines(columns, title, "probability", differences, log=True),
    ]
    return stack(panels, columns["step"])


def noise(columns: Columns) -> Figure | None:
    """AQN: nominal standard deviation beside the measured one of (noisy - clean), above the share
    of weights that changed at all.
    """
    steps, nominal = finite(columns, "aqn/expected_std")
    measured_steps, measured = _positive(columns, "aqn/measured_std")
    on = nominal > 0

    def draw_std(axes: Axes) -> None:
        title = "Noise on the rollout model's RMSNorm weights (no line: off)"
        axes.set(title=title, ylabel="standard deviation")
        levels = np.where(on, nominal, np.nan)
        # the marker shows a single step, whose line is invisible
        style = dict(color="black", linewidth=1.3, marker="_", markersize=4, zorder=3)
        axes.step(steps, levels, where="mid", label="nominal", **style)
        label = "measured, of (noisy - clean)"
        axes.plot(measured_steps, measured, "o", color=ORANGE, markersize=4, label=label)
        _log_axis(axes, np.concatenate([nominal[on], measured]), "noise off at every step")

    title = "Weights that the noise changed (the rest: noise lost in rounding)"
    changed = _lines(columns, title, "fraction", {"aqn/changed_fraction": ""})
    return stack([draw_std, *changed] if len(steps) else [], columns["step"], heights=(2, 1))


def routing(columns: Columns) -> Figure | None:
    """Of the choices of experts that were replayed, the share that the trainer would have made
    otherwise: of all, above each layer's.
    """
    prefix = "routing/flipped/layer_"
    layers = sorted(int(name.removeprefix(prefix)) for name in columns if name.startswith(prefix))
    shares = np.ma.masked_invalid([columns[f"{prefix}{layer}"] for layer in layers])
    steps = np.array(columns["step"])

    def draw_layers(axes: Axes) -> None:
        axes.set(title="The same by layer", ylabel="layer")
        colors = axes.pcolormesh(steps, range(len(layers)), shares, cmap="viridis", vmin=0)
        below = dict(orientation="horizontal", fraction=0.08, aspect=60)
        axes.figure.colorbar(colors, ax=axes, label="fraction", **below)
        every = math.ceil(len(layers) / LAYER_LABELS)
        axes.set_yticks(range(0, len(layers), every), layers[::every])
        axes.grid(visible=False)

    title = "Replayed choices of experts that the trainer would have made otherwise"
    labels = {"routing/flipped": "all layers"}
    panels = _lines(columns, title, "fraction", labels, beside=True)
    return stack([*panels, draw_layers] if panels else [], steps, heights=(1, 2))


def time_per_part(columns: Columns, evals: Columns) -> Figure | None:
    """Seconds per step, stacked by part; see `seconds_per_part`."""
    steps, parts = np.array(columns["step"]), seconds_per_part(columns, evals)
    edges = np.repeat(steps, 2) + np.tile([-0.5, 0.5], len(steps))

    def draw(axes: Axes) -> None:
        heights = [np.repeat(seconds, 2) for seconds in parts.values()]
        colors = [PART_COLORS[part] for part in parts]
        axes.stackplot(edges, heights, labels=parts, colors=colors, linewidth=0)
        if len(steps) > 2:
            axes.set_ylim(0, 1.1 * np.sum(heights, axis=0)[2:].max())
        title = "Time per part of a step (the first, with its warm-up, may be cut off)"
        axes.set(title=title, ylabel="seconds per step")
        axes.grid(axis="x", visible=False)
        # in the order of the stack
        axes.legend(reverse=True, loc="center left", bbox_to_anchor=(1.0, 0.5))

    return stack([draw] if parts and len(steps) else [], steps, panel_height=3.6)


def seconds_per_part(columns: Columns, evals: Columns) -> dict[str, np.ndarray]:
    """Seconds of each part by step (0 where it was not run): the named parts, "other" for the rest
    of time/step, and "eval" for the evaluation after the step. Empty when no times were logged.
    """
    logged = {part: columns[name] for part in TIME_PARTS if (name := f"time/{part}") in columns}
    parts = {part: np.nan_to_num(seconds) for part, seconds in logged.items()}
    if "time/step" in columns:
        parts["other"] = np.fmax(0.0, np.subtract(columns["time/step"], sum(parts.values())))
        parts["eval"] = np.zeros(len(columns["step"]))
        for step, seconds in zip(*finite(evals, "seconds")):
            parts["eval"][np.equal(columns["step"], step)] = seconds
    return parts


def stack(
    panels: list[Panel],
    steps: Iterable[float],
    *,
    heights: tuple[int, ...] = (),
    panel_height: float = 2.5,
) -> Figure | None:
    """One figure with the panels below each other over an axis that holds all `steps`; None without
    panels.
    """
    if not panels:
        return None
    figure = Figure(figsize=(8, 0.7 + panel_height * len(panels)), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.08)
    ratios = heights[: len(panels)] or (1,) * len(panels)
    grid = figure.subplots(len(panels), 1, sharex=True, squeeze=False, height_ratios=ratios)
    for axes, draw in zip(grid[:, 0], panels, strict=True):
        draw(axes)
    first, last = min(steps), max(steps)
    margin = max(0.7, 0.045 * (last - first))
    axes.set(xlabel="training step", xlim=(first - margin, last + margin))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10], min_n_ticks=1))
    return figure


def finite(columns: Columns, name: str) -> tuple[np.ndarray, np.ndarray]:
    """(steps, values) of one metric where it is a finite number."""
    steps = np.array(columns["step"])
    values = np.array(columns.get(name, [math.nan] * len(steps)), dtype=float)
    keep = np.isfinite(values)
    return steps[keep], values[keep]


def _positive(columns: Columns, name: str) -> tuple[np.ndarray, np.ndarray]:
    """(steps, |values|) of one metric without its zeros, for a log axis."""
    steps, values = finite(columns, name)
    return steps[values != 0], abs(values[values != 0])


def moving_mean(values: np.ndarray, half: int) -> np.ndarray:
    """The mean of each value and `half` neighbours on either side, fewer at both ends.

    >>> moving_mean(np.array([0.0, 3.0, 3.0, 6.0]), 1).tolist()
    [1.5, 2.0, 4.0, 4.5]
    """
    window = np.ones(2 * half + 1)
    return np.convolve(values, window, "same") / np.convolve(np.ones(len(values)), window, "same")


def _lines(
    columns: Columns,
    title: str,
    ylabel: str,
    labels: dict[str, str],
    log: bool = False,
    beside: bool = False,
) -> list[Panel]:
    """A panel of metrics by step, `labels` by name; none where no metric has a finite number.

    Args:
        log: absolute values on a log axis. beside: sigma of the noise on an axis to the right.
    """
    read = _positive if log else finite
    series = {label: read(columns, name) for name, label in labels.items()}

    def draw(axes: Axes) -> None:
        axes.set(title=title, ylabel=ylabel)
        styles = zip((BLUE, RED), ("-", "--"))
        for (label, (steps, values)), (color, style) in zip(series.items(), styles):
            if len(steps):
                draw_series(axes, steps, values, color, style, label)
        if log:
            drawn = np.concatenate([values for _, values in series.values()])
            _log_axis(axes, drawn, "exactly 0 at every step")
            return
        steps, sigma = _positive(columns, "aqn/sigma")
        if beside and len(steps):
            right = axes.twinx()
            right.set(yscale="log", ylabel="sigma")
            right.grid(visible=False)
            right.plot(steps, sigma, "_", color="#666666", markersize=7)
            axes.plot([], [], "_", color="#666666", markersize=7, label="sigma of the noise")
        _legend(axes)

    return [draw] if any(len(finite(columns, name)[0]) for name in labels) else []


def draw_series(
    axes: Axes,
    steps: np.ndarray,
    values: np.ndarray,
    color: str,
    linestyle: str = "-",
    label: str = "",
) -> None:
    """A line by step; a long one pale, with the mean over a twentieth of its points on top."""
    style: dict[str, Any] = dict(color=color, linestyle=linestyle)
    if len(steps) > SMOOTHED_POINTS:
        half = len(steps) // 40
        axes.plot(steps, values, color=color, alpha=0.25, linewidth=0.8)
        smoothed = f"mean of {2 * half + 1} steps"
        values, label = moving_mean(values, half), f"{label}, {smoothed}" if label else smoothed
    elif len(steps) <= MARKED_POINTS:
        style |= dict(marker="o", markersize=3.5)
    axes.plot(steps, values, **style, label=label or None)


def _limit_fractions(axes: Axes, values: np.ndarray) -> None:
    """The axis of a fraction; a reward of the user's own may be any number."""
    if values.min() >= 0 and values.max() <= 1:
        axes.set_ylim(-0.04, 1.19)


def _legend(axes: Axes) -> None:
    if axes.get_legend_handles_labels()[1]:
        axes.legend()


def _log_axis(axes: Axes, values: np.ndarray, nothing: str) -> None:
    """A legend, and a log scale with at least a decade around `values`; the sentence `nothing`
    instead when there are none.
    """
    if not len(values):
        middle = dict(transform=axes.transAxes, ha="center", va="center", color="#666666")
        axes.text(0.5, 0.5, nothing, **middle)
        axes.set_yticks([])
        return
    low, high = values.min(), values.max()
    axes.set_yscale("log")
    axes.set_ylim(min(low / 2, high / 10), max(high * 2, low * 10))
    axes.legend()
