"""benchmarks/study.py and studies.py with runs that are drawn: what it asks for, when it stops, and that its
tables are of its data alone.
"""

import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from mindspeed_qerl.runs.directory import RunDirectory
from tests import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import studies
import study
from sequential import pass_at


@pytest.fixture(autouse=True)
def two(monkeypatch):
    """A study of three cells, whose runs begin with "a model"."""
    cells = {"one": ("x=1",), "other": ("x=2",), "third": ("x=3",)}
    comparisons = (("one", "other", "accuracy"), ("third", "other", "pass@1"))
    two = studies.Study("Is one better?", cells, comparisons, {"sixteen": ()})
    monkeypatch.setitem(studies.STUDIES, "two", two)
    monkeypatch.setattr(studies.Study, "weights", lambda _: "a model")


@pytest.fixture
def carry_out(tmp_path):
    def carry_out(data, most=30, hours=1.0):
        cores = study.OneRunACore(hours, [0])
        study.carry_out("two", data, cores, most, root=tmp_path)

    return carry_out


def drawn(asked, effects, of_seed=0.01, questions=300, model="a model"):
    """A stand-in for `run_cell`, whose accuracies differ by `effects`."""

    def run(name, cell, seed, core, root):
        asked.append((seed, cell))
        generator = np.random.default_rng([seed, *cell.encode()])
        hard = np.random.default_rng(9).normal(0, 0.1, questions)
        chance = np.clip(0.5 + effects[cell] + generator.normal(0, of_seed) + hard, 0, 1)
        found = {
            measure: {
                "samples": samples,
                "right": "".join(
                    "0123456789abcdefg"[right] for right in generator.binomial(samples, chance)
                ),
            }
            for measure, samples in (("accuracy", 4), ("sixteen", 16))
        }
        return {**found, "model": model, "entropy": [0.5, 0.25]}, [
            f"{number}?" for number in range(questions)
        ]

    return run


def test_it_stops_when_everything_is_decided_and_goes_on_where_it_was(
    monkeypatch, tmp_path, carry_out
):
    asked = []
    monkeypatch.setattr(
        study, "run_cell", drawn(asked, {"one": 0.3, "other": 0.0, "third": 0.0}, 0.04)
    )
    data = studies.Data("two", tmp_path)
    carry_out(data, hours=0.0)
    # no time, no run
    assert asked == []
    carry_out(data, 2)
    assert (
        asked == [(seed, cell) for seed in (1, 2) for cell in ("one", "other", "third")]
        and data.most is None
    )
    again = studies.Data("two", tmp_path)
    assert again.cells == data.cells
    asked.clear()
    carry_out(again)
    assert min(seed for seed, _ in asked) == 3 and len(set(asked)) == len(asked)
    words = again.words()
    assert words["one", "other", "accuracy"][0] == "better" and None not in words.values()
    counts = {cell: max(seed for seed, of in asked if of == cell) for cell in data.cells}
    # what is decided needs no more runs
    assert counts["one"] < counts["third"] == counts["other"] <= again.most <= 30
    asked.clear()
    carry_out(studies.Data("two", tmp_path))
    assert asked == []


def test_a_seed_begun_with_another_model_is_run_anew(monkeypatch, tmp_path, carry_out):
    """As on another machine, where the same recipe makes other weights."""
    data = studies.Data("two", tmp_path)
    run = drawn([], dict.fromkeys(data.cells, 0.0))
    for seed, cells in (("1", ("one", "other", "third")), ("2", ("one", "other"))):
        for cell in cells:
            data.add(cell, int(seed), *run("two", cell, int(seed), 0, tmp_path))
    assert data.missing(2) == [(2, "third")]
    monkeypatch.setattr(studies.Study, "weights", lambda _: "another")
    assert data.missing(2) == [(2, "one"), (2, "other"), (2, "third")]
    data.cells["other"]["2"]["model"] = "another"
    # stopped half-way, no pair has two models
    assert len(data.differences("one", "other", "accuracy")) == 1
    asked = []
    monkeypatch.setattr(
        study, "run_cell", drawn(asked, dict.fromkeys(data.cells, 0.0), model="another")
    )
    carry_out(data, 2)
    assert asked == [(2, "one"), (2, "other"), (2, "third")] and data.missing(2) == []
    data.cells["one"]["1"]["model"] = "a third"
    assert data.missing(2) == [(1, "one"), (1, "other"), (1, "third")]


