"""Layouts, rules and memory for people: tables, JSON, a bar chart."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from mindspeed_qerl.families import ModelShape
from mindspeed_qerl.layout.memory import KINDS, MOMENTS, Memory
from mindspeed_qerl.layout.parts import GB, Part
from mindspeed_qerl.layout.plan import Plan
from mindspeed_qerl.layout.planner import across_nodes, idle_share, layer_collectives, reasons
from mindspeed_qerl.layout.rules import Violation
from mindspeed_qerl.layout.weights import model_parameters
from mindspeed_qerl.recipe.types import Layout

# Okabe and Ito's, one for each of KINDS
COLORS = ("#999999", "#0072B2", "#CC79A7", "#E69F00", "#56B4E9", "#D55E00", "#009E73")
DISCLAIMER = "An estimate from sizes, never measured on an NPU."
COLLECTIVES = "colls: collectives that a layer waits for. "
LEGEND = (
    "vLLM: infer TP x EP. batch: the number of prompts nearest to 64 that divides. train, sync, "
    "rollout: GB of the fullest rank in the forward and backward passes, in the weight sync, and "
    "in the rollout with its KV cache. util: gpu_memory_utilization. waits: share of an update "
    f"lost to the pipeline. {COLLECTIVES}KV for n of m: full-length answers at once that the KV "
    f"cache holds, of those that are needed. {DISCLAIMER}"
)
WIDE = 100  # columns; below, sums and notes stand under their table


def console() -> Console:
    """The terminal, or 110 columns where there is none: a file, a pipe."""
    return Console() if Console().is_terminal else Console(width=110)


def label(plan: Plan) -> str:
    """A layout in two short lines."""
    layout = plan.layout
    sizes = {"TP": layout.tp, "PP": layout.pp, "EP": layout.ep}
    training = " ".join(f"{name}{size}" for name, size in sizes.items() if size > 1)
    return f"{training or 'DP only'}\nvLLM {layout.infer_tp}x{layout.infer_ep}"


def model_line(shape: ModelShape) -> str:
    """The model in one line."""
    line = f"{shape.name}: {model_parameters(shape) / GB:.1f}B parameters, "
    line += f"{shape.num_hidden_layers} layers, {shape.num_attention_heads} heads, "
    line += f"{shape.num_key_value_heads} KV heads"
    if shape.moe:
        line += f", {shape.num_experts} experts, {shape.num_experts_per_tok} active"
    return line


def sizes_line(plan: Plan) -> str:
    """The sizes of the layout."""
    layout, moe = plan.layout, plan.shape.moe
    context = f", CP {layout.cp}" if layout.cp > 1 else ""
    experts = f", EP {layout.ep}" if moe else ""
    infer_experts = f" x EP {layout.infer_ep}" if moe else ""
    training = f"TP {layout.tp}, PP {layout.pp}{context}{experts}, DP {layout.dp}"
    return f"{training}; vLLM TP {layout.infer_tp}{infer_experts}"


def nodes(layout: Layout, assumed: bool) -> str:
    """How many nodes of how many ranks; where that is `assumed` and two could share the ranks, the
    option that says so.
    """
    line = f"{layout.nodes} node{'s' if layout.nodes > 1 else ''} of {layout.node_width}"
    if assumed and layout.nodes == 1 and layout.world % 2 == 0:
        line += f"; for two: --ranks-per-node {layout.world // 2}"
    return line


def batch_line(plan: Plan) -> str:
    """The batch in one line."""
    return (
        f"{plan.batch.global_batch_size} prompts x {plan.batch.samples_per_prompt} answers a step: "
        f"{plan.share} answers a training rank"
    )


def print_layouts(console: Console, ranked: Sequence[Memory]) -> None:
    """The ranked layouts, one a line, and what the columns are; where the terminal is narrow,
    without the collectives and with the notes under the table.
    """
    wide = console.width >= WIDE
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=0)
    places: dict[str, list[str]] = {}
    for number, memory in enumerate(ranked, 1):
        row = {"#": str(number), **_columns(memory)}
        for note in _notes(memory):
            places.setdefault(note, []).append(str(number))
        if not wide:
            del row["colls"], row["note"]
        if not table.columns:
            for name in row:
                is_note = name == "note"
                justify = "left" if is_note else "right"
                table.add_column(name, justify=justify, no_wrap=not is_note, overflow="fold")
        style = "yellow" if memory.tight else None
        table.add_row(*row.values(), style=style if memory.fits else "red")
    console.print(table)
    if wide:
        console.print(LEGEND, highlight=False, style="dim")
        return
    for note, numbers in places.items():
        console.print(f"{', '.join(numbers)}: {note}", highlight=False)
    console.print(LEGEND.replace(COLLECTIVES, ""), highlight=False, style="dim")


def _columns(memory: Memory) -> dict[str, str]:
    plan, layout, moe = memory.plan, memory.plan.layout, memory.plan.shape.moe
    sizes = {moment: memory.total(moment) / GB for moment in MOMENTS}
    columns = {"TP": str(layout.tp), "PP": str(layout.pp)}
    if moe:
        columns["EP"] = str(layout.ep)
    return columns | {
        "DP": str(layout.dp),
        "vLLM": f"{layout.infer_tp}x{layout.infer_ep}" if moe else str(layout.infer_tp),
        "batch": str(plan.batch.global_batch_size),
        "train": f"{max(sizes['update'], sizes['log-probs']):.0f}",
        "sync": f"{sizes['weight sync']:.0f}",
        "rollout": f"{sizes['rollout']:.0f}",
        "util": f"{memory.settings.gpu_memory_utilization:g}",
        "waits": f"{idle_share(plan):.0%}" if layout.pp > 1 else "",
        "colls": str(layer_collectives(plan)[0]),
        "note": "; ".join(_notes(memory)),
    }


def _notes(memory: Memory) -> list[str]:
    """What the columns do not say."""
    if not memory.fits:
        return [f"does not fit: {memory.excess / GB:.1f} GB over"]
    notes = ["tight"] if memory.tight else []
    if memory.answers_at_once < memory.answers_needed:
        notes.append(f"KV for {memory.answers_at_once} of {memory.answers_needed}")
    return notes + across_nodes(memory.plan)


def print_memory(console: Console, memory: Memory) -> None:
    """Each part of the fullest rank's memory at each moment, GB, and how it comes about: beside it,
    or below it where the terminal is narrow.
    """
    wide = console.width >= WIDE
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, show_footer=True)
    table.add_column("GB of one rank", footer="sum", no_wrap=True)
    for moment in MOMENTS:
        total = f"{memory.total(moment) / GB:.1f}"
        table.add_column(moment, justify="right", footer=total, no_wrap=True)
    if wide:
        capacity = f"of {memory.capacity / GB:.0f}"
        table.add_column("how", footer=capacity, overflow="fold", style="dim")
    hows = {}
    for name, row in parts_by_moment(memory).items():
        hows[name] = "; ".join(dict.fromkeys(part.how for part in row.values()))
        cells = [f"{row[moment].bytes / GB:.1f}" if moment in row else "" for moment in MOMENTS]
        table.add_row(name, *cells, *([hows[name]] if wide else []))
    console.print(table)
    if not wide:
        for name, how in hows.items():
            console.print(f"{name}: {how}", highlight=False, style="dim")


def parts_by_moment(memory: Memory) -> dict[str, dict[str, Part]]:
    """name of a part -> moment -> the part, in the order in which they are added up."""
    rows: dict[str, dict[str, Part]] = {}
    moments = [(moment, part) for moment, parts in memory.moments.items() for part in parts]
    for moment, part in sorted(moments, key=lambda entry: KINDS.index(entry[1].kind)):
        rows.setdefault(part.name, {})[moment] = part
    return rows


def faults_table(faults: Iterable[Violation]) -> Table:
    """Each broken rule with its numbers and its source."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("broken", overflow="fold", style="red")
    table.add_column("by", overflow="fold", style="dim")
    for fault in faults:
        repository, path = fault.source.split(" ")
        table.add_row(fault.message, f"{repository} {path.rpartition('/')[2]}")
    return table


