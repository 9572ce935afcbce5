"""A run of many small steps: do memory, files and seconds a step stay what they were?

    python benchmarks/long_run.py                       2,000 steps of 4 x 4 answers; minutes
    python benchmarks/long_run.py --steps 200 --images /tmp

The quickstart's model, AQN on, a checkpoint every 50 steps, an evaluation every 100, TensorBoard
on. Looked at every second: how many processes there are, how much memory they hold (PSS, shared
pages counted once), how many files they have open, and how many bytes lie in the run's directory,
in its temporary directory and in /dev/shm (the machine's: run nothing beside it). Exit status 1 if
anything but the run's directory grew by more than 5 % (and by more than 1) from steps 5-15 % to the
last tenth, or a step's time by more than 10 %.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

if __name__ == "__main__":  # a file of a checkout
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from mindspeed_qerl.common.entry import use_checkout

    use_checkout()

import numpy as np
import psutil

from mindspeed_qerl.common.markdown import markdown_table
from mindspeed_qerl.runs.directory import RunDirectory
from mindspeed_qerl.runs.metrics import read_jsonl, series
from mindspeed_qerl.runs.plots import STYLE

ROOT = Path(__file__).resolve().parents[1]
ROLES = ("driver", "rank 0", "rank 1", "rollout engine", "Ray")
COUNTS = ("open files", "processes")
PLACES = ("run directory", "temporary files", "/dev/shm")


def bytes_in(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(parent, name)).st_blocks * 512
            except FileNotFoundError:
                pass
    return total


def look(driver: psutil.Process, run: RunDirectory, temporary: Path) -> dict[str, float]:
    """MiB by role and place, and open files, at this moment."""
    found = dict.fromkeys((*ROLES, *COUNTS), 0.0)
    pids = {pid: name for name, pid in run.facts().get("processes", {}).items()}
    for process in (driver, *driver.children(recursive=True)):
        role = "driver" if process == driver else pids.get(process.pid, "Ray")
        try:
            found[role] += process.memory_full_info().pss / 2**20
            found["open files"] += process.num_fds()
            found["processes"] += 1
        except psutil.Error:
            pass
    places = zip(PLACES, (run.path, temporary, Path("/dev/shm")))
    return {
        **found,
        **{name: bytes_in(folder) / 2**20 for name, folder in places},
        "step": run.status()["step"],
    }


def carry_out(steps: int, work: Path) -> tuple[RunDirectory, list[dict[str, float]]]:
    """The run, and what was seen of it second by second, from its first step on."""
    temporary, seen, run = work / "tmp", [], None
    temporary.mkdir()
    command = [
        sys.executable,
        "cli/train_grpo.py",
        "--config-name",
        "grpo_tiny_moe_cpu",
        f"run.root={work}",
        "run.name=long",
        f"megatron_training.train_iters={steps}",
        "megatron_training.global_batch_size=4",
        "rl_config.mini_batch_size=4",
        "rl_config.n_samples_per_prompt=4",
        "megatron_training.save_interval=50",
        "eval.every=100",
        "eval.n_problems=20",
        "eval.samples_per_problem=1",
    ]
    driver = psutil.Popen(
        command, cwd=ROOT, env={**os.environ, "TMPDIR": str(temporary)}, stdout=subprocess.DEVNULL
    )
    while driver.poll() is None:
        time.sleep(1)
        run = run or next(
            (RunDirectory.open(file.parent) for file in work.glob("long/*/status.json")), None
        )
        if run and run.status()["step"]:
            try:
                seen.append(look(driver, run, temporary))
                print(f"\rstep {seen[-1]['step']} of {steps}", end="", flush=True)
            except psutil.NoSuchProcess:
                pass
    print()
    if driver.returncode:
        raise SystemExit(
            f"the run ended with {driver.returncode}: {run and run.status()['reason']}"
        )
    return run, [each for each in seen if each["step"] < steps]  # not while it ends


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--images", type=Path, default=ROOT / "docs" / "images")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="lr", dir="/tmp") as folder:
        run, seen = carry_out(arguments.steps, Path(folder))
        _, seconds = series(read_jsonl(run.metrics_file), "time/step")
    at = np.array([each["step"] for each in seen])
    columns = {name: np.array([each[name] for each in seen]) for name in (*ROLES, *PLACES, *COUNTS)}
    edges = [(0.05, 0.15), (0.45, 0.55), (0.9, 1.0)]
    parts = [(at >= low * arguments.steps) & (at <= high * arguments.steps) for low, high in edges]
    if not all(part.any() for part in parts):
        raise SystemExit("too few steps to look at their beginning, middle and end")
    medians = {
        name: [np.median(values[part]) for part in parts] for name, values in columns.items()
    }
    rows = [
        [name if name in COUNTS else f"{name}, MiB", *(f"{value:,.1f}" for value in values)]
        for name, values in medians.items()
    ]
    milliseconds = [
        1000 * np.median(seconds[int(low * len(seconds)) : int(high * len(seconds))])
        for low, high in edges
    ]
    rows.append(["a step, ms", *(f"{value:.0f}" for value in milliseconds)])
    titles = [
        f"steps {low * arguments.steps:.0f} to {high * arguments.steps:.0f}" for low, high in edges
    ]
    print("\n".join(markdown_table(["median of", *titles], rows)))
    draw(at, columns, seconds, arguments.images / "long_run.png")
    grown = [
        name
        for name, (first, _, last) in medians.items()
        if name != "run directory" and last > max(1.05 * first, first + 1)
    ]
    grown += ["a step's time"] if milliseconds[-1] > 1.1 * milliseconds[0] else []
    print(f"grown: {', '.join(grown) or 'nothing'}")
    return int(bool(grown))


def draw(at: np.ndarray, columns: dict[str, np.ndarray], seconds: np.ndarray, image: Path) -> None:
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(9, 6), layout="constrained")
        for axis, (title, names) in zip(
            figure.subplots(2, 2).flat,
            {"memory of processes, MiB": ROLES, "files, MiB": PLACES, "number": COUNTS}.items(),
        ):
            for name in names:
                axis.plot(at, columns[name], label=name)
            axis.set(title=title, xlabel="step", ylim=(0, None))
            axis.legend()
        axis = figure.axes[-1]
        axis.plot(np.arange(len(seconds)) + 1, seconds, ".", markersize=2)
        axis.set(title="seconds a step", xlabel="step", ylim=(0, 4 * np.median(seconds)))
        figure.savefig(image, dpi=130)
    print(image)


if __name__ == "__main__":
    sys.exit(main())
