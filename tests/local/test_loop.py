"""What the loop asks of its processes and in which order, with processes that write it down."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest

from mindspeed_qerl.aqn.injector import NoiseReport
from mindspeed_qerl.common.errors import EngineError
from mindspeed_qerl.common.seeds import derived_seed
from mindspeed_qerl.local.batch import PromptOrder, build_batch
from mindspeed_qerl.local.loop import LocalEngine, data_rank
from mindspeed_qerl.local.rollout import Completion
from mindspeed_qerl.recipe.types import (
    Algorithm,
    Batch,
    Evaluation,
    HardwareError,
    Layout,
    Quantization,
    Run,
    Sampling,
    Selection,
    Task,
)
from mindspeed_qerl.tasks.rows import row_of

ROWS = [row_of({"prompt": f"{i}?", "answer": str(i)}) for i in range(4)]
PROMPTS = SimpleNamespace(rows=ROWS, prompts=[[100 + i] for i in range(4)])
EOS = 2
NOISE = NoiseReport(
    sigma=0.05,
    stage=1,
    layers=1,
    names=("norm",),
    expected_std=0.05,
    measured_std=0.05,
    changed_fraction=1.0,
)


class Progress:
    """Keeps its messages."""

    def __init__(self):
        self.messages = []

    def message(self, text):
        self.messages.append(text)

    def phase(self, *_):
        pass

    step = evaluated = phase


def loop(cls=LocalEngine, **parts):
    """A loop whose rollout engine answers prompt 100 + i with i's digit and the end token, the
    second time with one token more, cut off.
    """
    parts = {
        "batch": Batch(samples_per_prompt=2, global_batch_size=2, mini_batch_size=1, epochs=3),
        "layout": Layout(),
        "run": Run(train_iters=9, seed=5),
        "sampling": Sampling(max_tokens=3, temperature=0.7),
        "selection": Selection(
            overlong_buffer_enable=True, overlong_buffer=2, rollout_max_tokens=3
        ),
        "evaluation": Evaluation(temperature=0.3),
        "task": Task(verifier_function=("gsm8k",), verifier_weight=(1.0,)),
        "algorithm": Algorithm(),
        "quantization": Quantization("nvfp4"),
        "hardware_error": HardwareError(rollout=("gaussian",), evaluation=("silu_table",)),
        **parts,
    }
    calls = []

    def on_rollouts(
        method, prompts, n, seed, sampling, noise_step, hardware_error, record_routes, quantized
    ):
        assert not record_routes  # nothing is replayed
        assert quantized == (noise_step is not None)  # rollouts, and not evaluations
        calls.append(
            dict(
                method=method,
                prompts=prompts,
                n=n,
                seed=seed,
                sampling=sampling,
                noise_step=noise_step,
                kinds=hardware_error and hardware_error["kinds"],
            )
        )
        answers = [
            [
                Completion([prompt[0] - 100, EOS], [-0.1, -0.2], False),
                Completion([9, 9, 9], [-0.3] * 3, True),
            ]
            for prompt in prompts
        ]
        return [([group[:n] for group in answers], NOISE if noise_step is not None else None)]

    tokenizer = SimpleNamespace(
        eos_token_id=EOS,
        batch_decode=lambda answers, **_: [
            "".join(str(token) for token in answer if token != EOS) for answer in answers
        ],
    )
    data = SimpleNamespace(tokenizer=tokenizer, train=PROMPTS, test=PROMPTS)
    metrics = SimpleNamespace(
        log_eval=lambda *_: None, log=lambda *row: calls.append(row), log_rollouts=lambda *_: None
    )
    run = SimpleNamespace(record=lambda **_: None)
    processes = SimpleNamespace(on_rollouts=on_rollouts)
    return cls(SimpleNamespace(**parts), run, metrics, Progress(), processes, data), calls


def test_a_step_samples_its_prompts_with_its_own_seed_and_noise():
    engine, calls = loop()
    sampled, noise = engine.sample(4)
    asked = PromptOrder(4, seed=5).take(2)
    assert calls == [
        dict(
            method="generate",
            prompts=[[100 + i] for i in asked],
            n=2,
            noise_step=3,
            seed=derived_seed(5, "rollout", 4),
            kinds=("gaussian",),
            sampling={"max_tokens": 3, "stop_token_ids": [EOS], "temperature": 0.7, "logprobs": 0},
        )
    ]
    assert noise is NOISE and sampled.rows == [ROWS[i] for i in asked for _ in range(2)]
    assert sampled.prompts == [[100 + i] for i in asked for _ in range(2)]
    # right, less half of the penalty for its length; wrong, and as long as it may be
    assert sampled.rewards.tolist() == [1 - 0.5, 0 - 1.0] * 2 and sampled.scores[
        "gsm8k"
    ].tolist() == [1, 0, 1, 0]
    assert [answer.truncated for answer in sampled.answers] == [False, True] * 2
    engine.sample(4, 1)
    engine.sample(5)
    assert len({call["seed"] for call in calls}) == 3 and calls[2]["noise_step"] == 4


def test_an_evaluation_samples_without_noise_at_its_own_temperature():
    engine, calls = loop()
    engine.evaluate(4)
    assert calls == [
        dict(
            method="generate",
            prompts=PROMPTS.prompts,
            n=1,
            noise_step=None,
            kinds=("silu_table",),
            seed=derived_seed(5, "evaluation", 4),
            sampling={
                "max_tokens": 3,
                "stop_token_ids": [EOS],
                "temperature": 0.3,
                "logprobs": None,
            },
        )
    ]


def test_an_evaluation_with_noise_stops_the_run():
    engine, _ = loop()
    engine._generate = lambda *_, **__: ([], NOISE)
    with pytest.raises(
        EngineError, match=r"the evaluation after step 4 had noise of sigma 0\.05 on"
    ):
        engine.evaluate(4)


@pytest.mark.parametrize(
    "layout", [Layout(), Layout(world=2), Layout(world=8, tp=2, pp=2), Layout(world=4, pp=2)]
)
def test_every_answer_is_in_one_share_of_its_mini_batch(layout):
    """Ranks of one data-parallel rank get the same; Megatron counts tensor parallel ranks first,
    stages last.
    """
    engine, _ = loop(layout=layout, batch=Batch(samples_per_prompt=2, mini_batch_size=2, epochs=3))
    given, calls = [[number] for number in range(8)], {}
    batch = build_batch([[1]] * 8, given, [[-0.1]] * 8, np.zeros(8))

    class Rank:
        def __init__(self, number):
            self.number = number

        def call(self, method, shards, epochs):
            calls[self.number] = (method, [shard.tokens[:, 1].tolist() for shard in shards], epochs)

    returned = {"time/logprobs": 1.0, "time/update": 2.0, "updates": 6, "loss/total": 0.5}
    engine.processes = SimpleNamespace(
        ranks=[Rank(number) for number in range(layout.world)],
        gather=lambda calls: [dict(returned) for _ in calls],
    )
    assert engine.update(batch) == {"loss/total": 0.5} and engine.updates == 6
    assert {(method, epochs) for method, _, epochs in calls.values()} == {("train", 3)}
    places = [
        (stage, data, tensor)
        for stage in range(layout.pp)
        for data in range(layout.dp)
        for tensor in range(layout.tp)
    ]
    for number, (_, data, _) in enumerate(places):
        assert data_rank(number, layout) == data and calls[number][1] == calls[data * layout.tp][1]
    for mini in range(2):
        shares = [calls[data * layout.tp][1][mini] for data in range(layout.dp)]
        assert sorted(itertools.chain(*shares)) == list(range(4 * mini, 4 * mini + 4))
        assert len({len(share) for share in shares}) == 1


class Watched(LocalEngine):
    """Writes down the parts of an iteration."""

    def update(self, batch):
        self.done = [("update", batch.mask.sum())]
        return {"loss/total": 0.5}

    def sync(self, step=0):
        self.done.append(("sync", step))


def test_an_iteration_trains_then_syncs_then_checks_what_it_logged():
    engine, calls = loop(Watched)
    engine.ends = {EOS}
    engine.checks = SimpleNamespace(
        check=lambda step, values, tokens, routes: (
            engine.done.append(("check", step, values["loss/total"], tokens, routes)) or []
        )
    )
    engine.iteration(4)
    assert engine.done == [("update", 10), ("sync", 4), ("check", 4, 0.5, 10, 0)]
    step, values = calls[-1]
    assert (
        step == 4 and values["aqn/sigma"] == 0.05 and values["response/truncated_fraction"] == 0.5
    )
    assert values["reward/mean"] == pytest.approx(-0.25) and values["verifier/gsm8k/mean"] == 0.5
