"""Which parallel layouts exist for a model on a number of NPUs, or whether one that you have in
mind does; what a rank must hold, and how long an iteration takes; and a config for one of them.

Asks every rule of MindSpeed-RL, Megatron, MindSpeed and vLLM about training, rollout and batch
together, and adds up what the fullest NPU must hold. Nothing is started, no NPU and no model
weights are needed. Memory and time are estimates, never measured on an NPU.
"""

import argparse
import os
import re
import shutil
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

if __name__ == "__main__":  # a file of a checkout
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from mindspeed_qerl.common.entry import quietly, use_checkout

    use_checkout()

from rich import box
from rich.console import Console
from rich.table import Column, Table

from mindspeed_qerl.common.errors import ConfigError, Fault, unknown
from mindspeed_qerl.engines import engine_of, examine
from mindspeed_qerl.families import (
    NAMED_SHAPES,
    PUBLISHED,
    ModelShape,
    family_of,
    read_config,
    read_shape,
)
from mindspeed_qerl.families.megatron import compare_with_model, not_on_npus
from mindspeed_qerl.layout import planner
from mindspeed_qerl.layout.memory import MOMENTS, Memory, estimate, settings_of
from mindspeed_qerl.layout.parts import GB, Part
from mindspeed_qerl.layout.plan import Plan, plan_of
from mindspeed_qerl.layout.rules import RULES, Violation, broken, layout_faults
from mindspeed_qerl.layout.sizes import model_parameters
from mindspeed_qerl.layout.time import (
    DEFAULT,
    HARDWARE,
    LAUNCH,
    Terms,
    idle_share,
    iteration,
    total,
)
from mindspeed_qerl.layout.written import PROMPT, Wanted, config_text, model_text
from mindspeed_qerl.local.limits import refused
from mindspeed_qerl.recipe.compose import CONFIGS, compose
from mindspeed_qerl.recipe.layout import MAX_RANKS, Layout
from mindspeed_qerl.recipe.types import Batch, Recipe
from mindspeed_qerl.tasks.rows import read_rows

GSM8K_ROWS = 7473
ANSWER = 1024  # tokens at most
THOUGHTS = 2048  # and the answer
NODE = 16  # NPUs of a node, where the width is not given
MOST_GB = 10**6
SIZES = ("tp", "pp", "ep", "infer_tp", "infer_ep")  # keys of --check
EXAMPLES = """exit status: 0 legal, or layouts exist; 1 illegal or refused, or none exists for NPUs;
2 wrong arguments

examples:
  python tools/plan_layout.py --model qwen3_30b_a3b --ranks 16
  python tools/plan_layout.py --model /models/Qwen3-30B-A3B --ranks 16 --ranks-per-node 8 --top 20
  python tools/plan_layout.py --model qwen3_30b_a3b --ranks 12 --check tp=3,ep=4,infer_tp=6
  python tools/plan_layout.py --model /models/Qwen3-32B --ranks 32 --write configs/mine.yaml
  python tools/plan_layout.py --config-name grpo_qwen3_30b_a3b_gsm8k_16npu \\
      actor_config.expert_model_parallel_size=8
"""


