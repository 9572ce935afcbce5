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
from dataclasses import asdict, replace
from pathlib import Path

if __name__ == "__main__":  # a file of a checkout
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from mindspeed_qerl.common.entry import quietly, use_checkout

    use_checkout()

from mindspeed_qerl.common.errors import ConfigError
from mindspeed_qerl.preflight import FAILED, SKIPPED, headline, preflight, print_table
from mindspeed_qerl.preflight.case import case_of, conversion
from mindspeed_qerl.preflight.machine import Machine
from mindspeed_qerl.recipe.compose import compose

WIDTH = 110  # columns, where the output is no terminal


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
        from rich.console import Console

        console = Console(highlight=False)
        if not console.is_terminal:
            console.width = WIDTH
        print_table(checks, f"Preflight of {name}", console)
    return 1 if any(check.state == FAILED for check in checks) else 0


if __name__ == "__main__":
    sys.exit(quietly(main))
