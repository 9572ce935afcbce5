"""What our trainer selects, with a dock and workers that are lists; test_trainer.py runs this with
upstream's code on the path.
"""

from itertools import repeat
from types import SimpleNamespace

import numpy as np
import pytest
import ray
import torch
from mindspeed_rl.utils.pad_process import (
    padding_dict_to_tensor_dict,
    remove_padding_tensor_dict_to_dict,
)

from mindspeed_qerl.ascend.observer import TokenObserver
from mindspeed_qerl.ascend.trainer import QeRLTrainer, to_our_names
from mindspeed_qerl.common.errors import EngineError
from mindspeed_qerl.recipe.types import Algorithm, Quantization, Selection

PROMPTS, N, EOS = 2, 2, 3
written = []  # what the observer was told of answers


class Remote:
    """Calls a function where Ray would send it to an actor."""

    def __init__(self, function):
        self.remote = function


class Dock:
    """The columns of one batch of answers."""

    def __init__(self):
        self.columns, self.metrics = {}, {}
        self.get_experience, self.clear = Remote(self._get), Remote(lambda: self.columns.clear())
        self.put_experience = Remote(self._put)

    def _get(self, consumer, names, count, indexes):
        assert indexes == list(range(PROMPTS * N))
        return padding_dict_to_tensor_dict({name: self.columns[name] for name in names}), indexes

    def _put(self, data_dict, indexes, is_prompt=False):
        self.columns |= remove_padding_tensor_dict_to_dict(data_dict)


