"""Which parallel layouts exist for a model on a number of NPUs, or whether one that you have in
mind does; what a rank must hold, and how long an iteration takes.

Asks every rule of MindSpeed-RL, Megatron, MindSpeed and vLLM about training, rollout and batch
together, and adds up what the fullest NPU must hold. Nothing is started, no NPU and no model
weights are needed. Memory and time are estimates, never measured on an NPU.
"""

import argparse
import sys
from functools import partial
from pathlib import Path

if __name__ == "__main__":  # a file of a checkout
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from mindspeed_qerl.common.entry import quietly, use_checkout

    use_checkout()

from mindspeed_qerl.common.errors import ConfigError, Fault, unknown
from mindspeed_qerl.engines import engine_of, examine
from mindspeed_qerl.families import NAMED_SHAPES, ModelShape, family_of, read_config, read_shape
from mindspeed_qerl.families.megatron import not_on_npus
from mindspeed_qerl.layout import planner, show
from mindspeed_qerl.layout.memory import Memory, estimate, settings_of
from mindspeed_qerl.layout.plan import Plan, plan_of
from mindspeed_qerl.layout.rules import RULES, broken
from mindspeed_qerl.layout.time import HARDWARE, Terms
from mindspeed_qerl.local.limits import refused
from mindspeed_qerl.recipe.compose import compose
from mindspeed_qerl.recipe.layout import MAX_RANKS, Layout
from mindspeed_qerl.recipe.types import Recipe

