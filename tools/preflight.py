"""Is this machine ready for this config? Run it before a launch; the launchers do.

Prints a table of checks, each passed, warning, failed, accepted or skipped, and below it what to
type about those that are not passed: NPUs as npu-smi, /dev, CANN, ASCEND_RT_VISIBLE_DEVICES and Ray
see them, CPUs, limits, memory, disk, ports, environment, versions, the config's keys, layout and
memory, the model against its config.json, data and base weights. Starts and changes nothing. Needs
no NPU: without one it says so and checks the rest.
"""

import argparse
import json
import shlex
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from textwrap import indent

if __name__ == "__main__":  # a file of a checkout
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from mindspeed_qerl.common.entry import quietly, use_checkout

    use_checkout()

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mindspeed_qerl.common.errors import ConfigError
from mindspeed_qerl.preflight import ACCEPTABLE, preflight
from mindspeed_qerl.preflight.case import (
    ACCEPTED,
    FAILED,
    PASSED,
    SKIPPED,
    WARNING,
    Check,
    case_of,
    conversion,
    plain,
)
from mindspeed_qerl.preflight.machine import Machine
from mindspeed_qerl.recipe.compose import compose

WIDTH = 110  # columns, where the output is no terminal
STYLES = {
    FAILED: "bold red",
    ACCEPTED: "magenta",
    WARNING: "yellow",
    PASSED: "green",
    SKIPPED: "dim",
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="exit status: 0 nothing failed (warnings may be there), 1 something failed, 2 "
        "wrong arguments\n\nexamples:\n  python tools/preflight.py --config-name "
        "grpo_qwen3_30b_a3b_gsm8k_16npu\n  python tools/preflight.py --config-name "
        "grpo_qwen3_30b_a3b_gsm8k_16npu actor_config.load=/data/converted --json",
    )
    parser.add_argument(
        "--config-name",
        required=True,
        metavar="NAME",
        help="a config of configs/, as for cli/train_grpo.py",
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="Hydra overrides, as for cli/train_grpo.py",
    )
    parser.add_argument(
        "--own-ray",
        action="store_true",
        help="a Ray will be started for the run with as many CPUs "
        "as it reserves, as the launchers do: "
        "one that is running is not looked at",
    )
    parser.add_argument(
        "--later",
        action="append",
        default=[],
        metavar="CHECK",
        help="what this check looks at is made after this, if it is missing, and checked then, "
        "as the launchers do; repeatable",
    )
    parser.add_argument(
        "--accept",
        action="append",
        default=[],
        metavar="CHECK",
        help="this check may fail: run.accepted_checks, which the run directory keeps; repeatable",
    )
    parser.add_argument("--json", action="store_true", help="print the checks as JSON")
    parser.add_argument(
        "--print-conversion",
        action="store_true",
        help="print the command that converts the base weights, to be run in MindSpeed-LLM's "
        "folder, and check nothing",
    )
    args = parser.parse_intermixed_args()
    name = args.config_name.removesuffix(".yaml")
    try:
        raw = compose(name, args.overrides)
        if args.accept:
            earlier = (raw.get("run") or {}).get("accepted_checks") or []
            accepted = [*([earlier] if isinstance(earlier, str) else earlier), *args.accept]
            raw["run"] = {**raw["run"], "accepted_checks": accepted}
        if args.print_conversion:
            print(shlex.join(conversion(case_of(raw, name))))
            return 0
        checks = preflight(raw, name, Machine(), args.own_ray)
    except ConfigError as error:
        parser.error(str(error))
    checks = [
        replace(
            check, state=SKIPPED, found=f"{check.found}. It is made next, and checked then", fix=""
        )
        if check.state == FAILED and check.name in args.later
        else check
        for check in checks
    ]
    if args.json:
        print(
            json.dumps(
                {
                    "config": name,
                    "summary": headline(checks),
                    "checks": [asdict(check) for check in checks],
                },
                indent=2,
            )
        )
    else:
        console = Console(highlight=False)
        if not console.is_terminal:
            console.width = WIDTH
        print_table(checks, f"Preflight of {name}", console)
    return 1 if any(check.state == FAILED for check in checks) else 0


def headline(checks: Iterable[Check]) -> str:
    """ "3 failed, 1 warning, 20 passed, 5 skipped"."""
    counts = Counter(check.state for check in checks)
    return ", ".join(f"{counts[state]} {state}" for state in STYLES if counts[state])


def print_table(checks: list[Check], title: str, console: Console) -> None:
    """The table by group, and below it what to type; commands are not broken into lines. `console`
    highlights nothing by itself.
    """
    table = Table(title=title, title_justify="left", expand=True)
    table.add_column("check", width=27)
    table.add_column("state", width=8)
    table.add_column("found", ratio=1, overflow="fold")
    group = None
    for check in checks:
        if check.group != group:
            group = check.group
            table.add_section()
            table.add_row(Text(group, style="bold"))
        state = Text(check.state, style=STYLES[check.state])
        table.add_row(Text(f"  {check.name}"), state, Text(check.found))
    console.print(table)
    for check in checks:
        if check.fix:
            console.out(check.name, style="bold")
            console.out(indent(check.fix, "    "))
    names = [plain(check.name) for check in checks if check.state == FAILED]
    names = [name for name in names if name in ACCEPTABLE]
    if names:
        words = f"If a check is wrong about this machine: --accept NAME (one of {', '.join(names)})"
        console.out(f"\n{words}; the run directory records it")
    console.out(f"\n{headline(checks)}")


if __name__ == "__main__":
    sys.exit(quietly(main))
