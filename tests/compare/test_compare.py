"""compare_runs on made-up runs: what is grouped, what is left out, and how often it sees what is
there and what is not.
"""

import io
import json
import re
import subprocess
import sys
import warnings
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from rich.console import Console
from rich.markdown import Markdown

from mindspeed_qerl.aqn.schedule import NoiseSchedule
from mindspeed_qerl.common.errors import ConfigError
from mindspeed_qerl.compare.comparison import compare
from mindspeed_qerl.compare.page import (
    EVALUATE_ALIKE,
    labels_of,
    sentence,
    to_markdown,
    write_comparison,
)
from mindspeed_qerl.compare.run import (
    ComparedRun,
    comparable_config,
    find_runs,
    logged_noise_fault,
    read_run,
)
from mindspeed_qerl.compare.statistics import seeds_needed
from mindspeed_qerl.runs.description import dotted
from mindspeed_qerl.runs.directory import RunDirectory
from tests import ROOT

from .test_statistics import differences

STEPS = 20


def config_of(aqn=False, seed=1, **changes):
    return {
        "megatron_training": {"seed": seed, "train_iters": STEPS, "save_interval": 5},
        "actor_config": {"lr": 2e-4},
        "aqn": {"enabled": aqn, "sigma_start": 0.05, "multipliers": None},
        "run": {"name": f"anything{seed}"},
        **changes,
    }


def noise_rows(measured=1.0):
    """Metrics of the noise of each step."""
    rows = []
    for step, sigma in enumerate(NoiseSchedule(total_steps=STEPS).sigmas(), 1):
        row = {"aqn/expected_std": sigma, "aqn/measured_std": measured * sigma}
        rows.append({"step": step, "aqn/sigma": sigma, **row})
    return rows


PLAIN = [{"step": step} for step in range(1, STEPS + 1)]


