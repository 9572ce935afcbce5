"""Rewards: found by name or import path, called with three lists, and every way to fail is named
with its row.
"""

import copy
import runpy
import subprocess
import sys
from decimal import Decimal
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mindspeed_qerl.common.errors import ConfigError
from mindspeed_qerl.common.imports import own_code
from mindspeed_qerl.engines import data_files
from mindspeed_qerl.recipe.compose import compose
from mindspeed_qerl.recipe.reader import read_recipe
from mindspeed_qerl.runs.directory import RunDirectory
from mindspeed_qerl.tasks.gsm8k import verifier
from mindspeed_qerl.tasks.rewards import RewardError, call_reward, load_reward, score, try_rewards
from mindspeed_qerl.tasks.rows import row_of
from tests import ROOT
from tests.tables import cells

ROWS = [
    row_of({"prompt": f"question {i}", "answer": str(i), "level": i}, f"data.jsonl:{i + 1}")
    for i in range(4)
]
TEXTS = ["#### 0", "it is 1", "#### 3", "none"]


def test_a_reward_gets_decoded_texts_answers_and_rows():
    seen = []

    def reward(responses, answers, rows):
        seen.append((responses, answers, rows))
        return [row["level"] * 0.5 for row in rows]

    assert call_reward("mine", reward, TEXTS, ROWS).tolist() == [0.0, 0.5, 1.0, 1.5]
    assert seen == [(TEXTS, ["0", "1", "2", "3"], [row.columns for row in ROWS])]


def gives(value):
    """A reward that returns `value`."""
    return lambda responses, answers, rows: value


@pytest.mark.parametrize(
    "given",
    [
        [1, 0.5, True, 0],
        (1, 0.5, 1, 0),
        np.array([1, 0.5, 1, 0], dtype=np.float32),
        torch.tensor([1, 0.5, 1, 0]),
        [torch.tensor(1), np.float16(0.5), Decimal(1), 0],
        (value for value in (1, 0.5, 1, 0)),
    ],
)
def test_any_list_of_numbers_will_do(given):
    scores = call_reward("mine", gives(given), TEXTS, ROWS)
    assert scores.dtype == np.float64 and scores.tolist() == [1.0, 0.5, 1.0, 0.0]


def test_several_rewards_are_weighted_and_summed(tmp_path, monkeypatch):
    (tmp_path / "weighted.py").write_text(
        "def levels(responses, answers, rows):\n    return [row['level'] for row in rows]\n"
    )
    monkeypatch.chdir(tmp_path)
    total, each = score(
        [("gsm8k", 1.0), ("gsm8k_strict", -0.25), ("weighted:levels", 10)], TEXTS, ROWS
    )
    assert {name: values.tolist() for name, values in each.items()} == {
        "gsm8k": [1, 1, 0, 0],
        "gsm8k_strict": [1, 0, 0, 0],
        "weighted:levels": [0, 1, 2, 3],
    }
    assert total.tolist() == [0.75, 11.0, 20.0, 30.0]


def bad_row(responses, answers, rows):
    return [1 / (row["level"] - 2) for row in rows]


def exits(responses, answers, rows):
    raise SystemExit("usage")


ROW = [
    f"data.jsonl:{i + 1}: question 'question {i}', answer '{i}', response {text!r}"
    for i, text in enumerate(TEXTS)
]
LENGTH = "for 4 responses, and must return a list with one number for each"
FINITE = "which is not a finite number, for"


@pytest.mark.parametrize(
    "reward, message",
    [
        (
            bad_row,
            f"test_rewards.py:{bad_row.__code__.co_firstlineno + 1}), on 4 responses, the first: "
            + ROW[0],
        ),
        (exits, "raised SystemExit: usage ("),
        (gives([0.0] * 3), f"returned [0.0, 0.0, 0.0] {LENGTH}"),
        (gives(None), f"returned None {LENGTH}"),
        (gives("0101"), f"returned '0101' {LENGTH}"),
        (gives(dict.fromkeys(range(4), 1.0)), LENGTH),
        (gives([0, 1, "1", 0]), f"returned '1', {FINITE} {ROW[2]}"),
        (gives([0, 1, 0, float("nan")]), f"returned nan, {FINITE} {ROW[3]}"),
        (gives([0, 10**400, 0, 0]), f"{FINITE} {ROW[1]}"),
        (gives([0, [1, 2], 0, 0]), f"returned [1, 2], {FINITE}"),
        (gives(1 / n for n in (1, 2, 0, 1)), "raised ZeroDivisionError: division by zero"),
    ],
)
def test_every_failure_is_named_with_its_row(reward, message):
    with pytest.raises(RewardError) as error:
        call_reward("mine", reward, TEXTS, ROWS)
    assert str(error.value).startswith("verifier 'mine' ") and message in str(error.value)


