"""Studies of many runs: planned from a pilot, stopped by a stated rule, resumed where they were.

    python benchmarks/study.py --study arithmetic --hours 8     # runs what is missing; killed, it resumes
    python benchmarks/study.py --study arithmetic --tables      # only the tables and the picture, from docs/studies/

The studies (STUDIES) are tables of cells, each some overrides of a config, and of comparisons between two cells. Seed
after seed, each cell gets a run of cli/train_grpo.py, in runs/studies, where studies with a cell in common share it.
As many run side by side as there are cores, each on one core, with one rank: on two cores 1.4 times as many an hour as
one after the other with two ranks each. After PILOT seeds the spread of the differences says how many seeds an effect
of EFFECT would take; so many, or --seeds at most, are run, and at fixed numbers of seeds every comparison is judged
(mindspeed_qerl/runs/sequential.py), with 5 % shared by all comparisons of the study. A comparison that is decided
needs no more runs. Differences are paired by seed and question, of runs that begin with the same weights.

What was found is kept in docs/studies/NAME.json: of each run and question how many of its answers were right. Tables
and pictures are made of that alone.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue

if __name__ == "__main__":  # a file of a checkout
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from mindspeed_qerl.entry import use_checkout

    use_checkout()

import numpy as np

from mindspeed_qerl.files import write_whole
from mindspeed_qerl.fingerprint import weights_digest
from mindspeed_qerl.runs.compare import SIGNIFICANCE
from mindspeed_qerl.runs.compare_report import interval
from mindspeed_qerl.runs.compared_run import find_runs, read_run
from mindspeed_qerl.runs.directory import RunDirectory
from mindspeed_qerl.runs.metrics import read_jsonl
from mindspeed_qerl.runs.plots import BLUE, RED, STYLE
from mindspeed_qerl.runs.report import markdown_table
from mindspeed_qerl.runs.sequential import judge, limits, looks, seeds_planned
from mindspeed_qerl.runs.statistics import effect_shown, estimate

ROOT = Path(__file__).resolve().parents[1]
ONE_RANK = ("rl_config.actor_resource.num_npus=1",)
PILOT, EFFECT = 4, 0.02  # seeds; points of accuracy


@dataclass(frozen=True)
class Study:
    """Cells by name with their overrides; comparisons (cell, baseline cell, measure); by name of a measure other than
    "accuracy", the run's own after its last step, arguments of tools/evaluate.py; what all cells are runs of."""

    question: str
    cells: dict[str, tuple[str, ...]]
    comparisons: tuple[tuple[str, str, str], ...]
    evaluations: dict[str, tuple[str, ...]] = field(default_factory=dict)
    config: str = "grpo_steps_moe_cpu"
    model: str = "models/steps_qwen3_moe"
    overrides: tuple[str, ...] = ()

    def weights(self) -> str:
        """Which model its runs begin with, here: the same recipe gives other floats on another processor."""
        return weights_digest(ROOT / self.model)[:12]

    def place(self, cell: str, root: Path) -> tuple[Path, str]:
        """`run.root` and `run.name` of a cell's runs, the same for studies that have it in common."""
        name = "_".join(override.rpartition("=")[2] for override in self.cells[cell])
        return root / f"{self.config}_{self.weights()}", name


