"""A task of one's own on the real upstream: rows packed by the tool, a reward by import path, an
exception.
"""

import json

import pytest
from rehearsal import ROOT, environment, finished, make_config, run_engine, run_python

from mindspeed_qerl.runs.directory import RunDirectory
from mindspeed_qerl.runs.metrics import read_jsonl

REWARD = """
def marked(responses, answers, rows):
    return [row["marks"]["base"] + len(response) / 100 for response, row in zip(responses, rows)]

def fails(responses, answers, rows):
    return [1 / (row["marks"]["base"] - 0.75) for row in rows]
"""
WORDS = (
    "none",
    "one pear",
    "two pears",
    "three pears",
    "four pears",
    "five pears",
)  # answers that are no numbers
BASES = {word: i / 4 for i, word in enumerate(WORDS)}
TRAINED, TESTED = WORDS[:4], WORDS[4:]


@pytest.fixture(scope="module")
def task(upstream, tiny, tmp_path_factory):
    """(model, changes to a config): four training rows, which are one batch, and two to test with."""
    folder, (model, _) = tmp_path_factory.mktemp("task"), tiny("qwen3")
    for name, words in (("train", TRAINED), ("test", TESTED)):
        rows = (
            {"prompt": f"Which is {BASES[word]}?", "answer": word, "marks": {"base": BASES[word]}}
            for word in words
        )
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    data_path = folder / "packed" / "train"
    words = [ROOT / "tools" / "pack_task.py", "--rows", folder / "train.jsonl"]
    words += ["--tokenizer", model, "--data-path", data_path]
    assert run_python(words, environment(upstream)).returncode == 0
    return model, {
        "megatron_training.data_path": str(data_path),
        "task.test_file": str(folder / "test.jsonl"),
        "eval.n_problems": 2,
        "rl_config.verifier_function": ["own_reward:marked"],
    }


def test_the_reward_sees_the_rows(task, upstream, tmp_path):
    """Its module is on PYTHONPATH. Each reward is counted again from the answer that was kept
    beside it.
    """
    model, changes = task
    package = tmp_path / "package"
    package.mkdir()
    (package / "own_reward.py").write_text(REWARD)
    config = make_config("qwen3", model, tmp_path, tmp_path, npus=2, train_iters=2, changes=changes)
    run = finished(run_engine(config, upstream, tmp_path, package), tmp_path / "rehearsal")

    kept, metrics = read_jsonl(run.rollouts_file), read_jsonl(run.metrics_file)
    for row in metrics:
        rollouts = [one for one in kept if one["step"] == row["step"]]
        expected = [BASES[one["answer"]] + len(one["response"]) / 100 for one in rollouts]
        assert sorted(one["answer"] for one in rollouts) == sorted(2 * TRAINED)
        assert [one["reward"] for one in rollouts] == pytest.approx(expected, rel=1e-6)
        means = row["verifier/own_reward:marked/mean"], row["reward/mean"]
        assert means == pytest.approx(2 * (sum(expected) / 8,))
    assert len(metrics) == 2 and len({one["reward"] for one in kept}) > 4, "the length counts"
    for evaluation in read_jsonl(run.eval_file):
        problems = [
            one for one in read_jsonl(run.eval_answers_file) if one["step"] == evaluation["step"]
        ]
        assert [problem["answer"] for problem in problems] == list(TESTED)
        expected = [
            BASES[problem["answer"]] + len(text) / 100
            for problem in problems
            for text in problem["responses"]
        ]
        assert [score for problem in problems for score in problem["scores"]] == pytest.approx(
            expected
        )
        assert evaluation["accuracy"] == pytest.approx(sum(expected) / 4)


def test_an_exception_in_the_reward_ends_the_run(task, upstream, tmp_path):
    """Its module is in the folder that the run starts in. The two rows that are tried before the
    start do not show it, nor do those of the evaluation.
    """
    model, changes = task
    (tmp_path / "own_reward.py").write_text(REWARD)
    config = make_config(
        "qwen3",
        model,
        tmp_path,
        tmp_path,
        npus=2,
        train_iters=2,
        changes=changes | {"rl_config.verifier_function": ["own_reward:fails"]},
    )
    result = run_engine(config, upstream, tmp_path)
    said = "verifier 'own_reward:fails' raised ZeroDivisionError: float division by zero ("
    assert result.returncode == 1 and said in result.stderr, (
        result.stdout[-3000:] + result.stderr[-3000:]
    )
    assert "own_reward.py:6), on " in result.stderr
    status = RunDirectory.open(next((tmp_path / "rehearsal").iterdir())).status()
    assert status["state"] == "failed" and status["step"] == 0 and said in status["reason"]