def numbers(words: str) -> tuple[int, ...]:
    """Of `1,2,3`."""
    return tuple(int(word) for word in words.split(","))


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", help=f"{', '.join(NAMED_SHAPES)}; or the directory of a Hugging Face model"
    )
    parser.add_argument("--ranks", type=int, help="NPUs: dies, a 910C has two")
    parser.add_argument("--ranks-per-node", type=int, help=f"NPUs of one node (default: {NODE})")
    parser.add_argument(
        "--check",
        metavar="KEY=SIZE,...",
        help=f"judge this layout; keys {', '.join(SIZES)}. Training sizes left "
        "out are 1, inference sizes those of training; the batch is chosen",
    )
    parser.add_argument(
        "--config-name",
        metavar="NAME",
        help="judge a config of configs/, with the overrides that follow",
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="Hydra overrides of the config"
    )
    parser.add_argument(
        "--top", type=int, default=10, help="how many layouts to list (default: 10)"
    )
    parser.add_argument(
        "--memory-gb", type=float, default=64.0, help="memory of one NPU, 10^9 bytes (default: 64)"
    )
    written = parser.add_argument_group("a config")
    written.add_argument(
        "--write", metavar="FILE", help="write a config for the best layout, or that of --check"
    )
    written.add_argument("--pick", type=int, default=1, metavar="N", help="the N-th of the list")
    written.add_argument("--overwrite", action="store_true", help="files that are there already")
    written.add_argument(
        "--max-prompt", type=int, metavar="TOKENS", help=f"of a prompt (default: {PROMPT})"
    )
    written.add_argument(
        "--max-answer",
        type=int,
        metavar="TOKENS",
        help=f"of an answer (default: {ANSWER}; {THOUGHTS} of a model that thinks)",
    )
    written.add_argument(
        "--train-file", metavar="FILE", help=".jsonl or .parquet (default: GSM8K's)"
    )
    time = parser.add_argument_group("time")
    time.add_argument(
        "--tokens",
        type=numbers,
        metavar="PROMPT,ANSWER,LONGEST",
        help="of the mean prompt, the mean answer and an iteration's longest (default: "
        "120,300,900, answers no longer than they may be)",
    )
    time.add_argument("--hardware", choices=HARDWARE, default="910C", help="default: 910C")
    return parser


def main() -> int:
    parser = arguments()
    args = parser.parse_intermixed_args()
    try:
        check_arguments(args)
        width = args.ranks_per_node or NODE
        if args.config_name:
            terms = terms_of(args, DEFAULT.longest)
            recipe, faults = recipe_of(args.config_name, args.overrides)
            path = Path(recipe.model.path)
            plan = plan_of(recipe, ranks_per_node=args.ranks_per_node)
            on_npus = engine_of(recipe).UPSTREAM and (path / "config.json").is_file()
            refused = on_npus and no_layout_runs(str(path), plan.shape)
            illegal = show_faults(plan)
            if not illegal:
                memory = estimate(plan, settings_of(recipe, args.memory_gb))
                show_legal(memory, terms, recipe.run.train_iters)
            for fault in faults:
                print(f"The {recipe.engine} engine refuses this config: {fault}")
            return bool(faults) or illegal or refused
        shape = read_shape(args.model)
        refused = no_layout_runs(args.model, shape)
        answer = args.max_answer or usual_answer(args.model, shape)
        terms = terms_of(args, answer)
        batch = batch_of((args.max_prompt or PROMPT) + answer)
        if args.check is not None:
            sizes = checked_sizes(args)
            as_trained = {"infer_tp": sizes.get("tp", 1), "infer_ep": sizes.get("ep", 1)}
            layout = Layout(args.ranks, ranks_per_node=width, **as_trained | sizes)
            plan = planner.fit_batch(planner.new_plan(shape, layout, batch), planner.PROMPTS)
            illegal = show_faults(plan)
            if not illegal:
                memory = planner.with_memory(plan, args.memory_gb, terms)
                show_legal(memory, terms)
                if args.write and not refused:
                    write(args, memory, terms)
            return illegal or refused
        ranked = planner.legal_layouts(shape, args.ranks, width, args.memory_gb, terms, batch)
        list_layouts(args, shape, width, terms, ranked)
        if args.write and ranked and not refused:
            if args.pick > len(ranked):
                raise ConfigError(f"--pick {args.pick}: {len(ranked)} layouts are legal")
            write(args, ranked[args.pick - 1], terms)
        return not ranked or refused
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2


