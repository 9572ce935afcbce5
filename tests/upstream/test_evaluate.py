"""tools/evaluate.py on a checkpoint of the NPU engine gives the greedy answers of the run's own
last evaluation.
"""

import json

import pytest
from rehearsal import ROOT, environment, finished, make_config, run_engine, run_python

from mindspeed_qerl.runs.metrics import read_jsonl


def evaluate(run, upstream, *more):
    command = [ROOT / "tools" / "evaluate.py", "--run", run.path, *more]
    return run_python(command, environment(upstream))


@pytest.mark.parametrize(
    "family, layout",
    [("qwen3", dict(tp=2, infer_tp=2)), ("qwen3_moe", dict(ep=2, infer_ep=2))],
    ids=["qwen3-tp2", "qwen3_moe-ep2"],
)
def test_greedy_answers_are_those_of_the_run(family, layout, upstream, tiny, tmp_path):
    changes = {
        "eval.temperature": 0.0,
        "eval.samples_per_problem": 1,
        "eval.n_problems": 8,
        "eval.every": 1,
        "actor_config.lr": 0.02,
    }
    sizes = dict(npus=2, train_iters=2, base=tmp_path / "base")
    config = make_config(family, *tiny(family), tmp_path, **sizes, changes=changes, **layout)
    run = finished(run_engine(config, upstream, tmp_path), tmp_path / "rehearsal")
    asked = {
        step: [row for row in read_jsonl(run.eval_answers_file) if row["step"] == step]
        for step in (0, 1, 2)
    }
    assert len(asked[2]) == 8
    texts = {step: [row["responses"] for row in rows] for step, rows in asked.items()}
    assert (
        texts[0] != texts[2] != texts[1]
    )  # training moved them: the right checkpoint is told from others

    for step in (2, 0):
        tool = evaluate(run, upstream, *(["--step", str(step)] if step < 2 else []))
        assert tool.returncode == 0, tool.stdout[-2000:] + tool.stderr[-4000:]
        folder = run.path / "evaluations" / f"step{step}"
        assert [row["responses"] for row in read_jsonl(folder / "answers.jsonl")] == texts[step]
        summary = json.loads((folder / "summary.json").read_text())
        of_run = [row for row in read_jsonl(run.eval_file) if row["step"] == step]
        assert summary["greedy"]["accuracy"] == of_run[0]["accuracy"] and summary["step"] == step
