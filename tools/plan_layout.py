"""Which parallel layouts exist for a model on a number of NPUs, or whether one that you have in
mind does; what a rank must hold, and how long an iteration takes.

Asks every rule of MindSpeed-RL, Megatron, MindSpeed and vLLM about training, rollout and batch
together, and adds up what the fullest NPU must hold. Nothing is started, no NPU and no model
weights are needed. Memory and time are estimates, never measured on an NPU.
"""

import argparse
import json
import sys
from collections.abc import Collection
from dataclasses import replace
from functools import partial
from pathlib import Path

if __name__ == "__main__":  # a file of a checkout
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from mindspeed_qerl.common.entry import quietly, use_checkout

    use_checkout()

from mindspeed_qerl.common.errors import ConfigError, unknown
from mindspeed_qerl.engines import engine_of, examine_for_engine
from mindspeed_qerl.families import NAMED_SHAPES, ModelShape, family_of, read_config, read_shape
from mindspeed_qerl.families.megatron import not_on_npus
from mindspeed_qerl.layout import planner, show
from mindspeed_qerl.layout.memory import settings_of
from mindspeed_qerl.layout.parts import Settings
from mindspeed_qerl.layout.plan import Plan, plan_of
from mindspeed_qerl.layout.rules import RULES, broken
from mindspeed_qerl.layout.time import HARDWARE, Terms, Work, iteration, launch_of
from mindspeed_qerl.local.limits import refused
from mindspeed_qerl.recipe.compose import compose
from mindspeed_qerl.recipe.layout import MAX_RANKS, Layout
from mindspeed_qerl.recipe.reader import Found, read, read_recipe
from mindspeed_qerl.recipe.types import Recipe
from mindspeed_qerl.runs.directory import RunDirectory
from mindspeed_qerl.runs.metrics import read_jsonl, series