def check_arguments(args: argparse.Namespace) -> None:
    """ConfigError for options that contradict each other or are out of range."""
    names = ("ranks", "ranks-per-node", "top", "pick", "max-prompt", "max-answer")
    given = [(name, getattr(args, name.replace("-", "_"))) for name in names]
    tokens = args.tokens or ()
    given += [("tokens", number) for number in tokens]
    for name, number in given:
        if number is not None and not 1 <= number <= MAX_RANKS:
            raise ConfigError(f"--{name} {number} must be at least 1 and at most {MAX_RANKS:,}")
    if tokens and (len(tokens) != 3 or tokens[1] > tokens[2]):
        raise ConfigError(
            f"--tokens {','.join(map(str, tokens))} must be three numbers, of the mean prompt, "
            "the mean answer and the longest answer"
        )
    if not 0 < args.memory_gb <= MOST_GB:
        raise ConfigError(
            f"--memory-gb {args.memory_gb:g} must be finite and above 0, and at most {MOST_GB:,}"
        )
    if args.config_name and (
        args.model is not None or args.ranks is not None or args.check is not None or args.write
    ):
        raise ConfigError(
            "--config-name has its own model, ranks and layout; change them with overrides such as "
            "rl_config.actor_resource.num_npus=12"
        )
    if not args.config_name and (args.overrides or not args.model or args.ranks is None):
        raise ConfigError(
            f"{args.overrides[0]!r} is an override of a config: give --config-name"
            if args.overrides
            else "--model and --ranks are needed, or --config-name; see --help"
        )


def recipe_of(
    name: str, overrides: list[str], folder: str | None = None
) -> tuple[Recipe, list[Fault]]:
    """The recipe of a config, and what its engine refuses of it besides its layout and files;
    ConfigError for an engine, a model, a section or a key that is unknown, and for values of the
    wrong kind: they would silently be left out of the judgement.
    """
    recipe, found = examine(compose(name, overrides, folder))
    unread = [fault for fault in found.faults if fault.rule in ("value", "unknown", "missing")]
    if unread:
        raise ConfigError(*unread)
    return recipe, [fault for fault in found.faults if fault.rule in ("conflict", "unsupported")]


def no_layout_runs(model: str, shape: ModelShape) -> bool:
    """Say so if the NPU engine does not run `model`, a name or a directory, whatever its layout."""
    if model in NAMED_SHAPES:  # of families that it runs
        return False
    path = Path(model)
    file = path / "config.json" if path.is_dir() else path
    why = not_on_npus(read_config(file), family_of(shape))
    if not why:
        return False
    there = refused(file, shape)
    local = f"refuses it: {'; '.join(there)}" if there else "can run it, on CPUs"
    print(
        f"No layout runs on NPUs: {'; '.join(why)}. The local engine {local}. By the rules of "
        "layouts alone:"
    )
    return True


def checked_sizes(args: argparse.Namespace) -> dict[str, int]:
    """The sizes of --check; ConfigError for what is no KEY=SIZE."""
    sizes = {}
    for part in filter(None, args.check.replace(" ", "").split(",")):
        key, _, size = part.partition("=")
        if key not in SIZES:
            raise ConfigError(unknown("key in --check:", key, SIZES))
        if key in sizes:
            raise ConfigError(f"--check {args.check}: {key} is given twice, leave one out")
        if not size.isdecimal() or len(size) > 9 or not 1 <= int(size) <= MAX_RANKS:
            raise ConfigError(
                f"--check {key}={size}: the size must be a whole number of at least 1 and at most "
                f"{MAX_RANKS:,}"
            )
        sizes[key] = int(size)
    return sizes


