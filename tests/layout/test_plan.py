"""Plans and shapes read from configs: every config for NPUs, and what a config may leave out or have wrong."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mindspeed_qerl.config import CONFIGS, ConfigError, compose
from mindspeed_qerl.layout.memory import estimate, read_settings
from mindspeed_qerl.layout.plan import read_plan, shape_of_config
from mindspeed_qerl.layout.rules import broken
from mindspeed_qerl.layout.shapes import SHAPES, read_shape

NPU_CONFIGS = sorted(path.stem for path in CONFIGS.glob("*npu*.yaml"))
PUBLISHED = {"qwen3_30b_a3b": "qwen3_30b_a3b", "qwen15_moe_a27b": "qwen15_moe_a2_7b", "qwen25_7b": "qwen25_7b", "qwen25_1_5b": "qwen25_1_5b"}


@pytest.mark.parametrize("name", NPU_CONFIGS)
def test_the_configs_are_legal_and_fit(name):
    raw = compose(name)
    shape = shape_of_config(raw)
    known = SHAPES[PUBLISHED[shape.name]]
    left_out = {"name", "norm_topk_prob", "rope_theta"}
    assert {key: value for key, value in vars(shape).items() if key not in left_out} == {
        key: value for key, value in vars(known).items() if key not in left_out}

    width = 8 if "2x8" in name else 16
    plan = read_plan(raw, shape, width)
    npus = re.search(r"_(?:(\d+)x)?(\d+)npu", name)
    assert plan.layout.world == int(npus[1] or 1) * int(npus[2]) and plan.layout.nodes == int(npus[1] or 1)
    assert plan.layout.tp == raw["actor_config"]["tensor_model_parallel_size"] and plan.lora and plan.share_backbone
    assert plan.layout.infer_ep == raw["generate_config"]["infer_expert_parallel_size"]
    assert plan.batch.samples_per_prompt == raw["rl_config"]["n_samples_per_prompt"]
    assert not broken(plan)
    memory = estimate(plan, read_settings(raw))
    assert memory.fits, memory.faults


@pytest.fixture
def raw():
    return compose("grpo_qwen3_30b_a3b_gsm8k_16npu")


def test_actor_config_overrides_the_model_and_megatron_training(raw):
    raw["model"]["qwen3_30b_a3b"]["micro_batch_size"] = 7
    raw["megatron_training"]["micro_batch_size"] = 6
    raw["actor_config"]["micro_batch_size"] = 5
    assert read_plan(raw, SHAPES["qwen3_30b_a3b"]).batch.micro_batch_size == 5
    del raw["actor_config"]["micro_batch_size"]
    assert read_plan(raw, SHAPES["qwen3_30b_a3b"]).batch.micro_batch_size == 6


def test_what_is_left_out_is_upstreams_default(raw):
    """config_cls/rl_config.py, generate_config.py, megatron_config.py."""
    for section, keys in {"rl_config": ("mini_batch_size", "n_samples_per_prompt", "guarantee_order", "share_backbone", "hccl_buffersize"),
                          "generate_config": ("infer_tensor_parallel_size", "infer_expert_parallel_size", "enable_expert_parallel", "max_model_len",
                                              "max_num_batched_tokens", "gpu_memory_utilization", "max_num_seqs", "offload_train_param"),
                          "actor_config": ("expert_model_parallel_size", "moe_tp_extend_ep"),
                          "megatron_training": ("lora_r", "sequence_parallel", "no_pad_to_seq_lengths")}.items():
        for key in keys:
            del raw[section][key]
    plan, settings = read_plan(raw, SHAPES["qwen3_30b_a3b"]), read_settings(raw)
    assert (plan.batch.mini_batch_size, plan.batch.samples_per_prompt, plan.batch.guarantee_order, plan.share_backbone) == (1, 1, False, False)
    assert (plan.layout.infer_tp, plan.layout.infer_ep, plan.layout.enable_expert_parallel) == (8, 1, False)
    assert (plan.batch.max_model_len, plan.batch.max_num_batched_tokens) == (2048, 2048)
    assert (plan.layout.ep, plan.layout.tp_extend_ep, plan.layout.sequence_parallel, plan.batch.no_pad_to_seq_lengths) == (1, False, False, False)
    assert (settings.gpu_memory_utilization, settings.max_num_seqs, settings.offload_train_param, settings.lora_r) == (0.5, 1, False, 8)
    assert settings.hccl_buffer_mib == 256


def test_layer_lists_and_dispatch_sizes(raw):
    raw["megatron_training"]["num_layer_list"] = "20,28"
    raw["actor_config"]["pipeline_model_parallel_size"] = 2
    raw["rl_config"]["actor_update_dispatch_size"] = 16
    plan = read_plan(raw, SHAPES["qwen3_30b_a3b"])
    assert plan.layers == (20, 28) and plan.batch.dispatch["actor_update_dispatch_size"] == 16
    assert plan.batch.dispatch["ref_dispatch_size"] is None


@pytest.mark.parametrize("section, key, value, message", [
    ("actor_config", "tensor_model_parallel_size", "two", "actor_config.tensor_model_parallel_size = 'two' must be int"),
    ("actor_config", "expert_model_parallel_size", 0, "actor_config.expert_model_parallel_size = 0 must be at least 1"),
    ("megatron_training", "global_batch_size", None, "global_batch_size is missing"),
    ("megatron_training", "num_layer_list", "a,b", "num_layer_list = 'a,b' must be whole numbers"),
    ("rl_config", "n_samples_per_prompt", 2.5, "rl_config.n_samples_per_prompt = 2.5 must be int"),
    ("rl_config", "actor_resource", {}, "rl_config.actor_resource.num_npus = None must be int"),
    ("generate_config", "enable_expert_parallel", "yes", "enable_expert_parallel = 'yes' must be bool"),
])
def test_a_wrong_value_is_named(raw, section, key, value, message):
    raw[section][key] = value
    with pytest.raises(ConfigError) as refused:
        read_plan(raw, SHAPES["qwen3_30b_a3b"])
    assert message in str(refused.value)


def test_a_model_without_sizes_is_named(raw):
    del raw["model"]["qwen3_30b_a3b"]["num_layers"]
    with pytest.raises(ConfigError, match="num_layers of the model is missing"):
        shape_of_config(raw)


def test_shape_from_a_config_json(tmp_path):
    """As transformers writes it, and the same numbers as the table's."""
    written = {"model_type": "qwen3_moe", "num_hidden_layers": 48, "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 4,
               "head_dim": 128, "intermediate_size": 6144, "vocab_size": 151936, "rope_theta": 1e6, "max_position_embeddings": 40960,
               "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True}
    (tmp_path / "config.json").write_text(json.dumps(written))
    shape = read_shape(tmp_path)
    assert {**vars(shape), "name": ""} == {**vars(SHAPES["qwen3_30b_a3b"]), "name": ""}
    with pytest.raises(ConfigError, match="unknown model 'qwen3_30b_a3', did you mean 'qwen3_30b_a3b'"):
        read_shape("qwen3_30b_a3")
    (tmp_path / "config.json").write_text(json.dumps({**written, "hidden_size": "big"}))
    with pytest.raises(ConfigError, match="hidden_size = 'big' in config.json must be a whole number"):
        read_shape(tmp_path)


def test_no_torch_is_imported():
    program = ("import sys; import mindspeed_qerl.layout.planner, mindspeed_qerl.layout.show; "
               "print([name for name in ('torch', 'numpy', 'rich', 'matplotlib', 'hydra') if name in sys.modules])")
    result = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert result.stdout.strip() == "[]"