NODE = 16  # NPUs of a node, where the width is not given
MOST_GB = 10**6
GSM8K_PROBLEMS = 1319  # of the test file, where a config takes all
# what --calibrate reads of a run's steps
MEASURED = ("time/rollout", "time/update", "response/length_mean", "response/length_max")
EXAMPLES = """exit status: 0 legal, or layouts exist; 1 illegal or refused, or none exists for NPUs;
2 wrong arguments

examples:
  python tools/plan_layout.py --model qwen3_30b_a3b --ranks 16
  python tools/plan_layout.py --model /models/Qwen3-30B-A3B --ranks 16 --ranks-per-node 8 --top 20
  python tools/plan_layout.py --model qwen3_30b_a3b --ranks 12 --check tp=3,ep=4,infer_tp=6
  python tools/plan_layout.py --model qwen3_30b_a3b --ranks 16,32,64,128      # the best of each
  python tools/plan_layout.py --config-name grpo_qwen3_30b_a3b_gsm8k_16npu \\
      actor_config.expert_model_parallel_size=8
  python tools/plan_layout.py --config-name NAME --calibrate runs/NAME/DATE_seed1
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
    parser.add_argument(
        "--ranks", type=numbers, default=(), help="NPUs: dies, a 910C has two; or several, a,b,..."
    )
    parser.add_argument("--ranks-per-node", type=int, help=f"NPUs of one node (default: {NODE})")
    parser.add_argument(
        "--check",
        metavar="KEY=SIZE,...",
        help=f"judge this layout; keys {', '.join(planner.CHANGEABLE)}. Training sizes left "
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
    time.add_argument(
        "--calibrate",
        metavar="RUN_DIR",
        type=Path,
        help="a run on NPUs: what a launch costs the host, and how long answers are, as it was "
        "there",
    )
    parser.add_argument("--json", action="store_true", help="print JSON (bytes) instead of tables")
    return parser


def main() -> int:
    parser = arguments()
    args = parser.parse_intermixed_args()
    try:
        check_arguments(args)
        width = args.ranks_per_node or NODE
        terms = Terms(Work(*args.tokens, GSM8K_PROBLEMS), HARDWARE[args.hardware])
        if args.calibrate:
            terms = calibrated(args.calibrate, terms, width)
        if args.config_name:
            recipe = recipe_of(args.config_name, args.overrides)
            plan, path = plan_of(recipe, ranks_per_node=width), Path(recipe.model.path)
            on_npus = engine_of(recipe).UPSTREAM and (path / "config.json").is_file()
            refused = on_npus and no_layout_runs(args, str(path), plan.shape)
            settings, terms = settings_of(recipe, args.memory_gb), terms_of(recipe, terms)
            iterations = recipe.run.train_iters
            illegal = judge(args, plan, settings, planner.CHANGEABLE, terms, iterations)
            return other_faults(args, recipe) or illegal or refused
        shape = read_shape(args.model)
        refused = no_layout_runs(args, args.model, shape)
        if args.check is not None:
            sizes = checked_sizes(args)
            typed = [
                name for name in planner.CHANGEABLE if name in sizes or not name.startswith("infer")
            ]
            as_trained = {"infer_tp": sizes.get("tp", 1), "infer_ep": sizes.get("ep", 1)}
            layout = Layout(args.ranks[0], ranks_per_node=width, **as_trained | sizes)
            plan = planner.new_plan(shape, layout, prompts=args.prompts)
            return judge(args, plan, None, typed, terms) or refused
        if len(args.ranks) > 1:
            return scale(args, shape, width, terms) or refused
        return list_layouts(args, shape, width, terms) or refused
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2


def check_arguments(args: argparse.Namespace) -> None:
    """ConfigError for options that contradict each other or are out of range."""
    given = [("ranks-per-node", args.ranks_per_node), ("top", args.top), ("prompts", args.prompts)]
    given += [("ranks", ranks) for ranks in args.ranks]
    given += [("tokens", tokens) for tokens in args.tokens]
    for name, number in given:
        if number is not None and not 1 <= number <= MAX_RANKS:
            raise ConfigError(f"--{name} {number} must be at least 1 and at most {MAX_RANKS:,}")
    if len(args.tokens) != 3 or args.tokens[1] > args.tokens[2]:
        raise ConfigError(
            f"--tokens {','.join(map(str, args.tokens))} must be three numbers, of the mean prompt, "
            "the mean answer and the longest answer"
        )
    if len(args.ranks) > 1 and (args.check is not None or args.json):
        raise ConfigError("several --ranks go neither with --check nor with --json")
    if not 0 < args.memory_gb <= MOST_GB:
        raise ConfigError(
            f"--memory-gb {args.memory_gb:g} must be finite and above 0, and at most {MOST_GB:,}"
        )
    if args.config_name and (args.model is not None or args.ranks or args.check is not None):
        raise ConfigError(
            "--config-name has its own model, ranks and layout; change them with overrides such as "
            "rl_config.actor_resource.num_npus=12"
        )
    if not args.config_name and (args.overrides or not args.model or not args.ranks):
        raise ConfigError(
            f"{args.overrides[0]!r} is an override of a config: give --config-name"
            if args.overrides
            else "--model and --ranks are needed, or --config-name; see --help"
        )


def recipe_of(name: str, overrides: list[str]) -> Recipe:
    """The recipe of a config; ConfigError for an engine, a model, a section or a key that is
    unknown, and for values of the wrong kind: it would silently be left out of the judgement.
    """
    recipe, found = read(compose(name, overrides))
    try:
        engine_of(recipe)
    except ConfigError as error:
        found.faults += error.faults
    found.raise_faults()
    return recipe


def other_faults(args: argparse.Namespace, recipe: Recipe) -> bool:
    """Say what the engine refuses of a config besides its layout, files aside."""
    found = Found()
    examine_for_engine(recipe, found)
    faults = [fault for fault in found.faults if fault.rule in ("conflict", "unsupported")]
    for fault in faults:
        stream = sys.stderr if args.json else sys.stdout
        print(f"The {recipe.engine} engine refuses this config: {fault}", file=stream)
    return bool(faults)


def no_layout_runs(args: argparse.Namespace, model: str, shape: ModelShape) -> bool:
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
        "layouts alone:",
        file=sys.stderr if args.json else sys.stdout,
    )
    return True


def checked_sizes(args: argparse.Namespace) -> dict[str, int]:
    """The sizes of --check; ConfigError for what is no KEY=SIZE."""
    sizes = {}
    for part in filter(None, args.check.replace(" ", "").split(",")):
        key, _, size = part.partition("=")
        if key not in planner.CHANGEABLE:
            raise ConfigError(unknown("key in --check:", key, planner.CHANGEABLE))
        if key in sizes:
            raise ConfigError(f"--check {args.check}: {key} is given twice, leave one out")
        if not size.isdecimal() or len(size) > 9 or not 1 <= int(size) <= MAX_RANKS:
            raise ConfigError(
                f"--check {key}={size}: the size must be a whole number of at least 1 and at most "
                f"{MAX_RANKS:,}"
            )
        sizes[key] = int(size)
    return sizes


def judge(
    args: argparse.Namespace,
    plan: Plan,
    settings: Settings | None,
    typed: Collection[str],
    terms: Terms,
    iterations: int | None = None,
) -> int:
    """Say whether the plan is legal, with its memory and time; or what it breaks, with what is near
    in the sizes that were typed.
    """
    faults = broken(plan)
    memory = None if faults else planner.with_memory(plan, settings, args.memory_gb)
    asked = (
        plan if args.config_name else replace(plan, batch=planner.PACKED)
    )  # --check has no batch of its own
    near = planner.nearest(asked, settings=settings, names=typed) if faults else []
    names = None if args.config_name else typed
    retyped = [(other, planner.changes(plan, other, names)) for other in near]
    if args.json:
        verdict = {
            "legal": not faults,
            "model": plan.shape.name,
            "plan": show.plan_dict(plan),
            "broken": [vars(fault) for fault in faults],
            "memory": memory and show.memory_dict(memory),
            "time": memory and show.time_dict(memory, terms),
            "nearest": [{**show.plan_dict(other), "changes": change} for other, change in retyped],
        }
        print(json.dumps(verdict, indent=1))
        return 1 if faults else 0
    console = show.console()
    say = partial(console.print, highlight=False)
    say(show.model_line(plan.shape))
    say(f"{plan.layout.world} ranks: {show.sizes_line(plan)}; {show.nodes(plan.layout)}")
    if memory:
        say(
            show.batch_line(plan)
            + ("" if args.config_name else " (the nearest number of prompts that divides)")
        )
        say(f"[bold green]legal[/], all {len(RULES)} rules hold. {show.DISCLAIMER}")
        show.print_memory(console, memory)
        for reason in planner.reasons(memory):
            say(f"- {reason}")
        show.print_time(console, memory, terms, iterations)
        return 0
    rules = "1 rule is" if len(faults) == 1 else f"{len(faults)} rules are"
    say(f"[bold red]illegal[/]: {rules} broken, of {len(RULES)}")
    console.print(show.faults_table(faults))
    heading = "The nearest legal layouts:"
    if not near:
        heading = "No layout exists for this model on these ranks."
        if planner.nearest(replace(plan, batch=planner.PACKED), settings=settings):
            heading = "Layouts exist for these ranks; none allows these values of the batch."
    say(heading)
    for other, change in retyped:
        say(f"  {', '.join(change)}\n    {show.sizes_line(other)}; {show.batch_line(other)}")
    return 1


def terms_of(recipe: Recipe, terms: Terms) -> Terms:
    """`terms` with the evaluations of a config."""
    evaluation = recipe.evaluation
    problems = (evaluation.n_problems or GSM8K_PROBLEMS) * evaluation.samples_per_problem
    return replace(terms, work=replace(terms.work, problems=problems, every=evaluation.every))


def calibrated(folder: Path, terms: Terms, width: int) -> Terms:
    """`terms` with what a launch cost the host in a run on NPUs, and with its answers; ConfigError
    for a run that does not tell.
    """
    try:
        run = RunDirectory.open(folder)
        recipe, rows = read_recipe(run.config()), read_jsonl(run.metrics_file)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--calibrate {folder}: {error}") from error
    if not engine_of(recipe).UPSTREAM or recipe.emulate_npu:
        raise ConfigError(f"--calibrate {folder}: not a run on NPUs")
    # the first step warms up
    steps = {name: series(rows[1:], name)[1] for name in MEASURED}
    means = {name: values.mean() for name, values in steps.items() if len(values)}
    if means.keys() != set(MEASURED):
        raise ConfigError(f"--calibrate {folder}: no steps behind the first with their times")
    answer, longest = means["response/length_mean"], means["response/length_max"]
    work = replace(terms.work, answer=round(answer), longest=round(longest))
    terms = terms_of(recipe, replace(terms, work=work))
    memory = planner.with_memory(plan_of(recipe, ranks_per_node=width), settings_of(recipe))
    try:
        launch = launch_of(memory, terms, means["time/rollout"])
    except ValueError as error:
        raise ConfigError(f"--calibrate {folder}: {error}") from error
    terms = replace(terms, launch=(launch, launch))
    update = [phase for phase in iteration(memory, terms) if phase.name == "update"]
    print(
        f"{folder}: a launch cost the host {launch * 1e6:.0f} us (rollouts of "
        f"{means['time/rollout']:.1f} s); updates took {means['time/update']:.1f} s, "
        f"{update[0].seconds(launch):.1f} s by this model",
        file=sys.stderr,
    )
    return terms


def scale(args: argparse.Namespace, shape: ModelShape, width: int, terms: Terms) -> int:
    """Show the best layout for each number of ranks."""
    best = []
    for ranks in args.ranks:
        ranked = planner.legal_layouts(shape, ranks, width, args.memory_gb, terms, args.prompts)
        if not ranked:
            raise ConfigError(f"no layout exists for {ranks} ranks: --ranks {ranks} says why")
        best.append(ranked[0])
    console = show.console()
    console.print(show.model_line(shape), highlight=False)
    show.print_scale(console, best, terms)
    return 0


def list_layouts(args: argparse.Namespace, shape: ModelShape, width: int, terms: Terms) -> int:
    """List the layouts that exist; if there is none, say what refuses them."""
    (ranks,) = args.ranks
    ranked = planner.legal_layouts(shape, ranks, width, args.memory_gb, terms, args.prompts)
    best, fitting = ranked[: args.top], sum(memory.fits for memory in ranked)
    why = [] if ranked else planner.why_none(shape, ranks, width)
    if args.json:
        layouts = [
            {
                **show.plan_dict(memory.plan),
                "memory": show.memory_dict(memory),
                "time": show.time_dict(memory, terms),
            }
            for memory in best
        ]
        listed = {
            "model": shape.name,
            "ranks": ranks,
            "existing": len(ranked),
            "fitting": fitting,
            "layouts": layouts,
            "refused": why,
        }
        print(json.dumps(listed, indent=1))
        return 0 if ranked else 1
    console, nodes = show.console(), show.nodes(Layout(ranks, ranks_per_node=width))
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
    for message in why[:8]:
        say(f"  {message}")
    return 1


if __name__ == "__main__":
    sys.exit(quietly(main))
