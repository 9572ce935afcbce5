"""The example of docs/own_task.md, run as it is printed: its files, its command, its rewards
counted again.
"""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from mindspeed_qerl.runs.directory import RunDirectory
from mindspeed_qerl.runs.metrics import read_jsonl
from mindspeed_qerl.tasks.rows import read_rows
from tests import ROOT

TEXT = (ROOT / "docs" / "own_task.md").read_text(encoding="utf-8")
EXAMPLE = TEXT[TEXT.index("## A complete example") : TEXT.index("## The files")]
FILES = dict(re.findall(r"`(my_task/[\w.]+)`:\n\n```\w+\n(.*?)```", EXAMPLE, re.DOTALL))
[COMMAND] = re.findall(r"```bash\n(.*?)```", EXAMPLE, re.DOTALL)


def start(folder, command):
    variables = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
    }
    return subprocess.run(
        ["bash", "-c", command],
        check=False,
        cwd=folder,
        capture_output=True,
        text=True,
        env=variables,
    )


def only_run(done, folder):
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    [path] = folder.iterdir()
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the quickstart's model is, untrained."""
    from mindspeed_qerl.demo.tiny_model import ModelRecipe, make_tiny_model

    folder = tmp_path_factory.mktemp("own")
    make_tiny_model(
        folder / "models" / "tiny_qwen3_moe",
        ModelRecipe(steps=0, train_problems=4, test_problems=4),
    )
    (folder / "cli").symlink_to(ROOT / "cli")
    (folder / "my_task").mkdir()
    for name, content in FILES.items():
        (folder / name).write_text(content, encoding="utf-8")
    return folder


# a reward of one's own in a run: test_a_reward_that_fails stops one before it starts
@pytest.mark.full
def test_the_example_runs_as_printed(folder):
    done = start(folder, COMMAND)
    path = only_run(done, folder / "runs" / "grpo_tiny_moe_cpu")
    run = RunDirectory.open(path)
    reward = runpy.run_path(str(folder / "my_task" / "reward.py"))["right_and_short"]

    rows = {row.question: row for row in read_rows(folder / "my_task" / "train.jsonl")}
    kept = read_jsonl(run.path / "rollouts.jsonl")
    assert [row["step"] for row in read_jsonl(run.metrics_file)] == [1, 2, 3] and {
        row["step"] for row in kept
    } == {1, 2, 3}
    for one in kept:
        row = rows[one["question"]]
        assert one["answer"] == row.answer and [one["reward"]] == reward(
            [one["response"]], [row.answer], [row.columns]
        )
    # the length counts
    assert len({one["reward"] for one in kept}) > 2

    tested = read_rows(folder / "my_task" / "test.jsonl")
    for scored in read_jsonl(run.path / "eval_answers.jsonl"):
        [row] = [row for row in tested if row.question == scored["question"]]
        assert (
            scored["scores"] == reward(scored["responses"], [row.answer] * 4, [row.columns] * 4)
            and "rules" not in scored
        )
    assert len(read_jsonl(run.path / "eval.jsonl")) >= 2


def test_a_reward_that_fails_ends_the_run_before_it_starts(folder):
    (folder / "my_task" / "bad.py").write_text(
        "def bad(responses, answers, rows):\n    return [row['points'] for row in rows]\n"
    )
    done = start(folder, COMMAND.replace("my_task.reward:right_and_short", "my_task.bad:bad"))
    assert done.returncode in (1, 2) and "Traceback" not in done.stderr
    for words in (
        "verifier 'my_task.bad:bad' raised KeyError: 'points' (",
        "my_task/bad.py:2), on 4 responses, the first: ",
        "my_task/train.jsonl:1: question 'Tom has 3",
    ):
        assert words in done.stderr