VERL = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": "2+2?"}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "4"},
    "extra_info": {"index": 7, "answer": "#### 4"},
}
TRL = {
    "prompt": [{"role": "system", "content": "Add."}, {"role": "user", "content": "2+2?"}],
    "solution": "4",
}
SAID = ["#### 4", "#### 5"]


def of_verl(file):
    """A module of the installed verl, whose package wants more than is installed here."""
    source = Path(find_spec("verl").origin).parent / "utils" / "reward_score" / file
    return runpy.run_path(str(source))


def judged(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    assert (data_source, extra_info["index"], kwargs) == ("openai/gsm8k", 7, {})
    return {"score": float(solution_str.endswith(ground_truth)), "acc": 5}


async def judged_later(data_source, solution_str, ground_truth, extra_info):
    return judged(data_source, solution_str, ground_truth, extra_info)


def judged_together(data_sources, solution_strs, ground_truths, extra_infos):
    return [judged(*each) for each in zip(data_sources, solution_strs, ground_truths, extra_infos)]


def right(completions, solution, **kwargs):
    return [
        float(said[0]["content"] == f"#### {gold}") for said, gold in zip(completions, solution)
    ]


async def right_later(prompts, completions, solution):
    assert all(prompt == TRL["prompt"] for prompt in prompts)
    return right(completions, solution)


def right_with_default(completions, *, solution, trainer_state=None, weight=1.0, log_extra=None):
    return [weight * each for each in right(completions, solution)]


class Right:  # of ms-swift, whose completions are texts
    def __call__(self, completions, solution, **kwargs):
        return [float(said == f"#### {gold}") for said, gold in zip(completions, solution)]


class RightLater(Right):
    async def __call__(self, completions, **kwargs):
        return super().__call__(completions, **kwargs)


class JudgedLater:
    async def __call__(self, solution_str, ground_truth):
        return float(solution_str.endswith(ground_truth))


class InOurs:
    def __call__(self, texts, golds, rows):
        return [float(text == f"#### {gold}") for text, gold in zip(texts, golds)]


@pytest.mark.parametrize(
    "reward, columns",
    [
        (judged, VERL),
        (judged_later, VERL),
        (judged_together, VERL),
        (right, TRL),
        (right_later, TRL),
        (right_with_default, TRL),
        (partial(right_with_default, weight=1.0), TRL),
        (InOurs(), VERL),
        (JudgedLater(), VERL),
    ],
)
def test_a_reward_is_called_by_its_parameters(reward, columns):
    assert call_reward("mine", reward, SAID, [row_of(columns)] * 2).tolist() == [1, 0]


OWN_TEXTS = [r"\\boxed{4}", "#### 4", "<think>2+2</think>4", "4"]


# TRL takes ten seconds to import; its form: test_a_reward_is_called_by_its_parameters
@pytest.mark.full
def test_rewards_of_trl_itself():
    """Against their own results for what they are given in TRL's trainer."""
    from trl.rewards import accuracy_reward, think_format_reward

    spoken = [[{"role": "assistant", "content": text}] for text in OWN_TEXTS]
    for reward, given in (
        (partial(accuracy_reward), accuracy_reward(spoken, ["4"] * 4)),
        (think_format_reward, think_format_reward(spoken)),
    ):
        assert call_reward("trl", reward, OWN_TEXTS, [row_of(TRL)] * 4).tolist() == given
        assert set(given) == {0, 1}


def test_rewards_of_verl_itself():
    strict = of_verl("gsm8k.py")["compute_score"]
    for reward in (strict, partial(strict, method="flexible")):
        expected = [reward(text, "4") for text in OWN_TEXTS]
        assert call_reward("verl", reward, OWN_TEXTS, [row_of(VERL)] * 4).tolist() == expected
        assert any(expected)


def test_verls_structured_ground_truth_is_given_as_it_is():
    row = row_of(VERL | {"reward_model": {"ground_truth": {"target": ["4", "four"]}}})
    assert row.answer == '{"target": ["4", "four"]}'
    judged = call_reward(
        "verl",
        lambda solution_str, ground_truth: solution_str in ground_truth["target"],
        ["four", "five"],
        [row] * 2,
    )
    assert judged.tolist() == [1, 0]


def test_completions_are_texts_where_the_prompt_is():
    seen = []

    def keep(prompts, completions, **columns):
        seen.append((prompts, completions, columns))
        return [0.0] * len(completions)

    call_reward(
        "mine",
        keep,
        ["4"],
        [row_of({"prompt": "2+2?", "answer": 4, "level": 1, "completion": "4"})],
    )
    columns = {"prompt": ["2+2?"], "answer": [4], "level": [1], "completion": ["4"]}
    assert seen == [(["2+2?"], ["4"], columns)]


def test_a_class_is_made_once_and_gets_texts(modules, monkeypatch):
    monkeypatch.setitem(
        sys.modules, "orms", SimpleNamespace(Right=Right, RightLater=RightLater, Bare=partial)
    )
    for name in ("orms:Right", "orms:RightLater"):
        assert call_reward(name, load_reward(name), SAID, [row_of(TRL)] * 2).tolist() == [1, 0]
        assert load_reward(name).__self__ is load_reward(name).__self__
    with pytest.raises(ConfigError, match=r"'orms:Bare' cannot be loaded: TypeError"):
        load_reward("orms:Bare")


@pytest.mark.parametrize(
    "reward, columns, words",
    [
        (lambda completion, answer, gold: [], TRL, "(completion, answer, gold): not one of"),
        (lambda completion_ids, **kwargs: [], TRL, "(completion_ids, **kwargs): not one of"),
        (lambda *args, **kwargs: [], TRL, "(*args, **kwargs): not one of the forms"),
        (lambda responses, answers: [], TRL, "(responses, answers): not one of the forms"),
        (lambda a, b, c, d: [], TRL, "missing a required argument: 'd'"),
        (lambda completions, answer: [], TRL, "missing a required argument: 'answer'"),
        (lambda completions, completion_ids: [], TRL, "a required argument: 'completion_ids'"),
        (judged, TRL, "missing a required argument: 'data_source'"),
        (judged_together, TRL, "missing a required argument: 'data_sources'"),
    ],
)
def test_what_fits_no_form_is_refused(reward, columns, words):
    with pytest.raises(RewardError) as error:
        call_reward("mine", reward, SAID, [row_of(columns)] * 2)
    assert str(error.value).startswith("verifier 'mine' takes ") and words in str(error.value)
    assert str(error.value).endswith("Columns that all rows have: prompt, solution")


@pytest.mark.parametrize(
    "parameters, wrong",
    [
        ("questions, responses, answers", "'questions' would be given the responses"),
        ("prompts, responses, answer", "'prompts' would be given the responses"),
        ("answers, responses, rows", "'answers' would be given the responses"),
        ("rows, responses, answers", "'rows' would be given the responses"),
        ("ground_truths, predictions, extra", "'ground_truths' would be given the responses"),
        ("texts, user_prompts, golds", "'user_prompts' would be given the answers"),
        ("texts, golds, questions", "'questions' would be given the rows"),
        ("responses, answers, rows", None),
        ("model_answers, gold_answers, extra_infos, weight=1.0", None),
        ("a, _, c", None),
        ("generated_texts, expected_output, c, **kwargs", None),
        ("solutions, solution_labels, metadata", None),
    ],
)
def test_a_parameter_that_names_another_role_than_its_place_is_refused(parameters, wrong):
    reward = eval(f"lambda {parameters}: [0.0] * 4")
    if wrong is None:
        assert call_reward("mine", reward, TEXTS, ROWS).tolist() == [0.0] * 4
    else:
        with pytest.raises(RewardError, match=f"verifier 'mine' takes .*{wrong}"):
            call_reward("mine", reward, TEXTS, ROWS)


def test_a_reward_that_tells_no_gold_from_an_empty_answer_is_warned_of(modules):
    (modules / "told.py").write_text("""
def by_place(a, b, c): return [float(x in y) for x, y in zip(b, c)]
def shortest(responses, answers, rows): return [-len(each) for each in responses]
def right(responses, answers, rows): return [float(x == y) for x, y in zip(responses, answers)]
def for_others(completions, **kwargs): return [None] * len(completions)
def as_verl(solution_str, ground_truth): return 0.0
""")

    def warnings(*names):
        return try_rewards([(f"told:{name}", 1.0) for name in names], ROWS)

    assert warnings("right") == warnings("right", "for_others") == []
    assert try_rewards([("gsm8k_strict", 1.0)], ROWS) == []
    values = "gives the gold answer 0 and an empty one 0 (data.jsonl:1)"
    first, second = warnings("by_place", "right", "as_verl")
    assert first.startswith(f"verifier 'told:by_place' {values}")
    assert "responses=['0'], answers=['0'], rows=[{'prompt': 'question 0', 'answer': '0'" in first
    assert second.startswith(f"verifier 'told:as_verl' {values}")
    assert second.endswith("passed ground_truth=['0'], solution_str=['0']")
    [told] = warnings("shortest")
    assert "gives the gold answer -1 and an empty one 0 " in told


def test_a_column_that_a_later_row_lacks_is_found_before_the_start(modules):
    (modules / "of_level.py").write_text(
        "def reward(completions, level):\n    return [0.0] * len(level)\n"
    )
    rows = [*ROWS, row_of({"prompt": "q", "answer": "a"}, "data.jsonl:5")]
    try_rewards([("of_level:reward", 1.0)], ROWS)
    with pytest.raises(RewardError, match="argument: 'level'.* all rows have: answer, prompt"):
        try_rewards([("of_level:reward", 1.0)], [*rows, ROWS[0]])


def change(responses, answers, rows):
    for row in rows:
        row["reward_model"]["ground_truth"] += "0"
        row["prompt"][0]["content"] = ""
    return [float(len({row["reward_model"]["ground_truth"] for row in rows}))] * len(rows)


def test_what_a_reward_changes_no_other_answer_sees():
    row = row_of(copy.deepcopy(VERL))
    first = call_reward("mine", change, ["a"] * 3, [row] * 3)
    assert (
        len(set(first)) == 1
        and call_reward("mine", change, ["a"] * 3, [row] * 3).tolist() == first.tolist()
    )
    assert row == row_of(VERL)


def test_none_of_trl_leaves_a_row_to_the_other_rewards(modules):
    (modules / "by_task.py").write_text("""
def even(completions, level, **kwargs):
    return [None if each % 2 else 1.0 for each in level]
def ours(responses, answers, rows):
    return [None] * len(rows)
def odd(completions, level, **kwargs):
    return [3.0 if each % 2 else None for each in level]
""")
    total, each = score([("by_task:even", 1.0), ("by_task:odd", 2.0)], TEXTS, ROWS)
    assert total.tolist() == [1, 6, 1, 6] and each["by_task:odd"].tolist() == [0, 3, 0, 3]
    with pytest.raises(RewardError, match="None, and so no reward at all, for data.jsonl:2"):
        score([("by_task:even", 1.0)], TEXTS, ROWS)
    total, each = score([("gsm8k", 1.0), ("by_task:ours", 1.0)], TEXTS, ROWS)
    assert np.isnan(total).all() and np.isnan(each["by_task:ours"]).all()  # no 0, and no others'
    assert each["gsm8k"].tolist() == [1, 1, 0, 0]
    total, _ = score([("by_task:ours", 1.0), ("by_task:even", 1.0)], TEXTS, ROWS)
    assert np.isnan(total).all()
    try_rewards([("by_task:even", 1.0), ("by_task:odd", 1.0)], ROWS)
    with pytest.raises(RewardError, match="None, and so no reward at all"):
        try_rewards([("by_task:even", 1.0)], ROWS)


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


@pytest.mark.parametrize(
    "name, words",
    cells("""
gsm8k_strikt ¦ \
unknown verifier 'gsm8k_strikt', did you mean 'gsm8k_strict'? Known: gsm8k, \
gsm8k_strict, math. Your own is written module:function
own_rewards.py:my_reward ¦ No module named 'own_rewards.py'
:my_reward ¦ cannot be loaded: ValueError: Empty module name
no_such:f ¦ No module named 'no_such'. It is written as in an import
package.other:f ¦ looked for in this folder (FOLDER) and on PYTHONPATH
needs:f ¦ No module named 'no_such_package'
broken:f ¦ 'broken:f' cannot be loaded: ZeroDivisionError: division by zero
unfinished:f ¦ SyntaxError: invalid syntax (unfinished.py, line 1)
script:f ¦ SystemExit: usage
own_rewards:my_rewards ¦ unknown function 'my_rewards', did you mean 'my_reward'?
own_rewards:limit ¦ unknown function 'limit'
"""),
)
def test_what_is_wrong_with_a_name(modules, name, words):
    with pytest.raises(ConfigError) as error:
        load_reward(name)
    assert words.replace("FOLDER", str(modules)) in str(error.value)


OWN = {
    "task/__init__.py": "from .rewards import f as g",
    "task/rewards.py": "from .. import nothing\nfrom task import limits\nimport numpy as np, os.path",
    "task/limits.py": "def later():\n    from .deep.inner import most\n    return most",
    "task/deep/inner.py": "import importlib\nmost = importlib.import_module('task_data').most",
    "task_data.py": "import mindspeed_qerl.tasks.rows, torch.nn\nmost = 7",
    "unused.py": "",
}


@pytest.fixture
def task(modules):
    for name, text in OWN.items():
        (modules / name).parent.mkdir(parents=True, exist_ok=True)
        (modules / name).write_text(text)
    return modules


def test_the_code_of_a_reward_is_all_that_a_user_wrote_of_it(task):
    """Of packages, relative, inside functions, by import_module; nothing is imported for it."""
    used = ["task", "task.deep.inner", "task.limits", "task.rewards", "task_data"]
    files = own_code(["task.rewards:f", "gsm8k", "vanilla"])
    assert list(files) == [f"code/{name}" for name in used]
    assert all(task in file.parents for file in files.values()) and "task" not in sys.modules
    assert own_code(["task:g"]) == files and list(own_code(["unused:f"])) == ["code/unused"]
    assert own_code(["gsm8k", "numpy:sum", "json:loads", "no.such:f", "broken:f"]) == {
        "code/broken": task / "broken.py"
    }


@pytest.mark.parametrize("changed", ["task/rewards.py", "task/deep/inner.py", "task_data.py"])
@pytest.mark.parametrize("key", ["rl_config.verifier_function", "algorithm.loss_mode"])
def test_a_run_is_not_resumed_with_other_code(task, changed, key):
    (task / "models").symlink_to(ROOT / "models")
    raw = compose("grpo_tiny_moe_cpu", [f"{key}=task.rewards:f"])
    files = partial(data_files, read_recipe(raw))
    run = RunDirectory.create(task, "run", config=raw, command=[], seed=1, data_files=files())
    assert RunDirectory.finished(task / "run", config=raw, data_files=files()) is None
    run.finish()
    assert RunDirectory.finished(task / "run", config=raw, data_files=files()).path == run.path
    (task / changed).write_text(OWN[changed] + "\nscale = 100")
    assert RunDirectory.finished(task / "run", config=raw, data_files=files()) is None
    run.fail("stopped")
    with pytest.raises(ValueError, match=f"code/{changed[:-3].replace('/', '.')}.sha256 was '"):
        run.resume(config=raw, command=[], data_files=files())
    (task / changed).write_text(OWN[changed])
    (task / "nothing.py").write_text("")  # what was found elsewhere, or not at all
    (task / "os").mkdir()
    run.resume(config=raw, command=[], data_files=files())


def test_a_script_of_another_folder_finds_the_reward_too(modules):
    """python cli/train_grpo.py puts cli/ on sys.path, not the current folder."""
    (modules / "elsewhere").mkdir()
    (modules / "elsewhere" / "start.py").write_text(
        "from mindspeed_qerl.tasks.rewards import "
        "load_reward\nprint(load_reward('own_rewards:my_reward')(['a'], ['a'], [{}]))\n"
    )
    done = subprocess.run(
        [sys.executable, "elsewhere/start.py"],
        check=False,
        cwd=modules,
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
    )
    assert done.stdout == "[1.0]\n", done.stderr


def test_a_reward_is_tried_with_an_answer_and_an_empty_response(modules):
    try_rewards([("own_rewards:my_reward", 1.0)], ROWS)
    try_rewards([("gsm8k", 1.0)], ROWS[:1])
    with pytest.raises(RewardError, match="needs_text' raised ZeroDivisionError"):
        try_rewards([("own_rewards:needs_text", 1.0)], ROWS)
    towns = [row_of({"prompt": "The capital of France?", "answer": "Paris"}, "towns.jsonl:1")]
    with pytest.raises(RewardError, match="ValueError: not a number: 'Paris'.*: towns.jsonl:1"):
        try_rewards([("gsm8k", 1.0)], towns)
