"""Studies of many runs: planned from a pilot, stopped by a stated rule, resumed where they were.

    python benchmarks/study.py --study arithmetic --hours 8   # runs what is missing
    python benchmarks/study.py --study arithmetic --tables    # tables and picture of docs/studies/

The studies (STUDIES) are tables of cells, each some overrides of a config, and of comparisons
between two cells. Seed after seed, each cell gets a run of cli/train_grpo.py, in runs/studies,
where studies with a cell in common share it. As many run side by side as there are cores, each on
one core, with one rank: on two cores 1.4 times as many an hour as one after the other with two
ranks each. After PILOT seeds the spread of the differences says how many seeds the effect that is
asked about would take; so many, or --seeds at most, are run, and at fixed numbers of seeds every
comparison is judged (sequential.py), with 5 % shared by all comparisons of the
study. A comparison that is decided needs no more runs. Differences are paired by seed and question,
of runs with the same weights and data; questions on the same numbers vary together, as one group
(sequential.py).

What was found is kept in docs/studies/NAME.json: of each run and question how many of its answers
were right. Tables and pictures are made of that alone. Further overrides make another study: it is
kept apart, by --data and --root.
"""

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any

if __name__ == "__main__":  # a file of a checkout
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from mindspeed_qerl.common.entry import use_checkout

    use_checkout()

import numpy as np
from sequential import grouped, judge, limits, looks, pass_at, seeds_planned  # beside this file

from mindspeed_qerl.common.files import write_whole
from mindspeed_qerl.compare.comparison import SIGNIFICANCE
from mindspeed_qerl.compare.page import interval
from mindspeed_qerl.compare.run import read_run
from mindspeed_qerl.compare.statistics import effect_shown, estimate
from mindspeed_qerl.families.fingerprint import weights_digest
from mindspeed_qerl.recipe.compose import compose
from mindspeed_qerl.runs.metrics import read_jsonl
from mindspeed_qerl.runs.plots import BLUE, RED, STYLE
from mindspeed_qerl.runs.report import markdown_table
from mindspeed_qerl.sweep import finished

ROOT = Path(__file__).resolve().parents[1]
ONE_RANK = ("rl_config.actor_resource.num_npus=1",)
PILOT = 4  # seeds
COMPOSING = threading.Lock()  # Hydra has one config at a time


def first_pair(question: str) -> tuple[int, ...]:
    """Of a word problem the pair of numbers that was held out, or not.

    >>> first_pair("Ella has 12 marbles. Ella sells 9. Lily gives Ella 11. How many marbles does Ella have now?")
    (9, 12)
    """
    return tuple(sorted(int(number) for number in re.findall(r"[0-9]+", question)[:2]))


@dataclass(frozen=True)
class Study:
    """Cells by name with their overrides; comparisons (cell, baseline cell, measure); by name of a
    measure other than "accuracy", the run's own after its last step, and "groups with signal", of its
    training, arguments of tools/evaluate.py; the effect it asks about, in accuracy; what questions that depend on each
    other have in common; what all cells are runs of.
    """

    question: str
    cells: dict[str, tuple[str, ...]]
    comparisons: tuple[tuple[str, str, str], ...]
    evaluations: dict[str, tuple[str, ...]] = field(default_factory=dict)
    effect: float = 0.02
    group: Callable[[str], Hashable] = first_pair
    config: str = "grpo_steps_moe_cpu"
    model: str = "models/steps_qwen3_moe"
    overrides: tuple[str, ...] = ()

    @property
    def points(self) -> str:
        """The effect, in words."""
        return f"{100 * self.effect:.0f} point" + "s" * (self.effect != 0.01)

    def weights(self) -> str:
        """Which model its runs begin with, here: the same recipe gives other floats on another
        processor.
        """
        return weights_digest(ROOT / self.model)[:12]

    def place(self, cell: str, root: Path) -> tuple[Path, str]:
        """`run.root` and `run.name` of a cell's runs, the same for studies that have it in common."""
        name = "_".join(override.rpartition("=")[2] for override in self.cells[cell])
        return root / f"{self.config}_{self.weights()}", name


