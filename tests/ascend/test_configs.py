"""The configs for NPUs: accepted by our rules, their shapes those of the published models, their layouts legal by upstream's rules."""

import shutil
from pathlib import Path

import pytest

from mindspeed_qerl.ascend.contract import CONTRACT
from mindspeed_qerl.ascend.settings import check
from mindspeed_qerl.config import ConfigError

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"
# name -> model_type of its config.json, parameters as published, in billions
SHIPPED = {
    "grpo_qwen3_30b_a3b_gsm8k_16npu": ("qwen3_moe", 30.5),
    "grpo_qwen15_moe_a27b_gsm8k_16npu": ("qwen2_moe", 14.3),
    "grpo_qwen25_7b_gsm8k_8npu": ("qwen2", 7.6),
}


@pytest.fixture(params=SHIPPED)
def raw(request, tmp_path, monkeypatch):
    """The resolved config, with a model directory and data where it looks for them."""
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    monkeypatch.setenv("MODELS", str(tmp_path / "models"))
    monkeypatch.setenv("DATA", str(tmp_path / "data"))
    with initialize_config_dir(str(CONFIGS), version_base=None):
        config = OmegaConf.to_container(compose(request.param), resolve=True)
    model = Path(config["megatron_training"]["tokenizer_name_or_path"])
    model.mkdir(parents=True)
    (model / "config.json").write_text(f'{{"model_type": "{SHIPPED[request.param][0]}"}}')
    train = Path(config["megatron_training"]["data_path"])
    assert train.parent.name == model.name, "token ids are one tokenizer's: a folder for each model"
    train.parent.mkdir(parents=True)
    for file in (config["gsm8k"]["test_file"], *(f"{train}_packed_{column}_document.{end}" for column in ("input_ids", "labels")
                                                 for end in ("bin", "idx"))):
        Path(file).touch()
    return request.param, config


def shape_of(config: dict) -> dict:
    """The model's keys, of the one model that the config names."""
    (name, shape), = config["model"].items()
    assert config["megatron_training"]["model"] == config["actor_config"]["model"] == name
    return shape


def test_accepted_with_everything_on(raw):
    name, config = raw
    settings = check(config)
    assert settings.lora_targets == ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
    assert settings.aqn.noise_schedule(settings.train_iters).sigma(settings.train_iters - 1) == pytest.approx(5e-4)
    assert settings.verifiers == (("gsm8k", 1.0),)
    assert settings.vllm_dp_size == config["generate_config"]["infer_expert_parallel_size"]
    assert settings.eval.n_problems is None and not settings.emulate_npu
    assert settings.extra_arguments == ({"shared_expert_gate": True} if "qwen15" in name else {})


def test_a_missing_model_and_missing_data_are_named(raw, tmp_path):
    _, config = raw
    shutil.rmtree(tmp_path / "data")
    Path(config["megatron_training"]["tokenizer_name_or_path"], "config.json").unlink()
    with pytest.raises(ConfigError) as error:
        check(config)
    lines = str(error.value).splitlines()
    assert len(lines) == 6 and sum("tools/convert_gsm8k.py" in line for line in lines) == 5
    assert any("no readable config.json" in line for line in lines)


def test_shape_has_the_published_number_of_parameters(raw):
    """Counted matrix by matrix; norms and biases are too few to show."""
    name, config = raw
    m = shape_of(config)
    h, heads, kv_heads = m["hidden_size"], m["num_attention_heads"] * m["kv_channels"], m["num_query_groups"] * m["kv_channels"]
    layer = h * (heads + 2 * kv_heads) + heads * h
    if "num_experts" in m:
        layer += m["num_experts"] * (3 * h * m["moe_ffn_hidden_size"] + h)
        layer += 3 * h * m.get("n_shared_experts", 0) * m["moe_ffn_hidden_size"]
    else:
        layer += 3 * h * m["ffn_hidden_size"]
    total = m["num_layers"] * layer + 2 * m["padded_vocab_size"] * h
    assert round(total / 1e9, 1) == SHIPPED[name][1]


def test_layout_and_lengths_are_legal(raw):
    """What upstream checks late, by a hang, or not at all (vllm_weight_container.py:140-177, transformer_config.py:559, vLLM)."""
    _, config = raw
    m, actor, generate = shape_of(config), config["actor_config"], config["generate_config"]
    world = config["rl_config"]["actor_resource"]["num_npus"]
    tp, ep = actor["tensor_model_parallel_size"], actor.get("expert_model_parallel_size", 1)
    infer_tp, infer_ep = generate["infer_tensor_parallel_size"], generate["infer_expert_parallel_size"]
    assert m["num_attention_heads"] % tp == m["num_query_groups"] % tp == m["num_query_groups"] % infer_tp == m["padded_vocab_size"] % tp == 0
    assert world % (tp * ep) == world % (infer_tp * infer_ep) == 0
    assert max(tp, infer_tp) % min(tp, infer_tp) == 0
    if "num_experts" in m:
        assert m["num_experts"] % (tp * ep) == m["num_experts"] % (infer_tp * infer_ep) == (infer_tp * infer_ep) % (tp * ep) == 0
    assert config["megatron_training"]["sequence_parallel"] == (tp > 1)

    batch = config["megatron_training"]["global_batch_size"]
    assert batch % (world // tp) == batch % (world // infer_tp) == 0
    assert config["rl_config"]["mini_batch_size"] % (world // tp) == 0
    whole = config["rl_config"]["max_prompt_length"] + generate["sampling_config"]["max_tokens"]
    assert whole == config["megatron_training"]["seq_length"] == generate["max_model_len"] <= generate["max_num_batched_tokens"]
    assert config["megatron_training"].get("recompute_num_layers", m["num_layers"]) == m["num_layers"]
    assert Path(actor["load"]).name == Path(config["megatron_training"]["tokenizer_name_or_path"]).name + (
        f"-tp{tp}-pp1-ep{ep}" if "num_experts" in m else f"-tp{tp}-pp1")


def test_the_guide_shows_these_configs_and_this_contract():
    guide = (ROOT / "docs" / "ascend.md").read_text()
    assert {path.stem for path in CONFIGS.glob("*npu.yaml")} == set(SHIPPED)
    assert all(f"| `{name}` |" in guide and f"# {name}: " in guide for name in SHIPPED)
    assert f"\n{len(CONTRACT)} promises: {len(CONTRACT)} holds\n" in guide
