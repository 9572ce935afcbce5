"""Check that MindSpeed-RL and what it stands on still are what the engine was written for.

Holds every name, signature, registry and behaviour that the engine relies on against the sources, which are parsed and not
imported: nothing has to be installed. Prints each promise with the line that keeps it and the reason, and under a broken one what
is there instead. A repository that is not given is not checked. The engine checks the installed packages so when it starts.
"""

import argparse
import sys
from collections import Counter
from pathlib import Path

if __name__ == "__main__":  # a file of a checkout
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from mindspeed_qerl.entry import use_checkout

    use_checkout()

from mindspeed_qerl.ascend.clauses import BROKEN
from mindspeed_qerl.ascend.contract import PINS, Pin, check, commit_of, repository


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="exit status: 0 all that was checked holds, 1 something is broken, 2 wrong arguments or a missing folder\n\n"
        "example:\n  python tools/check_upstream.py --mindspeed-rl MindSpeed-RL --mindspeed-llm MindSpeed-LLM \\\n"
        "      --mindspeed MindSpeed",
    )
    for key, pin in PINS.items():
        parser.add_argument(f"--{key.replace('_', '-')}", type=Path, metavar="DIR", required=key.startswith("mindspeed"),
                            help=f"checkout of {pin.title}; the engine was written for {pin.commit[:7]} ({pin.on})")
    parser.add_argument("--broken-only", action="store_true", help="leave out the promises that hold")
    args = parser.parse_args()
    roots = {key: root for key in PINS if (root := getattr(args, key))}
    try:
        findings = check(roots)
    except FileNotFoundError as error:
        parser.error(str(error))

    for key, pin in PINS.items():
        print(f"\n{pin.title}  {_which_commit(roots[key], pin) if key in roots else 'not given, so not checked'}")
        for finding in findings:
            if key not in roots or repository(finding.clause) != key or args.broken_only and finding.status != BROKEN:
                continue
            print(f"  {finding.status:6}  {finding.where}")
            for text in (finding.clause.promise, finding.found and f"found: {finding.found}", f"why: {finding.clause.why}"):
                if text:
                    print(f"          {text}")
    counts = Counter(finding.status for finding in findings)
    print(f"\n{len(findings)} promises: " + ", ".join(f"{number} {status}" for status, number in counts.items()))
    return 1 if counts[BROKEN] else 0


def _which_commit(root: Path, pin: Pin) -> str:
    commit = commit_of(root)
    if commit is None:
        return f"{root}, not a git checkout"
    return f"{root} at {commit[:7]}, " + ("the pin" if commit == pin.commit else f"not the pin {pin.commit[:7]} ({pin.on})")


if __name__ == "__main__":
    sys.exit(main())
