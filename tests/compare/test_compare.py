"""compare_runs on made-up runs: what is grouped, what is left out, and how often it sees what is
there and what is not.
"""

import io
import json
import math
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from rich.markdown import Markdown

from mindspeed_qerl.aqn.schedule import NoiseSchedule
from mindspeed_qerl.common.errors import ConfigError
from mindspeed_qerl.compare.comparison import compare
from mindspeed_qerl.compare.report import sentence, to_markdown, write_comparison
from mindspeed_qerl.compare.run import (
    ComparedRun,
    check_noise,
    comparable_config,
    find_runs,
    read_run,
)
from mindspeed_qerl.compare.statistics import seeds_needed
from mindspeed_qerl.runs.directory import RunDirectory
from mindspeed_qerl.runs.metrics import MetricsWriter

from .test_statistics import differences

ROOT = Path(__file__).parents[2]
STEPS = 20
AQN = {
    "enabled": True,
    "schedule": "exponential",
    "sigma_start": 0.05,
    "sigma_end": 0.0005,
    "num_stages": 10,
    "targets": "auto",
    "exclude": [],
    "restart_every": None,
    "multipliers": None,
    "multipliers_file": None,
    "seed": None,
}


def config_of(aqn=False, seed=1, **changes):
    return {
        "engine": "local",
        "megatron_training": {"seed": seed, "train_iters": STEPS, "save_interval": 5},
        "actor_config": {"lr": 2e-4},
        "aqn": {**AQN, "enabled": aqn},
        "run": {"name": f"anything{seed}"},
        **changes,
    }


def noise_rows(measured=1.0, **fields):
    schedule = NoiseSchedule(total_steps=STEPS)
    return [
        {
            "aqn/sigma": sigma,
            "aqn/layers": 2,
            "aqn/expected_std": sigma,
            "aqn/measured_std": measured * sigma,
            **fields,
        }
        for sigma in schedule.sigmas()
    ]


@pytest.fixture
def make_run(tmp_path):
    """A function that writes a run: `accuracy` of 60 questions before, a little more after."""

    def make(
        aqn=False,
        seed=1,
        accuracy=0.5,
        noise=None,
        finished=True,
        last=STEPS,
        data=b"data",
        questions=60,
        **changes,
    ):
        file = tmp_path / f"{hash(data)}.txt"
        file.write_bytes(data)
        run = RunDirectory.create(
            tmp_path / "runs",
            "test",
            config=config_of(aqn, seed, **changes),
            command=["train"],
            seed=seed,
            data_files={"train": file},
        )
        generator = np.random.default_rng([seed, aqn])
        with MetricsWriter(run, tensorboard=False) as writer:
            for step in (0, last):
                right = generator.random((questions, 4)) < accuracy + 0.2 * (step > 0)
                writer.log_eval(
                    step,
                    {"accuracy": right.mean()},
                    [
                        {"question": f"q{i}", "responses": ["?"] * 4, "scores": scores}
                        for i, scores in enumerate(right.astype(float).tolist())
                    ],
                )
            for step, row in enumerate(
                noise if noise is not None else noise_rows() if aqn else [{}] * STEPS, 1
            ):
                writer.log(step, {"reward/mean": accuracy + 0.2 * step / STEPS, **row})
        if finished:
            run.finish()
        return run.path

    return make


def read_all(*paths):
    return [read_run(path) for path in paths]


def test_runs_are_grouped_by_what_they_differ_in_but_the_seed(make_run):
    paths = [make_run(aqn, seed) for seed in (1, 2, 3) for aqn in (True, False)]
    comparison = compare(read_all(*paths))
    assert [(group.name, group.seeds) for group in comparison.groups] == [
        ("aqn off", [1, 2, 3]),
        ("aqn on", [1, 2, 3]),
    ]
    assert comparison.differing == ["aqn.enabled"] and comparison.left_out == []
    assert (comparison.steps, len(comparison.questions)) == ([0, STEPS], 60)


def test_groups_are_told_apart_by_every_key_that_matters(make_run):
    paths = [make_run(True, 1), make_run(True, 1, actor_config={"lr": 1e-4})]
    assert [group.name for group in compare(read_all(*paths)).groups] == [
        "actor_config.lr=0.0002",
        "actor_config.lr=0.0001",
    ]
    off = comparable_config(config_of(False))
    assert (
        off["aqn.enabled"] is False and "aqn.sigma_start" not in off
    )  # switched off, so no difference
    assert not any(key.startswith(("run", "megatron_training.s")) for key in off)
    assert comparable_config(config_of(True, 1)) == comparable_config(config_of(True, 2))


