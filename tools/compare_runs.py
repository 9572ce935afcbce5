"""Does the difference between runs mean anything? Groups runs that differ only in the seed, and
compares the groups.

    python tools/compare_runs.py runs/grpo_tiny_moe_cpu
    python tools/compare_runs.py RUN RUN RUN ... --baseline "aqn off" --output comparison

A RUN is a run directory, or a folder with some. Left out, with the reason: runs that did not finish
or whose last step was not evaluated, runs whose noise did not fire as their config says, runs with
other data or other code than most, repetitions of a seed.

The difference to the baseline is paired by seed and question. The verdict says better, worse, or
not distinguishable, and then about how many more seeds it would take; looked at once, it is wrong
in at most one of twenty cases where there is no difference (docs/evaluation.md has the
measurement).
Writes comparison.md and comparison.png to --output.
"""

import argparse
import sys
from pathlib import Path

if __name__ == "__main__":  # a file of a checkout
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from mindspeed_qerl.common.entry import quietly, use_checkout

    use_checkout()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="exit status: 0 compared, 1 nothing to compare or a damaged run, 2 wrong arguments",
    )
    parser.add_argument(
        "runs",
        nargs="+",
        type=Path,
        metavar="RUN",
        help="run directories, or folders that hold some",
    )
    parser.add_argument(
        "--baseline",
        metavar="GROUP",
        help="a group's settings, or a part of them (default: the one without AQN)",
    )
    parser.add_argument(
        "--evaluation",
        metavar="NAME",
        help="compare what tools/evaluate.py --run RUN --name NAME "
        "measured (default: the evaluations made during the run)",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        default=Path("comparison"),
        help="where the files go (default: comparison)",
    )
    args = parser.parse_args()
    from rich.console import Console
    from rich.markdown import Markdown

    from mindspeed_qerl.compare.comparison import compare
    from mindspeed_qerl.compare.page import to_markdown, write_comparison
    from mindspeed_qerl.compare.run import find_runs, read_run

    try:
        comparison = compare(
            [read_run(path, args.evaluation) for path in find_runs(args.runs)], args.baseline
        )
        files = write_comparison(comparison, args.output)
    except (ValueError, OSError) as error:
        print(f"compare_runs: {error}", file=sys.stderr)
        return 1
    console = Console()
    console.print(Markdown(to_markdown(comparison)))
    console.print(f"\n{', '.join(map(str, files))}", soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(quietly(main))
