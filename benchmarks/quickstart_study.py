"""Does the noise help, and does it help a model that meets other hardware? AQN off and on x clean and foreign rollouts
x seeds, on the quickstart's model.

    python benchmarks/quickstart_study.py    # draws docs/images/study.png

About half an hour on 2 cores; killed, it resumes with the same command.

A sweep of cli/train_grpo.py, an evaluation of each trained model on the foreign hardware by tools/evaluate.py beside
the run's own on the clean one, and tools/compare_runs.py's difference, with AQN - without, in each of the four cells.
Foreign hardware is docs/hardware_error.md's `gaussian`: 5 % on every product. Other overrides go to the runs.
"""

import argparse
import re
import subprocess
import sys
from pathlib import Path

if __name__ == "__main__":  # a file of a checkout
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from mindspeed_qerl.entry import use_checkout

    use_checkout()

import numpy as np

from mindspeed_qerl.runs.compare import SIGNIFICANCE, compare
from mindspeed_qerl.runs.compare_report import interval
from mindspeed_qerl.runs.compared_run import ComparedRun, find_runs, read_run
from mindspeed_qerl.runs.directory import RunDirectory
from mindspeed_qerl.runs.metrics import read_jsonl
from mindspeed_qerl.runs.plots import BLUE, RED, STYLE
from mindspeed_qerl.runs.report import markdown_table
from mindspeed_qerl.runs.statistics import estimate, seeds_needed

ROOT = Path(__file__).resolve().parents[1]
CLEAN, FOREIGN = "clean", "foreign"
HARDWARE = {"none": CLEAN, "gaussian": FOREIGN}
PARTS = ("has `#### n`", "right operation", "right operands", "right arithmetic")


def call(*command: object) -> None:
    subprocess.run([sys.executable, *map(str, command)], cwd=ROOT, check=True)


def read_cells(root: Path) -> dict[tuple[bool, str, str], list[ComparedRun]]:
    """(AQN, rollout hardware, evaluation hardware) -> its runs; each run is evaluated on the foreign hardware first,
    if it was not."""
    cells: dict[tuple[bool, str, str], list[ComparedRun]] = {}
    for path in find_runs([root]):
        if not (path / "evaluations" / FOREIGN).exists():
            call("tools/evaluate.py", "--run", path, "--name", FOREIGN, "--hardware-error", "gaussian")
        for hardware, run in ((CLEAN, read_run(path)), (FOREIGN, read_run(path, FOREIGN))):
            if run.faults:
                raise SystemExit(f"{path}: {'; '.join(run.faults)}")
            cells.setdefault((run.config["aqn.enabled"], HARDWARE[run.config.get("hardware_error.rollout", "none")],
                              hardware), []).append(run)
    return cells


def parts(run: ComparedRun, step: int) -> list[float]:
    """What the held-out answers after `step` updates get right: the form, of all; the rest, of the answers that state
    an equation."""
    form, rest = [], []
    for row in read_jsonl(RunDirectory.open(run.path).eval_answers_file):
        if row["step"] != step:
            continue
        a, b = (int(number) for number in re.findall(r"\d+", row["question"]))
        asked = "+" if a + b == int(row["answer"]) else "-"
        for response in row["responses"]:
            form.append(re.search(r"#### \d", response) is not None)
            if stated := re.search(r"(\d+)([+-])(\d+)=(\d+)", response):
                x, op, y, result = int(stated[1]), stated[2], int(stated[3]), int(stated[4])
                rest.append((op == asked, sorted((x, y)) == sorted((a, b)), result == (x + y if op == "+" else x - y)))
    return [float(np.mean(form)), *np.mean(rest, axis=0)]