def test_accuracy_is_the_mean_over_seeds_and_questions(make_run):
    paths = [make_run(False, seed) for seed in (1, 2, 3)]
    rows = [
        [json.loads(line) for line in (path / "eval.jsonl").read_text().splitlines()]
        for path in paths
    ]
    comparison = compare(read_all(*paths))
    assert comparison.groups[0].name == "all runs"
    for k, step in enumerate((0, STEPS)):
        assert comparison.accuracy["all runs"][step].mean == pytest.approx(
            np.mean([row[k]["accuracy"] for row in rows])
        )
    assert comparison.verdicts == [] and "nothing to compare it with" in to_markdown(comparison)


@pytest.mark.parametrize(
    "change, reason",
    [
        (dict(finished=False), "it is not finished: running after step 20 of 20"),
        (dict(last=15), "its last step, 20, was not evaluated"),
        (dict(noise=noise_rows()[:3]), "metrics.jsonl has 3 of 20 steps"),
        (dict(noise=[{}] * STEPS), "AQN is on in its config, but no step had noise"),
        (dict(noise=noise_rows(**{"aqn/layers": 0})), "the noise of step 3 reached no norm"),
        (
            dict(noise=noise_rows(measured=0.3)),
            "its noise was not as configured: over the run a measured std of",
        ),
        (
            dict(noise=noise_rows(measured=0.0)),
            "its noise was not as configured: over the run a measured std of 0 ",
        ),
        (dict(data=b"other"), "its data differ: train"),
    ],
)
def test_a_run_that_means_something_else_is_left_out_with_the_reason(make_run, change, reason):
    good = [make_run(True, seed) for seed in (1, 2)]
    bad = make_run(True, 4, **change)
    comparison = compare(read_all(*good, bad))
    assert [run.path for run in comparison.left_out] == [bad]
    assert reason in comparison.left_out[0].faults[0]
    assert all(4 not in group.seeds for group in comparison.groups)
    assert f"{bad}: {comparison.left_out[0].faults[0]}" in to_markdown(comparison)


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"packages": {"torch": "1.0"}}, "its code differs: torch 1.0 where most have 2."),
        ({"upstream": {"MindSpeed": "b" * 40}}, "its code differs: MindSpeed bbbbbbbbbbbb where"),
    ],
)
def test_other_code_is_left_out(make_run, change, reason):
    paths = [make_run(False, seed) for seed in (1, 2, 3)]
    for path in paths:
        file = path / "versions.json"
        versions = {**json.loads(file.read_text()), "upstream": {"MindSpeed": "a" * 40}}
        for section, values in change.items() if path == paths[1] else ():
            versions[section] |= values
        file.write_text(json.dumps(versions))
    (other,) = compare(read_all(*paths)).left_out
    assert other.path == paths[1] and other.faults[0].startswith(reason)


def test_checks_that_were_accepted_are_a_note(make_run):
    """They group nothing apart."""
    runs = [make_run(seed=1), make_run(seed=2, run={"accepted_checks": ["npu-smi", "driver"]})]
    comparison = compare([read_run(path) for path in runs])
    assert len(comparison.groups) == 1
    [noted] = [
        line for line in to_markdown(comparison).splitlines() if line.startswith(f"- {runs[1]}: ")
    ]
    assert noted.endswith("failed checks of its preflight were accepted: npu-smi, driver")


def test_a_repeated_seed_counts_once(make_run):
    first, second = make_run(False, 1), make_run(False, 1)
    comparison = compare(read_all(first, second, make_run(False, 2)))
    assert [run.path for run in comparison.left_out] == [min(first, second)]
    assert comparison.groups[0].seeds == [1, 2]


def numbered(rows):
    return [{"step": step, **row} for step, row in enumerate(rows, 1)]


def test_noise_of_a_run_that_is_off_is_a_fault():
    fault = "AQN is off in its config, but step 3 had noise"
    assert check_noise([{"step": 3, "aqn/measured_std": 0.1}], False) == ([fault], [])
    assert check_noise([{"step": 3}], False) == ([], [])


def test_noise_that_rounding_took_at_the_end_is_a_note():
    rows = numbered(noise_rows())
    for row in rows[-4:]:
        row["aqn/measured_std"] = 0.0
    note = "rounding took more than half of the noise in 4 of 18 noisy steps"
    assert check_noise(rows, True) == ([], [note])


@pytest.mark.parametrize(
    "measured, good", [(0.79, False), (0.81, True), (1.24, True), (1.26, False), (math.nan, False)]
)
def test_how_much_of_the_noise_must_be_measured(measured, good):
    assert (check_noise(numbered(noise_rows(measured)), True)[0] == []) == good


