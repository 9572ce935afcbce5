"""Layouts, rules and memory for people: tables, JSON, a bar chart, and the tables of docs/layouts.md."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindspeed_qerl.families import ModelShape
from mindspeed_qerl.layout.memory import GB, KINDS, MOMENTS, Memory, Part, model_parameters
from mindspeed_qerl.layout.plan import Plan
from mindspeed_qerl.layout.planner import Ranked, idle_share, layer_collectives
from mindspeed_qerl.layout.rules import BATCH, ROLLOUT, TRAINING, Violation
from mindspeed_qerl.recipe.types import Layout

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

# Okabe and Ito's, one for each of KINDS
COLORS = ("#999999", "#0072B2", "#CC79A7", "#E69F00", "#56B4E9", "#D55E00", "#009E73")
DISCLAIMER = "An estimate from sizes, never measured on an NPU."
COLLECTIVES = "colls: collectives that a layer waits for. "
LEGEND = ("vLLM: infer TP x EP. batch: the number of prompts nearest to 64 that divides. train, sync, rollout: GB of "
          "the fullest rank in the forward and backward passes, in the weight sync, and in the rollout with its KV "
          f"cache. util: gpu_memory_utilization. waits: share of an update lost to the pipeline. {COLLECTIVES}KV for "
          f"n of m: full-length answers at once that the KV cache holds, of those that are needed. {DISCLAIMER}")
WIDE = 100  # columns; below, sums and notes stand under their table


def console() -> "Console":
    """The terminal, or 110 columns where there is none: a file, a pipe."""
    from rich.console import Console

    return Console() if Console().is_terminal else Console(width=110)


def label(plan: Plan) -> str:
    """A layout in two short lines."""
    it = plan.layout
    sizes = {"TP": it.tp, "PP": it.pp, "EP": it.ep}
    return ((" ".join(f"{name}{size}" for name, size in sizes.items() if size > 1) or "DP only")
            + f"\nvLLM {it.infer_tp}x{it.infer_ep}")


def model_line(shape: ModelShape) -> str:
    """The model in one line."""
    experts = f", {shape.num_experts} experts of which {shape.num_experts_per_tok} answer a token" if shape.moe else ""
    return (f"{shape.name}: {model_parameters(shape) / GB:.1f}B parameters, {shape.num_hidden_layers} layers, "
            f"{shape.num_attention_heads} heads, {shape.num_key_value_heads} KV heads{experts}")


def sizes_line(plan: Plan) -> str:
    """The sizes of the layout."""
    it, moe = plan.layout, plan.shape.moe
    sizes = [("TP", it.tp), ("PP", it.pp), *([("CP", it.cp)] if it.cp > 1 else []), *([("EP", it.ep)] if moe else []),
             ("DP", it.dp)]
    return (f"{', '.join(f'{name} {size}' for name, size in sizes)}; vLLM TP {it.infer_tp}"
            + (f" x EP {it.infer_ep}" if moe else ""))


def layout_line(plan: Plan, assumed: bool = False) -> str:
    """The layout and its nodes in one line; with `assumed`, the width of a node was not given: how to give it."""
    return (f"{plan.layout.world} ranks: {sizes_line(plan)}; "
            f"{nodes(plan.layout.world, plan.layout.ranks_per_node, assumed)}")


def nodes(world: int, ranks_per_node: int, assumed: bool = False) -> str:
    """How many nodes of how many ranks; where that is `assumed` and two could share the ranks, the option that says
    so."""
    it = Layout(world, ranks_per_node=ranks_per_node)
    two = f"; for two: --ranks-per-node {world // 2}" if assumed and it.nodes == 1 and world % 2 == 0 else ""
    return f"{it.nodes} node{'s' if it.nodes > 1 else ''} of {it.node_width}{two}"


def batch_line(plan: Plan) -> str:
    """The batch in one line."""
    batch = plan.batch
    return (f"{batch.global_batch_size} prompts x {batch.samples_per_prompt} answers a step: "
            f"{batch.answers // plan.layout.dp} answers a training rank")


def print_layouts(console: "Console", ranked: Sequence[Ranked]) -> None:
    """The ranked layouts and what the columns are; where the terminal is narrow, without the collectives and with the
    notes under the table."""
    wide = console.width >= WIDE
    console.print(layouts_table(ranked, wide))
    places: dict[str, list[str]] = {}
    for number, entry in enumerate(ranked, 1):
        for note in _note(entry):
            places.setdefault(note, []).append(str(number))
    for note, numbers in places.items() if not wide else ():
        console.print(f"{', '.join(numbers)}: {note}", highlight=False)
    console.print(LEGEND if wide else LEGEND.replace(COLLECTIVES, ""), highlight=False, style="dim")


def layouts_table(ranked: Sequence[Ranked], wide: bool) -> "Table":
    """The ranked layouts, one a line; `wide` with collectives and notes."""
    from rich import box
    from rich.table import Table

    moe = ranked[0].plan.shape.moe
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=0)
    for name in ("#", "TP", "PP", *(["EP"] if moe else []), "DP", "vLLM", "batch", "train", "sync", "rollout", "util",
                 "waits", *(["colls"] if wide else [])):
        table.add_column(name, justify="right", no_wrap=True)
    if wide:
        table.add_column("note", overflow="fold")
    for number, entry in enumerate(ranked, 1):
        it, memory = entry.plan.layout, entry.memory
        gigabytes = [f"{size / GB:.0f}"
                     for size in (max(memory.total("update"), memory.total("log-probs")), memory.total("weight sync"),
                                  memory.total("rollout"))]
        table.add_row(str(number), *map(str, [it.tp, it.pp, *([it.ep] if moe else []), it.dp]),
                      f"{it.infer_tp}x{it.infer_ep}" if moe else str(it.infer_tp),
                      str(entry.plan.batch.global_batch_size), *gigabytes,
                      f"{entry.settings.gpu_memory_utilization:g}",
                      f"{idle_share(entry.plan):.0%}" if it.pp > 1 else "",
                      *([str(layer_collectives(entry.plan)[0]), "; ".join(_note(entry))] if wide else []),
                      style="red" if not memory.fits else "yellow" if memory.tight else None)
    return table


def _note(entry: Ranked) -> list[str]:
    """What the columns do not say."""
    memory = entry.memory
    if not memory.fits:
        return [f"does not fit: {memory.excess / GB:.1f} GB over"]
    short = ([f"KV for {memory.answers_at_once} of {memory.answers_needed}"]
             if memory.answers_at_once < memory.answers_needed else [])
    return [*(["tight"] if memory.tight else []), *short,
            *(reason for reason in entry.reasons if reason.startswith("across nodes"))]


def print_memory(console: "Console", memory: Memory) -> None:
    """Each part of the fullest rank's memory at each moment, GB, and how it comes about: beside it, or below it where
    the terminal is narrow."""
    from rich import box
    from rich.table import Table

    wide = console.width >= WIDE
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, show_footer=True)
    table.add_column("GB of one rank", footer="sum", no_wrap=True)
    for moment in MOMENTS:
        table.add_column(moment, justify="right", footer=f"{memory.total(moment) / GB:.1f}", no_wrap=True)
    if wide:
        table.add_column("how", footer=f"of {memory.capacity / GB:.0f}", overflow="fold", style="dim")
    rows = parts_by_moment(memory)
    hows = {name: "; ".join(dict.fromkeys(part.how for part in row.values())) for name, row in rows.items()}
    for name, row in rows.items():
        cells = [f"{row[moment].bytes / GB:.1f}" if moment in row else "" for moment in MOMENTS]
        table.add_row(name, *cells, *([hows[name]] if wide else []))
    console.print(table)
    for name, how in hows.items() if not wide else ():
        console.print(f"{name}: {how}", highlight=False, style="dim")


def parts_by_moment(memory: Memory) -> dict[str, dict[str, Part]]:
    """name of a part -> moment -> the part, in the order in which they are added up."""
    names = dict.fromkeys(part.name for kind in KINDS for parts in memory.moments.values()
                          for part in parts if part.kind == kind)
    return {name: {moment: part for moment, parts in memory.moments.items() for part in parts if part.name == name}
            for name in names}


def faults_table(faults: Iterable[Violation]) -> "Table":
    """Each broken rule with its numbers and its source."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("broken", overflow="fold", style="red")
    table.add_column("by", overflow="fold", style="dim")
    for fault in faults:
        repository, path = fault.source.split(" ", 1)
        table.add_row(fault.message, f"{repository} {path.rsplit('/', 1)[-1]}")
    return table


