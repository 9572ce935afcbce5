"""Rewards: found by name or import path, called with three lists, and every way to fail is named with its row."""

import subprocess
import sys
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest
import torch

from mindspeed_qerl.errors import ConfigError
from mindspeed_qerl.tasks.gsm8k import verifier
from mindspeed_qerl.tasks.rewards import RewardError, call_reward, load_reward, score, try_reward
from mindspeed_qerl.tasks.rows import row_of

REPO = Path(__file__).resolve().parents[2]
ROWS = [row_of({"prompt": f"question {i}", "answer": str(i), "level": i}, f"data.jsonl:{i + 1}") for i in range(4)]
TEXTS = ["#### 0", "it is 1", "#### 3", "none"]


def test_a_reward_gets_decoded_texts_answers_and_rows():
    seen = []

    def reward(responses, answers, rows):
        seen.append((responses, answers, rows))
        return [row["level"] * 0.5 for row in rows]

    assert call_reward("mine", reward, TEXTS, ROWS).tolist() == [0.0, 0.5, 1.0, 1.5]
    assert seen == [(TEXTS, ["0", "1", "2", "3"], [row.columns for row in ROWS])]


def test_a_reward_cannot_change_the_rows_of_the_next_call():
    def reward(responses, answers, rows):
        return [float(row.pop("level")) for row in rows]

    assert call_reward("mine", reward, TEXTS, ROWS).tolist() == call_reward("mine", reward, TEXTS, ROWS).tolist() == [
        0, 1, 2, 3]


@pytest.mark.parametrize("given", [
    [1, 0.5, True, 0], (1, 0.5, 1, 0), np.array([1, 0.5, 1, 0], dtype=np.float32), torch.tensor([1, 0.5, 1, 0]),
    [torch.tensor(1), np.float16(0.5), Decimal(1), 0], (value for value in (1, 0.5, 1, 0))])
def test_any_list_of_numbers_will_do(given):
    scores = call_reward("mine", lambda *_: given, TEXTS, ROWS)
    assert scores.dtype == np.float64 and scores.tolist() == [1.0, 0.5, 1.0, 0.0]


def test_several_rewards_are_weighted_and_summed(tmp_path, monkeypatch):
    (tmp_path / "weighted.py").write_text(
        "def levels(responses, answers, rows):\n    return [row['level'] for row in rows]\n")
    monkeypatch.chdir(tmp_path)
    total, each = score([("gsm8k", 1.0), ("gsm8k_strict", -0.25), ("weighted:levels", 10)], TEXTS, ROWS)
    flexible = [verifier.score(text, row.answer) for text, row in zip(TEXTS, ROWS)]
    strict = [verifier.score(text, row.answer, "strict") for text, row in zip(TEXTS, ROWS)]
    assert {name: values.tolist() for name, values in each.items()} == {
        "gsm8k": flexible, "gsm8k_strict": strict, "weighted:levels": [0.0, 1.0, 2.0, 3.0]}
    assert flexible == [1, 1, 0, 0] and strict == [1, 0, 0, 0] and total.tolist() == [0.75, 11.0, 20.0, 30.0]


def bad_row(responses, answers, rows):
    return [1 / (row["level"] - 2) for row in rows]


def together(responses, answers, rows):
    if len(rows) > 1:
        raise RuntimeError("too many")
    return [0.0]


ROW = {i: f"row {i} (data.jsonl:{i + 1}): question 'question {i}', answer '{i}', response {TEXTS[i]!r}"
       for i in range(4)}


@pytest.mark.parametrize("reward, message", [
    (bad_row, (f"raised ZeroDivisionError: division by zero (test_rewards.py:{bad_row.__code__.co_firstlineno + 1}), "
              f"on {ROW[2]}")),
    (together, f", on 4 responses together, and on none of them alone; the first is {ROW[0]}"),
    (lambda responses, answers: [], "takes (responses, answers), and is called as f(responses, answers, rows), "),
    (lambda *_: [0.0] * 3, f"returned 3 scores for 4 responses, and must return one for each; {ROW[3]} has none"),
    (lambda *_: [0.0] * 5, "returned 5 scores for 4 responses, and must return one for each"),
    (lambda *_: [], f"returned 0 scores for 4 responses, and must return one for each; {ROW[0]} has none"),
    (lambda *_: None, "returned None (NoneType) instead of a list of 4 numbers"),
    (lambda *_: 0.5, "returned 0.5 (float) instead of a list of 4 numbers"),
    (lambda *_: "0101", "returned '0101' (str) instead of a list"),
    (lambda *_: dict.fromkeys(range(4), 1.0), "(dict) instead of a list"),
    (lambda *_: {0, 1, 2, 3}, "(set) instead of a list"),
    (lambda *_: [0, 1, "1", 0], f"returned '1', which is not a finite number, for {ROW[2]}"),
    (lambda *_: [0, None, 1, 0], f"returned None, which is not a finite number, for {ROW[1]}"),
    (lambda *_: [0, 1, 0, float("nan")], f"returned nan, which is not a finite number, for {ROW[3]}"),
    (lambda *_: [float("-inf"), 1, 0, 0], f"returned -inf, which is not a finite number, for {ROW[0]}"),
    (lambda *_: [0, 10**400, 0, 0], "which is not a finite number, for row 1"),
    (lambda *_: [0, [1, 2], 0, 0], "returned [1, 2], which is not a finite number"),
    (lambda *_: (1 / n for n in (1, 2, 0, 1)), "raised ZeroDivisionError"),
])
def test_every_failure_is_named_with_its_row(reward, message):
    with pytest.raises(RewardError) as error:
        call_reward("mine", reward, TEXTS, ROWS)
    assert str(error.value).startswith("verifier 'mine' ") and message in str(error.value)


