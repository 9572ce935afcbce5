"""The shipped launcher of two nodes on two fake boxes with addresses of their own, joined by a
cable.
"""

import contextlib
import subprocess
import time

from tests.fake_box import ROOT, start
from tests.fake_box.network import ADDRESSES

LAUNCHER = ROOT / "examples" / "grpo" / "grpo_trainer_qwen3_30b_a3b_2x8npu.sh"
CONFIG = "grpo_qwen3_30b_a3b_gsm8k_2x8npu"
# HIDDEN: a folder that this node does not share with the other
COMMAND = f"""[[ -z ${{HIDDEN:-}} ]] || mount -t tmpfs none "$HIDDEN"
bash {LAUNCHER} "$@"; status=$?; echo left: /tmp/qerl-ray*; exit $status"""


class Launcher:
    """A launcher whose output is read, in `output`."""

    def __init__(self, process):
        self.process, self.output = process, ""

    def read_until(self, words):
        for line in self.process.stdout:
            self.output += line
            if words in line:
                return
        raise AssertionError(self.output)

    def end(self):
        self.output += self.process.stdout.read()
        return self.process.wait(timeout=60)


class Nodes:
    """The two launchers, what they print, and how long they took. arguments: those of both."""

    def __init__(self, folder, cables, variables, box, arguments=()):
        self.folder, self.cables, self.variables, self.default, self.arguments = (
            folder,
            cables,
            variables,
            box,
            arguments,
        )
        self.process, self.began = {}, {}

    def start(self, rank, box=None, **variables):
        address = {"NODE_ADDR": ADDRESSES[rank]} | (
            {"NODE_RANK": "1", "MASTER_ADDR": ADDRESSES[0]} if rank else {}
        )
        with open(self.folder / f"out{rank}", "w") as output:
            self.began[rank] = time.monotonic()
            self.process[rank] = start(
                box or self.default,
                ["bash", "-c", COMMAND, "bash", *self.arguments],
                self.box(rank),
                {**self.variables, **address, **variables},
                within=self.cables[rank],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def box(self, rank):
        return self.folder / f"box{rank}"

    def said(self, rank):
        return (self.folder / f"out{rank}").read_text()

    def until(self, rank, words):
        """Wait until a launcher has said it; AssertionError if it ends without."""
        while words not in self.said(rank):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process[rank].wait(timeout=0.1)
                assert words in self.said(rank), self.said(rank)
        self.report(rank, words)

    def end(self, rank, seconds=150):
        status = self.process[rank].wait(timeout=seconds)
        self.report(rank, f"ended with {status}")
        return status

    def kill(self):
        for process in self.process.values():
            process.kill()
            process.wait()

    def report(self, rank, what):
        print(f"node {rank}: {time.monotonic() - self.began[rank]:.1f} s: {what}")