@pytest.fixture
def make_run(tmp_path):
    """A function that writes a run: `accuracy` of 60 questions before, a little more after."""

    def make(
        aqn=False,
        seed=1,
        accuracy=0.5,
        rows=None,
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
        for step in (0, last):
            right = generator.random((questions, 4)) < accuracy + 0.2 * (step > 0)
            scores = right.astype(float).tolist()
            append(run.eval_file, {"step": step, "accuracy": right.mean()})
            for number, each in enumerate(scores):
                answer = {"step": step, "question": f"q{number}", "scores": each}
                append(run.eval_answers_file, answer)
        for row in rows or (noise_rows() if aqn else PLAIN):
            append(run.metrics_file, {"reward/mean": accuracy + 0.01 * row["step"], **row})
        run.reached(row["step"])
        if finished:
            run.finish()
        return run.path

    return make


def append(file, row):
    with open(file, "a") as lines:
        lines.write(json.dumps(row) + "\n")


def read_all(*paths):
    return [read_run(path) for path in paths]


@pytest.fixture
def six_runs(make_run):
    """With and without noise, three seeds each."""
    return read_all(*(make_run(aqn, seed) for seed in (1, 2, 3) for aqn in (True, False)))


def test_accuracy_is_the_mean_over_seeds_and_questions_of_runs_that_differ_in_the_seed(six_runs):
    comparison = compare(six_runs)
    assert list(comparison.groups) == ["aqn off", "aqn on"] and comparison.left_out == []
    assert (comparison.steps, len(comparison.questions)) == ([0, STEPS], 60)
    for name, runs in comparison.groups.items():
        assert [run.seed for run in runs] == [1, 2, 3]
        logged = [(run.path / "eval.jsonl").read_text().splitlines() for run in runs]
        for number, step in enumerate((0, STEPS)):
            expected = np.mean([json.loads(lines[number])["accuracy"] for lines in logged])
            assert comparison.accuracy[name][step].mean == pytest.approx(expected)
    alone = compare(comparison.groups["aqn on"])
    assert list(alone.groups) == ["all runs"] and alone.verdicts == []
    assert "nothing to compare it with" in to_markdown(alone)


def test_groups_are_told_apart_by_every_key_that_matters(make_run):
    paths = [make_run(True, 1), make_run(True, 1, actor_config={"lr": "2e-4"})]
    names = ["actor_config.lr=0.0002", 'actor_config.lr="2e-4"']
    assert list(compare(read_all(*paths)).groups) == names


@pytest.mark.parametrize(
    "section, off, other",
    [
        ("aqn", {"enabled": False, "sigma_start": 0.05}, {"sigma_start": 0.1}),
        ("rollout_quantization", {"format": "none", "evaluation": True}, {"evaluation": False}),
        ("megatron_training", {"train_iters": 5}, {"seed": 7, "save_interval": 9}),
        ("run", {"name": "first"}, {"name": "second"}),
        ("local", {"kv_cache_gib": 2}, {"kv_cache_gib": 1}),
    ],
)
def test_what_changes_no_number_is_no_difference(section, off, other):
    configs = [dotted(config_of(**{section: values})) for values in (off, {**off, **other})]
    plain, changed = map(comparable_config, configs)
    assert plain == changed


@pytest.mark.parametrize(
    "change, reason",
    [
        (dict(finished=False), "it is not finished: running after step 20 of 20"),
        (dict(last=15), "its last step, 20, was not evaluated"),
        (dict(rows=noise_rows()[:3]), "metrics.jsonl has 3 of 20 steps"),
        (dict(eval={"temperature": 0.7}), "it was evaluated otherwise: temperature 0.7"),
        (dict(eval={"temperature": 0}), "it was evaluated otherwise: samples 0 where most have 1"),
        (
            dict(hardware_error={"evaluation": "gaussian"}),
            "it was evaluated otherwise: hardware_error {'kinds'",
        ),
        (
            dict(rollout_quantization={"format": "nvfp4", "evaluation": True}),
            "it was evaluated otherwise: quantization {'format': 'nvfp4'",
        ),
        (
            dict(rl_config={"verifier_function": ["gsm8k_strict"]}),
            "evaluated otherwise: verifier gsm8k_strict",
        ),
        (dict(task={"prompt": "plain"}), "it was evaluated otherwise: prompt plain where"),
        (dict(generate_config={"dtype": "float32"}), "evaluated otherwise: dtype float32"),
        (dict(rows=PLAIN), "AQN is on in its config, but no step had noise"),
        (dict(data=b"other"), "its data differ: train"),
        (dict(questions=2), "it was evaluated otherwise: questions 2 ("),
    ],
)
def test_a_run_that_means_something_else_is_left_out_with_the_reason(
    make_run, six_runs, change, reason
):
    """And does not change what the others say."""
    bad = make_run(True, 4, **change)
    comparison = compare([read_run(bad), *six_runs])
    assert [run.path for run in comparison.left_out] == [bad]
    assert reason in comparison.left_out[0].faults[0]
    assert (EVALUATE_ALIKE in to_markdown(comparison)) == ("evaluated otherwise" in reason)
    assert comparison.verdicts == compare(six_runs).verdicts
    assert f"left out: {bad}: {comparison.left_out[0].faults[0]}" in to_markdown(comparison)


@pytest.mark.parametrize(
    "change",
    [
        dict(hardware_error={"rollout": "gaussian", "gaussian_std": 0.1}),
        dict(rollout_quantization={"format": "nvfp4"}),
    ],
)
def test_what_changes_training_alone_is_a_group(make_run, six_runs, change):
    comparison = compare([read_run(make_run(False, 1, **change)), *six_runs])
    assert len(comparison.groups) == 3 and comparison.left_out == []


def test_a_run_that_failed_before_its_noise_is_no_plain_baseline(make_run):
    path = make_run(True, rows=[{"step": 0}], finished=False)
    (path / "metrics.jsonl").write_text("")
    RunDirectory.open(path).fail("out of memory")
    assert read_run(path).faults == ("it is not finished: failed after step 0 of 20",)


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"packages": {"torch": "1.0"}}, "its code differs: torch 1.0 where most have 2."),
        ({"upstream": {"MindSpeed": "b"}}, "its code differs: MindSpeed b where most have a"),
        ({"code": "another"}, "its code differs: mindspeed_qerl another where most have "),
        ({"git": {"commit": "of a page", "dirty": False}}, None),
    ],
)
def test_other_code_is_left_out(make_run, change, reason):
    paths = [make_run(False, seed) for seed in (1, 2, 3)]
    for path in paths:
        file = path / "versions.json"
        versions = {**json.loads(file.read_text()), "upstream": {"MindSpeed": "a"}}
        for section, values in change.items() if path == paths[1] else ():
            is_section = isinstance(values, dict)
            versions[section] = {**versions[section], **values} if is_section else values
        file.write_text(json.dumps(versions))
    left_out = compare(read_all(*paths)).left_out
    assert [other.path for other in left_out] == ([paths[1]] if reason else [])
    assert not reason or left_out[0].faults[0].startswith(reason)


