"""verl's own worker extension and sender of weights, with AQN in the worker."""

import json
import re

import pandas
import pytest

from mindspeed_qerl.integrations.report import faults, read_lines
from tests import ROOT
from tests.integrations.programs import packages, run_program, with_tokenizer

pytest.importorskip("tensordict")
TRAINED = """
trainer.use_v1=false trainer.device=cpu trainer.logger=console trainer.n_gpus_per_node=1
trainer.total_training_steps=2 trainer.save_freq=-1 trainer.test_freq=1
+ray_kwargs.ray_init.num_gpus=1 ray_kwargs.ray_init.num_cpus=8
data.train_files=rows.parquet data.val_files=rows.parquet data.train_batch_size=4
data.max_prompt_length=64 data.max_response_length=16 algorithm.adv_estimator=grpo
actor_rollout_ref.model.path=model actor_rollout_ref.model.use_remove_padding=false
+actor_rollout_ref.model.override_config.attn_implementation=sdpa
actor_rollout_ref.actor.strategy=fsdp2 actor_rollout_ref.actor.ppo_mini_batch_size=4
actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8
actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=2
actor_rollout_ref.rollout.tensor_model_parallel_size=1 actor_rollout_ref.rollout.dtype=float32
actor_rollout_ref.rollout.enforce_eager=true actor_rollout_ref.rollout.agent.num_workers=1
actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8
actor_rollout_ref.rollout.free_cache_engine=false
+actor_rollout_ref.rollout.enable_sleep_mode=false
reward.custom_reward_function.path=reward.py
+actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls=mindspeed_qerl.integrations.verl.VerlNoiseExtension
"""
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return len(solution_str) % 5 / 5
"""


@pytest.mark.full
def test_two_steps_of_its_trainer(tmp_path):
    """verl.trainer.main_ppo in its own processes: FSDP, agent loop, vLLM's server; by verl's own
    comparison of vLLM's probabilities with the trainer's, only the noisy step's are off. The step is
    verl's, and its three validations have no noise.
    """
    with_tokenizer("qwen3", tmp_path / "model")
    rows = [
        {
            "data_source": "words",
            "prompt": [{"role": "user", "content": f"Tom has {i} apples and gets {i + 1}."}],
            "reward_model": {"style": "rule", "ground_truth": str(2 * i + 1)},
            "extra_info": {"index": i},
        }
        for i in range(8)
    ]
    pandas.DataFrame(rows).to_parquet(tmp_path / "rows.parquet")
    (tmp_path / "reward.py").write_text(REWARD)
    settings = {"report": str(tmp_path / "noise"), "noise": {"num_stages": 2, "total_steps": 2}}
    printed = run_program(
        "-m",
        tmp_path,
        "verl.trainer.main_ppo",
        *TRAINED.split(),
        PYTHONPATH=f"{ROOT}:{packages(tmp_path / 'packages')}",
        VERL_USE_EXTERNAL_MODULES="tests.integrations.verl_cpu,mindspeed_qerl.integrations.verl_step",
        VERL_PLATFORM="cpu",
        VERL_ENGINE_DEVICE="cuda",
        MINDSPEED_QERL_ROLLOUT=json.dumps(settings),
    )
    lines = read_lines(tmp_path / "noise")
    assert faults(lines) == []
    assert [line["tensors"] for line in lines if line["event"] == "arrival"] == 3 * [25]
    noise = [(line["step"], line["aqn/sigma"]) for line in lines if line["event"] == "noise"]
    assert noise == [(0, 0), (1, 0.05)]
    assert [line["noise"] for line in lines if line["event"] == "evaluation"] == 3 * [False]
    clean, noisy = map(float, re.findall(r"rollout_probs_diff_mean:([\d.e-]+)", printed))
    assert noisy > 3 * clean
