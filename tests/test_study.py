"""benchmarks/study.py with runs that are drawn: what it asks for, when it stops, and that its tables are of its data
alone."""

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def study(monkeypatch):
    spec = importlib.util.spec_from_file_location("study", ROOT / "benchmarks" / "study.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "study", module)
    spec.loader.exec_module(module)
    monkeypatch.setitem(module.STUDIES, "two", module.Study(
        "Is one better?", {"one": ("x=1",), "other": ("x=2",), "third": ("x=3",)},
        (("one", "other", "accuracy"), ("third", "other", "pass@1")), {"sixteen": ()}))
    monkeypatch.setattr(module.Study, "weights", lambda _: "a model")
    return module


def drawn(asked, effects, of_seed=0.01, questions=300, model="a model"):
    """A stand-in for `run_cell`, whose accuracies differ by `effects`."""
    def run(name, cell, seed, core, root):
        asked.append((seed, cell))
        generator = np.random.default_rng([seed, *cell.encode()])
        hard = np.random.default_rng(9).normal(0, 0.1, questions)
        chance = np.clip(0.5 + effects[cell] + generator.normal(0, of_seed) + hard, 0, 1)
        found = {measure: {"samples": samples, "right": "".join(
            "0123456789abcdefg"[right] for right in generator.binomial(samples, chance))}
            for measure, samples in (("accuracy", 4), ("sixteen", 16))}
        return {**found, "model": model, "entropy": [0.5, 0.25]}
    return run


def test_it_stops_when_everything_is_decided_and_goes_on_where_it_was(study, monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(study, "run_cell", drawn(asked, {"one": 0.3, "other": 0.0, "third": 0.0}, 0.04))
    data = study.Data("two", tmp_path)
    study.carry_out("two", data, study.OneRunACore(0.0, [0]), 30, root=tmp_path)
    assert asked == [], "no time, no run"
    study.carry_out("two", data, study.OneRunACore(1.0, [0]), 2, root=tmp_path)
    assert asked == [(seed, cell) for seed in (1, 2) for cell in ("one", "other", "third")] and data.most is None
    again = study.Data("two", tmp_path)
    assert again.cells == data.cells
    asked.clear()
    study.carry_out("two", again, study.OneRunACore(1.0, [0]), 30, root=tmp_path)
    assert min(seed for seed, _ in asked) == 3 and len(set(asked)) == len(asked)
    words = again.words()
    assert words["one", "other", "accuracy"] == "better" and None not in words.values()
    counts = {cell: max(seed for seed, of in asked if of == cell) for cell in data.cells}
    assert counts["one"] < counts["third"] == counts["other"] <= again.most <= 30, "what is decided needs no more runs"
    asked.clear()
    study.carry_out("two", study.Data("two", tmp_path), study.OneRunACore(1.0, [0]), 30, root=tmp_path)
    assert asked == []


def test_a_seed_begun_with_another_model_is_run_anew(study, monkeypatch, tmp_path):
    """As on another machine, where the same recipe makes other weights."""
    data = study.Data("two", tmp_path)
    run = drawn([], dict.fromkeys(data.cells, 0.0))
    for seed, cells in (("1", ("one", "other", "third")), ("2", ("one", "other"))):
        for cell in cells:
            data.cells[cell][seed] = run("two", cell, int(seed), 0, tmp_path)
    assert data.missing(2) == [(2, "third")]
    monkeypatch.setattr(study.Study, "weights", lambda _: "another")
    assert data.missing(2) == [(2, "one"), (2, "other"), (2, "third")]
    asked = []
    monkeypatch.setattr(study, "run_cell", drawn(asked, dict.fromkeys(data.cells, 0.0), model="another"))
    study.carry_out("two", data, study.OneRunACore(1.0, [0]), 2, root=tmp_path)
    assert asked == [(2, "one"), (2, "other"), (2, "third")] and data.missing(2) == []
    data.cells["one"]["1"]["model"] = "a third"
    assert data.missing(2) == [(1, "one"), (1, "other"), (1, "third")], "no pair has two models"


def test_the_number_of_seeds_follows_from_the_pilots_variance(study, monkeypatch, tmp_path):
    most = {}
    for of_seed in (0.005, 0.03):
        data = study.Data("two", tmp_path / str(of_seed))
        monkeypatch.setattr(study, "run_cell", drawn([], dict.fromkeys(data.cells, 0.0), of_seed))
        study.carry_out("two", data, study.OneRunACore(1.0, [0]), 60, root=tmp_path)
        most[of_seed] = data.most
    assert most[0.005] < most[0.03] <= 60


def test_pass_at_k_is_the_chance_over_all_subsets(study):
    from itertools import combinations

    for samples, k in ((5, 1), (5, 3), (6, 6)):
        for right in range(samples + 1):
            answers = [True] * right + [False] * (samples - right)
            brute = np.mean([any(subset) for subset in combinations(answers, k)])
            assert study.pass_at(k, np.array([right]), samples)[0] == pytest.approx(brute)


def test_tables_say_what_was_found(study, monkeypatch, tmp_path):
    data = study.Data("two", tmp_path)
    monkeypatch.setattr(study, "run_cell", drawn([], {"one": 0.2, "other": 0.0, "third": 0.0}))
    study.carry_out("two", data, study.OneRunACore(1.0, [0]), 30, root=tmp_path)
    text = study.tables(study.Data("two", tmp_path))
    one = np.mean([[int(digit) / 4 for digit in run["accuracy"]["right"]] for run in data.cells["one"].values()])
    assert f"| one | {len(data.cells['one'])} | {one:.3f}" in text and "0.500 → 0.250" in text
    assert "| one | other | accuracy |" in text and "| **better** |" in text
    study.draw(data, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000
    assert json.loads((tmp_path / "two.json").read_text())["most"] == data.most


@pytest.mark.parametrize("file", sorted((ROOT / "docs" / "studies").glob("*.json")), ids=lambda file: file.stem)
def test_the_tables_of_the_documents_are_those_of_their_data(study, file):
    assert study.tables(study.Data(file.stem, file.parent)) in (ROOT / "docs" / "results.md").read_text()


def test_the_studies_compare_cells_that_they_have(study):
    for each in study.STUDIES.values():
        for cell, baseline, measure in each.comparisons:
            assert {cell, baseline} <= each.cells.keys()
            assert measure == "accuracy" or measure in each.evaluations or (
                measure.startswith("pass@") and "sixteen" in each.evaluations)