def show_faults(plan: Plan) -> bool:
    """Say which plan it is, and what it breaks; True if it breaks anything."""
    faults = broken(plan)
    terminal = console()
    say = partial(terminal.print, highlight=False)
    layout = plan.layout
    say(model_line(plan.shape))
    say(
        f"{layout.world} ranks: TP {layout.tp}, PP {layout.pp}, EP {layout.ep}, DP {layout.dp}; "
        f"vLLM TP {layout.infer_tp} x EP {layout.infer_ep}; {nodes_of(layout)}"
    )
    if faults:
        rules = "1 rule is" if len(faults) == 1 else f"{len(faults)} rules are"
        say(f"[bold red]illegal[/]: {rules} broken, of {len(RULES)}")
        terminal.print(faults_table(faults))
        width = layout.ranks_per_node
        say(
            "The layouts that are legal: python tools/plan_layout.py --model MODEL --ranks "
            f"{layout.world} --ranks-per-node {width}"
        )
    return bool(faults)


def show_legal(memory: Memory, terms: Terms, iterations: int | None = None) -> None:
    """Say what a legal plan's ranks hold, and how long it takes."""
    terminal = console()
    say = partial(terminal.print, highlight=False)
    plan = memory.plan
    batch = plan.batch
    say(
        f"{batch.global_batch_size} prompts x {batch.samples_per_prompt} answers a step: "
        f"{plan.share} answers a training rank"
    )
    say(f"[bold green]legal[/], all {len(RULES)} rules hold. {DISCLAIMER}")
    print_memory(terminal, memory)
    for reason in planner.reasons(memory):
        say(f"- {reason}")
    print_time(terminal, memory, terms, iterations)


def list_layouts(
    args: argparse.Namespace, shape: ModelShape, width: int, terms: Terms, ranked: list[Memory]
) -> None:
    """List the layouts that exist; if there is none, say what refuses them."""
    ranks = args.ranks
    best = ranked[: args.top]
    fitting = sum(memory.fits for memory in ranked)
    terminal = console()
    nodes = nodes_of(Layout(ranks, ranks_per_node=width))
    say = partial(terminal.print, highlight=False)
    say(model_line(shape))
    if ranked:
        order = f"The best {len(best)}" if fitting else f"The {len(best)} nearest to it"
        say(
            f"{ranks} ranks, {nodes}. {len(ranked)} training layouts are legal, "
            f"{fitting or '[bold red]none[/]'} fit{'s' if fitting < 2 else ''} into "
            f"{args.memory_gb:g} GB. {order}, each with its best inference layout."
        )
        print_layouts(terminal, best, terms)
        return
    say(
        f"[bold red]No layout exists[/] for {ranks} ranks, {nodes}. What refuses every "
        "division of them by TP, PP and EP:"
    )
    for message in planner.why_none(shape, ranks, width)[:8]:
        say(f"  {message}")


# ---- a config ----


def terms_of(args: argparse.Namespace, longest: float) -> Terms:
    """The terms of --tokens and --hardware; of tokens that are not given the usual ones, with no
    answer beyond `longest`.
    """
    usual = (DEFAULT.prompt, min(DEFAULT.answer, longest), min(DEFAULT.longest, longest))
    return Terms(*(args.tokens or usual), HARDWARE[args.hardware])


def batch_of(length: int) -> Batch:
    """The planner's batch for sequences of `length` tokens, which rows and prefill take whole."""
    rows = max(planner.PACKED.update_max_packing_token_size, length)
    return replace(
        planner.PACKED,
        seq_length=length,
        max_model_len=length,
        max_num_batched_tokens=max(planner.PACKED.max_num_batched_tokens, length),
        update_max_packing_token_size=rows,
        actor_max_packing_token_size=rows,
        ref_max_packing_token_size=rows,
    )


def usual_answer(model: str, shape: ModelShape) -> int:
    """Tokens of an answer where --max-answer does not say: more of a model that thinks, as Qwen3
    but the Instruct-2507 does, and every template that can be told not to.
    """
    if model in PUBLISHED:
        thinks = shape.model_type.startswith("qwen3") and "2507" not in model
    else:
        files = [Path(model, name) for name in ("chat_template.jinja", "tokenizer_config.json")]
        texts = [file.read_text(encoding="utf-8") for file in files if file.is_file()]
        thinks = any("enable_thinking" in text for text in texts)
    return THOUGHTS if thinks else ANSWER


