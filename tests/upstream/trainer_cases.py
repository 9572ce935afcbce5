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

from mindspeed_qerl.aqn.schedule import NoiseLevel
from mindspeed_qerl.ascend.observer import TokenObserver
from mindspeed_qerl.ascend.trainer import QeRLTrainer, to_our_names
from mindspeed_qerl.common.errors import EngineError
from mindspeed_qerl.recipe.types import Algorithm, Noise, Quantization, Selection

PROMPTS, N, EOS = 2, 2, 3
LIKE = [1, 1, 1, 1]  # rewards that teach nothing


class Remote:
    """Calls a function where Ray would send it to an actor."""

    def __init__(self, function):
        self.remote = function


class Dock:
    """The columns of one batch of answers."""

    def __init__(self):
        self.columns, self.metrics = {}, {}
        self.get_experience = Remote(self._get)

    def _get(self, consumer, names, count, indexes):
        assert indexes == list(range(PROMPTS * N)) and count == len(indexes)
        return padding_dict_to_tensor_dict({name: self.columns[name] for name in names}), indexes

    def put(self, data_dict, indexes, is_prompt=False):
        self.columns |= remove_padding_tensor_dict_to_dict(data_dict)

    def update_metrics(self, key, value=None, cumulate=False):
        self.metrics.update({key: value} if key else value)

    def __getitem__(self, name):
        return [values[0].item() for values in self.columns[name]]


def answers(rewards, truncated=(0, 0, 0, 0), lengths=(2, 2, 2, 2), logprob=-0.5):
    responses = [
        torch.tensor([5 + i] * (length - 1) + [9 if cut else EOS])
        for i, (length, cut) in enumerate(zip(lengths, truncated))
    ]
    numbers = {"response_length": lengths, "truncated": truncated, "prompt_length": [1] * 4}
    numbers |= {"prompts": [0, 0, 1, 1], "labels": [7] * 4, "rm_scores": map(float, rewards)}
    return {
        **{name: [torch.tensor([value]) for value in values] for name, values in numbers.items()},
        "responses": responses,
        "input_ids": responses,
        "rollout_log_prob": [torch.full((length,), logprob) for length in lengths],
    }


@pytest.fixture
def make(monkeypatch):
    """make(batches, algorithm, selection): a trainer whose dock holds the first batch of answers,
    and gets the next one each time that prompts are asked; its dock, and what it says.
    """
    monkeypatch.setattr(ray, "get", lambda value: value)

    def build(*batches, algorithm=None, **selection):
        trainer, dock, said = object.__new__(QeRLTrainer), Dock(), []
        batches = iter(batches)
        dock.columns |= next(batches)
        trainer.recipe = SimpleNamespace(
            algorithm=algorithm or Algorithm(),
            selection=Selection(**selection),
            quantization=Quantization(),
            noise=Noise(),
        )
        prompts = {"prompts": list(torch.tensor([[8], [9]])), "labels": [torch.tensor([7])] * 2}

        def generate_sequences(blocking):
            assert set(dock.columns) == {"prompts", "prompt_length", "labels"}
            dock.columns |= next(batches)

        strategy = SimpleNamespace(
            put_experience=dock.put,
            update_metrics=dock.update_metrics,
            clear_main=dock.columns.clear,
            get_metrics=lambda: SimpleNamespace(metric={"timing/rollout": [2, 1]}),
        )
        observer = object.__new__(TokenObserver)
        vars(observer).update(
            ends={EOS},
            tokenizer=SimpleNamespace(decode=str),
            progress=SimpleNamespace(message=said.append),
            written=[],
            sampled_tokens=lambda step, answers: observer.written.append(answers["rm_scores"]),
        )
        vars(trainer).update(
            observer=observer,
            noise=None,
            level=None,
            transfer_dock=dock,
            data_strategy=strategy,
            dataset_additional_keys=["labels"],
            n_samples_per_prompt=N,
            global_batch_size=PROMPTS,
            rows=list(range(PROMPTS * N)),
            actor_worker=SimpleNamespace(generate_sequences=generate_sequences),
            reward_list=[SimpleNamespace(compute_rm_score=Remote(lambda: None))],
            batches=repeat(prompts),
            batches_asked=5,
            values={},
            tokens=0,
            routes=0,
            step=6,
            replays=False,
        )
        return trainer, dock, said

    return build


