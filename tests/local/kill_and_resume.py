"""Kill a run at random moments, go on with it, and compare what it wrote with an unbroken run's, bit for bit.

    python tests/local/kill_and_resume.py --kills 20

A run of two ranks. Each time SIGKILL hits a process drawn at random, of all that the run has (driver, ranks, rollout
engine, Ray's own), at a moment drawn at random between its start and its end; then `run.resume=auto` goes on. Exit
status 0 if every resumed run ended with the unbroken one's metrics, evaluations and answers, and left no process and
no file in the temporary directory, which is one of this script's own.
"""

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from mindspeed_qerl.runs.directory import RunDirectory
from mindspeed_qerl.runs.metrics import read_jsonl

ROOT = Path(__file__).parents[2]
FIXED = ("torchinductor_",)  # a cache, kept from run to run


def command(model: Path, runs: Path, *overrides: str) -> list[str]:
    return [sys.executable, "cli/train_grpo.py", "--config-name", "grpo_tiny_moe_cpu",
            f"megatron_training.tokenizer_name_or_path={model}", f"run.root={runs}",
            "megatron_training.global_batch_size=4", "rl_config.mini_batch_size=2",
            "rl_config.n_samples_per_prompt=16",
            "rl_config.verifier_function=[gsm8k]", "rl_config.init_kl_coef=0.01", "actor_config.lr=1e-3",
            "megatron_training.train_iters=24",
            "megatron_training.save_interval=3", "eval.every=6", "eval.n_problems=4", "aqn.num_stages=3",
            "run.tensorboard=false", *overrides]


def recorded(run: RunDirectory) -> list[dict]:
    """Everything that a run writes step by step, times aside."""
    files = (run.metrics_file, run.eval_file, run.eval_answers_file, run.rollouts_file)
    return [{name: value for name, value in row.items() if "time/" not in name and name != "seconds"}
            for file in files for row in read_jsonl(file)]


def all_runs(runs: Path) -> list[RunDirectory]:
    return [RunDirectory.open(path.parent) for path in runs.glob("*/*/status.json")]


def run_to_end(model: Path, runs: Path, *overrides: str) -> float:
    """Seconds that it took."""
    started = time.monotonic()
    done = subprocess.run(command(model, runs, *overrides), cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"the run failed with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return time.monotonic() - started


def kill_somewhere(model: Path, runs: Path, seconds: float, draw: random.Random) -> tuple[str, list[psutil.Process]]:
    """Start a run, kill one of its processes within `seconds`; returns what was hit, and all processes that there
    were, ended or not. A run that has ended by then does not count: another is started, and another moment drawn."""
    while True:
        process = subprocess.Popen(command(model, runs), cwd=ROOT, stdout=subprocess.DEVNULL,
                                   stderr=subprocess.DEVNULL, start_new_session=True)
        try:
            process.wait(timeout=draw.uniform(1, seconds))
        except subprocess.TimeoutExpired:
            break
        shutil.rmtree(runs)
    driver = psutil.Process(process.pid)
    there = [driver, *driver.children(recursive=True)]
    victim = draw.choice(there)
    try:
        what = f"{victim.pid} {' '.join(victim.cmdline()[:2])[-60:]}"
        victim.kill()
    except psutil.NoSuchProcess:
        what = f"{victim.pid}, which had ended"
    try:
        process.wait(timeout=2 * seconds)
    except subprocess.TimeoutExpired:
        what += ", after which nothing went on; then the driver"
        process.send_signal(signal.SIGKILL)
        process.wait()
    return what, there


def temporary_files() -> set[str]:
    return {name for name in os.listdir(tempfile.gettempdir()) if not name.startswith(FIXED)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    from mindspeed_qerl.local.tiny_model import Recipe, make_tiny_model

    draw, failures = random.Random(arguments.seed), 0
    (ROOT / "runs").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(
            dir=ROOT / "runs",
            prefix=".kill_and_resume-") as folder, tempfile.TemporaryDirectory(prefix="kr_") as temporary:
        os.environ["TMPDIR"] = tempfile.tempdir = temporary
        model, work = Path(folder) / "tiny", Path(folder)
        make_tiny_model(model, Recipe(steps=0, train_problems=64, test_problems=16))
        seconds = run_to_end(model, work / "unbroken")
        (unbroken,) = all_runs(work / "unbroken")
        print(f"unbroken: {seconds:.0f} s, {len(recorded(unbroken))} rows", flush=True)
        before = temporary_files()
        for number in range(1, arguments.kills + 1):
            runs = work / f"killed{number}"
            what, processes = kill_somewhere(model, runs, seconds, draw)
            steps = {run.path: run.status()["step"] for run in all_runs(runs)}
            if any(run.status()["state"] == "finished" for run in all_runs(runs)):
                how = "one of Ray's, which the run did without"
            else:
                run_to_end(model, runs, "run.resume=auto")
                how = "gone on with" if len(all_runs(runs)) == len(steps) else "begun anew, there was no checkpoint"
            finished = [run for run in all_runs(runs) if run.status()["state"] == "finished"]
            _, alive = psutil.wait_procs(processes, timeout=30)
            faults = ["other numbers"] * (len(finished) != 1 or recorded(finished[0]) != recorded(unbroken))
            faults += [f"alive: {process}" for process in alive]
            faults += ([f"left in the temporary directory: {', '.join(sorted(left))}"]
                       if (left := temporary_files() - before) else [])
            print(f"{number:2}. killed {what}; stopped after step {max(steps.values(), default=0)}; {how}: "
                  f"{'; '.join(faults) or 'the same, bit for bit'}", flush=True)
            failures += bool(faults)
    print(f"{arguments.kills - failures} of {arguments.kills} as if nothing had happened")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