def test_long_texts_are_cut_in_the_message():
    row = row_of({"prompt": "q" * 5000, "answer": "a"})
    with pytest.raises(RewardError) as error:
        call_reward("mine", lambda *_: [None], ["r" * 100_000], [row])
    assert "r" * 197 + "..." in str(error.value) and len(str(error.value)) < 700


MODULE = """
import math
limit = 3
def my_reward(responses, answers, rows):
    return [float(answer in response) for response, answer in zip(responses, answers)]
def needs_text(responses, answers, rows):
    return [1.0 / len(response) for response in responses]
"""


@pytest.fixture
def modules(tmp_path, monkeypatch):
    """A folder of modules that nobody has imported, as the current one."""
    (tmp_path / "own_rewards.py").write_text(MODULE)
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "inner.py").write_text(MODULE)
    (tmp_path / "broken.py").write_text("\n\n1 / 0\n")
    (tmp_path / "unfinished.py").write_text("def f(:\n")
    (tmp_path / "script.py").write_text("import sys\nsys.exit('usage')\n")
    (tmp_path / "needs.py").write_text("import no_such_package\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("own_rewards", "package", "package.inner"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def test_a_module_of_the_current_folder_or_a_package_is_found(modules):
    for name in ("own_rewards:my_reward", "package.inner:my_reward"):
        assert load_reward(name)(["so 7", "so 8"], ["7", "7"], [{}, {}]) == [1.0, 0.0]
    assert load_reward("gsm8k") is verifier.VERIFIERS["gsm8k"]


@pytest.mark.parametrize("name, words", [
    ("gsm8k_strikt", "unknown verifier 'gsm8k_strikt', did you mean 'gsm8k_strict'? Known: gsm8k, gsm8k_strict."),
    ("code", "unknown verifier 'code'. Known: gsm8k, gsm8k_strict. Your own is written module:function"),
    ("package.inner.my_reward", "Known: gsm8k, gsm8k_strict. Your own is written package.inner:my_reward"),
    ("own_rewards.py:my_reward",
     "'own_rewards.py' is not a module. Write it as in an import, my_package.my_module:my_reward"),
    ("./own_rewards:my_reward", "'./own_rewards' is not a module. Write it as in an import"),
    (":my_reward", "'' is not a module"),
    ("no_such:f",
     "no module 'no_such'. Start from the folder that holds it (this is FOLDER), or put that folder on PYTHONPATH"),
    ("package.other:f", "no module 'package.other'"),
    ("nowhere.inner:f", "no module 'nowhere'"),
    ("needs:f", "its module needs one that is missing: No module named 'no_such_package'"),
    ("broken:f", "importing broken failed: ZeroDivisionError: division by zero (broken.py:3)"),
    ("unfinished:f", "importing unfinished failed: SyntaxError: invalid syntax"),
    ("script:f", "importing script failed: SystemExit: usage"),
    ("own_rewards:my_rewards", "unknown function in FOLDER/own_rewards.py: 'my_rewards', did you mean 'my_reward'?"),
    ("own_rewards:", "unknown function in FOLDER/own_rewards.py: ''"),
    ("own_rewards:limit", "limit in FOLDER/own_rewards.py is no function but of type int"),
])
def test_what_is_wrong_with_a_name(modules, name, words):
    with pytest.raises(ConfigError) as error:
        load_reward(name)
    assert words.replace("FOLDER", str(modules)) in str(error.value)


def test_a_script_of_another_folder_finds_the_reward_too(modules):
    """python cli/train_grpo.py puts cli/ on sys.path, not the current folder."""
    (modules / "elsewhere").mkdir()
    (modules / "elsewhere" / "start.py").write_text(
        "from mindspeed_qerl.tasks.rewards import load_reward\nprint(load_reward('own_rewards:my_reward')(['a'], "
        "['a'], [{}]))\n")
    done = subprocess.run([sys.executable, "elsewhere/start.py"], check=False, cwd=modules, capture_output=True,
                          text=True, env={"PYTHONPATH": str(REPO), "PATH": ""})
    assert done.stdout == "[1.0]\n", done.stderr


def test_a_reward_is_tried_with_an_answer_and_an_empty_response(modules):
    try_reward("own_rewards:my_reward", ROWS)
    try_reward("gsm8k", ROWS[:1])
    with pytest.raises(RewardError, match=r"needs_text' raised ZeroDivisionError.*row 1 .*response ''. \(It was tried "
                                          r"before the start"):
        try_reward("own_rewards:needs_text", ROWS)
    with pytest.raises(RewardError,
                       match=r"'gsm8k' raised ValueError: not a number: 'Paris'.* on row 0 \(towns.jsonl:1\)"):
        try_reward("gsm8k", [row_of({"prompt": "The capital of France?", "answer": "Paris"}, "towns.jsonl:1")])
