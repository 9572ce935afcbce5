"""The pictures of a run. Each function draws from the rows a run left behind, and returns None when
there is nothing to draw.

`columns` is what `read_columns(metrics.jsonl)` returns, `evals` the rows of eval.jsonl. Colours are
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
BARS = 120  # longer runs show the mean of several steps per bar

Columns = dict[str, list[float]]
Panel = Callable[[Axes], None]


def write_plots(
    columns: Columns, evals: list[dict[str, Any]], folder: Path, title: str
) -> list[Path]:
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


def learning(columns: Columns, evals: list[dict[str, Any]]) -> Figure | None:
    """Training reward by step, above held-out accuracy by updates done, with 95% intervals."""
    rewards, scored = _finite(columns, "reward/mean"), [row for row in evals if "accuracy" in row]

    def draw_reward(axes: Axes) -> None:
        _draw_series(axes, *rewards, color=BLUE)
        axes.set(title="Training reward", ylabel="mean reward")
        if rewards[1].min() >= 0 and rewards[1].max() <= 1:
            axes.set_ylim(-0.04, 1.19)

    def draw_accuracy(axes: Axes) -> None:
        steps = [row["step"] for row in scored]
        accuracy = np.array([row["accuracy"] for row in scored])
        margin = 1.96 * np.nan_to_num([row.get("standard_error", 0.0) for row in scored])
        fraction = (
            accuracy.min() >= 0 and accuracy.max() <= 1
        )  # the mean score of a user's own reward may be anything
        errors = np.array([margin, margin])  # below and above
        if fraction:
            errors = np.minimum(errors, [accuracy, 1 - accuracy])
            axes.set_ylim(-0.04, 1.19)
        axes.errorbar(
            steps,
            accuracy,
            yerr=errors,
            color=RED,
            marker="o",
            markersize=5,
            capsize=3,
            elinewidth=1.2,
        )
        for k in sorted({0, len(steps) - 1}):
            axes.annotate(
                f"{accuracy[k]:.1%}" if fraction else f"{accuracy[k]:.3g}",
                (steps[k], accuracy[k] + errors[1, k]),
                xytext=(0, 5),
                textcoords="offset points",
                ha="center",
                color=RED,
                fontsize=9,
            )
        axes.set(title="Held-out accuracy (noise off; bars: 95% interval)", ylabel="accuracy")

    panels = [*([draw_reward] if len(rewards[0]) else []), *([draw_accuracy] if scored else [])]
    return stack(panels, [*rewards[0], *(row["step"] for row in scored)])


def exploration(columns: Columns) -> Figure | None:
    """Noise, what it does to the entropy, and what comes of that: groups whose answers' rewards
    differ, the gradient they give, and the length of the answers.
    """
    on = _positive(columns, "aqn/sigma")

    def draw_entropy(axes: Axes) -> None:
        for name, label, color, style in (
            ("entropy/mean", "all tokens", BLUE, "-"),
            ("entropy/first_tokens", "first tokens of an answer", RED, "--"),
        ):
            _draw_series(axes, *_finite(columns, name), color=color, linestyle=style, label=label)
        axes.set(
            title="Entropy of the trained policy's tokens"
            + (" beside the noise" if len(on[0]) else ""),
            ylabel="nats",
        )
        handles, labels = axes.get_legend_handles_labels()
        if len(on[0]):
            beside = axes.twinx()
            handles += beside.plot(*on, "_", color="#666666", markersize=7)
            labels += ["sigma of the noise"]
            beside.set(yscale="log", ylabel="sigma")
            beside.grid(visible=False)
        axes.legend(handles, labels)

    def panel(name: str, title: str, ylabel: str, color: str) -> Panel:
        def draw(axes: Axes) -> None:
            _draw_series(axes, *_finite(columns, name), color=color)
            axes.set(title=title, ylabel=ylabel)

        return draw

    others = (
        ("reward/groups_with_signal", "Groups whose answers' rewards differ", "fraction", GREEN),
        ("grad_norm", "Gradient norm, before clipping", "norm", ORANGE),
        ("response/length_mean", "Length of an answer", "tokens", BLUE),
    )
    panels = [panel(*words) for words in others if len(_finite(columns, words[0])[0])]
    if not len(_finite(columns, "entropy/mean")[0]):
        return None
    return stack([draw_entropy, *panels], columns["step"], panel_height=2.1)


def noise(columns: Columns) -> Figure | None:
    """AQN: nominal standard deviation beside the measured one of (noisy - clean), above the share
    of weights that changed at all.
    """
    steps, sigma = _finite(
        columns, "aqn/expected_std" if "aqn/expected_std" in columns else "aqn/sigma"
    )
    if not len(steps):
        return None
    changed = _finite(columns, "aqn/changed_fraction")
    on, many = sigma > 0, len(steps) > 200

    def shade_off(axes: Axes) -> None:
        # Steps without noise have no place on a log axis: say so instead of leaving a gap.
        off = steps[~on]
        runs = np.split(off, np.flatnonzero(np.diff(off) > 1) + 1) if len(off) else []
        for k, run in enumerate(runs):
            axes.axvspan(
                run[0] - 0.5,
                run[-1] + 0.5,
                color="#eeeeee",
                zorder=0,
                linewidth=0,
                label="off" if k == 0 else None,
            )

    def draw_sigma(axes: Axes) -> None:
        shade_off(axes)
        axes.set(title="Noise on the rollout model's RMSNorm weights", ylabel="standard deviation")
        measured_steps, measured = _positive(columns, "aqn/measured_std")
        if on.any():
            nominal = np.where(on, sigma, np.nan)
            axes.step(
                steps, nominal, where="mid", color="black", linewidth=1.3, zorder=3, label="nominal"
            )
            if on.sum() == 1:  # a line of one point is invisible
                axes.plot(steps, nominal, "_", color="black", markersize=14, zorder=3)
        if len(measured):
            axes.plot(
                measured_steps,
                measured,
                "o",
                color=ORANGE,
                markersize=3 if many else 5,
                label="measured, of (noisy - clean)",
            )
        _log_axis(axes, np.concatenate([sigma[on], measured]), "noise off at every step")

    def draw_changed(axes: Axes) -> None:
        shade_off(axes)
        axes.plot(*changed, "-" if many else "o-", color=GREEN, markersize=3, linewidth=1.2)
        axes.set(
            title="Weights that the noise changed (the rest: noise lost in rounding)",
            ylabel="fraction",
            ylim=(-0.04, 1.06),
        )

    return stack(
        [draw_sigma, draw_changed] if len(changed[0]) else [draw_sigma], steps, heights=(2, 1)
    )


def mismatch(columns: Columns) -> Figure | None:
    """Distance between rollout and training policy: KL estimates, above differences of token
    probabilities; log axes.
    """

    def panel(title: str, ylabel: str, names: dict[str, str]) -> Panel:
        def draw(axes: Axes) -> None:
            drawn = {label: _positive(columns, name) for label, name in names.items()}
            for (label, (steps, values)), color, style in zip(
                drawn.items(), (BLUE, RED), ("--", "-")
            ):
                if len(values):
                    _draw_series(axes, steps, values, color=color, linestyle=style, label=label)
            axes.set(title=title, ylabel=ylabel)
            _log_axis(
                axes,
                np.concatenate([values for _, values in drawn.values()]),
                "exactly 0 at every step",
            )

        return draw

    series = {
        ("KL between rollout and training policy", "nats per token"): {
            "|k1|": "mismatch/k1",
            "k3": "mismatch/k3",
        },
        ("|rollout - training| probability of the sampled token", "probability"): {
            "max": "mismatch/max_abs_prob_diff",
            "mean": "mismatch/mean_abs_prob_diff",
        },
    }
    return stack(
        [
            panel(*words, names)
            for words, names in series.items()
            if any(len(_finite(columns, name)[0]) for name in names.values())
        ],
        columns["step"],
    )


def routing(columns: Columns) -> Figure | None:
    """Of the choices of experts that were replayed, the share that the trainer would have made
    otherwise: of all, above each layer's.
    """
    prefix = "routing/flipped/layer_"
    layers = sorted(int(name.removeprefix(prefix)) for name in columns if name.startswith(prefix))
    steps, shares = _finite(columns, "routing/flipped")
    if not layers or not len(steps):
        return None
    of_layers = np.array([columns[f"{prefix}{layer}"] for layer in layers])[
        :, np.isin(columns["step"], steps)
    ]
    shown, sigmas = 100 * shares, _positive(columns, "aqn/sigma")

    def draw_all(axes: Axes) -> None:
        _draw_series(axes, steps, shown, color=BLUE, label="all layers")
        axes.set(
            title="Replayed choices of experts that the trainer would have made otherwise",
            ylabel="percent",
        )
        axes.set_ylim(bottom=0)
        if len(sigmas[0]):
            beside = axes.twinx()
            marks = beside.plot(*sigmas, "_", color="#666666", markersize=7)
            beside.set(yscale="log", ylabel="sigma")
            beside.grid(visible=False)
            axes.legend([*axes.get_lines()[-1:], *marks], ["all layers", "sigma of the noise"])

    def draw_layers(axes: Axes) -> None:
        edges = np.append(steps - 0.5, steps[-1] + 0.5)
        colors = axes.pcolormesh(
            edges, np.arange(len(layers) + 1) - 0.5, 100 * of_layers, cmap="viridis", vmin=0
        )
        axes.figure.colorbar(
            colors, ax=axes, label="percent", orientation="horizontal", fraction=0.08, aspect=60
        )
        axes.set(title="The same by layer", ylabel="layer")
        axes.set_yticks(
            range(0, len(layers), -(-len(layers) // 12)), layers[:: -(-len(layers) // 12)]
        )
        axes.grid(visible=False)

    return stack([draw_all, draw_layers], columns["step"], heights=(1, 2))


def time_per_part(columns: Columns, evals: list[dict[str, Any]]) -> Figure | None:
    """Seconds per step, stacked by part; see `seconds_per_part`."""
    steps, parts = np.array(columns["step"]), seconds_per_part(columns, evals)
    if not parts:
        return None
    per_bar = -(-len(steps) // BARS)
    starts = np.arange(0, len(steps), per_bar)
    counts = np.diff(np.append(starts, len(steps)))
    centers = np.add.reduceat(steps, starts) / counts

    def draw(axes: Axes) -> None:
        bottom = np.zeros(len(starts))
        for part, seconds in parts.items():
            height = np.add.reduceat(seconds, starts) / counts
            axes.bar(
                centers,
                height,
                bottom=bottom,
                width=0.85 * per_bar,
                color=PART_COLORS[part],
                label=part,
                linewidth=0,
            )
            bottom += height
        if (
            len(bottom) > 2 and bottom[0] > 2 * bottom[1:].max()
        ):  # warm-up in step 1 would flatten all the others
            axes.set_ylim(0, 1.2 * bottom[1:].max())
            axes.annotate(
                f"{bottom[0]:.3g} s (cut off)",
                (centers[0] + 0.43 * per_bar, 1.0),
                xytext=(4, -3),
                va="top",
                xycoords=("data", "axes fraction"),
                textcoords="offset points",
                fontsize=9,
                color="#444444",
            )
        unit = "seconds per step" if per_bar == 1 else f"seconds per step, mean of {per_bar}"
        axes.set(title="Time per part of a step", ylabel=unit)
        axes.grid(axis="x", visible=False)
        handles, labels = axes.get_legend_handles_labels()
        # in the order of the stack
        axes.legend(handles[::-1], labels[::-1], loc="center left", bbox_to_anchor=(1.0, 0.5))

    return stack([draw], steps, panel_height=3.6)


def seconds_per_part(columns: Columns, evals: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    """Seconds of each part by step (0 where it was not run): the named parts, "other" for the rest
    of time/step, and "eval" for the evaluation after the step. Empty when no times were logged.
    """
    parts = {
        part: np.nan_to_num(columns[f"time/{part}"])
        for part in TIME_PARTS
        if f"time/{part}" in columns
    }
    if "time/step" in columns:
        parts["other"] = np.fmax(0.0, np.subtract(columns["time/step"], sum(parts.values())))
        seconds_at = {row["step"]: row.get("seconds", 0.0) for row in evals}
        parts["eval"] = np.array([seconds_at.get(step, 0.0) for step in columns["step"]])
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
    all_axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False, height_ratios=ratios)[
        :, 0
    ]
    for axes, draw in zip(all_axes, panels, strict=True):
        draw(axes)
    first, last = min(steps), max(steps)
    margin = max(0.7, 0.045 * (last - first))
    all_axes[-1].set(xlabel="training step", xlim=(first - margin, last + margin))
    all_axes[-1].xaxis.set_major_locator(
        MaxNLocator(integer=True, steps=[1, 2, 5, 10], min_n_ticks=1)
    )
    return figure


def _finite(columns: Columns, name: str) -> tuple[np.ndarray, np.ndarray]:
    """(steps, values) of one metric where it is a finite number."""
    steps = np.array(columns["step"])
    values = np.array(columns.get(name, [math.nan] * len(steps)), dtype=float)
    keep = np.isfinite(values)
    return steps[keep], values[keep]


def _positive(columns: Columns, name: str) -> tuple[np.ndarray, np.ndarray]:
    """(steps, |values|) of one metric without its zeros, for a log axis."""
    steps, values = _finite(columns, name)
    return steps[values != 0], abs(values[values != 0])


def half_window(points: int) -> int:
    """Neighbours on either side that a long series is averaged over, together a twentieth of it; 0
    for a short one.
    """
    return points // 40 if points > SMOOTHED_POINTS else 0


def moving_mean(values: np.ndarray, half: int) -> np.ndarray:
    """The mean of each value and `half` neighbours on either side, fewer at both ends.

    >>> moving_mean(np.array([0.0, 3.0, 3.0, 6.0]), 1).tolist()
    [1.5, 2.0, 4.0, 4.5]
    """
    window = np.ones(2 * half + 1)
    return np.convolve(values, window, "same") / np.convolve(np.ones(len(values)), window, "same")


def _draw_series(
    axes: Axes,
    steps: np.ndarray,
    values: np.ndarray,
    color: str,
    linestyle: str = "-",
    label: str = "",
) -> None:
    if half := half_window(len(steps)):
        axes.plot(steps, values, color=color, alpha=0.25, linewidth=0.8)
        axes.plot(
            steps,
            moving_mean(values, half),
            color=color,
            linestyle=linestyle,
            label=", ".join(filter(None, [label, f"mean of {2 * half + 1} steps"])),
        )
        axes.legend()
    else:
        marker = "o" if len(steps) <= MARKED_POINTS else None
        axes.plot(
            steps,
            values,
            color=color,
            linestyle=linestyle,
            marker=marker,
            markersize=3.5,
            label=label or None,
        )


def _log_axis(axes: Axes, values: np.ndarray, nothing: str) -> None:
    """A legend, and a log scale with at least a decade around `values`; a sentence instead when
    there are none.
    """
    if not len(values):
        axes.text(
            0.5, 0.5, nothing, transform=axes.transAxes, ha="center", va="center", color="#666666"
        )
        axes.set_yticks([])
        return
    axes.set_yscale("log")
    axes.set_ylim(
        min(values.min() / 2, values.max() / 10), max(values.max() * 2, values.min() * 10)
    )
    axes.legend()