def crossed(values: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """Cells "VALUE, AQN off" and "VALUE, AQN on"."""
    return {
        f"{value}, AQN {'on' if aqn == 'qerl' else 'off'}": (*overrides, f"aqn={aqn}")
        for value, overrides in values.items()
        for aqn in ("off", "qerl")
    }


# What every noise study of the real model shares.
SMOLLM2: dict[str, Any] = {
    "group": str,  # every question stands for itself
    "config": "grpo_smollm2_135m_gsm8k_cpu",
    "model": "models/smollm2_135m_gsm8k",  # docs/evaluation.md
    "overrides": (
        "task.train_file=data/gsm8k_two_steps/train_chat.parquet",
        "task.test_file=data/gsm8k_two_steps/test_chat.parquet",
        "megatron_training.train_iters=20",
        "megatron_training.save_interval=20",
        "generate_config.sampling_config.max_tokens=96",
        "rl_config.verifier_function=[gsm8k]",
        "rl_config.verifier_weight=[1.0]",
        # In most groups no answer is right: of up to 16, 4 that have a signal are trained.
        "megatron_training.global_batch_size=8",
        "rl_config.filter_groups_enable=true",
        "rl_config.filter_groups_train_batch_size=4",
        "rl_config.filter_groups_max_batches=2",
        "eval.every=20",
        "eval.n_problems=326",
        "eval.samples_per_problem=4",
        "eval.temperature=1.0",
    ),
}
EXPLORED = ("pass@1", "pass@16", "groups with signal")
MEASURED_NOISE = {
    "off": ("aqn=off",),
    "qerl": ("aqn=qerl",),
    # Of k3 targets 0.001, 0.01, 0.03 and 0.1, that with the most groups with signal in one run of
    # the deep model with seed 101. All ended at a tenth.
    "target": ("aqn=target", "aqn.target_start=0.1", "aqn.target_end=0.01"),
}


def against_off(*cells: str) -> tuple[tuple[str, str, str], ...]:
    """Comparisons of `cells` with "off", in each measure of a study of noise."""
    return tuple((cell, "off", measure) for cell in cells for measure in EXPLORED)


STUDIES = {
    "arithmetic": Study(
        "Does quantization noise or AQN help a policy to learn?",
        crossed(
            {
                "fp32": (),
                "int8": ("rollout_quantization=int8_w8a8",),
                "nvfp4": ("rollout_quantization=nvfp4",),
            }
        ),
        (
            *(
                (f"{name}, AQN on", f"{name}, AQN off", "accuracy")
                for name in ("fp32", "int8", "nvfp4")
            ),
            ("int8, AQN off", "fp32, AQN off", "accuracy"),
            ("nvfp4, AQN off", "fp32, AQN off", "accuracy"),
        ),
    ),
    "hardware": Study(
        "Does AQN help a policy that meets other hardware?",
        crossed({"clean": (), "foreign": ("hardware_error.rollout=gaussian",)}),
        tuple(
            (f"{name}, AQN on", f"{name}, AQN off", measure)
            for name in ("clean", "foreign")
            for measure in ("accuracy", "foreign")
        ),
        {"foreign": ("--samples", "4", "--hardware-error", "gaussian")},
    ),
    "exploration": Study(
        "Does noise make a policy explore?",
        {
            "none": ("aqn=off",),
            "AQN": ("aqn=qerl",),
            "strong AQN": ("aqn=strong",),
            "nvfp4": ("rollout_quantization=nvfp4", "aqn=off"),
        },
        tuple(
            (cell, "none", f"pass@{k}") for cell in ("AQN", "strong AQN", "nvfp4") for k in (1, 16)
        ),
        {"sixteen": ("--samples", "16")},
    ),
    "target": Study(
        "Does noise of a measured strength help?",
        MEASURED_NOISE,
        against_off("qerl", "target"),
        {"sixteen": ("--samples", "16")},
    ),
    "real": Study(
        "Does AQN help a real model, SmolLM2-135M after a warm-up?",
        {"AQN off": ("aqn=off",), "AQN on": ("aqn=qerl",)},
        (("AQN on", "AQN off", "accuracy"),),
        effect=0.01,
        **SMOLLM2,
    ),
    "real_target": Study(
        "Does noise of a measured strength help a real model?",
        MEASURED_NOISE,
        against_off("qerl", "target"),
        {"sixteen": ("--samples", "16")},
        **SMOLLM2,
    ),
}
DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"  # right answers of one question


class Data:
    """What a study found so far: docs/studies/NAME.json."""

    def __init__(self, name: str, folder: Path):
        self.study, self.file = STUDIES[name], folder / f"{name}.json"
        kept = json.loads(self.file.read_text()) if self.file.exists() else {}
        if unknown := kept.get("cells", {}).keys() - self.study.cells.keys():
            raise SystemExit(
                f"{self.file} has cells that the study {name} has not: "
                f"{', '.join(sorted(unknown))}. Rename them there, or move it away"
            )
        self.most: int | None = kept.get("most")  # seeds; None: the pilot is not done
        self.groups: list[int] | None = kept.get("groups")  # of each question
        self.cells: dict[str, dict[str, dict]] = {
            cell: kept.get("cells", {}).get(cell, {}) for cell in self.study.cells
        }

    def save(self) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        lines = ",\n".join(
            f"  {json.dumps(cell)}: {{\n"
            + ",\n".join(f"    {json.dumps(seed)}: {json.dumps(run)}" for seed, run in runs.items())
            + "}"
            for cell, runs in self.cells.items()
        )
        write_whole(
            self.file,
            f'{{"most": {json.dumps(self.most)}, "groups": {json.dumps(self.groups)}, '
            f'"cells": {{\n{lines}}}}}\n',
        )

    def add(self, cell: str, seed: int, run: dict, questions: Iterable[str]) -> None:
        """What `run_cell` found. SystemExit if it was asked other questions than the runs before."""
        numbers: dict[Hashable, int] = {}
        groups = [
            numbers.setdefault(self.study.group(question), len(numbers)) for question in questions
        ]
        if self.groups not in (None, groups):
            raise SystemExit(
                f"seed {seed} of {cell} was asked other questions than {self.file} has: give "
                "--data and --root of its own"
            )
        self.groups, self.cells[cell][str(seed)] = groups, run
        self.save()

    def values(self, cell: str, measure: str, seeds: list[str]) -> np.ndarray:
        """[seeds, groups of questions]; of groups with signal, which are training's, [seeds, 1]."""
        if measure == "groups with signal":
            return np.array([[self.cells[cell][seed]["signal"]] for seed in seeds])
        evaluation, k = (
            ("sixteen", int(measure[5:])) if measure.startswith("pass@") else (measure, 1)
        )
        runs = [self.cells[cell][seed][evaluation] for seed in seeds]
        chances = [
            pass_at(k, np.array([DIGITS.index(digit) for digit in run["right"]]), run["samples"])
            for run in runs
        ]
        return grouped(np.array(chances), self.groups)

    def differences(self, cell: str, baseline: str, measure: str) -> np.ndarray:
        """[seeds, groups of questions], of the seeds that both have with the same weights and data,
        in order.
        """
        runs, others = self.cells[cell], self.cells[baseline]
        seeds = sorted(
            (
                seed
                for seed in runs.keys() & others.keys()
                if all(runs[seed].get(of) == others[seed].get(of) for of in ("model", "data"))
            ),
            key=int,
        )
        if not seeds:
            return np.zeros((0, 1))
        return self.values(cell, measure, seeds) - self.values(baseline, measure, seeds)

    def missing(self, count: int) -> list[tuple[int, str]]:
        """The runs, (seed, cell), that comparisons without a word need for `count` seeds. What a
        seed is compared in begins with one model and data: a seed that was begun with others, on
        another machine, is run anew.
        """
        undecided = {
            cell for each, word in self.words().items() if word is None for cell in each[:2]
        }
        cells, model = (
            [cell for cell in self.study.cells if cell in undecided],
            self.study.weights(),
        )
        runs = []
        for seed in range(1, count + 1):
            found = {
                cell: self.cells[cell][str(seed)] for cell in cells if str(seed) in self.cells[cell]
            }
            begun = {(run.get("model"), run.get("data")) for run in found.values()}
            models, whole = {run.get("model") for run in found.values()}, len(found) == len(cells)
            kept = found if len(begun) == 1 and (whole or models == {model}) else {}
            runs += [(seed, cell) for cell in cells if cell not in kept]
        return runs

    def words(self) -> dict[tuple[str, str, str], tuple[str, int] | None]:
        """What is said of each comparison, and after how many seeds; None: go on."""
        alpha = SIGNIFICANCE / len(self.study.comparisons)  # Bonferroni
        return {
            each: judge(self.differences(*each), self.most, alpha, self.study.effect)
            if self.most
            else None
            for each in self.study.comparisons
        }


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
    of, weights = STUDIES[study], STUDIES[study].weights()
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
    subprocess.run(
        [*on_core, "cli/train_grpo.py", "--multirun", "--config-name", of.config, *overrides],
        cwd=ROOT,
        check=True,
        stdout=subprocess.DEVNULL,
    )
    with COMPOSING:
        directory = finished(compose(of.config, overrides), of.config)
    run = read_run(directory.path)
    if run.faults:
        raise SystemExit(f"{run.path}: {'; '.join(run.faults)}")
    answers, evaluated = read_jsonl(directory.eval_answers_file), {}
    for evaluation, arguments in of.evaluations.items():
        file = run.path / "evaluations" / evaluation / "answers.jsonl"
        if not file.parent.exists():
            subprocess.run(
                [
                    *on_core,
                    "tools/evaluate.py",
                    "--run",
                    run.path,
                    "--name",
                    evaluation,
                    *arguments,
                ],
                cwd=ROOT,
                check=True,
                stdout=subprocess.DEVNULL,
            )
        evaluated[evaluation] = right_answers(read_jsonl(file), max(run.scores))
    rows = read_jsonl(directory.metrics_file)
    entropy = [round(row["entropy/mean"], 4) for row in rows if "entropy/mean" in row]
    signal = np.mean([row["reward/groups_with_signal"] for row in rows])
    data = hashlib.sha256(json.dumps(run.data, sort_keys=True).encode()).hexdigest()[:12]
    found = {
        "model": weights,
        "data": data,
        "code": run.code["mindspeed_qerl"][:7],
        "start": round(float(np.mean(list(run.scores[0].values()))), 4),
        "accuracy": right_answers(answers, max(run.scores)),
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
        self.end, self.longest, self.count = time.monotonic() + hours * 3600, 0.0, len(cores)
        self.free: SimpleQueue[int] = SimpleQueue()
        for core in cores:
            self.free.put(core)

    def run(
        self, study: str, cell: str, seed: int, **rest
    ) -> tuple[tuple[dict, list[str]] | None, float]:
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
            jobs = {
                pool.submit(self.run, name, cell, seed, **rest): (seed, cell)
                for seed, cell in wanted
            }
            try:
                for job in as_completed(jobs):
                    (seed, cell), (found, seconds) = jobs[job], job.result()
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
        while wanted := data.missing(
            count
        ):  # again, where a seed that was half there had other data
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
    needed = [
        seeds_planned(estimate(data.differences(*each)), alpha, data.study.effect)
        for each in data.study.comparisons
    ]
    for (cell, baseline, measure), count in zip(data.study.comparisons, needed):
        words = f"{count} seeds" if count else "more questions"
        print(
            f"to see {data.study.points} in {measure} of {cell} against {baseline} with a power "
            f"of 80 %: {words}",
            flush=True,
        )
    return min(most, max(count or most for count in needed))


def tables(data: Data) -> str:
    """Of cells and of comparisons, as Markdown."""
    measures = dict.fromkeys(measure for *_, measure in data.study.comparisons)
    rows = []
    for cell, runs in data.cells.items():
        seeds = sorted(runs, key=int)
        if seeds:
            first, last = np.mean([runs[seed]["entropy"] for seed in seeds], axis=0)
            rows.append(
                [
                    cell,
                    str(len(seeds)),
                    *(
                        interval(estimate(data.values(cell, measure, seeds)))
                        for measure in measures
                    ),
                    f"{first:.3f} → {last:.3f}",
                ]
            )
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
        word = f"smaller than {data.study.points}" if word == "smaller" else word
        rows.append(
            [
                cell,
                baseline,
                measure,
                str(count),
                interval(found, "+"),
                f"{found.p:.2g}",
                seen,
                f"**{word}**",
            ]
        )
    if rows:
        text += [
            "",
            *markdown_table(
                [
                    "of",
                    "against",
                    "in",
                    "seeds",
                    "difference",
                    "p",
                    "seen with a power of 80 %",
                    "verdict",
                ],
                rows,
            ),
        ]
    if data.most:
        judged = ", ".join(f"{count} ({limit:.1g})" for count, limit in limit_at.items())
        text += [
            "",
            f"Tested at these numbers of seeds (significance level): {judged}.",
        ]
    return "\n".join(text)


def draw(data: Data, image: Path) -> None:
    """Every comparison's difference with its interval."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(8, 1 + 0.45 * len(data.study.comparisons)), layout="constrained")
        axis = figure.subplots()
        axis.axvspan(-data.study.effect, data.study.effect, color="#eeeeee")
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
            title=data.study.question,
            ylim=(len(data.study.comparisons) - 0.6, -0.4),
            xlabel="difference (small dots: seeds; bars: 95 %; grey: less than "
            f"{data.study.points})",
        )
        axis.set_yticks(
            range(len(data.study.comparisons)),
            [
                f"{cell} - {baseline}\n{measure}"
                for cell, baseline, measure in data.study.comparisons
            ],
            fontsize=8,
        )
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
    if more and (
        arguments.data == parser.get_default("data") or arguments.root == parser.get_default("root")
    ):
        parser.error(f"{' '.join(more)} makes another study: give --data and --root of its own")
    data = Data(arguments.study, arguments.data)
    if not arguments.tables:
        carry_out(
            arguments.study,
            data,
            OneRunACore(arguments.hours, arguments.cores),
            arguments.seeds,
            root=arguments.root,
            more=more,
        )
    print(tables(data))
    if all(len(data.differences(*each)) > 1 for each in data.study.comparisons):
        draw(data, arguments.images / f"study_{arguments.study}.png")


if __name__ == "__main__":
    main()
