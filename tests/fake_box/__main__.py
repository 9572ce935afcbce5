"""A command in a fake Ascend box, by hand: python -m tests.fake_box [options] -- COMMAND ...

python -m tests.fake_box --lost 3 -- bash examples/grpo/grpo_trainer_qwen3_30b_a3b_16npu.sh
python -m tests.fake_box --prepare grpo_qwen3_30b_a3b_gsm8k_16npu --sick 13:Critical --sourced
-- bash
"""

import argparse
import dataclasses
import os
import sys
import tempfile
from pathlib import Path

from tests.fake_box import Box, start, why_not
from tests.fake_box.prepared import prepare


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        prog="python -m tests.fake_box",
    )
    parser.add_argument(
        "--dies", type=int, default=16, help="of the machine (default: %(default)s)"
    )
    parser.add_argument(
        "--kind", default="910C", help="910C, or 910B1 to 910B4 (default: %(default)s)"
    )
    parser.add_argument(
        "--lost",
        type=int,
        nargs="*",
        default=[],
        metavar="DIE",
        help="dies that are gone altogether",
    )
    parser.add_argument("--mapped", type=int, metavar="N", help="the container has davinci0 to N-1")
    parser.add_argument(
        "--acl", type=int, metavar="N", help="what acl counts (default: the device nodes)"
    )
    parser.add_argument("--acl-error", type=int, default=0, metavar="CODE", help="such as 507033")
    parser.add_argument(
        "--sick",
        nargs="*",
        default=[],
        metavar="DIE:WORD",
        help="health by npu-smi, as 13:Critical",
    )
    parser.add_argument(
        "--used", nargs="*", default=[], metavar="DIE:MB", help="HBM that others hold"
    )
    parser.add_argument(
        "--smi", default="works", help="works, missing, hangs, or the words with which it fails"
    )
    parser.add_argument("--cann", default="8.5.0", help="version; empty: no CANN")
    parser.add_argument("--driver", default="25.5.0", help="version; empty: no file of it")
    parser.add_argument("--no-nnal", action="store_true")
    parser.add_argument(
        "--package",
        nargs="*",
        default=[],
        metavar="NAME==VERSION",
        help="installed in place of the pin; NAME== for none",
    )
    parser.add_argument(
        "--memory", type=float, default=1536, metavar="GB", help="of the host, all of it free"
    )
    parser.add_argument("--shm", default="500G")
    parser.add_argument(
        "--without", nargs="*", default=[], metavar="COMMAND", help="that is not installed"
    )
    parser.add_argument(
        "--upstream",
        default=os.environ.get("UPSTREAM"),
        metavar="DIR",
        help="folder of the five checkouts (default: $UPSTREAM, else stand-ins that pass)",
    )
    parser.add_argument(
        "--sourced", action="store_true", help="CANN's environment is sourced, jemalloc preloaded"
    )
    parser.add_argument(
        "--prepare",
        metavar="CONFIG",
        help="MODELS and DATA with what that config needs: model, data "
        "and base weights, of the right sizes, without weights",
    )
    parser.add_argument("command", nargs="+")
    args = parser.parse_args()
    if reason := why_not():
        print(reason, file=sys.stderr)
        return 2
    memory = int(args.memory * 10**9)
    given = dict(
        dies=args.dies,
        kind=args.kind,
        lost=tuple(args.lost),
        mapped=args.mapped,
        acl=args.acl,
        acl_error=args.acl_error,
        sick=pairs(args.sick, ":", str),
        used=pairs(args.used, ":", int),
        smi=args.smi,
        cann=args.cann or None,
        driver=args.driver or None,
        nnal=not args.no_nnal,
        packages={
            name: version or None
            for name, _, version in (word.partition("==") for word in args.package)
        },
        memory=memory,
        free=memory,
        shm=args.shm,
        without=tuple(args.without),
        upstream=args.upstream,
    )
    with tempfile.TemporaryDirectory(prefix="fake-box.") as folder:
        environment = {
            **os.environ,
            **(prepare(args.prepare, Path(folder, "files")) if args.prepare else {}),
        }
        process = start(
            dataclasses.replace(Box(), **given),
            args.command,
            Path(folder),
            environment,
            args.sourced,
            start_new_session=False,
        )
        while True:
            try:
                return process.wait()
            except KeyboardInterrupt:  # the command has it too
                pass


def pairs(words: list[str], mark: str, read: type) -> dict:
    return {int(die): read(value) for die, _, value in (word.partition(mark) for word in words)}


if __name__ == "__main__":
    sys.exit(main())
