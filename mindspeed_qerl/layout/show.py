"""Layouts, rules and memory for people: tables."""

from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console
from rich.table import Column, Table

from mindspeed_qerl.families import ModelShape
from mindspeed_qerl.recipe.types import Layout

from .memory import MOMENTS, Memory
from .parts import GB, Part
from .planner import notes
from .rules import Violation
from .sizes import model_parameters
from .time import LAUNCH, Terms, idle_share, iteration, total

DISCLAIMER = "An estimate from sizes, never measured on an NPU."
COLUMNS = "# TP PP EP DP vLLM batch seconds train sync rollout util waits".split()
LEGEND = (
    "vLLM: infer TP x EP. batch: the nearest number of prompts that divides. seconds: of an "
    "iteration. train, sync, rollout: GB of the fullest rank in the forward and backward passes, "
    "in the weight sync, and in the rollout with its KV cache. util: gpu_memory_utilization. "
    "waits: share of an update lost to the pipeline. KV for n of m: full-length answers at once "
    f"that the KV cache holds, of those that are needed. {DISCLAIMER}"
)


def console() -> Console:
    """The terminal, or 110 columns where there is none: a file, a pipe."""
    return Console() if Console().is_terminal else Console(width=110)


def model_line(shape: ModelShape) -> str:
    """The model in one line."""
    line = (
        f"{shape.name}: {model_parameters(shape) / GB:.1f}B parameters, "
        f"{shape.num_hidden_layers} layers, {shape.num_attention_heads} heads, "
        f"{shape.num_key_value_heads} KV heads"
    )
    if shape.moe:
        line += f", {shape.num_experts} experts, {shape.num_experts_per_tok} active"
    return line


def nodes(layout: Layout) -> str:
    """Returns how many nodes of how many ranks."""
    return f"{layout.nodes} node{'s' * (layout.nodes > 1)} of {layout.node_width}"


def print_layouts(console: Console, ranked: Sequence[Memory], terms: Terms) -> None:
    """The ranked layouts, one a line, and what the columns are."""
    columns = [Column(name, justify="right", no_wrap=True) for name in COLUMNS]
    note = Column("note", overflow="fold")
    table = Table(*columns, note, box=box.SIMPLE_HEAD, pad_edge=False, padding=0)
    for number, memory in enumerate(ranked, 1):
        plan = memory.plan
        layout = plan.layout
        sizes = {moment: memory.total(moment) / GB for moment in MOMENTS}
        remarks = notes(memory)
        if not memory.fits:
            remarks = [f"does not fit: {memory.excess / GB:.1f} GB over"]
        cells = (
            number,
            layout.tp,
            layout.pp,
            layout.ep,
            layout.dp,
            f"{layout.infer_tp}x{layout.infer_ep}",
            plan.batch.global_batch_size,
            span(total(iteration(memory, terms))),
            f"{max(sizes['update'], sizes['log-probs']):.0f}",
            f"{sizes['weight sync']:.0f}",
            f"{sizes['rollout']:.0f}",
            memory.settings.gpu_memory_utilization,
            f"{idle_share(plan):.0%}" if layout.pp > 1 else "",
            "; ".join(remarks),
        )
        table.add_row(*map(str, cells), style=None if memory.fits else "red")
    console.print(table)
    console.print(LEGEND, highlight=False, style="dim")


def _table_of_sums(first: str, sums: str) -> Table:
    """A table whose columns end in their sums, with its first column."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, show_footer=True)
    table.add_column(first, footer=sums, no_wrap=True)
    return table


def print_memory(console: Console, memory: Memory) -> None:
    """Each part of the fullest rank's memory at each moment, GB, and below how it comes about."""
    table = _table_of_sums("GB of one rank", f"sum, of {memory.capacity / GB:.0f}")
    for moment in MOMENTS:
        total = f"{memory.total(moment) / GB:.1f}"
        table.add_column(moment, justify="right", footer=total, no_wrap=True)
    rows: dict[str, dict[str, Part]] = {}  # name of a part -> moment -> the part
    for moment, parts in memory.moments.items():
        for part in parts:
            rows.setdefault(part.name, {})[moment] = part
    for name, row in rows.items():
        cells = [f"{row[moment].bytes / GB:.1f}" if moment in row else "" for moment in MOMENTS]
        table.add_row(name, *cells)
    console.print(table)
    for name, row in rows.items():
        hows = dict.fromkeys(part.how for part in row.values())
        console.print(f"{name}: {'; '.join(hows)}", highlight=False, style="dim")


def span(seconds: Iterable[float]) -> str:
    """From the least to the most."""
    low, high = (f"{value:.{int(value < 10)}f}" for value in seconds)
    return low if low == high else f"{low}-{high}"


def print_time(console: Console, memory: Memory, terms: Terms, iterations: int | None) -> None:
    """Seconds of an iteration of the slowest rank, phase by phase, and hours of all."""
    phases = iteration(memory, terms)
    sums = total(phases)
    table = _table_of_sums("seconds of an iteration", "sum")
    table.add_column("launches", justify="right")
    table.add_column("the die", justify="right", footer=f"{sum(p.device for p in phases):.1f}")
    table.add_column("with the host", justify="right", footer=span(sums))
    table.add_column("")
    for phase in phases:
        seconds = total([phase])
        bar = "█" * round(40 * sum(seconds) / sum(sums))
        cells = (f"{phase.launches:,.0f}", f"{phase.device:.1f}", span(seconds), bar)
        table.add_row(phase.name, *cells)
    console.print(table)
    microseconds = [seconds * 1e6 for seconds in LAUNCH]
    words = (
        f"{terms.prompt:g} tokens a prompt, {terms.answer:g} an answer, {terms.longest:g} the "
        f"longest; a launch costs the host {span(microseconds)} us"
    )
    if iterations:
        hours = [iterations * seconds / 3600 for seconds in sums]
        words += f". {iterations} iterations: {span(hours)} hours"
    words += ". Launches were counted, the rest is computed; nothing was measured on an NPU."
    console.print(words, highlight=False)


def faults_table(faults: Iterable[Violation]) -> Table:
    """Each broken rule with its numbers and its source."""
    broken = Column("broken", overflow="fold", style="red")
    by = Column("by", style="dim")
    table = Table(broken, by, box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for fault in faults:
        repository, path = fault.source.split(" ")
        table.add_row(fault.message, f"{repository} {path.rpartition('/')[2]}")
    return table
