"""Disturb runs at random moments, resume them, and compare what they wrote with an unbroken run's,
bit for bit.

    python tests/local/endurance.py --kills 20
    python tests/local/endurance.py --kills 300 --full-disks 100

A run of two ranks goes on (`run.resume=auto`) until it is finished; on the way it is disturbed
again and again:

    kill          SIGKILL of a process drawn from all that the run has (driver, ranks, rollout
                  engine, Ray's own), at a moment drawn between its start and its end, or in a part
                  of the loop that is drawn: checkpoint, ...
    full disk     the file system of the run's directory is full after a number of bytes

Each time a run that ends must say why, in words that fit what was done to it, leave its checkpoints
whole, and no process and nothing in the temporary directory and in /dev/shm, which are this
script's own (unshare(1): as root, or with user namespaces). A limit that was not reached is not
counted. Exit status 0 if all was made, nothing was found amiss, and every run ended with the
unbroken one's metrics, evaluations, answers and last checkpoint.
"""

import argparse
import os
import random
import re
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import chain
from pathlib import Path

import psutil
from safetensors.torch import load_file

from mindspeed_qerl.common.files import checkpoint_iterations
from mindspeed_qerl.local.checkpoint import folder as checkpoint_folder
from mindspeed_qerl.local.checkpoint import read_state
from mindspeed_qerl.runs.directory import RunDirectory
from mindspeed_qerl.runs.metrics import read_jsonl

ROOT = Path(__file__).parents[2]
PHASES = ("rollout", "update", "sync", "checkpoint", "evaluation")
MARK = "MSQ_ENDURANCE"  # in the environment of every process of a run
# seconds in one part of the loop after which a run hangs, beyond those that all of it may take
HANGS = 60
ROOM = 64 * 2**20  # bytes of the run's file system when it is not to be full
SAYS = {  # what the reason of a run that ended must have
    "kill": "killed|died|ended without a word",
    "full disk": "No space left on device",
}


def command(model, runs):
    return [
        "--config-name",
        "grpo_tiny_moe_cpu",
        f"megatron_training.tokenizer_name_or_path={model}",
        f"run.root={runs}",
        "run.resume=auto",
        "megatron_training.global_batch_size=4",
        "rl_config.mini_batch_size=2",
        "rl_config.n_samples_per_prompt=16",
        "rl_config.verifier_function=[gsm8k]",
        "rl_config.init_kl_coef=0.01",
        "actor_config.lr=1e-3",
        "actor_config.lr_decay_style=linear",
        "megatron_training.train_iters=24",
        "megatron_training.save_interval=3",
        "eval.every=6",
        "eval.n_problems=4",
        "aqn.num_stages=3",
    ]


def drive():
    """cli/train_grpo.py, whose part of the loop at each moment is in the file that MARK names."""
    from mindspeed_qerl.runs.progress import Progress

    said, file = Progress.phase, Path(os.environ[MARK])

    def phase(progress, text):
        file.write_text(text)
        said(progress, text)

    Progress.phase = phase
    sys.argv = ["cli/train_grpo.py", *sys.argv[2:]]
    runpy.run_path("cli/train_grpo.py", run_name="__main__")


def held(run, iteration):
    """What a checkpoint says, with a hash of each tensor in the place of its files (whose bytes
    differ from run to run).
    """
    state, folder = (
        read_state(run.checkpoints_dir, iteration),
        checkpoint_folder(run.checkpoints_dir, iteration),
    )
    tensors = chain.from_iterable(load_file(folder / name).items() for name in state["files"])
    return {
        **state,
        "files": {name: sha256(tensor.numpy().tobytes()).hexdigest() for name, tensor in tensors},
    }


def recorded(run):
    """Everything that a run writes step by step, times aside, and what its checkpoints hold."""
    files = (run.metrics_file, run.eval_file, run.eval_answers_file, run.rollouts_file)
    states = [held(run, each) for each in checkpoint_iterations(run.checkpoints_dir)]
    return [
        {
            name: value
            for name, value in row.items()
            if "time/" not in name and name not in ("seconds", "run")
        }
        for row in (*chain.from_iterable(map(read_jsonl, files)), *states)
    ]