def test_what_has_other_data_or_questions_or_cells_is_not_mixed_in(tmp_path):
    data, run = studies.Data("two", tmp_path), drawn([], {"one": 0.0, "other": 0.0})
    for seed in (1, 2):
        for cell in ("one", "other"):
            data.add(cell, seed, *run("two", cell, seed, 0, tmp_path))
    data.cells["one"]["2"]["data"] = "converted anew"
    assert len(data.differences("one", "other", "accuracy")) == 1
    assert data.missing(2) == [(1, "third"), (2, "one"), (2, "other"), (2, "third")]
    with pytest.raises(SystemExit, match="seed 3 of one was asked other questions"):
        data.add("one", 3, *drawn([], {"one": 0.0}, questions=299)("two", "one", 3, 0, tmp_path))
    data.file.write_text(data.file.read_text().replace('"third"', '"renamed"'))
    with pytest.raises(SystemExit, match="cells that the study two has not: renamed"):
        studies.Data("two", tmp_path)


def test_pass_at_k_is_the_chance_over_all_subsets():
    from itertools import combinations

    for samples, k in ((5, 1), (5, 3), (6, 6)):
        for right in range(samples + 1):
            answers = [True] * right + [False] * (samples - right)
            brute = np.mean([any(subset) for subset in combinations(answers, k)])
            assert pass_at(k, np.array([right]), samples)[0] == pytest.approx(brute)


def test_tables_say_what_was_found(monkeypatch, tmp_path, carry_out):
    data = studies.Data("two", tmp_path)
    monkeypatch.setattr(study, "run_cell", drawn([], {"one": 0.2, "other": 0.0, "third": 0.0}))
    carry_out(data)
    text = study.tables(studies.Data("two", tmp_path))
    one = np.mean(
        [
            [int(digit) / 4 for digit in run["accuracy"]["right"]]
            for run in data.cells["one"].values()
        ]
    )
    assert f"| one | {len(data.cells['one'])} | {one:.3f}" in text and "0.500 → 0.250" in text
    assert "| one | other | accuracy |" in text and "| **better** |" in text
    study.draw(data, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000
    assert json.loads((tmp_path / "two.json").read_text())["most"] == data.most
    data.cells = {cell: {"1": runs["1"]} for cell, runs in data.cells.items()}
    data.most = None
    # of one seed no comparison is said, not an empty one
    assert study.tables(data).endswith("0.500 → 0.250 |")


@pytest.mark.parametrize("name", "arithmetic draws exploration hardware real target".split())
def test_the_tables_of_the_documents_are_those_of_their_data(name):
    data = studies.Data(name, ROOT / "docs" / "studies")
    assert study.tables(data) in (ROOT / "docs" / "results.md").read_text()


def test_a_cell_is_a_run_and_its_evaluations(monkeypatch, tmp_path):
    """What is called, by a stand-in that leaves what a run leaves; what is kept of it."""
    commands = []

    def call(command, **_):
        commands.append([str(part) for part in command])

    run = RunDirectory(tmp_path / "run")
    answers = [
        {"step": step, "question": "?", "scores": scores}
        for step, scores in ((0, [0, 1]), (9, [1, 1]))
    ]
    for file, rows in (
        ("eval_answers.jsonl", answers),
        ("evaluations/sixteen/answers.jsonl", answers),
        (
            "metrics.jsonl",
            [{"entropy/mean": value, "reward/groups_with_signal": value} for value in (0.5, 0.25)],
        ),
    ):
        (run.path / file).parent.mkdir(parents=True, exist_ok=True)
        (run.path / file).write_text("".join(json.dumps(row) + "\n" for row in rows))
    read = SimpleNamespace(
        faults=(),
        path=run.path,
        data={"test": "a digest"},
        code={"mindspeed_qerl": "0123456789"},
        scores={0: {"?": 0.5}, 9: {"?": 1.0}},
    )
    asked = []
    monkeypatch.setattr(study.subprocess, "run", call)
    monkeypatch.setattr(study, "compose", lambda name, overrides: overrides)
    monkeypatch.setattr(study, "finished", lambda raw, name: asked.append(raw) or run)
    monkeypatch.setattr(study, "read_run", lambda path: read)
    found, questions = study.run_cell(
        "two", "other", 3, 1, tmp_path / "runs", ["local.kv_cache_gib=1"]
    )
    [command] = commands  # the evaluation was there
    assert questions == ["?"] and found == {
        "model": "a model",
        "data": "4e52d87761fa",
        "code": "0123456",
        "start": 0.5,
        "entropy": [0.5, 0.25],
        "signal": 0.375,
        "accuracy": {"samples": 2, "right": "2"},
        "sixteen": {"samples": 2, "right": "2"},
    }
    assert {
        "x=2",
        "seed=3",
        "rl_config.actor_resource.num_npus=1",
        "local.kv_cache_gib=1",
        "run.name=2",
        f"run.root={tmp_path}/runs/grpo_steps_moe_cpu_a model",
    } <= set(command)
    # the run that is read is the one that was asked for
    assert set(asked[0]) <= set(command)
    read.faults = ("the noise of step 3 reached no norm",)
    with pytest.raises(SystemExit, match="run: the noise of step 3 reached no norm"):
        study.run_cell("two", "other", 3, 1, tmp_path / "runs", [])
