"""The reward `math` and its rows: against Math-Verify in this process, MATH's own normalisation
(verl's copy of hendrycks' is_equiv), the Hub's columns, brute force, and expressions without end.
"""

import itertools
import json
import os
import runpy
import signal
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import math_verify
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from mindspeed_qerl.runs.description import describe_data
from mindspeed_qerl.tasks import math_answers
from mindspeed_qerl.tasks.checks import missing_files
from mindspeed_qerl.tasks.evaluation import evaluate_answers
from mindspeed_qerl.tasks.math_answers import last_boxed, score_batch
from mindspeed_qerl.tasks.rewards import RewardError, score
from mindspeed_qerl.tasks.rows import INSTRUCTION, read_rows, row_of
from tests.tables import cells

ENDLESS = r"\boxed{9^{9^{9^{9}}}}"
MATH = Path(find_spec("verl").origin).parent / "utils" / "reward_score" / "math_reward.py"

# response, gold, the verdict, and MATH's own of what is in the box
TABLE = r"""
so it is $\boxed{\frac12}$. ¦ \frac{1}{2} ¦ 1 ¦ 1
\boxed{\dfrac{9}{7}} ¦ \frac97 ¦ 1 ¦ 1
\boxed{0.5} ¦ \frac{1}{2} ¦ 1 ¦ 1
\boxed{1/3} ¦ 0.333 ¦ 0 ¦ 0
\boxed{\frac{3}{6}} ¦ \frac{1}{2} ¦ 1 ¦ 0
\boxed{\sqrt{\frac{2}{3}}} ¦ \frac{\sqrt{6}}{3} ¦ 1 ¦ 0
\boxed{\frac{\sqrt{\frac{a}{b}}}{\{c\}}} ¦ 2 ¦ 0 ¦ 0
$\boxed{\left( 3, \frac{\pi}{2} \right)}$ ¦ (3, \pi/2) ¦ 1 ¦ 0
\boxed{(\frac{\pi}{2}, 3)} ¦ (3, \pi/2) ¦ 0 ¦ 0
\boxed{[0,1)} ¦ [0, 1) ¦ 1 ¦ 1
\boxed{(0,1)} ¦ [0,1) ¦ 0 ¦ 0
\boxed{(-\infty,2]\cup[3,\infty)} ¦ [3,\infty)\cup(-\infty,2] ¦ 1 ¦ 0
\boxed{\{3, 2, 1\}} ¦ \{1,2,3\} ¦ 1 ¦ 0
\boxed{3,2,1} ¦ 1,2,3 ¦ 1 ¦ 0
\boxed{1,2} ¦ 1,2,3 ¦ 0 ¦ 0
\boxed{50\%} ¦ 50\% ¦ 1 ¦ 1
\boxed{50} ¦ 50\% ¦ 1 ¦ 1
\boxed{10\text{ cm}} ¦ 10 ¦ 1 ¦ 1
\boxed{10} ¦ 10\text{ cm} ¦ 1 ¦ 1
\boxed{90^\circ} ¦ 90 ¦ 1 ¦ 1
\boxed{\$18.90} ¦ 18.90 ¦ 1 ¦ 1
\boxed{10080} ¦ 10,\!080 ¦ 1 ¦ 0
\boxed{x=5} ¦ 5 ¦ 1 ¦ 1
\boxed{5} ¦ x = 5 ¦ 1 ¦ 1
\boxed{-q+p} ¦ p - q ¦ 1 ¦ 0
\boxed{(x+1)^2} ¦ x^2 + 2x + 1 ¦ 1 ¦ 0
\boxed{x^2+2x+2} ¦ x^2 + 2x + 1 ¦ 0 ¦ 0
\boxed{3 \pm 2\sqrt{2}} ¦ 3+2\sqrt2, 3-2\sqrt2 ¦ 1 ¦ 0
\boxed{1\frac{4}{5}} ¦ \frac{9}{5} ¦ 1 ¦ 0
\boxed{\begin{pmatrix}1\\2\end{pmatrix}} ¦ \begin{pmatrix} 1 \\ 2 \end{pmatrix} ¦ 1 ¦ 1
\boxed{\text{Evelyn}} ¦ \text{Evelyn} ¦ 1 ¦ 1
\boxed{(B)} ¦ \text{(B)} ¦ 1 ¦ 0
\boxed{1} then no: $\boxed{2}$. ¦ 2 ¦ 1 ¦ 1
\boxed{1} then no: $\boxed{2}$. ¦ 1 ¦ 0 ¦ 0
\boxed{1} or \boxed{2} ¦ 2 ¦ 0 ¦ 1
\boxed{} ¦ 5 ¦ 0 ¦ 0
\boxed{5 ¦ 5 ¦ 0 ¦ -
⏎ ¦ 5 ¦ 0 ¦ -
I do not know. ¦ 5 ¦ 0 ¦ -
So $n+1 = 35$.⏎⏎Answer: 34 ¦ 34 ¦ 1 ¦ -
The final answer is $025$. ¦ 25 ¦ 1 ¦ -
#### 72 ¦ 72 ¦ 1 ¦ -
it is 72 or 73 ¦ 72 ¦ 0 ¦ -
"""
ROWS = cells(TABLE)


