"""The shipped launchers on several fake boxes with addresses of their own, joined by cables."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.fake_box import ROOT, start
from tests.fake_box.network import ADDRESSES

FOLDER = ROOT / "examples" / "grpo"
PAIR = "grpo_qwen3_30b_a3b_gsm8k_2x8npu"
TWO_NODES = ["grpo_trainer_qwen3_30b_a3b_2x8npu.sh"]
# HIDDEN: a folder that this node does not share with the others
COMMAND = f"""[[ -z ${{HIDDEN:-}} ]] || mount -t tmpfs none "$HIDDEN"
bash {FOLDER}/"$@"; status=$?; echo left: /tmp/qerl-ray*; exit $status"""
PYTHON = f"""#!/usr/bin/env bash
[[ "$*" != *preflight.py* || -z ${{NO_PREFLIGHT:-}} ]] || exit 0
[[ "$*" != *train_grpo.py* ]] || TRAINS
exec {sys.executable} "$@"
"""


def environment(folder, trains):
    """The variables of every launcher, whose training is what the words `trains` make of it."""
    fakes = folder / "bin"
    fakes.mkdir()
    (fakes / "python").write_text(PYTHON.replace("TRAINS", trains))
    (fakes / "python").chmod(0o755)
    (fakes / "ray").symlink_to(Path(sys.executable).with_name("ray"))
    (folder / "token").write_text("0" * 64)
    return {
        "PATH": f"{fakes}:/usr/bin:/bin:/usr/sbin:/sbin",
        "PYTHON": str(fakes / "python"),
        "HOME": str(folder),
        "RAY_AUTH_TOKEN_PATH": str(folder / "token"),
        # Ray would start as many workers as the box has CPUs, before anybody asks for one
        "RAY_prestart_worker_first_driver": "0",
    }


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
    """The launchers, what they print, and how long they took. command: a launcher of examples/grpo
    and its arguments, on all.
    """

    def __init__(self, folder, cables, variables, box, command):
        self.folder, self.cables, self.variables = folder, cables, variables
        self.default, self.command = box, command
        self.process, self.began = {}, {}
        self.ranks = range(len(cables))

    def start(self, rank, box=None, **variables):
        address = {
            "NODE_RANK": str(rank),
            "NODE_ADDR": ADDRESSES[rank],
            "MASTER_ADDR": ADDRESSES[0],
        }
        with open(self.folder / f"out{rank}", "w") as output:
            self.began[rank] = time.monotonic()
            self.process[rank] = start(
                box or self.default,
                ["bash", "-c", COMMAND, "bash", *self.command],
                self.box(rank),
                {**self.variables, **address, **variables},
                within=self.cables[rank],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def lose(self, rank, how):
        """Take a node away: "killed", "Ctrl-C" or "cable"; times are counted from now on."""
        self.began = dict.fromkeys(self.ranks, time.monotonic())
        if how == "cable":
            down = "ip link set eth0 down".split()
            subprocess.run([*self.cables[rank], *down], check=True)
        elif how == "Ctrl-C":
            os.killpg(self.process[rank].pid, signal.SIGINT)
        else:
            self.process[rank].kill()

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