def test_two_seeds_give_no_verdict(make_run):
    comparison = compare(
        read_all(*(make_run(aqn, seed) for seed in (1, 2) for aqn in (True, False)))
    )
    (verdict,) = comparison.verdicts
    assert verdict.word == "no verdict" and sentence(verdict, 60, STEPS).endswith(
        "no verdict, 2 seeds in common; it takes 3"
    )


def test_a_run_whose_adapters_were_never_seen_in_the_rollout_engine_has_a_note(make_run):
    adapted, plain = (
        make_run(actor_config={"lora_target_modules": ["linear_qkv"]}),
        make_run(seed=2),
    )
    note = "that its adapters reached the rollout engine was never proved"
    assert note in read_run(adapted).notes and note not in read_run(plain).notes
    RunDirectory.open(adapted).record(lora_proved_after=3)
    assert note not in read_run(adapted).notes


def test_only_seeds_that_both_have_are_compared(make_run):
    comparison = compare(
        read_all(
            *(make_run(False, seed) for seed in (1, 2)), *(make_run(True, seed) for seed in (2, 3))
        )
    )
    assert [group.seeds for group in comparison.groups] == [[1, 2], [2, 3]] and comparison.verdicts[
        0
    ].seeds == [2]
    off, on = (
        next(run for run in group.runs if run.seed == 2).scores[STEPS]
        for group in comparison.groups
    )
    assert comparison.difference["aqn on"][STEPS].mean == pytest.approx(
        np.mean(list(on.values())) - np.mean(list(off.values()))
    )


def test_the_baseline_can_be_chosen(make_run):
    runs = read_all(*(make_run(aqn, seed) for seed in (1, 2, 3) for aqn in (True, False)))
    assert compare(runs, "on").verdicts[0].baseline == "aqn on"
    with pytest.raises(ConfigError, match="'aqn' names 2 groups; the groups are: aqn"):
        compare(runs, "aqn")


def test_nothing_to_compare_is_an_error(make_run, tmp_path):
    with pytest.raises(ConfigError, match="none of 1 runs can be averaged in"):
        compare(read_all(make_run(finished=False)))
    with pytest.raises(ConfigError, match="is no run directory and holds none"):
        find_runs([tmp_path / "nowhere"])


@pytest.mark.parametrize(
    "change, reason",
    [
        (
            dict(questions=2),
            r"it was evaluated otherwise: questions 2 \(\w+\) where most have 60 \(\w+\)",
        ),
        (
            dict(last=3, noise=[{}] * 3, megatron_training={"seed": 9, "train_iters": 3}),
            "it was evaluated otherwise: last step 3 where most have 20",
        ),
    ],
)
def test_a_stray_run_does_not_change_what_the_others_say(make_run, change, reason):
    runs = read_all(*(make_run(aqn, seed) for seed in (1, 2, 3) for aqn in (True, False)))
    (before,), comparison = (
        compare(runs).verdicts,
        compare([read_run(make_run(False, 9, **change)), *runs]),
    )
    assert comparison.verdicts == [before] and len(comparison.questions) == 60
    assert re.fullmatch(reason, comparison.left_out[0].faults[0])


def test_evaluations_made_otherwise_under_one_name_are_told_apart(make_run):
    paths = [make_run(False, seed) for seed in (1, 2, 3)]
    for path, samples in zip(paths, (4, 2, 4)):
        folder = path / "evaluations" / "other"
        folder.mkdir(parents=True)
        (folder / "answers.jsonl").write_text((path / "eval_answers.jsonl").read_text())
        (folder / "summary.json").write_text(
            json.dumps({"samples": samples, "seed": samples, "hardware_error": None})
        )
    (left,) = compare([read_run(path, "other") for path in paths]).left_out
    assert left.path == paths[1] and left.faults == (
        "it was evaluated otherwise: samples 2 where most have 4",
    )
    for path, format in zip(paths, (None, "nvfp4", None)):
        quantization = format and {"format": format, "evaluation": True}
        summary = {"samples": 4, "quantization": quantization}
        (path / "evaluations" / "other" / "summary.json").write_text(json.dumps(summary))
    (left,) = compare([read_run(path, "other") for path in paths]).left_out
    assert left.path == paths[1] and "quantization" in left.faults[0]
    for path, flag in zip(paths, (True, False, True)):  # what changes no evaluation
        summary = {"samples": 4, "quantization": {"format": "nvfp4", "evaluation": flag}}
        (path / "evaluations" / "other" / "summary.json").write_text(json.dumps(summary))
    assert not compare([read_run(path, "other") for path in paths]).left_out