def test_what_a_reader_must_know_of_a_run_is_a_note(make_run):
    plain, noted = make_run(seed=1), make_run(seed=2, run={"accepted_checks": ["npu-smi"]})
    RunDirectory.open(noted).record(lora={"linear_qkv": {}})
    comparison = compare(read_all(plain, noted))
    assert len(comparison.groups) == 1
    (line,) = [line for line in to_markdown(comparison).splitlines() if str(noted) in line]
    assert "failed checks of its preflight were accepted: ['npu-smi']" in line
    assert "its adapters reached the rollout engine was never proved" in line
    RunDirectory.open(noted).record(lora_proved_after=3)
    assert not any("never proved" in note for note in read_run(noted).notes)


def test_a_repeated_seed_counts_once(make_run):
    first, second = make_run(False, 1), make_run(False, 1)
    comparison = compare(read_all(first, second, make_run(False, 2)))
    assert [run.path for run in comparison.left_out] == [min(first, second)]
    assert [run.seed for run in comparison.groups["all runs"]] == [1, 2]


@pytest.mark.parametrize(
    "rows, enabled, fault",
    [
        (PLAIN, False, None),
        (noise_rows(), False, "AQN is off in its config, but 18 steps had noise"),
        (noise_rows(0.79), True, "has 0.79 of the std"),
        (noise_rows(0.81), True, None),
        (noise_rows(1.24), True, None),
        (noise_rows(1.26), True, "has 1.26 of the std"),
        (noise_rows(float("nan")), True, "has nan of the std"),
        (noise_rows()[:14] + noise_rows(0.0)[14:], True, None),  # rounding took it at the end
    ],
)
def test_noise_is_as_configured(rows, enabled, fault):
    assert (fault or "None") in str(logged_noise_fault(rows, enabled))


def test_only_seeds_that_both_have_are_compared_and_two_give_no_verdict(make_run):
    paths = [make_run(aqn, seed) for aqn, seeds in ((0, (1, 2)), (1, (2, 3))) for seed in seeds]
    comparison = compare(read_all(*paths))
    (verdict,) = comparison.verdicts
    assert verdict.seeds == [2] and verdict.word == "no verdict"
    labels = labels_of(comparison)
    said = sentence(verdict, 60, STEPS, labels)
    assert said.endswith("no verdict, 1 seeds in common; it takes 3")
    off, on = (list(read_run(path).scores[STEPS].values()) for path in paths[1:3])
    expected = np.mean(on) - np.mean(off)
    assert comparison.difference["aqn on"][STEPS].mean == pytest.approx(expected)
    assert compare(read_all(paths[0], paths[3])).verdicts[0].difference is None


def test_the_baseline_can_be_chosen(six_runs):
    assert compare(six_runs, "on").verdicts[0].baseline == "aqn on"
    with pytest.raises(ConfigError, match="'aqn' names 2 groups; the groups are: aqn"):
        compare(six_runs, "aqn")