# ---- JSON ----

def plan_dict(plan: Plan) -> dict[str, Any]:
    """The numbers of a plan."""
    it = plan.layout
    return {**{name: getattr(it, name) for name in ("world", "ranks_per_node", "tp", "pp", "cp", "ep", "dp",
                                                    "infer_tp", "infer_ep", "infer_dp", "nodes", "sequence_parallel",
                                                    "enable_expert_parallel")},
            "num_layer_list": list(it.num_layer_list),
            "batch": {name: value for name, value in asdict(plan.batch).items() if name != "dispatch"}}


def memory_dict(memory: Memory) -> dict[str, Any]:
    """The memory of the fullest rank, bytes."""
    return {"capacity": memory.capacity, "fits": memory.fits, "faults": list(memory.faults),
            "pipeline_stage": memory.stage,
            "totals": {moment: memory.total(moment) for moment in MOMENTS},
            "parts": {moment: [asdict(part) for part in parts] for moment, parts in memory.moments.items()},
            "kv_cache": {"bytes": memory.kv_cache, "bytes_a_token": memory.kv_token,
                         "answers_at_once": memory.answers_at_once,
                         "answers_needed": memory.answers_needed}}


def ranked_dict(entry: Ranked) -> dict[str, Any]:
    """One line of the ranking."""
    return {**plan_dict(entry.plan), "gpu_memory_utilization": entry.settings.gpu_memory_utilization,
            "pipeline_idle": round(idle_share(entry.plan), 4), "memory": {**memory_dict(entry.memory), "parts": None},
            "reasons": list(entry.reasons)}