# ---- JSON ----


def plan_dict(plan: Plan) -> dict[str, Any]:
    """The numbers of a plan."""
    names = "world ranks_per_node tp pp cp ep dp infer_tp infer_ep infer_dp nodes"
    names += " sequence_parallel enable_expert_parallel"
    numbers = {name: getattr(plan.layout, name) for name in names.split()}
    batch = asdict(plan.batch)
    del batch["dispatch"]
    return numbers | {"num_layer_list": list(plan.layout.num_layer_list), "batch": batch}


def memory_dict(memory: Memory) -> dict[str, Any]:
    """The memory of the fullest rank, bytes."""
    parts = {moment: list(map(asdict, held)) for moment, held in memory.moments.items()}
    return {
        "capacity": memory.capacity,
        "fits": memory.fits,
        "faults": memory.faults,
        "pipeline_stage": memory.stage,
        "totals": {moment: memory.total(moment) for moment in MOMENTS},
        "parts": parts,
        "kv_cache": {
            "bytes": memory.kv_cache,
            "bytes_a_token": memory.kv_token,
            "answers_at_once": memory.answers_at_once,
            "answers_needed": memory.answers_needed,
        },
    }


def ranked_dict(memory: Memory) -> dict[str, Any]:
    """One line of the ranking."""
    return {
        **plan_dict(memory.plan),
        "gpu_memory_utilization": memory.settings.gpu_memory_utilization,
        "pipeline_idle": round(idle_share(memory.plan), 4),
        "memory": {**memory_dict(memory), "parts": None},
        "reasons": reasons(memory),
    }