def test_nothing_to_compare_is_an_error(make_run, tmp_path):
    with pytest.raises(ConfigError, match="none of 1 runs can be averaged in"):
        compare(read_all(make_run(finished=False)))
    with pytest.raises(ConfigError, match="is no run directory and holds none"):
        find_runs([tmp_path / "nowhere"])


def test_evaluations_made_otherwise_under_one_name_are_told_apart(make_run):
    paths = [make_run(False, seed) for seed in (1, 2, 3)]
    assert "it has no evaluation 'mine'" in read_run(paths[0], "mine").faults[0]
    for path, settings in zip(paths, ({"seed": 7}, {"samples": 2}, {})):  # a seed changes nothing
        folder = path / "evaluations" / "mine"
        folder.mkdir(parents=True)
        (folder / "answers.jsonl").write_text((path / "eval_answers.jsonl").read_text())
        (folder / "summary.json").write_text(json.dumps({"samples": 4, "seed": 1, **settings}))
    (left_out,) = compare([read_run(path, "mine") for path in paths]).left_out
    assert left_out.path == paths[1]
    assert left_out.faults[0] == "it was evaluated otherwise: samples 2 where most have 4"


def test_several_verdicts_share_the_limit_and_say_so(make_run):
    cells = ((False, 1, 0.5), (True, 1, 0.55), (True, 2, 0.6))
    paths = [
        make_run(aqn, seed, accuracy, actor_config={"lr": lr})
        for seed in (1, 2, 3)
        for aqn, lr, accuracy in cells
    ]
    comparison = compare(read_all(*paths))
    assert [verdict.limit for verdict in comparison.verdicts] == [0.025, 0.025]
    verdict = comparison.verdicts[0]
    assert verdict.word == "not distinguishable"
    needed = [seeds_needed(verdict.difference, limit) for limit in (0.025, 0.05)]
    assert verdict.seeds_needed == needed[0] > needed[1]
    assert "(below 0.025 counts: 2 groups share the 5 %)" in to_markdown(comparison)


@pytest.mark.parametrize(
    "name, change, message",
    [
        ("versions.json", lambda text: "{}", "KeyError: 'git'"),
        ("data.json", lambda text: "", "data.json is damaged: Expecting value"),
        ("eval_answers.jsonl", lambda text: text.replace('"scores"', '"x"'), "KeyError: 'scores'"),
    ],
)
def test_a_damaged_run_is_named(make_run, name, change, message):
    path = make_run()
    (path / name).write_text(change((path / name).read_text()))
    expected = re.escape(f"{path} is damaged, leave it out: ") + f"(?s:.*){message}"
    with pytest.raises(ValueError, match=expected):
        read_run(path)


def test_a_question_that_is_asked_twice_counts_twice(make_run):
    path = make_run(questions=2)
    file = path / "eval_answers.jsonl"
    file.write_text(file.read_text().replace("q1", "q0"))
    assert list(read_run(path).scores[STEPS]) == ["q0", "q0 (again)"]


def synthetic(generator, effect):
    """Runs of two groups with three seeds each, and their true difference planted, in logits."""
    values = differences(generator, 3, questions=150, effect=effect, of_seed=0.1, of_question=0.3)
    questions = [f"q{i}" for i in range(values.shape[1])]
    runs = []
    for seed in range(3):
        for aqn, sign in ((True, 1), (False, -1)):
            scores = {10: dict(zip(questions, 0.5 + sign * values[seed] / 2))}
            path, config = Path(f"{aqn}{seed}"), {"aqn.enabled": aqn}
            runs.append(ComparedRun(path, seed, config, scores, {}, {}, (), (), {}, ""))
    return runs


