"""Train with GRPO: a config of configs/, with any of its keys changed.

With --multirun a key may have several values, and each combination is run in turn: aqn=off,qerl
seed=1,2,3. Runs that are finished are not run again, one that stopped is resumed, one that fails is
reported at the end.
"""

import argparse
import sys
from pathlib import Path

if __name__ == "__main__":  # a file of a checkout
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from mindspeed_qerl.common.entry import quietly, use_checkout

    use_checkout()

from mindspeed_qerl.common.errors import ConfigError
from mindspeed_qerl.recipe import compose

EXAMPLES = """exit status: 0 finished, 1 stopped by a failure, 2 refused, 130 interrupted

examples, each behind `python cli/train_grpo.py --config-name grpo_tiny_moe_cpu`:
  --keys aqn                      every key of a section
  aqn=off actor_config.lr=1e-4
  run.resume=auto                 resume the newest run that stopped
  --multirun aqn=off,qerl seed=1,2,3
"""


def arguments() -> argparse.ArgumentParser:
    usage = (
        "%(prog)s --config-name NAME [key=value ...] "
        "[--multirun | --help | --keys [SECTION] | --cfg job]"
    )
    parser = argparse.ArgumentParser(
        usage=usage,
        description=__doc__,
        epilog=EXAMPLES,
        add_help=False,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "-cn",
        "--config-name",
        metavar="NAME",
        help="a config of this repository's configs/, or of ./configs",
    )
    parser.add_argument(
        "-cd",
        "--config-dir",
        metavar="DIR",
        help="a folder of your own configs, used instead of ./configs",
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="a key with another value, aqn=off to choose another variant of a section, ~key to drop one",
    )
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument(
        "-m", "--multirun", action="store_true", help="run every combination of the values, in turn"
    )
    instead.add_argument(
        "-h",
        "--help",
        action="store_true",
        help="print this, and the names of the configs",
    )
    instead.add_argument(
        "--keys",
        nargs="?",
        const="",
        metavar="SECTION",
        help="print every key of a section, those that the config sets with their values",
    )
    instead.add_argument("-c", "--cfg", choices=["job"], help="print the resolved config")
    return parser


def main() -> int:
    parser = arguments()
    args = parser.parse_intermixed_args()
    chosen = (args.config_name, args.overrides, args.config_dir)
    try:
        if args.help or not args.config_name:
            usage = parser.format_help() if args.help else parser.format_usage()
            about = compose.list_of_configs(args.config_dir)
            if args.help:
                print(f"{usage}\n{about}")
                return 0
            known = compose.config_files(args.config_dir)
            name = next((word for word in args.overrides if word in known), "NAME")
            print(f"{usage}error: give --config-name {name}\n\n{about}", file=sys.stderr)
            return 2
        if args.keys is not None:
            print(
                compose.list_of_keys(args.config_name, args.keys, args.overrides, args.config_dir)
            )
            return 0
        if args.multirun:
            return sweep(args)
        raw = compose.compose(*chosen)
    except ConfigError as error:
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        return 2
    if args.cfg:
        import yaml

        print(yaml.safe_dump(raw, sort_keys=False), end="")
        return 0
    from mindspeed_qerl.train import run

    return run(raw, args.config_name.removesuffix(".yaml"), args.overrides)


def sweep(args: argparse.Namespace) -> int:
    """Run each combination, all of which are checked first; exit status as
    `mindspeed_qerl.sweep.report` has it.
    """
    from mindspeed_qerl import sweep

    name, folder = args.config_name.removesuffix(".yaml"), args.config_dir
    combinations = compose.combinations(name, args.overrides, folder)
    configs = [compose.compose(name, overrides, folder) for overrides in combinations]
    for raw in configs:
        sweep.check(raw)
    command = [sys.argv[0], "--config-name", name]
    if folder:
        command += ["--config-dir", folder]
    try:
        outcomes = [
            sweep.run_one(raw, name, overrides, command)
            for raw, overrides in zip(configs, combinations)
        ]
        return sweep.report(outcomes)
    except KeyboardInterrupt:
        print("error: interrupted; the same command resumes the sweep", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(quietly(main))