def of_math_verify(gold, response):
    """The verdict of the library as its page calls it, in this process's main thread."""
    return float(math_verify.verify(math_verify.parse(f"${gold}$"), math_verify.parse(response)))


@pytest.fixture(scope="module")
def verdicts():
    return score_batch([row[0] for row in ROWS], [row[1] for row in ROWS])


@pytest.mark.parametrize("number", range(len(ROWS)))
def test_unusual_answers(number, verdicts):
    response, gold, expected, normalised = ROWS[number]
    assert verdicts[number] == float(expected) == of_math_verify(gold, response)
    of_math = runpy.run_path(str(MATH))
    box = of_math["last_boxed_only_string"](response)
    if normalised != "-":
        assert of_math["is_equiv"](of_math["remove_boxed"](box), gold) == (normalised == "1")


@pytest.fixture
def impatient(monkeypatch):
    """No process yet, and a fifth of a second of processor time for a pair."""
    monkeypatch.setattr(math_answers, "_idle", [])
    monkeypatch.setattr(math_answers, "SECONDS", 0.2)
    monkeypatch.setattr(math_answers, "_threads", ThreadPoolExecutor(1))


def test_what_never_ends_is_no_zero_and_the_others_are_judged(impatient):
    """In a thread, where the library itself raises ValueError."""
    found = []
    responses = [r"\boxed{5}", ENDLESS, "Answer: 6", "Answer: 5"]
    thread = threading.Thread(target=lambda: found.extend(score_batch(responses, ["5"] * 4)))
    thread.start()
    thread.join()
    assert found == [1.0, None, 0.0, 1.0]
    [process] = math_answers._idle
    process.send_signal(signal.SIGKILL)
    process.wait()
    row = row_of({"problem": "2+3?", "answer": "5"})
    total, each = score([("math", 1.0), ("gsm8k", 1.0)], ["#### 5"] * 2, [row] * 2)
    assert np.isnan(total[0]) and total[1] == 2 and np.isnan(each["math"][0])