def answers(rewards, truncated=(0, 0, 0, 0), lengths=(2, 2, 2, 2), logprob=-0.5):
    responses = [
        torch.tensor([5 + i] * (length - 1) + [EOS if not cut else 9])
        for i, (length, cut) in enumerate(zip(lengths, truncated))
    ]
    return {
        "prompts": [torch.tensor([i // N]) for i in range(4)],
        "prompt_length": [torch.tensor([1])] * 4,
        "responses": responses,
        "response_length": [torch.tensor([length]) for length in lengths],
        "input_ids": responses,
        "rm_scores": [torch.tensor([float(reward)]) for reward in rewards],
        "rollout_log_prob": [torch.full((length,), logprob) for length in lengths],
        "truncated": [torch.tensor([cut]) for cut in truncated],
        "labels": [torch.tensor([7])] * 4,
    }


@pytest.fixture
def make(monkeypatch):
    """make(batches, algorithm, selection): a trainer whose dock holds the first batch of answers,
    and gets the next one each time that prompts are asked.
    """
    monkeypatch.setattr(ray, "get", lambda found: found)
    written.clear()

    def build(batches, algorithm=None, **selection):
        trainer, dock, said = object.__new__(QeRLTrainer), Dock(), []
        batches = iter(batches)
        dock.columns |= next(batches)
        metrics = SimpleNamespace(metric={"timing/rollout": [2, 1]})
        trainer.recipe = SimpleNamespace(
            algorithm=algorithm or Algorithm(),
            selection=Selection(**selection),
            quantization=Quantization(),
        )
        trainer.transfer_dock, trainer.dataset_additional_keys = dock, ["labels"]
        trainer.n_samples_per_prompt, trainer.global_batch_size = N, PROMPTS
        trainer.batches_asked, trainer.values, trainer.tokens, trainer.step = 5, {}, 0, 6
        trainer.replay = trainer.recipe.algorithm.routing_replay
        prompts = {"prompts": [torch.tensor([8]), torch.tensor([9])]}
        trainer.batches = repeat(prompts | {"labels": [torch.tensor([7])] * 2})

        def update_metrics(key, value=None, cumulate=False):
            dock.metrics.update({key: value} if key else value)

        trainer.data_strategy = SimpleNamespace(
            put_experience=dock._put, get_metrics=lambda: metrics, update_metrics=update_metrics
        )

        def generate_sequences(blocking):
            assert set(dock.columns) == {"prompts", "prompt_length", "labels"}
            dock.columns |= next(batches)

        trainer.actor_worker = SimpleNamespace(generate_sequences=generate_sequences)
        trainer.reward_list = [SimpleNamespace(compute_rm_score=Remote(lambda: None))]
        trainer.observer = object.__new__(TokenObserver)
        vars(trainer.observer).update(
            ends={EOS},
            tokenizer=SimpleNamespace(decode=str),
            progress=SimpleNamespace(message=said.append),
            sampled_tokens=lambda step, answers: written.append((step, answers["rm_scores"])),
        )
        return trainer, dock, said

    return build


def column(dock, name):
    return [values[0].item() for values in dock.columns[name]]


def test_advantages_are_of_rewards_with_what_the_length_costs(make):
    trainer, dock, _ = make(
        [answers([1, 0, 1, 0], lengths=(10, 2, 9, 10))],
        overlong_buffer_enable=True,
        rollout_max_tokens=10,
        overlong_buffer=4,
        overlong_buffer_penalty_factor=0.5,
    )
    trainer.compute_advantage()
    rewards = np.array([1 - 0.5, 0, 1 - 0.375, -0.5]).reshape(2, 2)
    expected = (rewards - rewards.mean(1, keepdims=True)) / (
        rewards.std(1, ddof=1, keepdims=True) + 1e-6
    )
    assert column(dock, "advantages") == pytest.approx(expected.reshape(-1), abs=1e-5)
    assert [len(values) for values in dock.columns["advantages"]] == [10, 2, 9, 10]
    assert (
        column(dock, "trained") == [1, 1, 1, 1]
        and trainer.tokens == 31
        and trainer.batches_asked == 6
    )
    assert trainer.values["reward/mean"] == pytest.approx(rewards.mean())


def test_dynamic_sampling_asks_until_there_are_enough_groups(make):
    """Batches with one, none and two groups of different rewards: the first groups found are
    trained.
    """
    trainer, dock, said = make(
        [answers([1, 1, 0, 1]), answers([0, 0, 0, 0]), answers([1, 0, 0, 1])],
        filter_groups_enable=True,
        filter_groups_max_batches=0,
    )
    trainer.compute_advantage()
    assert (
        column(dock, "rm_scores") == [0, 1, 1, 0]
        and column(dock, "trained") == [1] * 4
        and said == []
    )
    assert (
        trainer.values["selection/sampled_groups"] == 6
        and trainer.values["selection/trained_groups"] == 2
    )
    assert trainer.values["reward/mean"] == pytest.approx(5 / 12) and trainer.batches_asked == 8
    assert dock.metrics["timing/rollout"] == [2, 1]  # what upstream had measured is still there


def test_too_few_groups_are_trained_and_the_rest_fills_up(make):
    trainer, dock, said = make(
        [answers([1, 1, 1, 1]), answers([0, 0, 0, 1])],
        filter_groups_enable=True,
        filter_groups_max_batches=2,
    )
    trainer.compute_advantage()
    assert (
        column(dock, "rm_scores") == [0, 1, 1, 1]
        and column(dock, "trained") == [1, 1, 0, 0]
        and said == []
    )
    assert trainer.tokens == 4


@pytest.mark.parametrize("limit", [0, -1])
def test_a_step_that_never_finds_enough_groups_is_no_silent_loop(make, limit):
    batches = [answers([1, 1, 1, 1])] * 20 + [answers([0, 1, 1, 0])]
    trainer, _, said = make(batches, filter_groups_enable=True, filter_groups_max_batches=limit)
    trainer.compute_advantage()
    assert [line.split(", and")[0] for line in said] == [
        f"Warning: step 7 asked {count} batches" for count in (10, 20)
    ]


def test_a_step_without_a_signal_says_so(make):
    trainer, dock, said = make(
        [answers([1, 1, 1, 1])] * 2, filter_groups_enable=True, filter_groups_max_batches=2
    )
    trainer.compute_advantage()
    assert column(dock, "trained") == [0] * 4 and trainer.tokens == 0
    assert said == [
        "Warning: step 7 trains nothing: no group had answers of different rewards, of 4 groups"
    ]
    values, tokens = logged(trainer, take_metrics=[{}])
    assert "loss/total" not in values and tokens == 0


def logged(trainer, **on_ranks):
    """(values, tokens) that the observer is told of the step."""
    told = []
    vars(trainer.observer).update(
        stepped=lambda step, values, tokens, routes: told.append((values, tokens)),
        wants_proof=lambda step: False,
        wants_evaluation=lambda step: False,
    )
    trainer.actor_worker.execute_sync_command = on_ranks.get
    trainer.log_metrics({}, 7)
    return told[0]


def test_the_error_of_quantised_weights_counts_each_part_once(make):
    """Two engines of two tensor parallel ranks, which have copies of shared parts and each their
    own experts.
    """
    trainer, _, _ = make([answers([1, 0, 1, 0])])
    trainer.recipe.quantization = Quantization("nvfp4")
    o_proj, expert = "model.layers.0.self_attn.o_proj", "model.layers.3.mlp.experts.{}.up_proj"
    squares = [
        {(o_proj, rank % 2): (1.0 + rank % 2, 8.0), (expert.format(rank), 0): (4.0, 16.0)}
        for rank in range(4)
    ]
    values, _ = logged(trainer, take_metrics=[{}] * 4, take_weight_squares=squares)
    assert values == pytest.approx(
        {
            "quantization/weight_error": (19 / 80) ** 0.5,
            "quantization/weight_error/layer_0": (3 / 16) ** 0.5,
            "quantization/weight_error/layer_3": 0.5,
        }
    )


def test_answers_that_were_cut_off_count_in_their_group_and_are_not_trained(make):
    trainer, dock, said = make(
        [answers([1, 0, 1, 0], truncated=(0, 1, 0, 1))], Algorithm(mask_truncated_completions=True)
    )
    trainer.compute_advantage()
    assert column(dock, "trained") == [1, 0, 1, 0] and trainer.tokens == 4 and said == []
    assert column(dock, "advantages") == pytest.approx([0.7071, -0.7071] * 2, abs=1e-4)
    trainer, dock, said = make(
        [answers([1, 0, 1, 0], truncated=(1, 1, 1, 1))], Algorithm(mask_truncated_completions=True)
    )
    trainer.compute_advantage()
    assert said == ["Warning: step 7 trains nothing: every answer was cut off, of 2 groups"]


@pytest.mark.parametrize("logprob", [float("nan"), -float("inf"), 0.5])
def test_a_log_prob_that_is_none_names_the_answer(make, logprob):
    """And the answers are written before the run stops."""
    trainer, _, _ = make([answers([1, 0, 1, 0], logprob=logprob)])
    with pytest.raises(
        EngineError,
        match=rf"vLLM gave {logprob} as a log probability for token 1 of the answer "
        r"'tensor\(\[5, 3\]\)'",
    ):
        trainer.compute_advantage()
    assert [(step, torch.cat(rewards).tolist()) for step, rewards in written] == [(7, [1, 0, 1, 0])]


def test_an_answer_that_lost_its_end_stops_the_run(make):
    lost = answers([1, 0, 1, 0])
    lost["responses"][2] = torch.tensor([5, 6])
    trainer, _, _ = make([lost])
    with pytest.raises(
        EngineError, match=r"the last trained token of 1 of 4 answers that ended by themselves"
    ):
        trainer.compute_advantage()


def test_upstreams_metrics_have_our_names():
    metrics = {"actor/lr": 1e-3, "gsm8k_rewards/mean": "0.5", "aqn/layers": 4.0, "x": None}
    assert to_our_names(metrics | {"e2e_tps": 3}) == {
        "lr": 1e-3,
        "verifier/gsm8k/mean": 0.5,
        "aqn/layers": 4,
        "upstream/e2e_tps": 3.0,
    }