NODE = 16  # NPUs of a node, where the width is not given
MOST_GB = 10**6
SIZES = ("tp", "pp", "ep", "infer_tp", "infer_ep")  # keys of --check
EXAMPLES = """exit status: 0 legal, or layouts exist; 1 illegal or refused, or none exists for NPUs;
2 wrong arguments

examples:
  python tools/plan_layout.py --model qwen3_30b_a3b --ranks 16
  python tools/plan_layout.py --model /models/Qwen3-30B-A3B --ranks 16 --ranks-per-node 8 --top 20
  python tools/plan_layout.py --model qwen3_30b_a3b --ranks 12 --check tp=3,ep=4,infer_tp=6
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
        "--prompts",
        type=int,
        default=64,
        help="of an iteration, with 8 answers each: the nearest number that divides (default: 64)",
    )
    parser.add_argument(
        "--top", type=int, default=10, help="how many layouts to list (default: 10)"
    )
    parser.add_argument(
        "--memory-gb", type=float, default=64.0, help="memory of one NPU, 10^9 bytes (default: 64)"
    )
    time = parser.add_argument_group("time")
    time.add_argument(
        "--tokens",
        type=numbers,
        metavar="PROMPT,ANSWER,LONGEST",
        default=(120, 300, 900),
        help="of the mean prompt, the mean answer and an iteration's longest (default: "
        "120,300,900)",
    )
    time.add_argument("--hardware", choices=HARDWARE, default="910C", help="default: 910C")
    return parser


def main() -> int:
    parser = arguments()
    args = parser.parse_intermixed_args()
    try:
        check_arguments(args)
        width = args.ranks_per_node or NODE
        terms = Terms(*args.tokens, HARDWARE[args.hardware])
        if args.config_name:
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
        if args.check is not None:
            sizes = checked_sizes(args)
            as_trained = {"infer_tp": sizes.get("tp", 1), "infer_ep": sizes.get("ep", 1)}
            layout = Layout(args.ranks, ranks_per_node=width, **as_trained | sizes)
            plan = planner.new_plan(shape, layout, prompts=args.prompts)
            illegal = show_faults(plan)
            if not illegal:
                show_legal(planner.with_memory(plan, args.memory_gb), terms)
            return illegal or refused
        return list_layouts(args, shape, width, terms) or refused
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2


def check_arguments(args: argparse.Namespace) -> None:
    """ConfigError for options that contradict each other or are out of range."""
    names = ("ranks", "ranks-per-node", "top", "prompts")
    given = [(name, getattr(args, name.replace("-", "_"))) for name in names]
    given += [("tokens", tokens) for tokens in args.tokens]
    for name, number in given:
        if number is not None and not 1 <= number <= MAX_RANKS:
            raise ConfigError(f"--{name} {number} must be at least 1 and at most {MAX_RANKS:,}")
    if len(args.tokens) != 3 or args.tokens[1] > args.tokens[2]:
        raise ConfigError(
            f"--tokens {','.join(map(str, args.tokens))} must be three numbers, of the mean prompt, "
            "the mean answer and the longest answer"
        )
    if not 0 < args.memory_gb <= MOST_GB:
        raise ConfigError(
            f"--memory-gb {args.memory_gb:g} must be finite and above 0, and at most {MOST_GB:,}"
        )
    if args.config_name and (
        args.model is not None or args.ranks is not None or args.check is not None
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


def recipe_of(name: str, overrides: list[str]) -> tuple[Recipe, list[Fault]]:
    """The recipe of a config, and what its engine refuses of it besides its layout and files;
    ConfigError for an engine, a model, a section or a key that is unknown, and for values of the
    wrong kind: they would silently be left out of the judgement.
    """
    recipe, found = examine(compose(name, overrides))
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
    console = show.console()
    say = partial(console.print, highlight=False)
    layout = plan.layout
    say(show.model_line(plan.shape))
    say(
        f"{layout.world} ranks: TP {layout.tp}, PP {layout.pp}, EP {layout.ep}, DP {layout.dp}; "
        f"vLLM TP {layout.infer_tp} x EP {layout.infer_ep}; {show.nodes(layout)}"
    )
    if faults:
        rules = "1 rule is" if len(faults) == 1 else f"{len(faults)} rules are"
        say(f"[bold red]illegal[/]: {rules} broken, of {len(RULES)}")
        console.print(show.faults_table(faults))
        width = layout.ranks_per_node
        say(
            "The layouts that are legal: python tools/plan_layout.py --model MODEL --ranks "
            f"{layout.world} --ranks-per-node {width}"
        )
    return bool(faults)


def show_legal(memory: Memory, terms: Terms, iterations: int | None = None) -> None:
    """Say what a legal plan's ranks hold, and how long it takes."""
    console = show.console()
    say = partial(console.print, highlight=False)
    plan = memory.plan
    batch = plan.batch
    say(
        f"{batch.global_batch_size} prompts x {batch.samples_per_prompt} answers a step: "
        f"{plan.share} answers a training rank"
    )
    say(f"[bold green]legal[/], all {len(RULES)} rules hold. {show.DISCLAIMER}")
    show.print_memory(console, memory)
    for reason in planner.reasons(memory):
        say(f"- {reason}")
    show.print_time(console, memory, terms, iterations)


def list_layouts(args: argparse.Namespace, shape: ModelShape, width: int, terms: Terms) -> int:
    """List the layouts that exist; if there is none, say what refuses them."""
    ranks = args.ranks
    ranked = planner.legal_layouts(shape, ranks, width, args.memory_gb, terms, args.prompts)
    best = ranked[: args.top]
    fitting = sum(memory.fits for memory in ranked)
    console = show.console()
    nodes = show.nodes(Layout(ranks, ranks_per_node=width))
    say = partial(console.print, highlight=False)
    say(show.model_line(shape))
    if ranked:
        order = f"The best {len(best)}" if fitting else f"The {len(best)} nearest to it"
        say(
            f"{ranks} ranks, {nodes}. {len(ranked)} training layouts are legal, "
            f"{fitting or '[bold red]none[/]'} fit{'s' if fitting < 2 else ''} into "
            f"{args.memory_gb:g} GB. {order}, each with its best inference layout."
        )
        show.print_layouts(console, best, terms)
        return 0
    say(
        f"[bold red]No layout exists[/] for {ranks} ranks, {nodes}. What refuses every "
        "division of them by TP, PP and EP:"
    )
    for message in planner.why_none(shape, ranks, width)[:8]:
        say(f"  {message}")
    return 1


if __name__ == "__main__":
    sys.exit(quietly(main))