def test_several_verdicts_share_the_limit_and_say_so(make_run):
    runs = read_all(
        *(
            make_run(aqn, seed, accuracy, actor_config={"lr": lr})
            for seed in (1, 2, 3)
            for aqn, lr, accuracy in ((False, 1, 0.5), (True, 1, 0.55), (True, 2, 0.6))
        )
    )
    comparison = compare(runs)
    assert [verdict.limit for verdict in comparison.verdicts] == [0.025, 0.025]
    verdict = comparison.verdicts[0]
    assert verdict.word == "not distinguishable"
    assert (
        verdict.seeds_needed
        == seeds_needed(verdict.difference, 0.025)
        > seeds_needed(verdict.difference)
    )
    assert "(below 0.025 counts: 2 groups share the 5 %)" in to_markdown(comparison)


def test_groups_that_look_alike_have_names_of_their_own(make_run):
    runs = read_all(
        *(make_run(False, 1, actor_config={"lr": lr}) for lr in (1, "1")),
        make_run(False, 1, actor_config={"lr": 2, "more": None}),
    )
    assert [group.name for group in compare(runs).groups] == [
        "actor_config.lr=1",
        "actor_config.lr=1 (2)",
        "actor_config.lr=2",
    ]


@pytest.fixture
def long_groups(make_run):
    """Runs of three groups, two seeds each, that differ in four keys."""
    changes = [(True, 1e-4, 0.05), (False, 2e-4, 0.0), (True, 3e-4, 0.1)]
    return read_all(
        *(
            make_run(
                aqn,
                seed,
                actor_config={"lr": lr},
                rl_config={"kl_coef": kl, "clip_ratio": 0.2 + kl},
            )
            for seed in (1, 2)
            for aqn, lr, kl in changes
        )
    )


def test_groups_that_differ_in_much_are_letters_with_a_legend(long_groups):
    groups = compare(long_groups).groups
    assert [group.name for group in groups] == ["A", "B", "C"] and groups[0].settings == (
        "actor_config.lr=0.0002, aqn off, rl_config.kl_coef=0.0, rl_config.clip_ratio=0.2"
    )
    console = Console(width=80, file=io.StringIO())
    console.print(Markdown(to_markdown(compare(long_groups))))
    shown = [line.split() for line in console.file.getvalue().splitlines()]
    assert "…" not in console.file.getvalue()
    for line in ("key A B C", "aqn.enabled false true true", "rl_config.kl_coef 0.0 0.05 0.1"):
        assert line.split() in shown
    assert [line[:2] for line in shown if line[:1] == ["0"]] == [["0", "A"]]  # a step is named once


def test_letters_stay_whichever_is_the_baseline(long_groups):
    for asked, name in ((None, "A"), ("B", "B"), ("lr=0.0003", "C"), ("aqn off", "A")):
        groups = compare(long_groups, asked).groups
        rates = {group.name: group.config["actor_config.lr"] for group in groups}
        assert groups[0].name == name and rates == {"A": 2e-4, "B": 1e-4, "C": 3e-4}


@pytest.mark.parametrize(
    "section, off, changed",
    [
        (
            "hardware_error",
            {"rollout": "none", "training": ["none"], "evaluation": [], "gaussian_std": 0.05},
            {"rollout": "gaussian"},
        ),
        ("rollout_quantization", {"format": "none", "lora": "beside"}, {"format": "nvfp4"}),
    ],
)
def test_a_section_that_is_off_is_no_difference(section, off, changed):
    plain = comparable_config(config_of())
    assert comparable_config(config_of(**{section: off})) == plain
    values = comparable_config(config_of(**{section: {**off, **changed}}))
    ((key, value),) = changed.items()
    assert values[f"{section}.{key}"] == value and len(values) > len(
        plain.keys() - {f"{section}.{key}"}
    )
    listed = comparable_config(config_of(hardware_error={**off, "rollout": ["gaussian"]}))
    assert listed["hardware_error.rollout"] == "gaussian"


@pytest.mark.parametrize(
    "name, change, message",
    [
        ("versions.json", lambda text: "{}", "KeyError: 'git'"),
        ("data.json", lambda text: "", "JSONDecodeError"),
        ("config.yaml", lambda text: "a: [", "expected the node content"),
        (
            "eval_answers.jsonl",
            lambda text: text.replace('"scores"', '"score"'),
            "KeyError: 'scores'",
        ),
    ],
)
def test_a_damaged_run_is_named(make_run, name, change, message):
    path = make_run()
    (path / name).write_text(change((path / name).read_text()))
    with pytest.raises(ValueError, match=f"{path} is damaged, leave it out: .*") as error:
        read_run(path)
    assert message in str(error.value)


