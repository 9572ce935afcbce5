"""Studies of many runs: planned from a pilot, stopped by a stated rule, resumed where they were.

    python benchmarks/study.py --study arithmetic --hours 8   # runs what is missing
    python benchmarks/study.py --study arithmetic --tables    # tables and picture of docs/studies/

The studies (studies.py) are tables of cells and of comparisons between two cells. Seed after seed,
each cell gets a run of cli/train_grpo.py, in runs/studies, where studies with a cell in common
share it. As many run side by side as there are cores, each on one core, with one rank: on two cores
1.4 times as many an hour as one after the other with two ranks each. After PILOT seeds the spread
of the differences says how many seeds the effect that is asked about would take; so many, or
--seeds at most, are run, and at fixed numbers of seeds every comparison is judged (sequential.py),
with 5 % shared by all comparisons of the study. A comparison that is decided needs no more runs.
Differences are paired by seed and question, of runs with the same weights and data; questions on
the same numbers vary together, as one group (sequential.py).

Tables and pictures are made of what is kept in docs/studies/NAME.json alone. Further overrides make
another study: it is kept apart, by --data and --root.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from queue import SimpleQueue

if __name__ == "__main__":  # a file of a checkout
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from mindspeed_qerl.common.entry import use_checkout

    use_checkout()

import numpy as np
from sequential import limits, looks, seeds_planned  # beside this file
from studies import DIGITS, ROOT, STUDIES, Data

from mindspeed_qerl.common.markdown import markdown_table
from mindspeed_qerl.compare.comparison import SIGNIFICANCE
from mindspeed_qerl.compare.page import interval
from mindspeed_qerl.compare.run import read_run
from mindspeed_qerl.compare.statistics import effect_shown, estimate
from mindspeed_qerl.recipe.compose import compose
from mindspeed_qerl.runs.metrics import read_jsonl
from mindspeed_qerl.runs.plots import BLUE, RED, STYLE
from mindspeed_qerl.sweep import finished

ONE_RANK = ("rl_config.actor_resource.num_npus=1",)
PILOT = 4  # seeds
COMPOSING = threading.Lock()  # Hydra has one config at a time
COMPARED = (  # columns of the table of comparisons
    "of",
    "against",
    "in",
    "seeds",
    "difference",
    "p",
    "seen with a power of 80 %",
    "verdict",
)


def right_answers(rows: list[dict], step: int) -> dict:
    """Of the evaluation after `step`: how many of how many answers were right, question by
    question.
    """
    scores = [row["scores"] for row in rows if row["step"] == step]
    return {
        "samples": len(scores[0]),
        "right": "".join(DIGITS[round(sum(each))] for each in scores),
    }


def run_cell(
    study: str, cell: str, seed: int, core: int, root: Path, more: list[str]
) -> tuple[dict, list[str]]:
    """One run with its evaluations, or what there is of it: what the study keeps, and the
    questions. Killed, it takes the run along. SystemExit for a run that is not what its config
    says.
    """
    of = STUDIES[study]
    weights = of.weights()
    folder, name = of.place(cell, root)
    on_core = ["setpriv", "--pdeathsig", "KILL", "taskset", "--cpu-list", str(core), sys.executable]
    overrides = [
        *ONE_RANK,
        f"megatron_training.tokenizer_name_or_path={of.model}",
        *of.overrides,
        f"seed={seed}",
        f"run.root={folder}",
        f"run.name={name}",
        *of.cells[cell],
        *more,
    ]

    def run_on_core(*command: str) -> None:
        subprocess.run([*on_core, *command], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)

    run_on_core("cli/train_grpo.py", "--multirun", "--config-name", of.config, *overrides)
    with COMPOSING:
        directory = finished(compose(of.config, overrides), of.config)
    run = read_run(directory.path)
    if run.faults:
        raise SystemExit(f"{run.path}: {'; '.join(run.faults)}")
    last = max(run.scores)
    answers = read_jsonl(directory.eval_answers_file)
    evaluated = {"accuracy": right_answers(answers, last)}
    for evaluation, arguments in of.evaluations.items():
        file = run.path / "evaluations" / evaluation / "answers.jsonl"
        if not file.parent.exists():
            of_run = ("--run", str(run.path), "--name", evaluation)
            run_on_core("tools/evaluate.py", *of_run, *arguments)
        evaluated[evaluation] = right_answers(read_jsonl(file), last)
    rows = read_jsonl(directory.metrics_file)
    entropy = [round(row["entropy/mean"], 4) for row in rows if "entropy/mean" in row]
    signal = np.mean([row["reward/groups_with_signal"] for row in rows])
    data = hashlib.sha256(json.dumps(run.data, sort_keys=True).encode()).hexdigest()[:12]
    found = {
        "model": weights,
        "data": data,
        "code": run.code["mindspeed_qerl"][:7],
        "start": round(float(np.mean(list(run.scores[0].values()))), 4),
        "entropy": [entropy[0], entropy[-1]],
        "signal": round(float(signal), 4),
        **evaluated,
    }
    return found, [row["question"] for row in answers if row["step"] == 0]


class OneRunACore:
    """Runs of a study side by side, none of which begins when one as long as the longest so far
    would end after `hours`.
    """

    def __init__(self, hours: float, cores: list[int]):
        self.end = time.monotonic() + hours * 3600
        self.longest = 0.0
        self.count = len(cores)
        self.free: SimpleQueue[int] = SimpleQueue()
        for core in cores:
            self.free.put(core)

    def run(
        self, study: str, cell: str, seed: int, **rest
    ) -> tuple[tuple[dict, list[str]] | None, float]:
        """`run_cell`'s result and its seconds; None if there is no time for it."""
        core = self.free.get()
        begun = time.monotonic()
        try:
            if begun + self.longest > self.end:
                return None, 0.0
            found = run_cell(study, cell, seed, core=core, **rest)
            seconds = time.monotonic() - begun
            self.longest = max(self.longest, seconds)
            return found, seconds
        finally:
            self.free.put(core)

    def all(self, name: str, data: Data, wanted: list[tuple[int, str]], **rest) -> bool:
        """Whether there was time for all the runs `wanted`, (seed, cell)."""
        whole = True
        with ThreadPoolExecutor(self.count) as pool:
            jobs = {
                pool.submit(self.run, name, cell, seed, **rest): (seed, cell)
                for seed, cell in wanted
            }
            try:
                for job in as_completed(jobs):
                    seed, cell = jobs[job]
                    found, seconds = job.result()
                    if found is None:
                        whole = False
                        continue
                    data.add(cell, seed, *found)
                    accuracy = data.values(cell, "accuracy", [str(seed)]).mean()
                    print(
                        f"seed {seed}, {cell}: accuracy {accuracy:.3f}, {seconds:.0f} s", flush=True
                    )
            except BaseException:  # Ctrl-C, too: no further run begins
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        return whole


