"""Our verifier function in place of upstream's: ours and upstream's by name, weights, and errors instead of silence."""

import json
import os
import subprocess
import sys

import pytest
from rehearsal import environment

from mindspeed_qerl import emulation

SCRIPT = """
import json, sys
from types import SimpleNamespace
from mindspeed_qerl.ascend import reward
from mindspeed_rl.models import rule_verifier
answers = []
for responses, labels, names, weights in json.loads(sys.argv[1]):
    config = SimpleNamespace(verifier_function=names, verifier_weight=weights)
    data = {} if labels is None else {"labels": labels}
    try:
        answers.append(reward.verifier(responses, data, config))
    except ValueError as error:
        answers.append(str(error))
config = SimpleNamespace(verifier_function=["base_acc"], verifier_weight=[1.0])
answers.append(rule_verifier.verifier([RIGHT, "7"], {"labels": ["7", "7"]}, config)[0])
print("ANSWERS", json.dumps(answers))
"""
RIGHT = "<think>3+4</think><answer>\\boxed{7}</answer>"


@pytest.fixture(scope="module")
def answers(upstream):
    cases = [
        (["#### 7", "#### 8", "it is 7"], ["7 ", " 7", "7"], ["gsm8k_strict"], [1.0]),
        ([RIGHT, "#### 7"], ["7", "7"], ["gsm8k", "base_acc"], [0.5, 2.0]),
        (["#### 7"], ["7"], ["gsm8c"], [1.0]),
        (["#### 7"], None, ["gsm8k"], [1.0]),
        (["#### 7", "#### 7"], ["7", " "], ["gsm8k"], [1.0]),
    ]
    variables = environment(upstream)
    path = os.pathsep.join([str(emulation.STAND_INS), variables["PYTHONPATH"]])
    result = subprocess.run([sys.executable, "-c", SCRIPT.replace("RIGHT", repr(RIGHT)), json.dumps(cases)], check=False, capture_output=True,
                            text=True, env={**variables, **emulation.environment(1), "PYTHONPATH": path, "IS_MULTIMODAL": "False"})
    [line] = [line for line in result.stdout.splitlines() if line.startswith("ANSWERS")] or [result.stderr[-2000:]]
    return json.loads(line.removeprefix("ANSWERS"))


def test_labels_arrive_with_spaces(answers):
    assert answers[0] == [[1.0, 0.0, 0.0], {"gsm8k_strict_rewards/mean": [1.0, 0.0, 0.0]}]


def test_ours_and_upstreams_are_weighted_and_summed(answers):
    scores, metrics = answers[1]
    assert metrics["base_acc_rewards/mean"] == [1.0, 0.0] == answers[5]
    assert scores == [0.5 * ours + 2.0 * theirs for ours, theirs in zip(metrics["gsm8k_rewards/mean"], metrics["base_acc_rewards/mean"])]
    assert metrics["gsm8k_rewards/mean"][1] == 1.0


def test_an_unknown_name_is_an_error_with_the_known_ones(answers):
    assert "unknown verifier 'gsm8c', did you mean 'gsm8k'? Known: acc, acc_for_dapo" in answers[2]


def test_missing_labels_are_an_error(answers):
    assert answers[3].startswith("1 responses with 0 labels, first missing or empty at 0")
    assert answers[4].startswith("2 responses with 2 labels, first missing or empty at 1")
