"""What the loop does with its processes and its observer, and in which order."""

import itertools
import math
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from mindspeed_qerl.aqn.injector import NoiseReport
from mindspeed_qerl.aqn.schedule import NoiseLevel
from mindspeed_qerl.common.errors import EngineError
from mindspeed_qerl.common.seeds import derived_seed
from mindspeed_qerl.local import checkpoint
from mindspeed_qerl.local import loop as module
from mindspeed_qerl.local.batch import Answer, PromptOrder, deal
from mindspeed_qerl.local.loop import LocalEngine
from mindspeed_qerl.local.rank import TrainRank
from mindspeed_qerl.local.rollout import RolloutEngine
from mindspeed_qerl.recipe.types import (
    Algorithm,
    Batch,
    Correction,
    Evaluation,
    HardwareError,
    Layout,
    Local,
    Noise,
    Quantization,
    Run,
    Sampling,
    Selection,
    Task,
)
from mindspeed_qerl.runs.checks import StepChecks
from mindspeed_qerl.runs.observer import RunObserver
from mindspeed_qerl.tasks.rows import row_of

from .conftest import batch_of

ROWS = [row_of({"prompt": f"{i}?", "answer": str(i)}) for i in range(4)]
PROMPTS = SimpleNamespace(rows=ROWS, prompts=[[100 + i] for i in range(4)])
EOS = 2
NOISE = NoiseReport(
    sigma=0.05, stage=1, layers=1, expected_std=0.05, measured_std=0.05, changed_fraction=1.0
)
PROOF = dict(
    moved=1.0,
    expected=1.0,
    max_error=0.0,
    resolution=1e-7,
    lost=0.0,
    arrived=1.0,
    arrived_error=0.0,
)


class Told:
    """An observer, or a Progress, that keeps what it is told: (name, *arguments)."""

    earlier = ()

    def __init__(self):
        self.calls = []
        self.run = SimpleNamespace(record=lambda **_: None)

    @property
    def progress(self):
        return Told()

    def wants_proof(self, step, gradient):
        return False

    def __getattr__(self, name):
        return lambda *arguments, **named: self.calls.append((name, *arguments, *named.items()))

    def names(self):
        return [call[0] for call in self.calls]


class Processes:
    """Writes down calls; the rollout engine answers prompt 100 + i with i's digit and the end
    token, the second time with one token more, cut off.
    """

    def __init__(self, ranks=(), results=None):
        self.ranks, self.calls, self.results = ranks, [], results or {}
        self.rollout = self

    def on_ranks(self, method, *arguments):
        self.calls.append((method, *arguments))
        return [self.results.get(method.__name__)]

    def gather(self, calls):
        return list(calls.values())

    def on_rollout(self, method, *arguments):
        self.calls.append((method, *arguments))
        if method is not RolloutEngine.generate:
            return self.results.get(method.__name__)
        [request] = arguments
        answers = []
        for prompt in request.prompts:
            right = Answer(prompt, [prompt[0] - 100, EOS], [-0.1, -0.2])
            answers += [right, Answer(prompt, [9, 9, 9], [-0.3] * 3, True)][: request.n]
        return answers, NOISE if request.noise else None

    call = on_rollout


TOKENIZER = SimpleNamespace(
    eos_token_id=EOS,
    batch_decode=lambda answers, **_: [
        "".join(str(token) for token in answer if token != EOS) for answer in answers
    ],
)


@pytest.fixture(autouse=True)
def shape(monkeypatch):
    """Of the model: two layers."""
    monkeypatch.setattr(module, "read_shape", lambda _: SimpleNamespace(num_hidden_layers=2))


