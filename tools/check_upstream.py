"""Which versions of MindSpeed-RL and what it stands on are here, and are they what the engine was
written for?

Compares all that the engine relies on with the digests in mindspeed_qerl/ascend/contract.yaml.
Sources are parsed and not imported: nothing of upstream has to be installed. Without folders the
packages that this Python would import are compared, as the engine does when it starts; with folders
only these.
"""

import argparse
import sys
from pathlib import Path

if __name__ == "__main__":  # a file of a checkout
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from mindspeed_qerl.common.entry import quietly, use_checkout

    use_checkout()

from mindspeed_qerl.ascend.contract import ENTRIES, PINS, TABLE, Report, check, installed
from mindspeed_qerl.common.errors import ConfigError


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="exit status: 0 all that was compared is unchanged, 1 something is not, 2 wrong "
        "arguments or a missing folder\n\nexample:\n  python tools/check_upstream.py "
        "--mindspeed-rl MindSpeed-RL --mindspeed MindSpeed",
    )
    for package, pin in PINS.items():
        option = f"--{package.replace('_', '-')}"
        parser.add_argument(
            option, type=Path, metavar="DIR", help=f"checkout of {pin.title}; {pin}"
        )
    parser.add_argument(
        "--all", action="store_true", help="print what is unchanged too, each with its reason"
    )
    parser.add_argument(
        "--write", action="store_true", help="write what is there to contract.yaml as the pins"
    )
    args = parser.parse_args()
    given = {package: root for package in PINS if (root := getattr(args, package))}
    try:
        reports = check(given or installed())
    except ConfigError as error:
        parser.error(str(error))
    if args.write:
        return write(reports)
    for report in reports:
        print(report, *(report.findings if args.all else report.changed), sep="\n  ")
    for pin in PINS.values():
        if pin not in [report.pin for report in reports]:
            print(f"{pin.title} is not there, so not compared")
    return 1 if any(report.changed for report in reports) else 0


def write(reports: list[Report]) -> int:
    """Put the contents and digests of what is there into contract.yaml; a new entry's digest is any
    word.
    """
    text = TABLE.read_text(encoding="utf-8")
    for report in reports:
        text = text.replace(report.pin.content, report.content)
        for finding in report.changed:
            if finding.change == "gone":
                print(finding, file=sys.stderr)
                continue
            key, entry = f"  {finding.name or finding.file}: ", ENTRIES[finding.file][finding.name]
            text = text.replace(f"{key}{entry}\n", f"{key}{finding.digest} {finding.why}\n")
    TABLE.write_text(text, encoding="utf-8")
    print(f"wrote {TABLE}; commits, refs and the entries of what is gone are written by hand")
    return 0


if __name__ == "__main__":
    sys.exit(quietly(main))