@pytest.mark.parametrize("effect, least, most", [(0.0, 0, 10), (-1.0, 0, 0), (1.0, 180, 200)])
def test_how_often_of_200_it_says_better(effect, least, most):
    generator = np.random.default_rng(0)
    words = [compare(synthetic(generator, effect)).verdicts[0].word for _ in range(200)]
    assert least <= words.count("better") <= most
    if effect == 0:
        assert words.count("better") + words.count("worse") <= 10  # 5 %


def test_from_the_command_line_to_the_files(six_runs, make_run, tmp_path):
    make_run(True, 4, finished=False)

    def run(*arguments):
        command = [sys.executable, ROOT / "tools/compare_runs.py", *arguments]
        environment = {"COLUMNS": "200", "PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)}
        return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)

    done = run(tmp_path / "runs", "--output", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert "aqn on beside aqn off: not distinguishable" in done.stdout
    assert "it is not finished" in done.stdout
    assert (tmp_path / "out/comparison.png").stat().st_size > 20_000
    refused = run(tmp_path / "nowhere")
    assert refused.returncode == 1 and "holds none" in refused.stderr


@pytest.mark.parametrize("count", [1, 2, 10])
def test_many_groups_of_long_names_are_told_apart(count, tmp_path, monkeypatch):
    """At 80 columns, and in the picture."""
    runs, figures = [], []
    for number, seed in product(range(count), range(3)):
        rewards = "examples.rewards_of_my_own_project:" + f"reward_{number}" * (1 + number % 3)
        config = {"aqn.enabled": number > 0, "rl_config.verifier_function": [rewards]}
        answers = {f"q{i}": float(i * (seed + 1) % 10 < number) for i in range(40)}
        scores = {0: answers, 1: answers}
        path = Path(f"{number}-{seed}")
        runs.append(ComparedRun(path, seed, config, scores, {}, {}, (), (), {}, ""))
    comparison = compare(runs)
    save = Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda figure, *a, **k: figures.append(figure) or save(figure, *a, **k)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        write_comparison(comparison, tmp_path)
    screen = io.StringIO()
    Console(file=screen, width=80).print(Markdown(to_markdown(comparison)))
    table = screen.getvalue().partition("Accuracy by step")[2].partition("Runs")[0]
    named = {line.split()[1] for line in table.splitlines() if line[1:2].isdigit()}
    assert len(named) == count and "\u2026" not in table
    (figure,) = figures
    (legend,) = figure.legends
    panels = [axes.get_tightbbox() for axes in figure.axes]
    assert legend.get_window_extent().y1 <= min(box.y0 for box in panels) + 4
    lines = [bars.lines[0] for bars in figure.axes[0].containers]
    drawn = [(line.get_color(), line.get_linestyle()) for line in lines]
    assert len(set(drawn)) == len(drawn) == count


@pytest.mark.parametrize(
    "seeds, words",
    [
        ((1, 1), "95 % intervals over questions, of one seed."),
        ((3, 1), "over seeds and questions; where a group has one seed, over questions alone."),
    ],
)
def test_what_an_interval_is_over_is_said(make_run, seeds, words):
    paths = [make_run(aqn, seed) for aqn in (False, True) for seed in range(seeds[aqn])]
    assert words in to_markdown(compare(read_all(*paths)))


def test_what_never_varies_gives_no_verdict_and_no_interval(six_runs):
    """Right in each of three questions with noise, and wrong without."""
    always = []
    for run in six_runs:
        right = float(run.config["aqn.enabled"])
        scores = {step: dict.fromkeys("abc", right) for step in (0, STEPS)}
        always.append(replace(run, scores=scores))
    comparison = compare(always)
    text = to_markdown(comparison)
    assert comparison.verdicts[0].word == "no verdict" and "+1.000 for every seed" in text
    assert "nan" not in text and "| 20 | aqn on | 1.000 | +1.000 |" in text


def test_a_picture_of_no_common_seed(make_run, tmp_path):
    runs = read_all(make_run(False, 1), make_run(True, 2))
    _, picture = write_comparison(compare(runs), tmp_path / "out")
    assert picture.stat().st_size > 10_000