def crossed(values: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """Cells "VALUE, AQN off" and "VALUE, AQN on"."""
    return {f"{value}, AQN {'on' if aqn == 'qerl' else 'off'}": (*overrides, f"aqn={aqn}")
            for value, overrides in values.items() for aqn in ("off", "qerl")}


STUDIES = {
    "arithmetic": Study(
        "Does quantisation noise or AQN help a policy to learn?",
        crossed({"fp32": (), "int8": ("rollout_quantization=int8_w8a8",),
                               "nvfp4": ("rollout_quantization=nvfp4",)}),
        (*((f"{name}, AQN on", f"{name}, AQN off", "accuracy") for name in ("fp32", "int8", "nvfp4")),
         ("int8, AQN off", "fp32, AQN off", "accuracy"), ("nvfp4, AQN off", "fp32, AQN off", "accuracy"))),
    "hardware": Study(
        "Does AQN help a policy that meets other hardware?",
        crossed({"clean": (), "foreign": ("hardware_error.rollout=gaussian",)}),
        tuple((f"{name}, AQN on", f"{name}, AQN off", measure) for name in ("clean", "foreign")
              for measure in ("accuracy", "foreign")),
        {"foreign": ("--samples", "4", "--hardware-error", "gaussian")}),
    "exploration": Study(
        "Does noise make a policy explore?",
        {"none": ("aqn=off",), "AQN": ("aqn=qerl",), "strong AQN": ("aqn=strong",),
         "nvfp4": ("rollout_quantization=nvfp4", "aqn=off")},
        tuple((cell, "none", f"pass@{k}") for cell in ("AQN", "strong AQN", "nvfp4") for k in (1, 16)),
        {"sixteen": ("--samples", "16")}),
    "real": Study(
        "Does AQN help a real model, SmolLM2-135M after a warm-up?",
        {"AQN off": ("aqn=off",), "AQN on": ("aqn=qerl",)}, (("AQN on", "AQN off", "accuracy"),),
        config="grpo_smollm2_135m_gsm8k_cpu", model="models/smollm2_135m_gsm8k",  # tools/warm_up.py makes it
        overrides=("generate_config.dtype=bfloat16", "megatron_training.train_iters=20",
                   "megatron_training.save_interval=20", "rl_config.verifier_function=[gsm8k]",
                   "rl_config.verifier_weight=[1.0]", "eval.every=20", "eval.n_problems=200",
                   "eval.samples_per_problem=4", "eval.temperature=1.0")),
}
DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"  # right answers of one question


def pass_at(k: int, right: np.ndarray, samples: int) -> np.ndarray:
    """The chance that one of k answers is right, without bias, from `right` of `samples` (arXiv 2107.03374).

    >>> pass_at(2, np.array([0, 1, 4]), 4)
    array([0. , 0.5, 1. ])
    """
    wrong = samples - right[..., None] - np.arange(k)
    return 1 - np.prod(np.maximum(wrong, 0) / (samples - np.arange(k)), axis=-1)


class Data:
    """What a study found so far: docs/studies/NAME.json."""

    def __init__(self, name: str, folder: Path):
        self.study, self.file = STUDIES[name], folder / f"{name}.json"
        kept = json.loads(self.file.read_text()) if self.file.exists() else {}
        self.most: int | None = kept.get("most")  # seeds; None: the pilot is not done
        self.cells: dict[str, dict[str, dict]] = {cell: kept.get("cells", {}).get(cell, {})
                                                  for cell in self.study.cells}

    def save(self) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        lines = ",\n".join(f"  {json.dumps(cell)}: {{\n" + ",\n".join(
            f"    {json.dumps(seed)}: {json.dumps(run)}" for seed, run in runs.items()) + "}"
            for cell, runs in self.cells.items())
        write_whole(self.file, f'{{"most": {json.dumps(self.most)}, "cells": {{\n{lines}}}}}\n')

    def values(self, cell: str, measure: str, seeds: list[str]) -> np.ndarray:
        """[seeds, questions]."""
        evaluation, k = ("sixteen", int(measure[5:])) if measure.startswith("pass@") else (measure, 1)
        runs = [self.cells[cell][seed][evaluation] for seed in seeds]
        right = np.array([[DIGITS.index(digit) for digit in run["right"]] for run in runs])
        return pass_at(k, right, runs[0]["samples"])

    def differences(self, cell: str, baseline: str, measure: str) -> np.ndarray:
        """[seeds, questions], of the seeds that both have, begun with the same weights, in their order."""
        runs, others = self.cells[cell], self.cells[baseline]
        seeds = sorted((seed for seed in runs.keys() & others.keys()
                        if runs[seed].get("model") == others[seed].get("model")), key=int)
        if not seeds:
            return np.zeros((0, 1))
        return self.values(cell, measure, seeds) - self.values(baseline, measure, seeds)

    def missing(self, count: int) -> list[tuple[int, str]]:
        """The runs, (seed, cell), that comparisons without a word need for `count` seeds. What a seed is compared in
        begins with one model: a seed that was begun with another, on another machine, is run anew."""
        undecided = {cell for each, word in self.words().items() if word is None for cell in each[:2]}
        cells, model = [cell for cell in self.study.cells if cell in undecided], self.study.weights()
        runs = []
        for seed in range(1, count + 1):
            found = {cell: self.cells[cell][str(seed)] for cell in cells if str(seed) in self.cells[cell]}
            models, whole = {run.get("model") for run in found.values()}, len(found) == len(cells)
            kept = found if models == {model} or (whole and len(models) == 1) else {}
            runs += [(seed, cell) for cell in cells if cell not in kept]
        return runs

    def words(self) -> dict[tuple[str, str, str], tuple[str, int] | None]:
        """What is said of each comparison, and after how many seeds; None: go on."""
        alpha = SIGNIFICANCE / len(self.study.comparisons)  # Bonferroni
        return {each: judge(self.differences(*each), self.most, alpha, EFFECT) if self.most else None
                for each in self.study.comparisons}


def right_answers(file: Path) -> dict:
    """Of the last evaluation in a file of answers: how many of how many were right, question by question."""
    rows = read_jsonl(file)
    last = [row["scores"] for row in rows if row["step"] == rows[-1]["step"]]
    return {"samples": len(last[0]), "right": "".join(DIGITS[round(sum(scores))] for scores in last)}


def run_cell(study: str, cell: str, seed: int, core: int, root: Path, more: list[str]) -> dict:
    """One run with its evaluations, or what there is of it; what the study keeps. Killed, it takes the run along."""
    of, weights = STUDIES[study], STUDIES[study].weights()
    folder, name = of.place(cell, root)
    on_core = ["setpriv", "--pdeathsig", "KILL", "taskset", "--cpu-list", str(core), sys.executable]
    subprocess.run([*on_core, "cli/train_grpo.py", "--multirun", "--config-name", of.config, *ONE_RANK,
                    f"megatron_training.tokenizer_name_or_path={of.model}", *of.overrides, f"seed={seed}",
                    f"run.root={folder}", f"run.name={name}", *of.cells[cell], *more],
                   cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    run = next(run for path in find_runs([folder / name]) if (run := read_run(path)).seed == seed and not run.faults)
    for evaluation, arguments in of.evaluations.items():
        if not (run.path / "evaluations" / evaluation).exists():
            subprocess.run([*on_core, "tools/evaluate.py", "--run", run.path, "--name", evaluation, *arguments],
                           cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    directory = RunDirectory.open(run.path)
    entropy = [round(row["entropy/mean"], 4) for row in read_jsonl(directory.metrics_file) if "entropy/mean" in row]
    return {"model": weights, "accuracy": right_answers(directory.eval_answers_file),
            "entropy": [entropy[0], entropy[-1]],
            **{name: right_answers(run.path / "evaluations" / name / "answers.jsonl") for name in of.evaluations}}


class OneRunACore:
    """Runs of a study side by side, none of which begins when it would end after `hours`."""

    def __init__(self, hours: float, cores: list[int]):
        self.end, self.longest, self.count = time.monotonic() + hours * 3600, 0.0, len(cores)
        self.free: SimpleQueue[int] = SimpleQueue()
        for core in cores:
            self.free.put(core)

    def run(self, study: str, cell: str, seed: int, **rest) -> tuple[dict | None, float]:
        """`run_cell`'s result and its seconds; None if there is no time for it."""
        core, begun = self.free.get(), time.monotonic()
        try:
            if begun + self.longest > self.end:
                return None, 0.0
            found = run_cell(study, cell, seed, core=core, **rest)
            self.longest = max(self.longest, time.monotonic() - begun)
            return found, time.monotonic() - begun
        finally:
            self.free.put(core)

    def all(self, name: str, data: Data, wanted: list[tuple[int, str]], **rest) -> bool:
        """Whether there was time for all the runs `wanted`, (seed, cell)."""
        whole = True
        with ThreadPoolExecutor(self.count) as pool:
            jobs = {pool.submit(self.run, name, cell, seed, **rest): (seed, cell) for seed, cell in wanted}
            try:
                for job in as_completed(jobs):
                    (seed, cell), (found, seconds) = jobs[job], job.result()
                    if found is None:
                        whole = False
                        continue
                    data.cells[cell][str(seed)] = found
                    data.save()
                    accuracy = data.values(cell, "accuracy", [str(seed)]).mean()
                    print(f"seed {seed}, {cell}: accuracy {accuracy:.3f}, {seconds:.0f} s", flush=True)
            except BaseException:  # Ctrl-C, too: no further run begins
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        return whole


def carry_out(name: str, data: Data, runs: OneRunACore, most: int, **rest) -> None:
    """Runs what is missing, until every comparison is decided, or the time is over before another run would be."""
    count = min(PILOT, most)
    while True:
        if not runs.all(name, data, data.missing(count), **rest):
            print(f"stopped before {count} seeds: the hours are over", flush=True)
            return
        if data.most is None and count == PILOT:
            data.most = plan(data, most)
            data.save()
        if data.most is None or count >= data.most:
            return
        count = next(look for look in looks(data.most) if look > count)


def plan(data: Data, most: int) -> int:
    """How many seeds: what EFFECT takes in the comparison that varies most, by the pilot's variance, or `most`."""
    alpha = SIGNIFICANCE / len(data.study.comparisons)
    needed = [seeds_planned(estimate(data.differences(*each)), alpha, EFFECT) for each in data.study.comparisons]
    for (cell, baseline, measure), count in zip(data.study.comparisons, needed):
        words = f"{count} seeds" if count else "more questions"
        print(f"to see {100 * EFFECT:.0f} points in {measure} of {cell} against {baseline} with a power of 80 %: "
              f"{words}", flush=True)
    return min(most, max(count or most for count in needed))


def tables(data: Data) -> str:
    """Of cells and of comparisons, as Markdown."""
    measures = dict.fromkeys(measure for *_, measure in data.study.comparisons)
    rows = []
    for cell, runs in data.cells.items():
        seeds = sorted(runs, key=int)
        if seeds:
            first, last = np.mean([runs[seed]["entropy"] for seed in seeds], axis=0)
            rows.append([cell, str(len(seeds)),
                         *(interval(estimate(data.values(cell, measure, seeds))) for measure in measures),
                         f"{first:.3f} → {last:.3f}"])
    text = markdown_table(["cell", "seeds", *measures, "entropy, first and last step"], rows)
    rows, alpha = [], SIGNIFICANCE / len(data.study.comparisons)
    limit_at = dict(zip(looks(data.most), limits(looks(data.most), alpha))) if data.most else {}
    for (cell, baseline, measure), said in data.words().items():
        values = data.differences(cell, baseline, measure)
        if len(values) < 2:
            continue
        word, count = said or ("not finished", len(values))
        found = estimate(values[:count])
        seen = f"{effect_shown(found, count, limit_at[count]):.3f}" if said else ""
        word = f"smaller than {100 * EFFECT:.0f} points" if word == "smaller" else word
        rows.append([cell, baseline, measure, str(count), interval(found, "+"), f"{found.p:.2g}", seen, f"**{word}**"])
    text += ["", *markdown_table(["of", "against", "in", "seeds", "difference", "p", "seen with a power of 80 %",
                                "verdict"], rows)]
    if data.most:
        judged = ", ".join(f"{count} ({limit:.1g})" for count, limit in limit_at.items())
        text += ["", f"Judged after so many seeds, significant below p in brackets: {judged}."]
    return "\n".join(text)


def draw(data: Data, image: Path) -> None:
    """Every comparison's difference with its interval."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(8, 1 + 0.45 * len(data.study.comparisons)), layout="constrained")
        axis = figure.subplots()
        axis.axvspan(-EFFECT, EFFECT, color="#eeeeee")
        axis.axvline(0, color="black", linewidth=1)
        for at, (each, said) in enumerate(data.words().items()):
            word, count = said or ("", None)
            values = data.differences(*each)[:count]
            found = estimate(values)
            color = RED if word in ("better", "worse") else BLUE
            axis.errorbar(found.mean, at, xerr=[[found.mean - found.low], [found.high - found.mean]], fmt="o",
                          capsize=4, color=color)
            axis.plot(values.mean(1), [at + 0.2] * len(values), ".", color=color, alpha=0.4)
        axis.set(title=data.study.question,
                 xlabel=f"difference (small dots: seeds; bars: 95 %; grey: less than {100 * EFFECT:.0f} points)")
        axis.set_yticks(range(len(data.study.comparisons)),
                        [f"{cell} - {baseline}\n{measure}" for cell, baseline, measure in data.study.comparisons],
                        fontsize=8)
        axis.invert_yaxis()
        figure.savefig(image, dpi=130)
    print(image)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--study", choices=STUDIES, required=True)
    parser.add_argument("--hours", type=float, default=8.0, help="no run begins that would end later (default: 8)")
    parser.add_argument("--seeds", type=int, default=40, help="at most, once the pilot is done (default: 40)")
    parser.add_argument("--cores", type=int, nargs="+", default=sorted(os.sched_getaffinity(0)), metavar="CORE",
                        help="those to run on (default: all)")
    parser.add_argument("--tables", action="store_true", help="run nothing")
    parser.add_argument("--root", type=Path, default=ROOT / "runs" / "studies", help="where the runs are kept")
    parser.add_argument("--data", type=Path, default=ROOT / "docs" / "studies", help="where what was found is kept")
    parser.add_argument("--images", type=Path, default=ROOT / "docs" / "images")
    arguments, more = parser.parse_known_args()
    data = Data(arguments.study, arguments.data)
    if not arguments.tables:
        carry_out(arguments.study, data, OneRunACore(arguments.hours, arguments.cores), arguments.seeds,
                  root=arguments.root, more=more)
    print(tables(data))
    if all(len(data.differences(*each)) > 1 for each in data.study.comparisons):
        draw(data, arguments.images / f"study_{arguments.study}.png")


if __name__ == "__main__":
    main()
