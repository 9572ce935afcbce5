"""TRL's GRPOTrainer with vLLM in its process, on this machine's CPU, and AQN around it."""

import json
import math
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from mindspeed_qerl.integrations.report import faults, read_lines
from mindspeed_qerl.integrations.trainer import telling
from mindspeed_qerl.integrations.trl import parts_of
from tests import ROOT
from tests.integrations.programs import assert_a_target_is_followed, run_program, with_tokenizer

pytest.importorskip("trl")
PROGRAM = ROOT / "tests/integrations/trl_colocated.py"


@pytest.fixture
def trl(tmp_path):
    """Runs the program on a model in a mode -> the lines of its worker."""

    def run(model, mode):
        run_program(PROGRAM, tmp_path, model, tmp_path / "trl", mode)
        return read_lines(tmp_path / "trl" / "noise")

    return run


@pytest.mark.full
@pytest.mark.parametrize("family, norms, tensors", [("qwen3", 5, 25), ("qwen3_moe", 2, 69)])
def test_five_steps(trl, tmp_path, family, norms, tensors):
    """Noise by TRL's step, none in its evaluation, in its own weights and in what it saves; each
    sync arrives; vLLM's log-probs are those of transformers with the same noise (in the program).
    """
    rows = trl(with_tokenizer(family, tmp_path / "model"), "noise")
    assert faults(rows) == []
    noise = {row["step"]: row for row in rows if row["event"] == "noise"}
    noise.pop(5)  # of the program's own question, after the run
    assert list(noise) == [0, 1, 2, 3, 4]
    sigmas = [row["aqn/sigma"] for row in noise.values()]
    assert sigmas == pytest.approx([0, 0, 0.05, 0.05, 0.0005])
    assert {row["aqn/layers"] for row in noise.values()} == {norms}
    assert noise[2]["aqn/measured_std"] == pytest.approx(0.05, rel=0.2)
    arrivals = [row for row in rows if row["event"] == "arrival"]
    assert len(arrivals) >= 5 and {row["tensors"] for row in arrivals} == {tensors}
    module = "mindspeed_qerl.integrations.report"
    shown = run_program("-m", ROOT, module, tmp_path / "trl" / "noise")
    assert f"{tensors} of {tensors} weights" in shown and "picture: " in shown


@pytest.mark.full
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_each_answer_has_a_draw_of_its_own(trl, tmp_path, family):
    """Log-probs of each are those of transformers with its draw, in each noisy step (in the
    program).
    """
    rows = trl(with_tokenizer(family, tmp_path / "model"), "answer")
    assert faults(rows) == []
    assert [row["step"] for row in rows if row["event"] == "noise"] == [0, 1, 2, 3, 4]


def test_tokens_of_tools_and_unknown_log_probs_are_not_counted():
    """Around a batch as TRL's `_generate_and_score_completions` returns it, of two processes; and
    one whose log-probs ms-swift does not know. By k3's formula.
    """
    sampled = torch.tensor([[-1.0, 0.0, -2.0, math.nan]])
    batch = {
        "sampling_per_token_logps": sampled,
        "old_per_token_logps": torch.tensor([[-1.1, -5.0, -2.1, -3.0]]),
        "completion_mask": torch.ones(1, 4).int(),
        "tool_mask": torch.tensor([[1, 0, 1, 1]]),
    }

    def parts(batch):
        [known] = parts_of(batch)
        return [known, (None, *known[1:])]

    told = []
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(gather=lambda fields: fields.repeat(2, 1)),
    )
    telling(lambda: batch, SimpleNamespace(measured=told.append), trainer, parts)()
    assert told[0]["mismatch/k3"] == pytest.approx(math.exp(-0.1) - 1 + 0.1, rel=1e-5)


@pytest.mark.full
def test_a_target_is_followed_by_trls_own_log_probs(trl, tmp_path):
    rows = trl(with_tokenizer("qwen3", tmp_path / "model"), "target")
    assert_a_target_is_followed(rows)
    history = json.loads((tmp_path / "trl" / "trained.json").read_text())["history"]
    for row, logged in zip((row for row in rows if row["event"] == "measured"), history):
        ratio = logged["sampling/importance_sampling_ratio/mean"]  # of all its tokens
        # float32 rounds it by 1.2e-6, noise moves it by 0.01 and more
        assert (row["mismatch/k3"] > 1e-6) == (row["step"] >= 2) == (abs(ratio - 1) > 1e-5), ratio


@pytest.mark.full
@pytest.mark.parametrize("rounding, share, count", [("nearest", 0, 4), ("unbiased", 1, 0)])
def test_the_share_of_the_update_that_arrives(trl, tmp_path, rounding, share, count):
    """Of updates with lr 5e-6, of a model on bfloat16's grid, which TRL loads and sends in float32
    to a vLLM in bfloat16.
    """
    model = with_tokenizer("qwen3", tmp_path / "model")
    published = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    published.save_pretrained(model)
    rows = trl(model, rounding)
    assert len(faults(rows)) == count
    arrived = [(row["arrived"], row["arrived_error"]) for row in rows[1:]]
    assert len(arrived) == 4 and all(error < 0.2 for _, error in arrived)
    assert all(abs(found - share) < 3 * error for found, error in arrived)


@pytest.mark.full
def test_without_noise_it_trains_as_without_us(tmp_path):
    model = with_tokenizer("qwen3", tmp_path / "model")
    trained = {}
    for mode in ("off", "without"):
        run_program(PROGRAM, tmp_path, model, tmp_path / mode, mode)
        trained[mode] = json.loads((tmp_path / mode / "trained.json").read_text())
    assert trained["off"] == trained["without"]
    assert len(trained["off"]["history"]) == 5