def carry_out(name: str, data: Data, runs: OneRunACore, most: int, **rest) -> None:
    """Runs what is missing, until every comparison is decided, or the time is over before another
    run would be.
    """
    count = min(PILOT, most)
    while True:
        # again, where a seed that was half there had other data
        while wanted := data.missing(count):
            if not runs.all(name, data, wanted, **rest):
                print(f"stopped before {count} seeds: the hours are over", flush=True)
                return
        if data.most is None and count == PILOT:
            data.most = plan(data, most)
            data.save()
        if data.most is None or count >= data.most:
            return
        count = next(look for look in looks(data.most) if look > count)


def plan(data: Data, most: int) -> int:
    """How many seeds: what the effect takes in the comparison that varies most, by the pilot's
    variance, or `most`.
    """
    alpha = SIGNIFICANCE / len(data.study.comparisons)
    planned = 0
    for cell, baseline, measure in data.study.comparisons:
        pilot = estimate(data.differences(cell, baseline, measure))
        count = seeds_planned(pilot, alpha, data.study.effect)
        words = f"{count} seeds" if count else "more questions"
        print(
            f"to see {data.study.points} in {measure} of {cell} against {baseline} with a power "
            f"of 80 %: {words}",
            flush=True,
        )
        planned = max(planned, count or most)
    return min(most, planned)