def draw(accuracy: dict, difference: dict, cells: dict, image: Path) -> None:
    """Left: accuracy after training, each seed a dot; right: with AQN - without."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    places = [(rollout, hardware) for rollout in (CLEAN, FOREIGN) for hardware in (CLEAN, FOREIGN)]
    labels = [f"rollouts {rollout}\nevaluated {hardware}" for rollout, hardware in places]
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(11, 3.8), layout="constrained")
        left, right = figure.subplots(1, 2, width_ratios=(3, 2))
        for aqn, color, shift in ((False, BLUE, -0.12), (True, RED, 0.12)):
            for at, place in enumerate(places):
                value, runs = accuracy[aqn, *place], cells[aqn, *place]
                left.errorbar(at + shift, value.mean, yerr=[[value.mean - value.low], [value.high - value.mean]],
                              fmt="_", markersize=14, capsize=4, color=color,
                              label=f"AQN {'on' if aqn else 'off'}" if at == 0 else None)
                left.plot([at + shift] * len(runs), [np.mean(list(run.scores[max(run.scores)].values()))
                                                     for run in runs], ".", color=color, alpha=0.6)
        left.set(title="Accuracy after training (dots: seeds; bars: 95 % over seeds and questions)",
                 ylabel="held-out accuracy")
        left.legend()
        right.axhline(0, color="black", linewidth=1)
        for at, place in enumerate(places):
            value = difference[place]
            right.errorbar(at, value.mean, yerr=[[value.mean - value.low], [value.high - value.mean]], fmt="o",
                           capsize=4, color="black")
        right.set(title="With AQN - without, paired by seed and question", ylabel="difference of accuracy")
        for axis in (left, right):
            axis.set_xticks(range(len(places)), labels, fontsize=8)
        figure.savefig(image, dpi=130)
    print(image)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="default: 1 2 3")
    parser.add_argument("--root", type=Path, default=ROOT / "runs", help="where the runs are kept, in a folder study")
    parser.add_argument("--image", type=Path, default=ROOT / "docs" / "images" / "study.png")
    arguments, overrides = parser.parse_known_args()
    call("cli/train_grpo.py", "--multirun", "--config-name", "grpo_tiny_moe_cpu", "aqn=off,qerl",
         "hardware_error.rollout=none,gaussian", f"seed={','.join(map(str, arguments.seeds))}",
         f"run.root={arguments.root}", "run.name=study", *overrides)
    cells = read_cells(arguments.root / "study")
    first = cells[False, CLEAN, CLEAN][0]
    before = first.path / "evaluations" / "foreign_before"
    if not before.exists():
        call("tools/evaluate.py", "--run", first.path, "--step", 0, "--name", before.name, "--hardware-error",
             "gaussian")
    print(f"\nbefore training: {np.mean(list(first.scores[0].values())):.3f} on clean hardware, "
          f"{np.mean(list(read_run(first.path, before.name).scores[0].values())):.3f} on foreign\n")

    accuracy = {cell: estimate(np.array([list(run.scores[max(run.scores)].values()) for run in runs]))
                for cell, runs in cells.items()}
    difference, rows = {}, []
    for rollout in (CLEAN, FOREIGN):
        for hardware in (CLEAN, FOREIGN):
            (verdict,) = compare([*cells[False, rollout, hardware], *cells[True, rollout, hardware]]).verdicts
            found = difference[rollout, hardware] = verdict.difference
            limit = SIGNIFICANCE / 4  # four verdicts share the 5 % (Bonferroni)
            word = verdict.word if found.p < limit else "not distinguishable"
            needed = "" if word != "not distinguishable" else f"about {count:,}" if (
                count := seeds_needed(found, limit)) else "more questions"
            rows.append([rollout, hardware,
                         *(interval(accuracy[aqn, rollout, hardware]) for aqn in (False, True)),
                         interval(found, "+"), f"{found.p:.2g}", f"**{word}**",
                         needed])
    header = ["rollouts", "evaluated on", "AQN off", "AQN on", "difference", "p", "verdict",
              "seeds that would show it"]
    print("\n".join(markdown_table(header, rows)), end="\n\n")
    rows = []
    for aqn in (False, True):
        for rollout in (CLEAN, FOREIGN):
            runs = cells[aqn, rollout, CLEAN]
            taught = zip(*(np.mean([parts(run, step(run.scores)) for run in runs], axis=0) for step in (min, max)))
            rows.append(["on" if aqn else "off", rollout, *(f"{a:.2f} → {b:.2f}" for a, b in taught)])
    print("\n".join(markdown_table(["AQN", "rollouts", *PARTS], rows)), end="\n\n")
    draw(accuracy, difference, cells, arguments.image)


if __name__ == "__main__":
    main()
