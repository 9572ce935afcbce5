"""A command in a fake Ascend box, by hand: what differs from a healthy box, then the command.

    python -m tests.fake_box --box "lost=(3,)" -- bash
    examples/grpo/grpo_trainer_qwen3_30b_a3b_16npu.sh python -m tests.fake_box --box "sick={13:
    'Critical'}" --sourced \\
        --prepare grpo_qwen3_30b_a3b_gsm8k_16npu -- bash
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path

from tests.fake_box import Box, start, why_not
from tests.fake_box.prepared import prepare


def main():
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        prog="python -m tests.fake_box",
    )
    parser.add_argument(
        "--box", default="", help=f"fields of Box as in Python: {', '.join(vars(Box()))}"
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
        parser.error(reason)
    box = eval(f"Box({args.box})", {"Box": Box})  # of whoever may run any command
    with tempfile.TemporaryDirectory(prefix="fake-box.") as folder:
        files = prepare(args.prepare, Path(folder, "files")) if args.prepare else {}
        environment = {**os.environ, **files}
        options = dict(sourced=args.sourced, start_new_session=False)
        process = start(box, args.command, Path(folder), environment, **options)
        while True:
            try:
                return process.wait()
            except KeyboardInterrupt:  # the command has it too
                pass


if __name__ == "__main__":
    sys.exit(main())