def test_without_the_library_nothing_is_scored(impatient, tmp_path, monkeypatch):
    (tmp_path / "math_verify.py").write_text("raise ImportError('no such parser')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    row = row_of({"problem": "2+3?", "answer": "5"})
    with pytest.raises(RewardError, match=r"pip install 'math-verify\[antlr4-9-3\]==0.9.0'"):
        score([("math", 1.0)], ["5"], [row])


ANSWERS = [
    "\\boxed{\\frac12}",
    "Answer: 0.5",
    "\\boxed{2}",
    "\\boxed{1,2}",
    "\\boxed{\\{2,1\\}}",
    "no",
]


def test_pass_at_k_and_maj_at_k_are_those_of_brute_force():
    """Every draw of three answers: which are equal, by Math-Verify in this process, pair by pair;
    and the winner by counting.
    """
    golds = ["0.5", "2", r"\{1,2\}"]
    draws = [draw for draw in itertools.product(range(len(ANSWERS)), repeat=3)][::9]
    rows = [row_of({"problem": str(i), "answer": golds[i % 3]}) for i in range(len(draws))]
    texts = [ANSWERS[place] for draw in draws for place in draw]
    result, answers = evaluate_answers(rows, texts, [False] * len(texts), 3, "math")
    parsed = [math_verify.parse(text) for text in ANSWERS]
    best, majority = [], []
    for row, draw in zip(rows, draws):
        gold = math_verify.parse(f"${row.answer}$")
        right = [float(math_verify.verify(gold, parsed[place])) for place in draw]
        best.append(max(right))
        votes = {
            i: sum(math_verify.verify(parsed[place], parsed[other]) for other in draw)
            for i, place in enumerate(draw)
            if parsed[place]
        }
        most = max(votes.values(), default=0)
        winners = [right[i] for i, count in votes.items() if count == most]
        majority.append(np.mean(winners) if winners else 0.0)
    assert result["pass@3"] == np.mean(best) and result["maj@3"] == pytest.approx(np.mean(majority))
    assert "not_computed" not in result and 0.2 < result["maj@3"] < result["pass@3"] < 0.8
    for draw, answer in zip(draws, answers):
        assert Counter(map(type, answer["equal_to"]))[type(None)] == draw.count(5)


def test_an_evaluation_counts_what_could_not_be_computed_as_wrong(impatient):
    row = row_of({"problem": "2+3?", "answer": "5"})
    texts = ["Answer: 5", ENDLESS, "?", "Answer: 5"]
    result, answers = evaluate_answers([row] * 4, texts, [False] * 4, 1, "math")
    assert result["not_computed"] == 1 and result["accuracy"] == 0.5
    assert [answer["scores"] for answer in answers] == [[1.0], [0.0], [0.0], [1.0]]


# ---- rows as published ----

# a row of EleutherAI/hendrycks_math, HuggingFaceH4/MATH-500, BytedTsinghua-SIA/DAPO-Math-17k,
# HuggingFaceH4/aime_2024, Maxwell-Jia/AIME_2024 and math-ai/aime25, and its gold answer
PUBLISHED = r"""
\frac{4}{2} ¦ {"problem": "1+1?", "level": "Level 1", "type": "Algebra",
"solution": "It is not $\\boxed{1}$ but $\\boxed{\\frac{4}{2}}$."}

2 ¦ {"problem": "1+1?", "solution": "$\\boxed{3}$", "answer": "2", "subject": "Algebra", "level": 1,
"unique_id": "test/algebra/1.json"}

34 ¦ {"data_source": "math_dapo", "prompt": [{"content": "1+1?", "role": "user"}], "ability": "MATH",
"reward_model": {"ground_truth": "34", "style": "rule"}, "extra_info": {"index": "9"}}

204 ¦ {"id": 60, "problem": "1+1?", "solution": "So \\boxed{203}.", "answer": "204", "url": "x",
"year": "2024"}

33 ¦ {"ID": "2024-I-1", "Problem": "1+1?", "Solution": "So 2.", "Answer": 33}

70 ¦ {"problem": "1+1?", "answer": "70", "id": "0"}
"""
PUBLISHED = [tuple(row.split(" ¦ ")) for row in PUBLISHED.split("\n\n")]


@pytest.mark.parametrize("gold, published", PUBLISHED)
def test_rows_are_read_as_published(gold, published, tmp_path):
    gold, columns = gold.strip(), json.loads(published)
    below = tmp_path / "data"
    below.mkdir()
    (tmp_path / "README.md").write_text("not a row")
    table = pyarrow.Table.from_pylist([columns])
    pyarrow.parquet.write_table(table, below / "train-00000-of-00002.parquet")
    for name in ("train-00001-of-00002", "test"):
        (below / f"{name}.jsonl").write_text(json.dumps(columns) + "\n")
    asked = "1+1?" if "prompt" in columns else f"1+1? {INSTRUCTION}"
    plain = "1+1?" if "prompt" in columns else "1+1?\n"
    rows = read_rows(tmp_path / "*" / "train-*")
    for row in rows:
        assert row.messages == [{"role": "user", "content": asked}]
        assert (row.prompt, row.answer, row.columns) == (plain, gold, columns)
    assert [Path(row.where).name for row in rows] == [
        "train-00000-of-00002.parquet: row 1",
        "train-00001-of-00002.jsonl:1",
    ]
    assert len(read_rows(tmp_path)) == 3 and len(read_rows(below / "test.jsonl")) == 1
    assert score([("math", 1.0)], [rf"\boxed{{{gold}}}"], rows[:1])[0] == [1]


def test_several_files_are_data_of_a_run(tmp_path, monkeypatch):
    """A change of one of them, wherever it is, is seen; and none is none."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "0.jsonl").write_text('{"problem": "q", "answer": "1"}\n')
    (tmp_path / "a" / "1.jsonl").write_text('{"problem": "r", "answer": "1"}\n')

    def digests():
        return [describe_data({"train": path})["train"]["sha256"] for path in ("a", "a/*.jsonl")]

    before = digests()
    assert before[0] == before[1] and len(before[0]) == 64
    (tmp_path / "a" / "1.jsonl").write_text('{"problem": "r", "answer": "2"}\n')
    assert before[0] != digests()[0] == digests()[1]

    class Task:
        train_file, test_file = "a", ""

    os.mkdir("empty")
    assert [fault.key for fault in missing_files(Task, ("train_file", "test_file"))] == [
        "task.test_file"
    ]
    for path in ("empty", "b", "b/*.jsonl"):
        with pytest.raises(FileNotFoundError, match="no such file"):
            read_rows(path)


def test_the_last_box_of_a_solution_is_that_of_maths_authors():
    of_math = runpy.run_path(str(MATH))
    boxes = [
        r"\boxed{1}",
        r"\boxed{\frac{1}{\sqrt{2}}}",
        r"\fbox{3}",
        r"\boxed{\{1,2\}}",
        r"\boxed{5",
    ]
    for first, last in itertools.product([*boxes[:2], ""], boxes):
        solution = f"So ${first}$ and then ${last}$."
        box = of_math["last_boxed_only_string"](solution)
        expected = box and box.partition("{")[2][:-1]
        # theirs prefers a \boxed in front to an \fbox
        if not (first and "fbox" in last):
            assert last_boxed(solution) == expected, solution
    assert last_boxed(r"so $\boxed 2$.") == of_math["remove_boxed"](
        of_math["last_boxed_only_string"](r"so $\boxed 2$.")
    )
    assert last_boxed("no box, but a long text") is None
    with pytest.raises(ValueError, match="of a problem its last .boxed"):
        row_of({"problem": "2+2?", "solution": "4", "level": "Level 1"})