def write(args: argparse.Namespace, memory: Memory, terms: Terms) -> None:
    """Write the config of a plan, and its model's part where there is none; ConfigError, and no
    file, for what is there already, does not fit, or is not read back as the plan.
    """
    target = Path(args.write)
    if not memory.fits:
        raise ConfigError(*memory.faults)
    if target.suffix != ".yaml":
        raise ConfigError(f"--write {target}: the name of a config ends in .yaml")
    shape = memory.plan.shape
    part, title, path = names_of(args.model)
    model = model_text(shape, part, title, path, usual_answer(args.model, shape))
    rows, task = GSM8K_ROWS, {}
    if args.train_file:
        rows = len(read_rows(args.train_file))
        stem = Path(args.train_file).stem
        data = f"${{oc.env:DATA,data}}/{stem}/{Path(path).name}/{stem}"
        task = {"train_file": os.path.abspath(args.train_file), "data_path": data}
    wanted = Wanted(title, part, rows, args.max_prompt, args.max_answer, **task)
    files = {target: config_text(memory, wanted, terms)}
    places = [folder / "model" / f"{part}.yaml" for folder in (target.parent, CONFIGS)]
    there = [place for place in places if place.is_file()]
    if not there or (args.overwrite and there[0] == places[0] and args.model not in PUBLISHED):
        files[places[0]] = model
    with TemporaryDirectory() as folder:
        for file, text in files.items():
            trial = Path(folder, file.relative_to(target.parent))
            trial.parent.mkdir(exist_ok=True)
            trial.write_text(text, encoding="utf-8")
        if there and places[0] not in files:
            shutil.copytree(there[0].parent, Path(folder, "model"), dirs_exist_ok=True)
        check_written(args, target.stem, folder, memory)
    taken = [str(file) for file in files if file.exists()]
    if taken and not args.overwrite:
        raise ConfigError(f"{', '.join(taken)}: there already; --overwrite replaces it")
    for file, text in files.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
        print(f"written: {file}")


def names_of(model: str) -> tuple[str, str, str]:
    """The name of a model's part in configs/model/, its title, and its directory as configs have
    it.
    """
    if model in PUBLISHED:
        return model, PUBLISHED[model], f"${{oc.env:MODELS,models}}/{PUBLISHED[model]}"
    directory = Path(os.path.abspath(model))
    part = re.sub(r"\W+", "_", directory.name.lower())
    return part, directory.name, str(directory)


def check_written(args: argparse.Namespace, name: str, folder: str, memory: Memory) -> None:
    """ConfigError unless the config that was written in `folder` is read as the plan, legal and
    fitting, of the model that it is for.
    """
    recipe, faults = recipe_of(name, [], folder)
    plan = plan_of(recipe, memory.plan.shape, memory.plan.layout.ranks_per_node)
    if faults:
        raise ConfigError(*faults)
    if args.model in PUBLISHED:
        shape = memory.plan.shape
        config = {**family_of(shape).hf_config(shape), "model_type": shape.model_type}
        config["rope_theta"] = shape.rope_theta
    else:
        config = read_config(Path(args.model, "config.json"))
    faults = compare_with_model(recipe.model.arguments, config)
    found = estimate(plan, settings_of(recipe, args.memory_gb))
    faults += layout_faults(plan) + [Fault("layout", fault) for fault in found.faults]
    if faults:
        raise ConfigError(*faults)
    read = plan.layout, plan.batch, found.settings
    meant = memory.plan.layout, memory.plan.batch, memory.settings
    assert read == meant, (read, meant)


# ---- tables ----

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


def nodes_of(layout: Layout) -> str:
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
        remarks = planner.notes(memory)
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


if __name__ == "__main__":
    sys.exit(quietly(main))