def test_advantages_are_of_rewards_with_what_the_length_costs(make):
    trainer, dock, _ = make(
        answers([1, 0, 1, 0], lengths=(10, 2, 9, 10)),
        overlong_buffer_enable=True,
        rollout_max_tokens=10,
        overlong_buffer=4,
        overlong_buffer_penalty_factor=0.5,
    )
    trainer.compute_advantage()
    rewards = np.array([1 - 0.5, 0, 1 - 0.375, -0.5]).reshape(2, 2)
    expected = rewards - rewards.mean(1, keepdims=True)
    expected /= rewards.std(1, ddof=1, keepdims=True) + 1e-6
    assert dock["advantages"] == pytest.approx(expected.reshape(-1), abs=1e-5)
    assert [len(values) for values in dock.columns["advantages"]] == [10, 2, 9, 10]
    assert (dock["trained"], trainer.tokens, trainer.batches_asked) == ([1] * 4, 31, 6)
    assert trainer.values["reward/mean"] == pytest.approx(rewards.mean())


@pytest.mark.parametrize(
    "batches, limit, scores, trained",
    [
        # one, none and two groups of different rewards: the first groups are trained
        ([[1, 1, 0, 1], [0, 0, 0, 0], [1, 0, 0, 1]], 0, [0, 1, 1, 0], [1] * 4),
        # too few: the rest fills up
        ([LIKE, [0, 0, 0, 1]], 2, [0, 1, 1, 1], [1, 1, 0, 0]),
    ],
)
def test_dynamic_sampling(batches, limit, scores, trained, make):
    trainer, dock, said = make(
        *map(answers, batches), filter_groups_enable=True, filter_groups_max_batches=limit
    )
    trainer.compute_advantage()
    assert (dock["rm_scores"], dock["trained"], said) == (scores, trained, [])
    assert trainer.tokens == 2 * sum(trained) and trainer.batches_asked == 5 + len(batches)
    assert trainer.values["selection/sampled_groups"] == 2 * len(batches)
    assert trainer.values["selection/trained_groups"] == sum(trained) / N
    assert trainer.values["reward/mean"] == np.mean(batches)
    assert dock.metrics["timing/rollout"] == [2, 1]  # what upstream had measured is still there


NOTHING = ({}, {}, {}, {})  # that a rank reports


def logged(trainer, *reports):
    """(values, tokens) that the observer is told of the step, which ranks report so of."""
    told = []
    vars(trainer.observer).update(
        stepped=lambda step, values, tokens, routes, noise: told.append((values, tokens)),
        wants_proof=lambda step, gradient: False,
        wants_evaluation=lambda step: False,
    )
    asked = []
    trainer.on_ranks = lambda method: asked.append(method) or reports or [NOTHING]
    trainer.log_metrics({}, 7)
    assert asked == ["take_report"]  # of each step, also of one that trains nothing
    return told[0]


@pytest.mark.parametrize(
    "batch, options, why",
    [
        (
            answers(LIKE),
            dict(filter_groups_enable=True),
            "no group had answers of different rewards, of 2 groups",
        ),
        (
            answers([1, 0, 1, 0], truncated=(1, 1, 1, 1)),
            dict(algorithm=Algorithm(mask_truncated_completions=True)),
            "every answer was cut off or could not be judged, of 2 groups",
        ),
    ],
)
def test_a_step_that_trains_nothing_says_so(batch, options, why, make):
    trainer, dock, said = make(batch, **options)
    trainer.compute_advantage()
    assert dock["trained"] == [0] * 4 and trainer.tokens == 0
    assert said == [f"Warning: step 7 trains nothing: {why}"]
    values, tokens = logged(trainer)
    assert "loss/total" not in values and tokens == 0


