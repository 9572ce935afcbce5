"""The quickstart with and without noise, several seeds each, as a table: what was learned, and how sure that is.

    python benchmarks/quickstart_seeds.py --seeds 1 2 3

Runs that are finished in --root are not run again; give another --root with other overrides. Intervals over seeds are 95% Student-t intervals of the mean; the interval of
the difference is Welch's. Three seeds make them wide, and that is what they say.
"""

import argparse
import re
import subprocess
import sys
from pathlib import Path

import numpy as np

from mindspeed_qerl.runs.directory import RunDirectory
from mindspeed_qerl.runs.metrics import read_jsonl

ROOT = Path(__file__).resolve().parents[1]
T_95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}  # two-sided, by degrees of freedom
PARTS = ("has `#### n`", "right operation", "right operands", "right arithmetic")


def finished_run(root: Path, name: str, seed: int) -> RunDirectory | None:
    """The first finished run of this name and seed."""
    runs = (RunDirectory.open(path) for path in sorted((root / name).glob("*_seed*")))
    return next((run for run in runs if run.status()["state"] == "finished" and run.status()["seed"] == seed), None)


def parts(run: RunDirectory, step: int) -> list[float]:
    """What the held-out answers after `step` updates get right: the form, of all; the rest, of the answers that state an equation."""
    form, rest = [], []
    for row in read_jsonl(run.eval_answers_file):
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


def interval(values: list[float]) -> str:
    """mean [95% t-interval] of a few seeds."""
    half = T_95[len(values) - 1] * np.std(values, ddof=1) / np.sqrt(len(values))
    return f"{np.mean(values):.3f} [{np.mean(values) - half:.3f}, {np.mean(values) + half:.3f}]"


def difference(treated: list[float], baseline: list[float]) -> str:
    """Welch's 95% interval of the difference of means."""
    variances = [np.var(values, ddof=1) / len(values) for values in (treated, baseline)]
    freedom = sum(variances) ** 2 / sum(v**2 / (len(values) - 1) for v, values in zip(variances, (treated, baseline)))
    half = T_95[min(max(T_95), max(1, int(freedom)))] * np.sqrt(sum(variances))
    mean = np.mean(treated) - np.mean(baseline)
    return f"{mean:+.3f} [{mean - half:+.3f}, {mean + half:+.3f}]"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="at least two, at most ten (default: 1 2 3)")
    parser.add_argument("--aqn", nargs="+", default=["off", "qerl"], help="configs/aqn/*.yaml, the baseline first (default: off qerl)")
    parser.add_argument("--root", type=Path, default=ROOT / "runs" / "seeds", help="where the runs are kept")
    arguments, overrides = parser.parse_known_args()
    final, rows = {}, []
    for aqn in arguments.aqn:
        final[aqn] = []
        for seed in arguments.seeds:
            if not (run := finished_run(arguments.root, f"aqn-{aqn}", seed)):
                subprocess.run([sys.executable, "cli/train_grpo.py", f"aqn={aqn}", f"megatron_training.seed={seed}", f"run.name=aqn-{aqn}",
                                f"run.root={arguments.root}", *overrides], cwd=ROOT, check=True)
                run = finished_run(arguments.root, f"aqn-{aqn}", seed)
            first, last = read_jsonl(run.eval_file)[0], read_jsonl(run.eval_file)[-1]
            final[aqn].append(last["accuracy"])
            noisy = [row for row in read_jsonl(run.metrics_file) if row.get("aqn/sigma")]
            rows.append([aqn, seed, f"{first['accuracy']:.3f} ± {1.96 * first['standard_error']:.3f}",
                         f"{last['accuracy']:.3f} ± {1.96 * last['standard_error']:.3f}", len(noisy),
                         *(f"{a:.2f} → {b:.2f}" for a, b in zip(parts(run, 0), parts(run, last["step"])))])
    header = ["aqn", "seed", "accuracy before", "accuracy after", "noisy syncs", *PARTS]
    for row in (header, ["---"] * len(header), *rows):
        print("|", " | ".join(map(str, row)), "|")
    print()
    for aqn, values in final.items():
        print(f"after training, aqn={aqn}, {len(values)} seeds: {interval(values)}")
    baseline = arguments.aqn[0]
    for aqn in arguments.aqn[1:]:
        print(f"difference aqn={aqn} - aqn={baseline}: {difference(final[aqn], final[baseline])}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
