"""What the observer of both engines writes, says and refuses."""

from types import SimpleNamespace

import pytest

from mindspeed_qerl.common.errors import EngineError
from mindspeed_qerl.recipe.types import Evaluation, LoRA, Quantization, Run
from mindspeed_qerl.runs.metrics import MetricsWriter, read_jsonl
from mindspeed_qerl.runs.observer import RunObserver

from .test_checks import ARRIVED

ANSWERS = [
    {"question": f"{i} + 1?", "response": str(i + 1), "answer": str(i + 1), "reward": 1.0}
    for i in range(4)
]
RANK = {"linear_qkv": {"modules": 2, "parameters": 1200}}


@pytest.fixture
def observer(new_run):
    """Of a new run of 5 steps; what it says is in `said`."""
    recipe = SimpleNamespace(
        model=SimpleNamespace(path="qwen3_8b", dtype="float32"),
        run=Run(train_iters=5, rollout_samples=3, prove_every=3),
        lora=LoRA(targets=("linear_qkv",)),
        evaluation=Evaluation(every=2, temperature=0.3),
        quantization=Quantization("nvfp4"),
    )
    run = new_run()
    said = []
    ignored = lambda *_: None
    progress = SimpleNamespace(message=said.append, step=ignored, evaluated=ignored)
    made = RunObserver(recipe, run, MetricsWriter(run, tensorboard=False), progress)
    made.said = said
    return made


def test_what_a_failing_step_saw_is_written_before_it_fails(observer):
    """Its metrics, its answers, an evaluation with noise, and a sync that did not arrive."""
    run = observer.run

    def refuse(*_):
        raise EngineError("step 1 cannot be right")

    observer.checks.check = refuse
    observer.sampled(1, ANSWERS)
    with pytest.raises(EngineError, match="cannot be right"):
        observer.stepped(1, {"loss/total": 7.0}, tokens=3)
    assert [row["response"] for row in read_jsonl(run.rollouts_file)] == ["1", "2", "3"]
    assert read_jsonl(run.metrics_file) == [{"step": 1, "loss/total": 7.0}]
    with pytest.raises(EngineError, match=r"after step 2 had noise of sigma 0\.05 on"):
        observer.evaluated(2, {"accuracy": 0.5}, [{"question": "?"}], seconds=1.5, sigma=0.05)
    (row,) = read_jsonl(run.eval_file)
    assert row == {"step": 2, "accuracy": 0.5, "temperature": 0.3, "seconds": 1.5}
    assert read_jsonl(run.eval_answers_file) == [{"step": 2, "question": "?"}]
    lost = {"linear_qkv": ARRIVED | {"lost": 1.0}}
    with pytest.raises(EngineError, match=r"^the sync after step 2: linear_qkv: "):
        observer.proved(2, lost)
    assert run.facts() == {"lora_movement": lost} and not observer.is_proved


def test_batches_of_one_step_share_its_samples(observer):
    for step in (1, 2):
        observer.sampled(step, ANSWERS[:2])
        observer.sampled(step, iter(ANSWERS[2:]))
    rows = read_jsonl(observer.run.rollouts_file)
    assert [(row["step"], row["answer"]) for row in rows] == [
        (step, answer) for step in (1, 2) for answer in "123"
    ]
    assert rows[0].keys() == {"step", "question", "response", "answer", "reward"}


def test_lora_is_counted_over_ranks_and_proved(observer):
    observer.begin([RANK, {}, RANK], ["norm"])
    observer.end()
    assert observer.run.facts() == {
        "lora": {"linear_qkv": {"modules": 4, "parameters": 2400}},
        "aqn_layers": ["norm"],
    }
    assert observer.said[:2] == [
        "LoRA trains linear_qkv: 4 modules, 2,400 parameters",
        "AQN targets 1 RMSNorm layers: norm",
    ]
    assert "was never proved" in observer.said.pop()
    still = {"linear_qkv": ARRIVED | {"moved": 0.0, "expected": 0.0}}
    del still["linear_qkv"]["arrived"]
    observer.proved(1, still)
    assert not observer.is_proved and "lora_movement" not in observer.run.facts()
    for step in (2, 3):
        observer.proved(step, {"linear_qkv": ARRIVED})
    facts = observer.run.facts()
    assert (facts["lora_movement"], facts["lora_proved_after"]) == ({"linear_qkv": ARRIVED}, 3)
    observer.end()
    assert observer.said[2:] == [
        "LoRA reached the rollout engine: 99.0 % of the update (linear_qkv 99.0 ± 0.4)"
    ]
    lost = {"linear_qkv": ARRIVED | {"arrived": 0.05, "lost": 0.0}}
    with pytest.raises(EngineError, match="linear_qkv: 5 % of its update reached .* of nvfp4"):
        observer.proved(4, lost)
    assert observer.run.facts()["lora_movement"] == lost
    with pytest.raises(EngineError, match="2 weights are not nvfp4 of what was synced"):
        observer.proved(4, {"linear_qkv": ARRIVED}, unlike=["b", "a"])


def test_a_target_without_modules_is_refused(observer):
    with pytest.raises(EngineError, match="LoRA target linear_qkv has no module"):
        observer.begin([{}])


def test_what_is_due(observer):
    assert [step for step in range(6) if observer.wants_evaluation(step)] == [0, 2, 4, 5]
    gradients = {1: 0.0, 2: 0.5, 3: 0.0, 4: 0.0, 5: 0.0}  # 0: all advantages of the step are 0
    due = [step for step, gradient in gradients.items() if observer.wants_proof(step, gradient)]
    assert due == [2, 3, 5]
    observer.is_proved = True
    due = [step for step, gradient in gradients.items() if observer.wants_proof(step, gradient)]
    assert due == [3, 5]


def test_warnings(observer):
    observer.checks.check = lambda *_: ["uneven"]
    observer.stepped(1, {"reward/mean": 0.5}, tokens=0)
    observer.trains_nothing(1, groups=4, all_cut_off=False)
    observer.trains_nothing(2, groups=4, all_cut_off=True)
    for batches in range(1, 22):
        observer.still_sampling(2, batches, groups=1, wanted=4)
    assert observer.said[:3] == [
        "Warning: uneven",
        "Warning: step 1 trains nothing: no group had answers of different rewards, of 4 groups",
        "Warning: step 2 trains nothing: every answer was cut off or could not be judged, of 4 groups",
    ]
    asked = [said.split(",")[0] for said in observer.said[3:]]
    assert asked == [f"Warning: step 2 asked {batches} batches" for batches in (10, 20)]


def test_a_resumed_run_knows_the_noise_of_its_steps(observer, tmp_path):
    recipe = observer.recipe
    recipe.run = Run(resume="it")
    rows = tmp_path / "rows.jsonl"
    noise = '{"step": 2, "aqn/expected_std": 0.05, "aqn/measured_std": 0.04}'
    rows.write_text('{"step": 1, "aqn/expected_std": 0.0}\n' + noise + "\n")
    resumed = RunObserver(recipe, SimpleNamespace(metrics_file=rows), None, None)
    assert resumed.checks.noise == [(0.05, 0.04)]