# ---- picture ----


def plot_memory(bars: Mapping[str, Memory], title: str, file: Path) -> None:
    """A stacked bar for each moment of each layout, by KINDS; `bars` maps a label to a layout's
    memory.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(max(6.0, 1.6 + 2.1 * len(bars)), 4.4), layout="constrained")
    axes, step = figure.subplots(), len(MOMENTS) + 1
    moments = [memory.moments[moment] for memory in bars.values() for moment in MOMENTS]
    places = [group * step + index for group in range(len(bars)) for index in range(len(MOMENTS))]
    tops = [0.0] * len(moments)
    for kind, color in zip(KINDS, COLORS, strict=True):
        heights = [sum(part.bytes for part in parts if part.kind == kind) / GB for parts in moments]
        alpha = 0.35 if kind == "KV cache" else 1.0
        axes.bar(places, heights, 0.86, tops, color=color, alpha=alpha, label=kind)
        tops = [top + height for top, height in zip(tops, heights)]
    for place, top in zip(places, tops):
        axes.text(place, top + 0.6, f"{top:.0f}", ha="center", fontsize=8)
    axes.set_xticks(places, [*MOMENTS] * len(bars), rotation=45, ha="right", fontsize=8)
    limit = max(memory.capacity for memory in bars.values()) / GB
    highest = max(limit, *tops)
    for group, text in enumerate(bars):
        axes.text(group * step + 1.5, highest * 1.05, text, ha="center", va="bottom", fontsize=9)
    axes.axhline(limit, color="#D55E00", linewidth=1.2, linestyle="--")
    axes.set_ylim(0, highest * 1.2)
    axes.set_ylabel("GB of the fullest rank")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    figure.suptitle(f"{title}. {DISCLAIMER}", fontsize=9, x=0.01, ha="left")
    figure.savefig(file, dpi=110)
