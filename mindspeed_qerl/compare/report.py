"""A comparison as text and as a picture."""

import json
import re
import textwrap
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes

from mindspeed_qerl.common.files import json_text
from mindspeed_qerl.compare.comparison import SIGNIFICANCE, Comparison, Verdict
from mindspeed_qerl.compare.statistics import LEAST_SEEDS, Estimate
from mindspeed_qerl.runs.plots import (
    BLUE,
    GREEN,
    ORANGE,
    RED,
    STYLE,
    half_window,
    moving_mean,
    stack,
)
from mindspeed_qerl.runs.report import markdown_table

COLORS = (BLUE, RED, GREEN, ORANGE, "#CC79A7", "#56B4E9", "#999999", "#000000")
MARKERS = "osD^vPX*"


def write_comparison(comparison: Comparison, folder: Path) -> list[Path]:
    """Write comparison.md, comparison.json and comparison.png into `folder`; returns them."""
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"comparison.{kind}" for kind in ("md", "json", "png")]
    picture = "\n![accuracy, difference and reward by step](comparison.png)\n"
    files[0].write_text(to_markdown(comparison) + picture, encoding="utf-8")
    files[1].write_text(json_text(comparison.to_json()), encoding="utf-8")
    draw(comparison, files[2])
    return files


def sentence(verdict: Verdict, questions: int, step: int) -> str:
    """A verdict in words."""
    over = _count(len(verdict.seeds), "seed") + " in common"
    if verdict.word == "no verdict":
        return f"**{verdict.group}** beside {verdict.baseline}: no verdict, {over}; it takes {LEAST_SEEDS}"
    difference = verdict.difference
    sharing = round(SIGNIFICANCE / verdict.limit)
    limit = (
        ""
        if sharing == 1
        else f" (below {verdict.limit:.2g} counts: {sharing} groups share the 5 %)"
    )
    text = (
        f"**{verdict.group}** beside {verdict.baseline}: **{verdict.word}** after step {step}, "
        f"{interval(difference, '+')}, p = {difference.p:.2g}{limit}, {over}, "
        f"{_count(questions, 'question')}"
    )
    if verdict.word != "not distinguishable":
        return text
    if difference.mean == 0:
        return f"{text}. There is no difference at all"
    if verdict.seeds_needed is None:
        return f"{text}. To tell a difference of this size from none takes more questions, or thousands of seeds"
    more = max(verdict.seeds_needed - len(verdict.seeds), 1)
    return (
        f"{text}. To tell a difference of this size from none with a power of 80 % would take "
        f"about {_count(more, 'more seed')}"
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def to_markdown(comparison: Comparison) -> str:
    """The comparison as a page. Its tables fit a terminal of 80 columns, unless many groups differ
    in values that are long.
    """
    first, last, differences = comparison.steps[0], comparison.steps[-1], comparison.difference
    explained = (
        "Accuracy on the held-out questions, noise off. In brackets: 95 % intervals over seeds "
        "and questions (of the training reward: over seeds)."
    )
    lines = ["# Comparison", "", explained, "", "## Verdict", ""]
    lines += [
        f"- {sentence(verdict, len(comparison.questions), last)}" for verdict in comparison.verdicts
    ] or ["- one group only: nothing to compare it with"]
    evaluated = list(dict.fromkeys((first, last)))
    header = ["group", "seeds", *(f"accuracy after step {step}" for step in evaluated)]
    lines += [
        "",
        "## Groups",
        "",
        *markdown_table(
            header,
            [
                [
                    group.name,
                    ", ".join(map(str, group.seeds)),
                    *(interval(comparison.accuracy[group.name][step]) for step in evaluated),
                ]
                for group in comparison.groups
            ],
        ),
    ]
    names = [group.name for group in comparison.groups]
    if len(names) > 1:
        configs = [group.config for group in comparison.groups]
        lines += [
            "",
            "They differ in:",
            "",
            *markdown_table(
                ["key", *names],
                [
                    [
                        key,
                        *(json.dumps(config[key]) if key in config else "-" for config in configs),
                    ]
                    for key in comparison.differing
                ],
            ),
        ]
    if comparison.left_out:
        of = len(comparison.left_out) + sum(len(group.runs) for group in comparison.groups)
        lines += [
            "",
            f"## Left out: {len(comparison.left_out)} of {of} runs",
            "",
            *(f"- {run.path}: {'; '.join(run.faults)}" for run in comparison.left_out),
        ]
    if noted := [run for group in comparison.groups for run in group.runs if run.notes]:
        lines += ["", "## Notes", "", *(f"- {run.path}: {'; '.join(run.notes)}" for run in noted)]
    header = ["step", "group", "accuracy", *([f"difference to {names[0]}"] if names[1:] else [])]
    lines += [
        "",
        "## Accuracy by step",
        "",
        *markdown_table(
            header,
            [
                [
                    str(step) if name == names[0] else "",
                    name,
                    interval(comparison.accuracy[name][step]),
                    *(
                        [interval(differences[name][step], "+") if differences.get(name) else ""]
                        if names[1:]
                        else []
                    ),
                ]
                for step in comparison.steps
                for name in names
            ],
        ),
    ]
    if all(comparison.reward.values()):
        shared = set.intersection(*(set(by_step) for by_step in comparison.reward.values()))
        shown = [step for step in comparison.steps if step in shared] or [max(shared)]
        lines += [
            "",
            "## Training reward by step",
            "",
            *markdown_table(
                ["step", "group", "training reward"],
                [
                    [
                        str(step) if name == names[0] else "",
                        name,
                        interval(comparison.reward[name][step]),
                    ]
                    for step in shown
                    for name in names
                ],
            ),
        ]
    return (
        re.sub(r"(?<!\*)\*(?!\*)", r"\\*", "\n".join(lines)) + "\n"
    )  # a pattern's star in a name is no emphasis


def draw(comparison: Comparison, file: Path) -> None:
    """Accuracy, its difference to the baseline, and training reward, by step, with 95 % intervals."""
    names = [group.name for group in comparison.groups]
    legend = {
        group.name: textwrap.fill(group.legend.replace("$", r"\$"), 110)
        for group in comparison.groups
    }
    style = {
        name: dict(color=COLORS[i % len(COLORS)], marker=MARKERS[i % len(MARKERS)])
        for i, name in enumerate(names)
    }
    offset = 0.012 * (
        comparison.steps[-1] - comparison.steps[0]
    )  # side by side, not on top of each other

    def draw_bars(axes: Axes, estimates: dict[str, dict[int, Estimate]]) -> None:
        for i, (name, by_step) in enumerate(estimates.items()):
            values, shift = list(by_step.values()), offset * (i - (len(estimates) - 1) / 2)
            below, above = (
                [value.mean - value.low for value in values],
                [value.high - value.mean for value in values],
            )
            axes.errorbar(
                [step + shift for step in by_step],
                [value.mean for value in values],
                yerr=[below, above],
                capsize=3,
                elinewidth=1.2,
                markersize=4,
                **style[name],
                label=legend[name],
            )

    def accuracy(axes: Axes) -> None:
        draw_bars(axes, comparison.accuracy)
        axes.set(
            title="Held-out accuracy (noise off; bars: 95% interval over seeds and questions)",
            ylabel="accuracy",
        )

    def difference(axes: Axes) -> None:
        axes.axhline(0, color="black", linewidth=1)
        draw_bars(axes, comparison.difference)
        axes.set(
            title=f"Difference of accuracy to {names[0]}, paired by seed and question",
            ylabel="difference",
        )

    def reward(axes: Axes) -> None:
        half = 0
        for name, by_step in comparison.reward.items():
            means, color = (
                np.array([value.mean for value in by_step.values()]),
                style[name]["color"],
            )
            half = half_window(len(means))
            if half:
                axes.plot(list(by_step), means, color=color, alpha=0.25, linewidth=0.6)
            axes.plot(list(by_step), moving_mean(means, half), color=color)
        smoothed = f"; bold: mean of {2 * half + 1} steps" if half else ""
        axes.set(title=f"Training reward (mean over seeds{smoothed})", ylabel="mean reward")

    panels = [accuracy]
    panels += [difference] if any(comparison.difference.values()) else []
    panels += [reward] if all(comparison.reward.values()) else []
    with mpl.rc_context(STYLE):
        figure = stack(panels, comparison.steps, panel_height=2.8)
        figure.legend(
            *figure.axes[0].get_legend_handles_labels(), loc="outside lower center", fontsize=8
        )
        figure.savefig(file, dpi=130)


def interval(value: Estimate, sign: str = "") -> str:
    """Mean and interval; `sign` "+" for differences."""
    return f"{value.mean:{sign}.3f} [{value.low:{sign}.3f}, {value.high:{sign}.3f}]"
