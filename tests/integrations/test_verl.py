"""verl's own worker extension and sender of weights, with AQN in the worker."""

import json
from pathlib import Path

import pytest

from mindspeed_qerl.integrations.report import faults, read_lines
from tests.integrations.programs import run_program, with_tokenizer

pytest.importorskip("tensordict")
ROOT = Path(__file__).parents[2]
# verl asks for the version of `vllm`, which the CPU build is not called
METADATA = "Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n"


@pytest.mark.full
@pytest.mark.parametrize("mode, tensors", [("merged", 25), ("adapters", 16)])
def test_ten_syncs(tmp_path, mode, tensors):
    """The noise of one step is not there in the next, all weights or adapters arrive each time, and
    vLLM's log-probs are those of transformers with the same noise.
    """
    packages = tmp_path / "packages"
    (packages / "vllm-0.32.0+cpu.dist-info").mkdir(parents=True)
    (packages / "vllm-0.32.0+cpu.dist-info" / "METADATA").write_text(METADATA)
    noise = {"num_stages": 3, "total_steps": 10}
    run_program(
        ROOT / "tests/integrations/verl_worker.py",
        tmp_path,
        with_tokenizer("qwen3", tmp_path / "model"),
        mode,
        PYTHONPATH=f"{ROOT}:{packages}",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VERL_RAY_JOB_ID="test",
        MINDSPEED_QERL_ROLLOUT=json.dumps({"report": str(tmp_path / "noise"), "noise": noise}),
    )
    rows = read_lines(tmp_path / "noise")
    assert faults(rows) == []
    steps = [row["step"] for row in rows if row["event"] == "noise"]
    assert steps == list(range(10))
    of = "adapters" if mode == "adapters" else "weights"
    arrived = [row["tensors"] for row in rows if row["event"] == "arrival" and row["of"] == of]
    assert arrived == [tensors] * 10
