"""The studies of study.py: what each of them asks, and what it has found so far.

A study (STUDIES) is a table of cells, each some overrides of a config, and of comparisons between
two cells. What was found is kept in docs/studies/NAME.json: of each run and question how many of
its answers were right.
"""

import json
import re
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from sequential import grouped, judge, pass_at  # beside this file

from mindspeed_qerl.common.files import write_whole
from mindspeed_qerl.compare.comparison import SIGNIFICANCE
from mindspeed_qerl.families.fingerprint import weights_digest

ROOT = Path(__file__).resolve().parents[1]


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


# As far from the policy at temperature 1 as the noise is, whose k3 was 0.030 ("step") and 0.028
# ("answer") in the mean over runs with seed 1: KL(p_T || p_1) per token of answers at T is 0.029,
# 0.030 and 0.025, by the model of a run at T = 1.4 with seed 101 after 0, 40 and 60 steps.
AS_FAR_AS_NOISE = "generate_config.sampling_config.temperature=1.36"


def against(cell: str, *baselines: str) -> tuple[tuple[str, str, str], ...]:
    """Comparisons of `cell` with each of `baselines`, in each measure of a study of noise."""
    return tuple((cell, baseline, measure) for baseline in baselines for measure in EXPLORED)


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
        (*against("qerl", "off"), *against("target", "off")),
        {"sixteen": ("--samples", "16")},
    ),
    # The hypothesis, written before it started: at equal k3 a draw for each answer has more groups
    # with signal than one for each step, and in pass@16 a gain of 2 points, or an effect smaller
    # than 2 points.
    "draws": Study(
        "Is noise better that a group can tell apart?",
        {
            "off": MEASURED_NOISE["off"],
            "step": MEASURED_NOISE["target"],
            "answer": (*MEASURED_NOISE["target"], "aqn.draws=answer"),
            "temperature": (*MEASURED_NOISE["off"], AS_FAR_AS_NOISE),
        },
        against("answer", "step", "off", "temperature"),
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
        (*against("qerl", "off"), *against("target", "off")),
        {"sixteen": ("--samples", "16")},
        **SMOLLM2,
    ),
}
DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"  # right answers of one question


def begun_with(run: dict) -> tuple[str | None, str | None]:
    """Returns the model and the data that a run began with."""
    return run.get("model"), run.get("data")


class Data:
    """What a study found so far: docs/studies/NAME.json."""

    def __init__(self, name: str, folder: Path):
        self.study = STUDIES[name]
        self.file = folder / f"{name}.json"
        kept = json.loads(self.file.read_text()) if self.file.exists() else {}
        runs = kept.get("cells", {})
        if unknown := runs.keys() - self.study.cells.keys():
            raise SystemExit(
                f"{self.file} has cells that the study {name} has not: "
                f"{', '.join(sorted(unknown))}. Rename them there, or move it away"
            )
        self.most: int | None = kept.get("most")  # seeds; None: the pilot is not done
        self.groups: list[int] | None = kept.get("groups")  # of each question
        # by cell and seed
        self.cells: dict[str, dict[str, dict]] = {
            cell: runs.get(cell, {}) for cell in self.study.cells
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
        groups = []
        for question in questions:
            groups.append(numbers.setdefault(self.study.group(question), len(numbers)))
        if self.groups not in (None, groups):
            raise SystemExit(
                f"seed {seed} of {cell} was asked other questions than {self.file} has: give "
                "--data and --root of its own"
            )
        self.groups = groups
        self.cells[cell][str(seed)] = run
        self.save()

    def values(self, cell: str, measure: str, seeds: list[str]) -> np.ndarray:
        """[seeds, groups of questions]; of groups with signal, which are training's, [seeds, 1]."""
        if measure == "groups with signal":
            return np.array([[self.cells[cell][seed]["signal"]] for seed in seeds])
        evaluation = measure
        k = 1
        if measure.startswith("pass@"):
            evaluation = "sixteen"
            k = int(measure.removeprefix("pass@"))
        chances = []
        for seed in seeds:
            run = self.cells[cell][seed][evaluation]
            right = np.array([DIGITS.index(digit) for digit in run["right"]])
            chances.append(pass_at(k, right, run["samples"]))
        return grouped(np.array(chances), self.groups)

    def differences(self, cell: str, baseline: str, measure: str) -> np.ndarray:
        """[seeds, groups of questions], of the seeds that both have with the same weights and data,
        in order.
        """
        runs = self.cells[cell]
        others = self.cells[baseline]
        seeds = []
        for seed in sorted(runs.keys() & others.keys(), key=int):
            if begun_with(runs[seed]) == begun_with(others[seed]):
                seeds.append(seed)
        if not seeds:
            return np.zeros((0, 1))
        return self.values(cell, measure, seeds) - self.values(baseline, measure, seeds)

    def missing(self, count: int) -> list[tuple[int, str]]:
        """The runs, (seed, cell), that comparisons without a word need for `count` seeds. What a
        seed is compared in begins with one model and data: a seed that was begun with others, on
        another machine, is run anew.
        """
        undecided = set()
        for (cell, baseline, _), word in self.words().items():
            if word is None:
                undecided |= {cell, baseline}
        cells = [cell for cell in self.study.cells if cell in undecided]
        model = self.study.weights()
        runs = []
        for seed in range(1, count + 1):
            found = [cell for cell in cells if str(seed) in self.cells[cell]]
            begun = {begun_with(self.cells[cell][str(seed)]) for cell in found}
            is_whole = len(found) == len(cells)
            is_kept = len(begun) == 1 and (is_whole or begun.pop()[0] == model)
            runs += [(seed, cell) for cell in cells if not is_kept or cell not in found]
        return runs

    def words(self) -> dict[tuple[str, str, str], tuple[str, int] | None]:
        """What is said of each comparison, and after how many seeds; None: go on."""
        words = dict.fromkeys(self.study.comparisons)
        alpha = SIGNIFICANCE / len(words)  # Bonferroni
        for each in words if self.most else ():
            words[each] = judge(self.differences(*each), self.most, alpha, self.study.effect)
        return words