def loop(cls=LocalEngine, observer=None, processes=None, **parts):
    """A loop over four rows."""
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
        "hardware_error": HardwareError(rollout=("gaussian",), evaluation=("bf16_blocks",)),
        "local": Local(),
        "model": SimpleNamespace(path=""),
        "noise": Noise(),
        **parts,
    }
    data = SimpleNamespace(tokenizer=TOKENIZER, train=PROMPTS, test=PROMPTS, ends={EOS})
    return cls(SimpleNamespace(**parts), observer or Told(), processes or Processes(), data)


def requests(engine):
    """What the rollout engine was asked, as plain values."""
    asked = []
    for method, request in engine.processes.calls:
        assert method is RolloutEngine.generate
        asked.append(asdict(request) | {"hardware_error": request.hardware_error["kinds"]})
    return asked


def test_a_step_samples_its_prompts_with_its_own_seed_and_noise():
    engine = loop()
    level = NoiseLevel(step=3, stage=1, sigma=0.05)
    answers, report = engine.sample(4, level)
    chosen = PromptOrder(4, seed=5).take(2)
    assert requests(engine) == [
        dict(
            prompts=[[100 + i] for i in chosen],
            n=2,
            noise=asdict(level),
            draws=[],
            seed=derived_seed(5, "rollout", 4),
            hardware_error=("gaussian",),
            sampling={"max_tokens": 3, "stop_token_ids": [EOS], "temperature": 0.7},
            trained=True,
            quantized=True,
        )
    ]
    assert report is NOISE
    numbers = [i for i in chosen for _ in range(2)]
    expected = [(ROWS[i].question, [100 + i]) for i in numbers]
    assert [(answer.question, answer.prompt) for answer in answers] == expected
    # right, less half of the penalty for its length; wrong, and as long as it may be
    earned = [(answer.reward, answer.scores, answer.is_truncated) for answer in answers]
    assert earned == [(1 - 0.5, {"gsm8k": 1}, False), (0 - 1.0, {"gsm8k": 0}, True)] * 2
    engine.sample(4, level, 1)
    engine.sample(5, level)
    assert len({request["seed"] for request in requests(engine)}) == 3


def test_each_answer_of_a_step_has_a_draw_of_its_own():
    """Batches of dynamic sampling, too; in a step that repeats draws two have one, and without
    noise none has any.
    """
    engine = loop(noise=Noise(draws="answer", repeat_every=4))
    level = NoiseLevel(step=2, stage=1, sigma=0.05)
    for batch in (0, 1):
        engine.sample(3, level, batch)
    engine.sample(4, replace(level, step=3))
    engine.sample(4, replace(level, sigma=0.0))
    engine.evaluate(4)
    asked = [list(request["draws"]) for request in requests(engine)]
    assert asked == [[1, 2, 3, 4], [5, 6, 7, 8], [1, 1, 3, 3], [], []]


def test_an_evaluation_samples_without_noise_at_its_own_temperature():
    engine = loop()
    engine.evaluate(4)
    assert requests(engine) == [
        dict(
            prompts=PROMPTS.prompts,
            n=1,
            noise=None,
            draws=(),
            hardware_error=("bf16_blocks",),
            seed=derived_seed(5, "evaluation", 4),
            sampling={"max_tokens": 3, "stop_token_ids": [EOS], "temperature": 0.3},
            trained=False,
            quantized=False,
        )
    ]


def test_an_update_is_counted_and_its_times_are_of_the_iteration():
    trained = {"time/logprobs": 1.0, "time/update": 2.0, "updates": 6, "loss/total": 0.5}
    engine = loop(processes=Processes(results={"train": trained}))
    batch = batch_of([[1]], [[2]])
    assert engine.update(batch) == {"loss/total": 0.5} and engine.updates == 6
    assert engine.processes.calls == [(TrainRank.train, batch)]
    assert engine.seconds == {"time/logprobs": 1.0, "time/update": 2.0}