def tables(data: Data) -> str:
    """Of cells and of comparisons, as Markdown."""
    measures = dict.fromkeys(measure for *_, measure in data.study.comparisons)
    rows = []
    for cell, runs in data.cells.items():
        seeds = sorted(runs, key=int)
        if not seeds:
            continue
        first, last = np.mean([runs[seed]["entropy"] for seed in seeds], axis=0)
        found = [estimate(data.values(cell, measure, seeds)) for measure in measures]
        entropy = f"{first:.3f} → {last:.3f}"
        rows.append([cell, str(len(seeds)), *map(interval, found), entropy])
    text = markdown_table(["cell", "seeds", *measures, "entropy, first and last step"], rows)
    rows = []
    alpha = SIGNIFICANCE / len(data.study.comparisons)
    limit_at = {}
    if data.most:
        counts = looks(data.most)
        limit_at = dict(zip(counts, limits(counts, alpha)))
    for (cell, baseline, measure), said in data.words().items():
        values = data.differences(cell, baseline, measure)
        if len(values) < 2:
            continue
        word, count = said or ("not finished", len(values))
        found = estimate(values[:count])
        seen = f"{effect_shown(found, count, limit_at[count]):.3f}" if said else ""
        word = f"smaller than {data.study.points}" if word == "smaller" else word
        difference = interval(found, "+")
        numbers = [str(count), difference, f"{found.p:.2g}", seen]
        rows.append([cell, baseline, measure, *numbers, f"**{word}**"])
    if rows:
        text += ["", *markdown_table(COMPARED, rows)]
    if data.most:
        judged = ", ".join(f"{count} ({limit:.1g})" for count, limit in limit_at.items())
        text += ["", f"Tested at these numbers of seeds (significance level): {judged}."]
    return "\n".join(text)


def draw(data: Data, image: Path) -> None:
    """Every comparison's difference with its interval."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    study = data.study
    rows = len(study.comparisons)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(8, 1 + 0.45 * rows), layout="constrained")
        axis = figure.subplots()
        axis.axvspan(-study.effect, study.effect, color="#eeeeee")
        axis.axvline(0, color="black", linewidth=1)
        for at, (each, said) in enumerate(data.words().items()):
            word, count = said or ("", None)
            values = data.differences(*each)[:count]
            found = estimate(values)
            color = RED if word in ("better", "worse") else BLUE
            axis.errorbar(
                found.mean,
                at,
                xerr=[[found.mean - found.low], [found.high - found.mean]],
                fmt="o",
                capsize=4,
                color=color,
            )
            axis.plot(values.mean(1), [at + 0.2] * len(values), ".", color=color, alpha=0.4)
        axis.set(
            title=study.question,
            ylim=(rows - 0.6, -0.4),
            xlabel=f"difference (small dots: seeds; bars: 95 %; grey: less than {study.points})",
        )
        labels = [f"{cell} - {other}\n{measure}" for cell, other, measure in study.comparisons]
        axis.set_yticks(range(rows), labels, fontsize=8)
        figure.savefig(image, dpi=130)
    print(image)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--study", choices=STUDIES, required=True)
    parser.add_argument(
        "--hours", type=float, default=8.0, help="no run begins that would end later (default: 8)"
    )
    parser.add_argument(
        "--seeds", type=int, default=40, help="at most, once the pilot is done (default: 40)"
    )
    parser.add_argument(
        "--cores",
        type=int,
        nargs="+",
        default=sorted(os.sched_getaffinity(0)),
        metavar="CORE",
        help="those to run on (default: all)",
    )
    parser.add_argument("--tables", action="store_true", help="run nothing")
    parser.add_argument(
        "--root", type=Path, default=ROOT / "runs" / "studies", help="where the runs are kept"
    )
    parser.add_argument(
        "--data", type=Path, default=ROOT / "docs" / "studies", help="where what was found is kept"
    )
    parser.add_argument("--images", type=Path, default=ROOT / "docs" / "images")
    arguments, more = parser.parse_known_args()
    kept_with_others = parser.get_default("data") == arguments.data
    kept_with_others |= parser.get_default("root") == arguments.root
    if more and kept_with_others:
        parser.error(f"{' '.join(more)} makes another study: give --data and --root of its own")
    data = Data(arguments.study, arguments.data)
    if not arguments.tables:
        runs = OneRunACore(arguments.hours, arguments.cores)
        kept = {"root": arguments.root, "more": more}
        carry_out(arguments.study, data, runs, arguments.seeds, **kept)
    print(tables(data))
    if all(len(data.differences(*each)) > 1 for each in data.study.comparisons):
        draw(data, arguments.images / f"study_{arguments.study}.png")


if __name__ == "__main__":
    main()