def test_the_ranks_are_told_the_noise_of_the_next_step_once_this_one_was_reported(make):
    trainer, _, _ = make(answers(LIKE))
    told = []
    assert logged(trainer)[1] == 0  # a run without noise tells nobody
    trainer.level = before = NoiseLevel(step=6, stage=1, sigma=0.1)
    after = NoiseLevel(step=7, stage=1, sigma=0.2)
    trainer.noise = SimpleNamespace(
        level={7: after}.get, update=lambda level, values: {"aqn/reached_k3": level.sigma}
    )
    trainer.observer.stepped = lambda step, values, *more: told.append((step, values, more))
    trainer.on_ranks = lambda *call: told.append(call) or [NOTHING]
    trainer.log_metrics({}, 7)
    assert told[-2:] == [(7, {"aqn/reached_k3": 0.1}, (0, 0, before)), ("set_noise", after)]


def test_the_error_of_quantized_weights_counts_each_part_once(make):
    """Two engines of two tensor parallel ranks, which have copies of shared parts and each their
    own experts.
    """
    trainer, _, _ = make(answers([1, 0, 1, 0]))
    trainer.recipe.quantization = Quantization("nvfp4")
    o_proj, expert = "model.layers.0.self_attn.o_proj", "model.layers.3.mlp.experts.{}.up_proj"
    squares = [
        {(o_proj, rank % 2): (1.0 + rank % 2, 8.0), (expert.format(rank), 0): (4.0, 16.0)}
        for rank in range(4)
    ]
    reports = [({}, {}, of_rank, {"aqn/sigma": 0.1}) for of_rank in squares]
    values, _ = logged(trainer, *reports)
    assert values == pytest.approx(
        {
            "aqn/sigma": 0.1,
            "quantization/weight_error": (19 / 80) ** 0.5,
            "quantization/weight_error/layer_0": (3 / 16) ** 0.5,
            "quantization/weight_error/layer_3": 0.5,
        }
    )


def test_answers_that_were_cut_off_count_in_their_group_and_are_not_trained(make):
    masked = Algorithm(mask_truncated_completions=True)
    trainer, dock, said = make(answers([1, 0, 1, 0], truncated=(0, 1, 0, 1)), algorithm=masked)
    trainer.compute_advantage()
    assert (dock["trained"], trainer.tokens, said) == ([1, 0, 1, 0], 4, [])
    assert dock["advantages"] == pytest.approx([0.7071, -0.7071] * 2, abs=1e-4)


def test_answers_without_a_reward_leave_the_update_and_their_group(make):
    trainer, dock, said = make(answers([1, 0, 1, np.nan], lengths=(2, 2, 3, 5)))
    trainer.compute_advantage()
    assert (dock["trained"], trainer.tokens, said) == ([1, 1, 1, 0], 7, [])
    assert dock["advantages"] == pytest.approx([0.7071, -0.7071, 0, 0], abs=1e-4)
    assert trainer.values["reward/mean"] == pytest.approx(2 / 3)
    assert trainer.values["reward/not_computed"] == 1


def without_end():
    lost = answers([1, 0, 1, 0])
    lost["responses"][2] = torch.tensor([5, 6])
    return lost


@pytest.mark.parametrize(
    "batch, fault",
    [
        (answers([1, 0, 1, 0], logprob=float("nan")), r"vLLM gave nan .* 'tensor\(\[5, 3\]\)'"),
        (answers([1, 0, 1, 0], logprob=-float("inf")), "vLLM gave -inf as the log probability of"),
        (answers([1, 0, 1, 0], logprob=0.5), "vLLM gave 0.5 as the log probability of a token"),
        (without_end(), "the last trained token of 1 of 4 answers that ended by themselves"),
    ],
)
def test_answers_that_cannot_be_trained_on_stop_the_run(batch, fault, make):
    """They are written before."""
    trainer, _, _ = make(batch)
    with pytest.raises(EngineError, match=fault):
        trainer.compute_advantage()
    assert torch.cat(trainer.observer.written[0]).tolist() == [1, 0, 1, 0]


def test_upstreams_metrics_have_our_names():
    metrics = {"actor/lr": 1e-3, "verifier/gsm8k/mean": "0.5", "x": None, "e2e_tps": 3}
    expected = {"lr": 1e-3, "verifier/gsm8k/mean": 0.5, "upstream/e2e_tps": 3.0}
    assert to_our_names(metrics) == expected
