"""Our verifier function in place of upstream's: weights, a user's own, errors instead of silence."""

import json

import pytest
from rehearsal import emulated, make_tokenizer, run_python

from mindspeed_qerl.tasks.packed import pack_rows
from mindspeed_qerl.tasks.rows import read_rows

SCRIPT = """
import json, sys
from types import SimpleNamespace
from ray import cloudpickle
from mindspeed_qerl.ascend import reward
from mindspeed_rl.models import rule_verifier
cases, data_path = json.loads(sys.argv[1]), sys.argv[2]
answers = []
for responses, labels, names, weights, packed in cases:
    config = SimpleNamespace(verifier_function=names, verifier_weight=weights)
    data = {} if labels is None else {"labels": labels}
    try:
        answers.append(reward.verifier(responses, data, config, data_path if packed else "nowhere"))
    except ValueError as error:
        answers.append(f"{type(error).__name__}: {error}")

def finite(value):
    return [None if number != number else number for number in value]
answers = [[finite(each[0]), each[1]] if type(each) is not str else each for each in answers]
process = reward.QeRLRuleReward.__ray_actor_class__.__new__(reward.QeRLRuleReward.__ray_actor_class__)
reward.RuleReward.__ray_actor_class__.initialize = lambda self, *arguments: answers.append(len(arguments))
process.initialize(SimpleNamespace(data_path=data_path), "rl_config", "tokenizer")
config = SimpleNamespace(verifier_function=["own_reward:levels"], verifier_weight=[1.0])
answers.append(rule_verifier.verifier(["a", "b"], {"labels": ["1", "0"]}, config)[0])

# the second of two processes, as Ray sends it, with answers of the first one's share that nobody has taken
class_ = cloudpickle.loads(cloudpickle.dumps(reward.QeRLRuleReward.__ray_actor_class__))
process, taken = class_.__new__(class_), []
def remote(function):
    return SimpleNamespace(remote=function)
def take(stage, columns, count, indexes, get_n_samples):
    taken.append(indexes)
    return {}, []
class_.__mro__[1].compute_rm_score.__globals__.update(
    ray=SimpleNamespace(get=lambda value: value), get_node_nums=lambda: 2)
process.rl_config = SimpleNamespace(guarantee_order=True, reward_dispatch_size=2, n_samples_per_prompt=2,
                                    multi_turn_enable=False)
process.megatron_config = SimpleNamespace(global_batch_size=4, dataset_additional_keys=["labels"])
process.dp_rank, process.tokenizer, process.sampling_transfer_dock = 1, SimpleNamespace(pad=1), None
process.td = SimpleNamespace(all_consumed=remote(lambda stage: False), get_experience=remote(take))
process.compute_rm_score()
answers.append(taken)
print("ANSWERS", json.dumps(answers))
"""
OWN = """
def levels(responses, answers, rows):
    return [float(response == answer) + row["level"] for response, answer, row in zip(responses, answers, rows)]
def fails(responses, answers, rows):
    return [1 / row["level"] for row in rows]
def seen(responses, answers, rows):
    return [float(row == {"answer": "7"}) for row in rows]
"""

# answers, labels, verifiers, their weights, whether the packed rows are there
CASES = r"""[
    [["#### 7", "#### 8", "it is 7"], ["7 ", " 7", "7"], ["gsm8k_strict"], [1.0], false],
    [["#### 7", "it is 7"], ["7", "7"], ["gsm8k", "gsm8k_strict"], [0.5, 2.0], false],
    [["#### 7"], ["7"], ["gsm8c"], [1.0], false],
    [["#### 7"], null, ["gsm8k"], [1.0], false],
    [["#### 7", "#### 7"], ["7", " "], ["gsm8k"], [1.0], false],
    [["7", "two words"], ["0", "1 "], ["own_reward:levels"], [0.5], true],
    [["x"], ["7"], ["own_reward:seen"], [1.0], false],
    [["a", "b"], ["0", "1"], ["own_reward:fails"], [1.0], true],
    [["a"], ["3"], ["own_reward:levels"], [1.0], true],
    [["\\\\boxed{0.5}", "\\\\boxed{9^{9^{9^{9}}}}", "Answer: 7"], ["2", "2", "2"],
        ["math", "own_reward:levels"], [1.0, 0.5], true],
    [["\\\\boxed{9^{9^{9^{9}}}}"], ["7"], ["math"], [1.0], false]
]"""


@pytest.fixture(scope="module")
def answers(upstream, tmp_path_factory):
    folder = tmp_path_factory.mktemp("own")
    (folder / "own_reward.py").write_text(OWN)
    (folder / "rows.jsonl").write_text(
        '{"prompt": "Which?", "answer": "7", "level": 10}\n{"prompt": "What?", "answer": "two '
        'words", "level": 0}\n'
        + json.dumps({"problem": "Half?", "solution": r"It is $\\boxed{\\frac12}$.", "level": 1})
    )
    make_tokenizer().save_pretrained(folder / "tokenizer")
    data_path = str(
        pack_rows(
            read_rows(folder / "rows.jsonl"), folder / "packed" / "train", folder / "tokenizer"
        ).data_path
    )
    result = run_python(["-c", SCRIPT, CASES, data_path], emulated(upstream), folder)
    assert "ANSWERS" in result.stdout, result.stderr[-2000:]
    return json.loads(result.stdout.split("ANSWERS")[1])


def test_rewards_are_weighted_and_summed(answers):
    strict, both = answers[:2]  # labels arrive with spaces
    assert strict == [[1.0, 0.0, 0.0], {"verifier/gsm8k_strict/mean": [1.0, 0.0, 0.0]}]
    means = {"verifier/gsm8k/mean": [1.0, 1.0], "verifier/gsm8k_strict/mean": [1.0, 0.0]}
    assert both == [[2.5, 0.5], means]


def test_a_users_own_reward_gets_the_rows_that_were_packed(answers):
    assert answers[5] == [[5.5, 0.5], {"verifier/own_reward:levels/mean": [11.0, 1.0]}]
    assert answers[6][0] == [1.0], "without packed rows, a row is what is known of it"


def test_what_math_verify_cannot_compute_has_no_reward_and_is_in_no_mean(answers):
    """Packed rows of MATH, as published: the gold answer is in the last box of the solution."""
    means = {"verifier/math/mean": [1.0, 0.0], "verifier/own_reward:levels/mean": [1.0] * 3}
    assert answers[9] == [[1.5, None, 0.5], means]
    assert answers[10] == [[None], {}]


@pytest.mark.parametrize(
    "number, words",
    [
        (2, "ConfigError: rl_config.verifier_function: unknown verifier 'gsm8c', did you mean"),
        (3, "ConfigError: 1 responses with 0 labels: the data needs the column `labels`"),
        (4, "ConfigError: label '' is neither an answer nor the number"),
        (7, "RewardError: verifier 'own_reward:fails' raised ZeroDivisionError: division by zero"),
        (7, "own_reward.py:5), on 2 responses, the first: "),
        (8, "ConfigError: label '3' is neither an answer nor the number of a packed row"),
    ],
)
def test_what_is_wrong_is_an_error(number, words, answers):
    assert words in answers[number]


def test_the_reward_process_puts_it_in_upstreams_place(answers):
    assert answers[11:13] == [3, [0.0, 10.0]]


def test_a_reward_process_ends_with_its_own_share(answers):
    """Upstream's takes more until all answers are taken: two nodes' processes seldom end together."""
    assert answers[13] == [[4, 5], [6, 7]]