@dataclass
class Place:
    """Where one run lives: its file system, temporary directory and /dev/shm are its own."""

    folder: Path
    model: Path
    runs: Path = field(init=False)

    def __post_init__(self):
        self.runs, self.temporary = (
            self.folder / "runs",
            Path(tempfile.mkdtemp(prefix="e", dir="/tmp")),
        )
        self.phase_file = self.folder / "phase"
        self.runs.mkdir(parents=True)
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={ROOM}", "runs", self.runs], check=True
        )
        self.environment = {
            **os.environ,
            MARK: str(self.phase_file),
            "TMPDIR": str(self.temporary),
            "RAY_worker_niceness": "0",
        }

    def close(self):
        subprocess.run(["umount", self.runs], check=True)
        shutil.rmtree(self.folder)
        shutil.rmtree(self.temporary)

    def start(self):
        """The run, or what is left to do of it."""
        self.phase_file.write_text("starting")
        with open(self.folder / "output", "w") as output:
            return psutil.Popen(
                [sys.executable, __file__, "drive", *command(self.model, self.runs)],
                cwd=ROOT,
                env=self.environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def room(self, size):
        """The file system of the runs has `size` bytes."""
        subprocess.run(["mount", "-o", f"remount,size={size}", self.runs], check=True)

    def seconds_in_phase(self):
        """Since when the run is in this part of the loop."""
        return time.time() - self.phase_file.stat().st_mtime

    def room_left(self):
        return os.statvfs(self.runs).f_bfree

    def used(self):
        disk = os.statvfs(self.runs)
        return (disk.f_blocks - disk.f_bfree) * disk.f_frsize

    def processes(self):
        """Those of the run, whoever their parent is."""
        found = []
        for process in psutil.process_iter():
            try:
                if (
                    process.environ().get(MARK) == str(self.phase_file)
                    and process.status() != psutil.STATUS_ZOMBIE
                ):
                    found.append(process)
            except psutil.Error:
                pass
        return found

    def all_runs(self):
        return [RunDirectory.open(path.parent) for path in self.runs.glob("*/*/status.json")]

    def step(self):
        return max((run.status()["step"] for run in self.all_runs()), default=0)

    def finished(self):
        return next((run for run in self.all_runs() if run.status()["state"] == "finished"), None)

    def amiss(self):
        """What a run that has ended should not have left."""
        _, alive = psutil.wait_procs(self.processes(), timeout=30)
        faults = [f"alive: {process.pid} {' '.join(process.cmdline()[:3])}" for process in alive]
        for process in alive:
            process.kill()
        for folder in (self.temporary, Path("/dev/shm")):
            faults += [f"left: {file}" for file in folder.rglob("*") if file.is_file()]
        for run in self.all_runs():
            if run.status()["state"] == "finished":
                faults += [
                    f"left: {path}"
                    for path in (*run.checkpoints_dir.glob(".*"), *run.path.rglob("*.tmp"))
                ]
            for iteration in checkpoint_iterations(run.checkpoints_dir):
                try:
                    read_state(run.checkpoints_dir, iteration)
                except ValueError as error:
                    faults.append(str(error))
        return faults

    def said(self):
        """The run's reason."""
        lines = (self.folder / "output").read_text().splitlines()
        if any(line.startswith("Traceback") for line in lines):
            return f"TRACEBACK, {next(line for line in reversed(lines) if line.strip())}"
        return next((line for line in reversed(lines) if line.startswith("error: ")), "")


@dataclass
class Unbroken:
    """What a run takes that nothing disturbs, and what it writes."""

    seconds: float
    written: int  # bytes
    rows: list[dict]


def measure(place):
    started, before = time.monotonic(), place.used()
    if place.start().wait():
        raise SystemExit((place.folder / "output").read_text())
    seconds = time.monotonic() - started
    if faults := place.amiss():
        raise SystemExit("\n".join(faults))
    return Unbroken(seconds, place.used() - before, recorded(place.finished()))


def has_ended(process, seconds):
    """Waits for that long, at most."""
    try:
        process.wait(timeout=seconds)
    except psutil.TimeoutExpired:
        return False
    return True


def moment(process, place, draw, seconds):
    """Waits for a moment that is drawn; the part of the loop that the run is in then, None if it
    has ended.
    """
    if has_ended(process, draw.uniform(0.5, seconds * 0.8)):
        return None
    if draw.random() < 0.6:
        wanted, until = draw.choice(PHASES), time.monotonic() + seconds
        while place.phase_file.read_text() != wanted and time.monotonic() < until:
            if has_ended(process, 0.001):
                return None
        if has_ended(process, draw.uniform(0, 0.05)):
            return None
    return place.phase_file.read_text() or "between"


def victim_of(place, draw):
    """A process of the run, and what it is."""
    victim = draw.choice(place.processes())
    words = " ".join(victim.cmdline()[:3])
    names = {
        "endurance.py drive": "driver",
        "ray::": "rank or engine",
        "raylet/raylet": "raylet",
        "gcs_server": "GCS",
    }
    return victim, next((name for mark, name in names.items() if mark in words), "another of Ray's")


def disturb(kind, place, draw, unbroken):
    """Start the run, and disturb it; what was done (None if it ended before)."""
    if kind == "full disk":
        # most bytes are checkpoints': half of the disks are full before one
        size = 4096 * draw.randint(1, draw.choice([64, unbroken.written // 4096]))
        place.room(place.used() + size)
        return place.start(), f"{size / 2**10:,.0f} KiB more"
    process = place.start()
    if not (phase := moment(process, place, draw, unbroken.seconds)):
        return process, None
    try:
        victim, name = victim_of(place, draw)
        victim.kill()
    except (psutil.NoSuchProcess, IndexError):  # it, or the run, ended in that moment
        return process, None
    return process, f"{name} in {phase}"


def wrong_words(said, kind):
    """What is wrong with the reason of a run that ended."""
    if not said or said.startswith("TRACEBACK"):
        return "no reason in words"
    return "words that do not fit" if kind and not re.search(SAYS[kind], said) else None


def run_through(
    kinds,
    place,
    draw,
    unbroken,
    keep,
):
    """One run to its end, disturbed as `kinds` says, from which is taken what was done."""
    while not place.finished():
        kind = kinds[-1] if kinds else None
        process, what = disturb(kind, place, draw, unbroken) if kind else (place.start(), None)
        faults = []
        longest = unbroken.seconds + HANGS
        while not (ended := has_ended(process, 1)) and place.seconds_in_phase() < longest:
            pass
        if not ended:
            faults.append(f"hangs in {place.phase_file.read_text()}")
            for left in place.processes():
                left.kill()
            process.wait()
        faults += place.amiss()
        said, code = place.said(), process.returncode  # a killed one's guard says it after its end
        if not code and kind == "full disk" and place.room_left():
            what = None  # the limit was not reached
        place.room(ROOM)
        # before its guard lives, or after the run is finished, a killed driver has nobody to speak
        # for it
        has_voice = (
            said
            or code != -signal.SIGKILL
            or not (what == "driver in starting" or place.finished())
        )
        if code and has_voice and (wrong := wrong_words(said, kind)):
            faults.append(wrong)
        if code and not what:
            faults.append("undisturbed, it failed")
        if place.finished() and recorded(place.finished()) != unbroken.rows:
            faults.append("other numbers")
        if what:
            kinds.pop()
        if what or faults:
            words = re.sub(r"/\S+", "PATH", re.sub(r"\d+", "N", said))[:200]
            keep(
                {
                    "kind": kind,
                    "what": what,
                    "step": place.step(),
                    "code": code,
                    "said": words,
                    "faults": faults,
                }
            )
        if faults or (code and not what):
            print((place.folder / "output").read_text(), flush=True)
        if code and not what:
            raise SystemExit("an undisturbed run failed")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=0, metavar="N")
    parser.add_argument("--full-disks", type=int, default=0, metavar="N")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if not os.environ.get("MSQ_ENDURANCE_INSIDE"):
        os.environ["MSQ_ENDURANCE_INSIDE"] = "1"
        mapped = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
        os.execvp("unshare", ["unshare", *mapped, "--mount", sys.executable, *sys.argv])
    subprocess.run(["mount", "-t", "tmpfs", "shm", "/dev/shm"], check=True)
    from mindspeed_qerl.demo.tiny_model import Recipe, make_tiny_model

    draw, lines = random.Random(arguments.seed), []
    kinds = ["kill"] * arguments.kills + ["full disk"] * arguments.full_disks
    draw.shuffle(kinds)

    def keep(line):
        lines.append(line)
        print(f"{len(kinds):4} left;", *line.values(), sep="; ", flush=True)

    with tempfile.TemporaryDirectory(prefix="endurance_") as folder:
        model = Path(folder) / "tiny"
        make_tiny_model(model, Recipe(steps=0, train_problems=64, test_problems=16))
        place = Place(Path(folder) / "unbroken", model)
        unbroken = measure(place)
        place.close()
        while kinds:
            place = Place(Path(folder) / f"run{len(kinds)}", model)
            run_through(kinds, place, draw, unbroken, keep)
            place.close()
    faulty = [line for line in lines if line["faults"]]
    print(f"{len(lines) - len(faulty)} of {len(lines)} as if nothing had happened")
    return int(bool(faulty))


if __name__ == "__main__":
    sys.exit(drive() if sys.argv[1:2] == ["drive"] else main())