# ---- picture ----

def plot_memory(bars: Mapping[str, Memory], title: str, file: Path) -> None:
    """A stacked bar for each moment of each layout, by KINDS; `bars` maps a label to a layout's memory."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(max(6.0, 1.6 + 2.1 * len(bars)), 4.4), layout="constrained")
    for group, memory in enumerate(bars.values()):
        for index, moment in enumerate(MOMENTS):
            bottom, x = 0.0, group * (len(MOMENTS) + 1) + index
            for kind, color in zip(KINDS, COLORS, strict=True):
                height = sum(part.bytes for part in memory.moments[moment] if part.kind == kind) / GB
                axes.bar(x, height, 0.86, bottom, color=color, alpha=0.35 if kind == "KV cache" else 1.0,
                         label=kind if group == index == 0 else None)
                bottom += height
            axes.text(x, bottom + 0.6, f"{bottom:.0f}", ha="center", fontsize=8)
    places = [group * (len(MOMENTS) + 1) + index for group in range(len(bars)) for index in range(len(MOMENTS))]
    axes.set_xticks(places, [*MOMENTS] * len(bars), rotation=45, ha="right", fontsize=8)
    limit = max(memory.capacity for memory in bars.values()) / GB
    top = max(limit, *(memory.total(moment) / GB for memory in bars.values() for moment in MOMENTS))
    for group, text in enumerate(bars):
        axes.text(group * (len(MOMENTS) + 1) + 1.5, top * 1.05, text, ha="center", va="bottom", fontsize=9)
    axes.axhline(limit, color="#D55E00", linewidth=1.2, linestyle="--")
    axes.set_ylim(0, top * 1.2)
    axes.set_ylabel("GB of the fullest rank")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    figure.suptitle(f"{title}. {DISCLAIMER}", fontsize=9, x=0.01, ha="left")
    figure.savefig(file, dpi=110)
    plt.close(figure)


# ---- docs/layouts.md ----

def rules_markdown() -> str:
    """Every rule with its source, as the tables of docs/layouts.md."""
    lines = []
    for title, rules in (("Training", TRAINING), ("Rollout", ROLLOUT), ("Batch", BATCH)):
        lines += [f"| {title} | source |", "|---|---|"]
        for rule in rules:
            lines.append(f"| {rule.statement} | {rule.repository} `{rule.path.rsplit('/', 1)[-1]}:{rule.line}` |")
        lines.append("")
    return "\n".join(lines)


def memory_markdown(memories: Mapping[str, Memory]) -> str:
    """The memory of several configs side by side, as the table of docs/layouts.md; GB."""
    lines = ["| GB of one rank | " + " | ".join(memories) + " |", "|---" * (1 + len(memories)) + "|"]
    tables = {name: parts_by_moment(memory) for name, memory in memories.items()}

    def cells(moment: str, part: str) -> list[str]:
        rows = [table.get(part, {}).get(moment) for table in tables.values()]
        return [f"{row.bytes / GB:.1f}" if row else "–" for row in rows]

    for moment in reversed(MOMENTS):
        names = dict.fromkeys(part.name for memory in memories.values() for kind in KINDS
                              for part in memory.moments[moment] if part.kind == kind)
        lines += [f"| {moment}: {name} | " + " | ".join(cells(moment, name)) + " |" for name in names]
        lines.append(f"| **{moment}** | "
                     + " | ".join(f"**{memory.total(moment) / GB:.1f}**" for memory in memories.values()) + " |")
    lines.append("| answers of full length that the KV cache holds, needed | "
                 + " | ".join(f"{memory.answers_at_once}, {memory.answers_needed}" for memory in memories.values())
                 + " |")
    return "\n".join(lines)
