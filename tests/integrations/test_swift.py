"""ms-swift's own GRPO with AQN by its plugin. It needs other versions of TRL and PEFT than the
other tests: MS_SWIFT names a folder with them (docs/integrations.md).
"""

import json
import os

import pytest

from mindspeed_qerl.integrations.report import faults, read_lines
from tests import ROOT
from tests.integrations.programs import assert_a_target_is_followed, run_program, with_tokenizer

PACKAGES = os.environ.get("MS_SWIFT")


@pytest.mark.full
@pytest.mark.skipif(not PACKAGES, reason="MS_SWIFT names no folder with ms-swift")
@pytest.mark.parametrize(
    "words, of, tensors, schedule",
    [((), "weights", 25, "exponential"), (("--vllm_enable_lora", "true"), "adapters", 8, "target")],
    ids=["merged", "adapters"],
)
def test_five_steps(tmp_path, words, of, tensors, schedule):
    report = tmp_path / "noise"
    settings = {"report": str(report), "noise": {"schedule": schedule, "num_stages": 3}}
    run_program(
        ROOT / "tests/integrations/swift_run.py",
        tmp_path,
        with_tokenizer("qwen3", tmp_path / "model"),
        tmp_path / "out",
        *words,
        PYTHONPATH=f"{ROOT}:{PACKAGES}",
        MINDSPEED_QERL_ROLLOUT=json.dumps(settings),
        USE_HF="1",
        VLLM_PLUGINS="none",  # ms-swift's own would need torchvision
    )
    rows = read_lines(report)
    assert faults(rows) == []
    noise = [row for row in rows if row["event"] == "noise"]
    assert [row["step"] for row in noise] == [0, 1, 2, 3, 4]
    if schedule == "target":
        assert_a_target_is_followed(rows)
    else:
        assert [row["aqn/sigma"] for row in noise] == pytest.approx([0, 0, 0.05, 0.05, 0.0005])
    arrived = [row["tensors"] for row in rows if row["event"] == "arrival" and row["of"] == of]
    assert arrived[-4:] == [tensors] * 4