def test_log_probabilities_before_the_update_come_back_to_their_rows():
    """From two data-parallel ranks, each with its share of each mini-batch, of two pipeline stages:
    the first one's are zeros.
    """
    prompts = [[10 * row] * (2 + row % 3) for row in range(8)]
    batch = batch_of(prompts, [[row] * (5 - row // 2) for row in range(8)])
    logprobs = batch.tokens[:, 1:] * batch.mask

    class Ranks(Processes):
        def on_ranks(self, method, given):
            assert (method, given) == (TrainRank.logprobs_before, batch)
            results = []
            for stage in range(2):
                for rank in range(2):
                    share = deal(batch.lengths, 4, 2, rank)
                    shards = [batch.rows(rows) for rows in share]
                    values = [shard.tokens[:, 1:] * shard.mask * stage for shard in shards]
                    results.append(list(zip(share, (np.stack([v, -v]) for v in values))))
            return results

    engine = loop(processes=Ranks())
    policy, reference = engine.logprobs_before(batch)
    assert np.array_equal(policy, logprobs) and np.array_equal(reference, -logprobs)
    assert engine.seconds.keys() == {"time/logprobs"}


def test_a_sync_brings_one_layer_after_the_other():
    class Rank:
        def call(self, method, layer):
            return method.__name__, layer

    errors = {"quantization/weight_error": 0.1}
    processes = Processes([Rank()], {"finish_sync": errors})
    engine = loop(processes=processes)
    engine.sync()
    assert engine.weight_errors == errors
    assert processes.calls == [
        (RolloutEngine.start_sync,),
        (RolloutEngine.load, ("merged_weights", 0)),
        (RolloutEngine.load, ("merged_weights", 1)),
        (RolloutEngine.finish_sync,),
    ]


class Watched(LocalEngine):
    """An iteration whose ranks and weights are not there."""

    loss, proof = 0.5, {}

    def update(self, batch):
        self.observer.progress.phase("update")
        self.parts = [("update", batch.mask.sum())]
        parts = {"loss/policy": 0.5, "loss/kl": 0.0, "loss/total": self.loss}
        counts = {"selection/trained_tokens": 30}
        return parts | counts | {"mismatch/k3": 0.0, "mismatch/sensitivity": 0.1}

    def sync(self):
        self.parts.append("sync")

    def movement(self):
        self.parts.append("movement")
        return self.proof


def test_an_iteration_trains_then_syncs_then_reports():
    engine = loop(Watched, noise=Noise(enabled=True, schedule="target", num_stages=3))
    engine.iteration(4)
    assert engine.parts == [("update", 10), "sync"]
    assert engine.observer.names() == ["sampled", "stepped"]
    _, step, values, tokens, routes, level = engine.observer.calls[-1]
    assert (step, tokens, routes) == (4, 10, 0)
    assert (level.step, level.stage, level.sigma) == (3, 1, 0.05) and "aqn/reached_k3" in values
    assert values["loss/total"] == 0.5 and values["aqn/sigma"] == 0.05
    assert values["response/truncated_fraction"] == 0.5 and values["verifier/gsm8k/mean"] == 0.5
    assert values["reward/mean"] == pytest.approx(-0.25)


class Files:
    """A MetricsWriter that keeps what it is given."""

    def __init__(self):
        self.written = {}

    def log(self, step, values):
        self.written["metrics"] = values

    def log_rollouts(self, step, rows):
        self.written["rollouts"] = rows


@pytest.fixture
def observed(monkeypatch):
    """(an engine with a real observer, and what that one writes)."""
    shape = SimpleNamespace(moe=False)
    monkeypatch.setattr("mindspeed_qerl.runs.observer.read_shape", lambda _: shape)
    engine, files = (
        loop(
            Watched,
            run=Run(train_iters=1, seed=5),
            model=SimpleNamespace(path="", dtype="float32"),
            lora=SimpleNamespace(targets=("linear_qkv",)),
            correction=Correction(),
        ),
        Files(),
    )
    run = SimpleNamespace(record=lambda **_: None, metrics_file=Path("none"))
    engine.observer = RunObserver(engine.recipe, run, files, Told())
    engine.observer.checks = SimpleNamespace(check=lambda *_: [])
    return engine, files.written


@pytest.mark.parametrize("fault", ["logprobs", "metrics", "sync"])
def test_what_a_failing_step_saw_is_written_before_it_fails(observed, fault):
    engine, written = observed
    if fault == "logprobs":
        bad = Answer([100], [1, EOS], [math.nan, -0.1])
        engine.processes.on_rollout = lambda *_: ([bad] * 4, None)
    elif fault == "metrics":
        engine.observer.checks = StepChecks(engine.recipe, routed=False, earlier=[])
        engine.loss = math.nan
    else:
        engine.proof = {"linear_qkv": PROOF | {"max_error": 1e-3}}
    with pytest.raises(EngineError):
        engine.iteration(1)
    expected = ["rollouts"] if fault == "logprobs" else ["rollouts", "metrics"]
    assert list(written) == expected
    assert written["rollouts"][0]["question"].endswith("?")


def sampled_with(drawn):
    """Stands for `LocalEngine.sample`: the rewards of each batch, two answers a prompt."""
    from .test_sampled import sampled

    def sample(step, noise, batch=0):
        sample.batches.append((step, noise, batch))
        return sampled(drawn(batch)), f"noise of batch {batch}"

    sample.batches = []
    return sample


@pytest.mark.parametrize(
    "metric, limit, batches, kept",
    [
        (None, 9, 3, [1, 2, 4]),  # enough after three batches; the fourth group with signal is left
        (None, 2, 2, [1, 2]),  # too few within the limit: those are trained
        (None, 0, 3, [1, 2, 4]),  # no limit
        ("gsm8k", 4, 4, [4]),  # of the verifier alone
    ],
)
def test_dynamic_sampling_asks_until_enough_groups_have_a_signal(metric, limit, batches, kept):
    drawn = [[1, 1, 1, 0], [0, 1, 0, 0], [2, 0, 0, 1], [1, 1, 0, 0]]
    selection = Selection(
        filter_groups_enable=True,
        filter_groups_train_batch_size=3,
        filter_groups_max_batches=limit,
        filter_groups_metric=metric,
    )
    engine = loop(selection=selection)
    engine.sample = sampled_with(drawn.__getitem__)
    answers, trained, report = engine.gather(7, None)
    rewards = list(itertools.chain(*drawn[:batches]))
    expected = [rewards[2 * group + place] for group in kept for place in range(2)]
    assert [answer.reward for answer in trained] == expected
    assert engine.sample.batches == [(7, None, batch) for batch in range(batches)]
    assert report == "noise of batch 0"
    assert [answer.reward for answer in answers] == rewards
    assert engine.observer.names() == ["still_sampling"] * (batches - 1)


def test_a_run_that_resumes_goes_on_from_the_position_of_its_checkpoint(tmp_path):
    state = {"updates": 10, "prompts_asked": 23}
    checkpoint.save(tmp_path, 5, state, lambda folder: None, keep=1)
    engine = loop()
    engine.observer.run.checkpoints_dir = tmp_path
    assert engine.restore() == 5
    assert engine.processes.calls == [(TrainRank.restore, f"{tmp_path}/iter_0000005", 10, 5)]
    unbroken = PromptOrder(4, seed=5)
    unbroken.take(23)
    assert engine.order.take(4) == unbroken.take(4) and engine.updates == 10


def test_a_checkpoint_that_cannot_be_written_says_how_to_go_on(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "describe", lambda *_: {})
    monkeypatch.setattr(checkpoint, "save", fail)
    engine = loop(lora=None)
    engine.observer.run = SimpleNamespace(
        path=tmp_path, checkpoints_dir=tmp_path / "checkpoints", identity=dict
    )
    with pytest.raises(EngineError, match="No space left.*\n.*make room.* resume with run.resume="):
        engine.save(5)
