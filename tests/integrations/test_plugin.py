"""vLLM as it is, with the plugin that it finds installed."""

import pytest

from mindspeed_qerl.integrations.report import faults, read_lines
from tests import ROOT
from tests.integrations.programs import packages, run_program, with_tokenizer

PROGRAM = """
import sys
from vllm import LLM
from mindspeed_qerl.integrations.cpu import keep_weights

keep_weights()
if __name__ == "__main__":
    words = {"worker_extension_cls": sys.argv[2]} if len(sys.argv) > 2 else {}
    llm = LLM(sys.argv[1], dtype="float32", max_model_len=128, enforce_eager=True, **words)
    llm.generate({"prompt_token_ids": [5, 6, 7]}, use_tqdm=False)
"""


@pytest.mark.full
@pytest.mark.parametrize("extension", [(), ("mindspeed_qerl.integrations.vllm.NoiseExtension",)])
def test_noise_in_vllms_own_process(tmp_path, extension):
    """The plugin alone, and beside `worker_extension_cls`: one rollout in the worker."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    settings = '{"report": "noise", "first_step": 3, "noise": {"num_stages": 2, "total_steps": 4}}'
    model = with_tokenizer("qwen3", tmp_path / "model")
    run_program(program, tmp_path, model, *extension, MINDSPEED_QERL_ROLLOUT=settings)
    rows = read_lines(tmp_path / "noise")
    assert [(row["event"], row["step"], row["aqn/layers"]) for row in rows] == [("noise", 3, 5)]
    assert rows[0]["aqn/measured_std"] == pytest.approx(0.05, rel=0.2)
    assert faults(rows) == []


@pytest.mark.full
def test_the_example_without_a_trainer_names_what_was_planted():
    """As docs/integrations.md shows it; no other matrix is named."""
    shown = run_program("examples/proof_without_a_trainer.py", ROOT).splitlines()
    page = (ROOT / "docs" / "integrations.md").read_text()
    assert shown and all(line in page for line in shown)
    assert [line for line in shown if "model.layers" in line] == shown[-1:]


@pytest.mark.full
@pytest.mark.parametrize(
    "program, words, of, arrived",
    [
        ("transfer", "", "weights", [25, 16]),
        ("verl", "merged", "weights", [25, 25]),
        ("verl", "adapters", "adapters", [20, 20]),
    ],
)
def test_ten_syncs(tmp_path, program, words, of, arrived):
    """By vLLM's weight transfer, as TRL's server syncs, and by verl's own sender: the noise of one
    step is not there in the next, also where the norms are not sent, all that is sent arrives, and
    vLLM's log-probs are those of transformers with the same noise.
    """
    if program == "verl":
        pytest.importorskip("tensordict")
    run_program(
        ROOT / f"tests/integrations/{program}_worker.py",
        tmp_path,
        with_tokenizer("qwen3", tmp_path / "model"),
        *words.split(),
        PYTHONPATH=f"{ROOT}:{packages(tmp_path / 'packages')}",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VERL_RAY_JOB_ID="test",
        MINDSPEED_QERL_ROLLOUT='{"report": "noise", "noise": {"num_stages": 3, "total_steps": 10}}',
    )
    rows = read_lines(tmp_path / "noise")
    assert faults(rows) == []
    assert [row["step"] for row in rows if row["event"] == "noise"] == [*range(10)]
    assert [row["tensors"] for row in rows if row.get("of") == of] == arrived * 5
