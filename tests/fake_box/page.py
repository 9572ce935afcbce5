"""docs/cases.md, of what the tests have seen:

    CASES=/tmp/seen.jsonl make test-full && python -m tests.fake_box.page /tmp/seen.jsonl >
    docs/cases.md

cases.py has the cases that the preflight meets. `OTHERS` are shown by the tests of launchers, of
two nodes, of workers and of the engine, which say what they saw with `seen`. Of `NOT_CAUGHT`
nothing is shown but why.
"""

import json
import os
import re
import sys
import time
from pathlib import Path

from tests.fake_box import ROOT
from tests.fake_box.cases import CANN, FILES, HOST, NPUS, PREFLIGHT, SHELL, VERSIONS

PAGE = ROOT / "docs" / "cases.md"
RAY = ["a Ray in which another job holds 12 of 16 NPUs"]
LAUNCHER = [
    "a second launcher",
    "a second launcher with another RAY_PORT, that waits a second",
    "a launcher was killed, and its training still runs",
    "a launcher joins a Ray while another has the box",
    "a foreign script that exits while it is sourced",
    "RAY_ADDRESS where nobody listens",
    "no flock and no setsid",
    "BOX_WAIT=abc",
    "NODE_ADDR that no interface has",
    "a jemalloc that cannot be loaded",
    "no NPUs at all",
    "a config whose layout cannot exist",
    "the checked conversion wrote nothing",
    "the launcher below uv run",
]
STOPPING = [
    *(
        f"Ctrl-C while {what}"
        for what in (
            "the config is read",
            "the preflight runs",
            "the data is converted",
            "the base weights are converted",
            "Ray starts, and its NPUs are waited for",
        )
    ),
    "SIGTERM to the launcher alone, in the preflight",
    "SIGHUP in training: the terminal is closed",
    "Ctrl-C in a terminal, in training",
    "two Ctrl-C at a training that ignores being told",
    "one Ctrl-C at a training that ignores being told, STOP_TIMEOUT=1",
]
NODES = [
    "the second node is missing",
    "the second node is killed in training",
    "Ctrl-C on the second node in training",
    "the cable between two nodes is cut in training",
    "NODE_ADDR of node 1 where node 0 does not reach it",
    "NODE_ADDR of node 0 where node 1 does not reach it",
    "another token on the second node",
    "16 dies are visible on both nodes",
    "other code on the second node",
    "another clock on the second node",
]
WORKERS = [
    "an import error in a worker's constructor",
    "an import error in a worker's module",
    "an import error in a task of a worker",
    "an import error in the driver",
]
OTHERS = [*RAY, *LAUNCHER, *STOPPING, *NODES, *WORKERS]
NOT_CAUGHT = {
    "HCCL_EXEC_TIMEOUT (3600 s) above torch's watchdog (30 min)": "upstream's own value: "
    "[hangs.md](hangs.md#which-clock-ends-it) "
    "says which clock ends what",
    "wrong answers of the pinned vllm-ascend in some layouts": "no file tells. The evaluation "
    "before the first step shows it, "
    "and k3 is judged in each step "
    "([faults.md](faults.md)); no "
    "floor is set for the accuracy",
    "vllm-ascend built for another chip (`_build_info.py`)": "the pin reads that file for a 310P "
    "only",
    "a die that is called OK and has ECC errors": "the output of `npu-smi info -t ecc` on a 910C "
    "has not been seen",
    "TLS on for the NPUs' links of one node only": "each node would have to be asked from the "
    "other",
    "a stale /etc/hccl_rootinfo.json": "that a 910C refuses version 1.0 is not shown",
    "a kernel older than 5.5": "a warning of accelerate; no run was seen to stop by it",
    "pinned host memory above 200 GB in one piece": "what is offloaded is far below",
    "Python 3.10": "told in one line by every command (tests/test_cli.py, with the version "
    "played); no second Python is at hand to show it in a box",
}
GROUPS = {
    "NPUs": NPUS,
    "The host": HOST,
    "CANN, and what is compiled": CANN,
    "The shell": SHELL,
    "Versions, and what a worker imports": VERSIONS,
    "Model, data and base weights": FILES,
    "Ray": RAY,
    "The launcher": LAUNCHER,
    "Stopping it": STOPPING,
    "Two nodes": NODES,
    "Workers": WORKERS,
}
HEAD = """# What can be wrong with a box, and what is said

{number} cases: what is done to a box, what a user is told, how many seconds later, and the test that shows it.
{caught} are told; {rest} are not, and say why. They are those of the first trial in fake boxes, and others from public
issue threads, which the checks name in their source. Every row was run in a [fake box](launch.md#a-fake-box) or beside
it, through the real preflight, launcher, Ray or engine; **none on an NPU**.

Seconds are from the command, or from the fault, to the last word of what is said: the preflight prints one table at
its end, so its rows have the time of the whole table. Measured on 2 cores that others used too; on a quiet machine
the preflight in a box takes two seconds, and on a box with torch_npu and vLLM their import comes on top. `make
test-full` runs all rows; this page is written by `python -m tests.fake_box.page` from what those tests saw.
"""
SHORT = 190


