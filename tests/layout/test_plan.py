"""Plans and shapes read from configs: every config for NPUs, and what a config may leave out or
have wrong.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from mindspeed_qerl.common.errors import ConfigError
from mindspeed_qerl.families import NAMED_SHAPES, read_shape
from mindspeed_qerl.layout.memory import settings_of
from mindspeed_qerl.layout.plan import plan_of, shape_of_model
from mindspeed_qerl.recipe.compose import compose
from mindspeed_qerl.recipe.reader import read, read_recipe
from mindspeed_qerl.recipe.writer import to_config
from tests.families.public_models import MODELS
from tests.tables import cells


@pytest.fixture
def raw():
    return compose("grpo_qwen3_30b_a3b_gsm8k_16npu")


def test_actor_config_overrides_the_model_and_megatron_training(raw):
    raw["model"]["qwen3_30b_a3b"]["micro_batch_size"] = 7
    assert plan_of(read_recipe(raw), NAMED_SHAPES["qwen3_30b_a3b"]).batch.micro_batch_size == 1
    del raw["actor_config"]["micro_batch_size"]
    assert plan_of(read_recipe(raw), NAMED_SHAPES["qwen3_30b_a3b"]).batch.micro_batch_size == 7
    raw["megatron_training"]["micro_batch_size"] = 6
    assert plan_of(read_recipe(raw), NAMED_SHAPES["qwen3_30b_a3b"]).batch.micro_batch_size == 6


LEFT_OUT = """
rl_config.mini_batch_size rl_config.guarantee_order rl_config.share_backbone
rl_config.hccl_buffersize generate_config.infer_tensor_parallel_size
generate_config.infer_expert_parallel_size generate_config.max_model_len
generate_config.max_num_batched_tokens generate_config.gpu_memory_utilization
generate_config.max_num_seqs generate_config.offload_train_param
actor_config.expert_model_parallel_size megatron_training.lora_r
megatron_training.sequence_parallel megatron_training.no_pad_to_seq_lengths
megatron_training.seq_length
"""
FOLLOWS = yaml.safe_load("""
plan: {share_backbone: false}
layout: {infer_tp: 1, infer_ep: 1, ep: 1, sequence_parallel: false}
batch: {mini_batch_size: 64, guarantee_order: true, max_model_len: 1536, seq_length: 1536,
  max_num_batched_tokens: 8192}
settings: {gpu_memory_utilization: 0.5, max_num_seqs: 256, offload_train_param: false, lora_r: 8}
""")


def test_what_is_left_out_is_the_same_on_every_engine_and_told_to_upstream(raw):
    """Not upstream's defaults (infer TP 8, mini-batches of one prompt, max_model_len 2048): they
    would make another run of the same YAML.
    """
    for key in LEFT_OUT.split():
        section, name = key.split(".")
        del raw[section][name]
    recipe = read_recipe(raw)
    plan, settings = plan_of(recipe, NAMED_SHAPES["qwen3_30b_a3b"]), settings_of(recipe)
    for part, values in FOLLOWS.items():
        found = {"plan": plan, "settings": settings}.get(part) or getattr(plan, part)
        assert {name: getattr(found, name) for name in values} == values
    told = to_config(recipe)
    assert (
        told["generate_config"]["infer_tensor_parallel_size"] == 1
        and told["rl_config"]["mini_batch_size"] == 64
    )
    assert not settings.offload_train_param
    told = to_config(recipe)
    assert told["generate_config"]["infer_tensor_parallel_size"] == 1
    assert told["rl_config"]["mini_batch_size"] == 64
    assert told["generate_config"]["max_model_len"] == told["actor_config"]["seq_length"] == 1536
    assert told["rl_config"]["hccl_buffersize"] == 256 and told["actor_config"]["lora_r"] == 8


def test_layer_lists(raw):
    raw["megatron_training"]["num_layer_list"] = "20,28"
    raw["actor_config"]["pipeline_model_parallel_size"] = 2
    plan = plan_of(read_recipe(raw), NAMED_SHAPES["qwen3_30b_a3b"])
    assert plan.layers == (20, 28)


def test_without_a_model_one_line_says_so(tmp_path):
    key = "megatron_training.tokenizer_name_or_path"
    recipe, _ = read(compose("grpo_tiny_moe_cpu", [f"{key}={tmp_path}"]))
    with pytest.raises(ConfigError) as refused:
        shape_of_model(recipe)
    assert str(refused.value).endswith(f"= '{tmp_path}': no config.json there")


def test_shape_from_a_config_json(tmp_path):
    """As transformers writes it, and the same numbers as the table's."""
    written = MODELS["Qwen3-30B-A3B"]
    (tmp_path / "config.json").write_text(json.dumps(written))
    shape = read_shape(tmp_path)
    assert {**vars(shape), "name": ""} == {**vars(NAMED_SHAPES["qwen3_30b_a3b"]), "name": ""}


WRITTEN = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
}


@pytest.mark.parametrize(
    "changed, message",
    cells(r"""
{"hidden_size": 0} ¦ hidden_size = 0 in config.json:\u0020
{"num_attention_heads": 1000000001} ¦ num_attention_heads = 1000000001 in config.json:\u0020
{"vocab_size": "4"} ¦ refuses config.json: .*vocab_size.*expected int, got str
{"num_experts": null} ¦ config.json does not state num_experts
{"num_key_value_heads": null} ¦ 'num_key_value_heads' expected int, got NoneType
{"head_dim": 0} ¦ head_dim = 0 in config.json:\u0020
{"hidden_size": 3} ¦ head_dim = 0 in config.json:\u0020
{"num_experts_per_tok": 9} ¦ num_experts_per_tok = 9 must be at most num_experts = 8
{"num_experts_per_tok": 0} ¦ num_experts_per_tok = 0 must be at least 1
{"model_type": "qwen3", "intermediate_size": 0} ¦ intermediate_size = 0 must be at least
{"rope_theta": "big"} ¦ rope_theta = 'big' in config.json:\u0020
{"rope_theta": NaN} ¦ rope_theta = nan in config.json:\u0020
{"tie_word_embeddings": "no"} ¦ 'tie_word_embeddings' expected bool, got str
{"mlp_only_layers": [0]} ¦ mlp_only_layers = \[0\] in config.json is not modelled here
"""),
)
def test_a_config_json_that_cannot_be(tmp_path, changed, message):
    (tmp_path / "config.json").write_text(json.dumps({**WRITTEN, **json.loads(changed)}))
    with pytest.raises(ConfigError, match=message):
        read_shape(tmp_path)


def test_what_a_config_json_may_leave_out(tmp_path, monkeypatch):
    """The name is the folder's, whatever it is called on the way; head_dim and rope_theta may be
    null, theta may be in rope_parameters.
    """
    (tmp_path / "config.json").write_text(
        json.dumps(
            {
                **WRITTEN,
                "head_dim": None,
                "rope_parameters": {"rope_theta": 5e5},
                "quantization_config": None,
            }
        )
    )
    monkeypatch.chdir(tmp_path)
    shape = read_shape(".")
    assert (shape.name, shape.head_dim, shape.rope_theta, shape.num_key_value_heads) == (
        tmp_path.name,
        16,
        5e5,
        2,
    )


def test_no_torch_is_imported():
    program = (
        "import sys; import mindspeed_qerl.layout.written; "
        "print([name for name in ('torch', 'numpy', 'matplotlib', 'hydra') if name in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", program],
        check=True,
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert result.stdout.strip() == "[]"