def test_what_is_no_number_is_not_averaged(make_run):
    rows = [{}] * (STEPS - 1) + [{"reward/mean": math.nan}]
    comparison = compare(read_all(make_run(False, 1, noise=rows), make_run(False, 2)))
    assert (
        list(comparison.reward["all runs"]) == list(range(1, STEPS))
        and comparison.groups[0].runs[0].notes[-1] == "no number as its reward: 1 of 20 steps"
    )
    path = make_run(False, 3)
    file = path / "eval_answers.jsonl"
    file.write_text(file.read_text().replace("[1.0,", "[NaN,", 1))
    assert read_run(path).faults == ("some of its answers have a score that is no number",)


def test_runs_below_a_folder_called_checkpoints_are_found(make_run, tmp_path):
    path = make_run()
    (tmp_path / "checkpoints").mkdir()
    moved = path.rename(tmp_path / "checkpoints" / path.name)
    assert find_runs([tmp_path / "checkpoints"]) == [moved]


def synthetic(generator, effect):
    """Runs of two groups with three seeds each, and their true difference planted, in logits."""
    values = differences(generator, 3, questions=150, effect=effect, of_seed=0.1, of_question=0.3)
    questions = [f"q{i}" for i in range(values.shape[1])]

    def run(aqn, seed, scores):
        return ComparedRun(
            path=Path(f"{aqn}{seed}"),
            seed=seed,
            config={"aqn.enabled": aqn},
            scores={10: dict(zip(questions, scores.tolist()))},
            rewards={},
            data={},
            code={},
            faults=(),
            notes=(),
        )

    return [
        run(aqn, seed, 0.5 + values[seed] / 2 * (1 if aqn else -1))
        for seed in range(3)
        for aqn in (True, False)
    ]


@pytest.mark.parametrize("effect, least, most", [(0.0, 0, 10), (-1.0, 0, 0), (1.0, 180, 200)])
def test_how_often_of_200_it_says_better(effect, least, most):
    generator = np.random.default_rng(0)
    words = [compare(synthetic(generator, effect)).verdicts[0].word for _ in range(200)]
    assert least <= words.count("better") <= most
    if effect == 0:
        assert words.count("better") + words.count("worse") <= 10  # 5 %


def test_several_groups_share_the_5_percent():
    """Four treatments that do nothing: at least one is called better or worse in at most 5 % of the
    draws, not in 18 %.
    """
    generator, false = np.random.default_rng(0), 0
    for _ in range(200):
        runs = synthetic(generator, 0.0)
        for number in range(1, 4):
            for run in synthetic(generator, 0.0):
                config = {"aqn.enabled": True, "n": number}
                if run.config["aqn.enabled"]:
                    path = Path(f"{number}{run.seed}")
                    runs.append(replace(run, path=path, config=config))
        false += any(verdict.word != "not distinguishable" for verdict in compare(runs).verdicts)
    assert false <= 16  # the 99 % quantile of 5 %


def test_from_the_command_line_to_the_files(make_run, tmp_path):
    for seed in (1, 2, 3):
        make_run(True, seed)
        make_run(False, seed)
    make_run(True, 4, finished=False)
    command = [
        sys.executable,
        ROOT / "tools/compare_runs.py",
        tmp_path / "runs",
        "--output",
        tmp_path / "out",
    ]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=True,
        env={"COLUMNS": "200", "PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)},
    )
    assert (
        "aqn on beside aqn off: not distinguishable" in done.stdout
        and "it is not finished" in done.stdout
    )
    found = json.loads((tmp_path / "out/comparison.json").read_text())
    assert [group["seeds"] for group in found["groups"]] == [[1, 2, 3], [1, 2, 3]]
    assert (
        found["verdicts"][0]["difference"]["low"]
        < found["verdicts"][0]["difference"]["mean"]
        < found["verdicts"][0]["difference"]["high"]
    )
    assert (tmp_path / "out/comparison.png").stat().st_size > 20_000
    refused = subprocess.run(
        [*command[:2], tmp_path / "nowhere"], capture_output=True, text=True, check=False
    )
    assert refused.returncode == 1 and "holds none" in refused.stderr


def test_pictures_of_one_run_and_of_no_reward(make_run, tmp_path):
    write_comparison(compare(read_all(make_run(False, 1))), tmp_path / "one")
    write_comparison(compare(synthetic(np.random.default_rng(0), 0.0)), tmp_path / "no_reward")
