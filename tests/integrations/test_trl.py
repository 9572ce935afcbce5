"""TRL's GRPOTrainer with vLLM in its process, on this machine's CPU, and AQN around it."""

import os
import subprocess
import sys

import pytest

from mindspeed_qerl.demo.tiny_model import build_tokenizer
from mindspeed_qerl.integrations.report import faults, read_lines
from tests.local.conftest import make_model

pytest.importorskip("trl")
PROGRAM = """
import sys
import torch
from datasets import Dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer
from mindspeed_qerl.integrations.trl import add_noise

def reward(completions, **kwargs):
    return [float(len(completion) % 3) for completion in completions]

model, folder = sys.argv[1:]
config = GRPOConfig(
    output_dir=folder, use_vllm=True, vllm_mode="colocate", vllm_gpu_memory_utilization=0.1,
    vllm_max_model_length=128, per_device_train_batch_size=8, num_generations=4,
    max_completion_length=16, max_steps=5, logging_steps=1, report_to=[], use_cpu=True,
    bf16=False, save_strategy="no", learning_rate=1e-2)
trainer = GRPOTrainer(
    model=model, reward_funcs=reward, args=config,
    train_dataset=Dataset.from_list([{"prompt": f"tom has {i % 9 + 1} apples"} for i in range(64)]),
    peft_config=LoraConfig(r=8, target_modules=["q_proj", "o_proj"]))
add_noise(trainer, report=f"{folder}/noise", noise={"num_stages": 3})
norms = {n: p.clone() for n, p in trainer.model.named_parameters() if "norm" in n}
trainer.train()
for name, parameter in trainer.model.named_parameters():
    assert name not in norms or torch.equal(parameter, norms[name]), name
"""


@pytest.mark.full
@pytest.mark.parametrize("family, norms, tensors", [("qwen3", 5, 25), ("qwen3_moe", 2, 69)])
def test_five_steps(tmp_path, family, norms, tensors):
    """Noise by TRL's step, each sync compared, the trainer's own norms as they were."""
    tokenizer, model = build_tokenizer(), tmp_path / "model"
    words = dict(
        vocab_size=len(tokenizer),
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    make_model(family, model, **words)
    tokenizer.save_pretrained(model)
    quiet = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(model), str(tmp_path / "trl")],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, **quiet},
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = read_lines(tmp_path / "trl" / "noise")
    assert faults(rows) == []
    noise = [row for row in rows if row["event"] == "noise"]
    assert [row["step"] for row in noise] == [0, 1, 2, 3, 4]
    assert [row["aqn/sigma"] for row in noise] == pytest.approx([0, 0, 0.05, 0.05, 0.0005])
    assert {row["aqn/layers"] for row in noise} == {norms}
    assert noise[2]["aqn/measured_std"] == pytest.approx(0.05, rel=0.2)
    arrivals = [row for row in rows if row["event"] == "arrival"]
    assert [row["tensors"] for row in arrivals] == [tensors] * 5