def seen(done: str, message: str, began: float) -> None:
    """Keep what a user was told in case `done`, into the file that CASES names; began:
    time.monotonic() before it.
    """
    assert done in OTHERS or done in {case.done for case in PREFLIGHT}, (
        f"{done}: not in the list of cases"
    )
    if file := os.environ.get("CASES"):
        test = os.environ["PYTEST_CURRENT_TEST"].split(" (")[0].split("[")[0]
        with open(file, "a", encoding="utf-8") as kept:
            kept.write(
                json.dumps(
                    {
                        "done": done,
                        "message": message,
                        "test": test,
                        "seconds": time.monotonic() - began,
                    }
                )
                + "\n"
            )


def told(message: str) -> str:
    """In one line, shortened, without the folders of a test."""
    line = (
        " ".join(message.split()).replace(sys.executable, "python").replace(str(ROOT), "CHECKOUT")
    )
    line = line.replace(str(Path(sys.executable).parent), "/venv/bin")
    line = re.sub(r"/tmp/pytest-of-[^/]+/pytest-[^/]+/[^/\s]+(/(files|box|of))?", "/data", line)
    return line if len(line) <= SHORT else line[:SHORT].rsplit(" ", 1)[0] + " ..."


def page(rows: dict[str, dict]) -> str:
    """rows: by case, the last one that `seen` kept."""
    names = {
        title: [getattr(case, "done", case) for case in group] for title, group in GROUPS.items()
    }
    caught = sum(map(len, names.values()))
    if missing := [name for group in names.values() for name in group if name not in rows]:
        raise SystemExit(f"not seen: {'; '.join(missing)}")
    text = HEAD.format(number=caught + len(NOT_CAUGHT), caught=caught, rest=len(NOT_CAUGHT))
    for title, group in names.items():
        text += f"\n## {title}\n\n| what is done | what is said | s | test |\n|---|---|---|---|\n"
        for name in group:
            row = rows[name]
            file, _, test = row["test"].partition("::")
            said = escape(told(row["message"]).replace("`", "'"))
            text += (
                f"| {escape(name)} | `{said}` | {row['seconds']:.1f} | "
                f"{Path(file).name} {test.removeprefix('test_').replace('_', ' ')} |\n"
            )
    text += "\n## Not caught\n\n| what is done | why |\n|---|---|\n"
    return text + "".join(f"| {escape(name)} | {why} |\n" for name, why in NOT_CAUGHT.items())


def escape(words: str) -> str:
    return words.replace("|", "\\|")


if __name__ == "__main__":
    print(
        page(
            {
                row["done"]: row
                for row in map(json.loads, Path(sys.argv[1]).read_text().splitlines())
            }
        ),
        end="",
    )
