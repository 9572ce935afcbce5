"""The configs for NPUs: accepted by our rules, their shapes those of the published models, their
layouts legal by upstream's rules.
"""

import json
import shutil
from dataclasses import asdict
from functools import cache
from pathlib import Path

import pytest

from mindspeed_qerl.ascend.contract import ENTRIES, PINS
from mindspeed_qerl.ascend.limits import worker_environment
from mindspeed_qerl.common.errors import ConfigError
from mindspeed_qerl.families import NAMED_SHAPES, family_of
from mindspeed_qerl.families.megatron import compare_with_model
from mindspeed_qerl.layout.memory import estimate, settings_of
from mindspeed_qerl.layout.plan import plan_of, shape_of_model
from mindspeed_qerl.layout.rules import broken
from mindspeed_qerl.recipe.compose import CONFIGS, at, compose
from mindspeed_qerl.recipe.reader import read_recipe
from tests import ROOT, checked
from tests.tables import cells

MODELS = ("qwen3_30b_a3b", "qwen3_30b_a3b_2507", "qwen15_moe_a2_7b", "qwen25_1_5b", "qwen25_7b")


def numbers(words):
    return [int(word) for word in words.split()]


# config ¦ model ¦ NPUs ¦ training TP PP EP ¦ infer TP EP ¦ ranks of a node
TABLE = """
grpo_qwen3_30b_a3b_gsm8k_16npu ¦ qwen3_30b_a3b_2507 ¦ 16 ¦ 1 1 16 ¦ 1 16 ¦ 16
grpo_qwen3_30b_a3b_gsm8k_16npu_tp4_ep4 ¦ qwen3_30b_a3b_2507 ¦ 16 ¦ 4 1 4 ¦ 4 4 ¦ 16
grpo_qwen3_30b_a3b_gsm8k_12npu ¦ qwen3_30b_a3b_2507 ¦ 12 ¦ 1 1 4 ¦ 1 4 ¦ 16
grpo_qwen3_30b_a3b_gsm8k_12npu_tp4 ¦ qwen3_30b_a3b_2507 ¦ 12 ¦ 4 1 1 ¦ 4 1 ¦ 16
grpo_qwen3_30b_a3b_gsm8k_12npu_tp4_pp3 ¦ qwen3_30b_a3b_2507 ¦ 12 ¦ 4 3 1 ¦ 4 1 ¦ 16
grpo_qwen3_30b_a3b_gsm8k_2x8npu ¦ qwen3_30b_a3b_2507 ¦ 16 ¦ 1 1 8 ¦ 1 8 ¦ 8
grpo_qwen15_moe_a27b_gsm8k_16npu ¦ qwen15_moe_a2_7b ¦ 16 ¦ 1 1 4 ¦ 1 4 ¦ 16
grpo_qwen15_moe_a27b_gsm8k_12npu ¦ qwen15_moe_a2_7b ¦ 12 ¦ 1 1 4 ¦ 1 4 ¦ 16
grpo_qwen15_moe_a27b_gsm8k_8npu ¦ qwen15_moe_a2_7b ¦ 8 ¦ 1 1 4 ¦ 1 4 ¦ 16
grpo_qwen25_1_5b_gsm8k_8npu ¦ qwen25_1_5b ¦ 8 ¦ 1 1 1 ¦ 1 1 ¦ 16
grpo_qwen25_7b_gsm8k_8npu ¦ qwen25_7b ¦ 8 ¦ 2 1 1 ¦ 1 1 ¦ 16
"""
SHIPPED = {name: (model, *map(numbers, sizes)) for name, model, *sizes in cells(TABLE)}


@cache
def composed(name):
    """The resolved config; not to be changed."""
    return compose(name)


each = pytest.mark.parametrize("name", SHIPPED)
# values when three configs were whole: of the first, and of the others where they differ
BEFORE = json.loads((ROOT / "tests" / "ascend" / "shipped.json").read_text())
INSTRUCT = "Qwen3-30B-A3B-Instruct-2507"  # the model of the 30B configs since
NAMED = (
    "actor_config.load",
    "megatron_training.data_path",
    "megatron_training.tokenizer_name_or_path",
)
CHANGED = {
    "megatron_training.seq_length": 1536,
    "generate_config.max_model_len": 1536,
    "generate_config.sampling_config.max_tokens": 1024,
    "model.qwen3_30b_a3b.rotary_base": 10_000_000,
    "model.qwen3_30b_a3b.max_position_embeddings": 262_144,
}


# the first config of each model: the layouts of all are looked at below
FIRST = {model: name for name, (model, *_) in reversed(SHIPPED.items())}


@pytest.fixture(params=FIRST.values())
def raw(request, tmp_path, monkeypatch):
    """The resolved config, with a model directory and data where it looks for them."""
    monkeypatch.setenv("MODELS", str(tmp_path / "models"))
    monkeypatch.setenv("DATA", str(tmp_path / "data"))
    config = compose(request.param)
    model = Path(config["megatron_training"]["tokenizer_name_or_path"])
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps(asdict(NAMED_SHAPES[SHIPPED[request.param][0]])))
    train = Path(config["megatron_training"]["data_path"])
    # token ids are one tokenizer's: a folder for each model
    assert train.parent.name == model.name
    train.parent.mkdir(parents=True)
    for file in (
        config["task"]["train_file"],
        config["task"]["test_file"],
        *(
            f"{train}_packed_{column}_document.{end}"
            for column in ("input_ids", "labels")
            for end in ("bin", "idx")
        ),
    ):
        Path(file).touch()
    return request.param, config


def test_accepted_with_everything_on(raw):
    _, config = raw
    recipe, _ = checked(config)
    assert recipe.lora.targets == ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
    assert recipe.noise.noise_schedule(recipe.run.train_iters).sigma(
        recipe.run.train_iters - 1
    ) == pytest.approx(5e-4)
    assert recipe.task.verifiers == (("gsm8k", 1.0),)
    groups = worker_environment(recipe, {})["VLLM_DP_SIZE"]
    assert groups == str(config["generate_config"]["infer_expert_parallel_size"])
    assert recipe.evaluation.n_problems is None and not recipe.emulate_npu
    assert not config["generate_config"]["trust_remote_code"]


@pytest.mark.parametrize("raw", ["grpo_qwen3_30b_a3b_gsm8k_16npu"], indirect=True)
def test_a_missing_model_and_missing_data_are_named(raw, tmp_path):
    _, config = raw
    shutil.rmtree(tmp_path / "data")
    Path(config["megatron_training"]["tokenizer_name_or_path"], "config.json").unlink()
    with pytest.raises(ConfigError) as error:
        checked(config)
    lines = str(error.value).splitlines()
    assert len(lines) == 6 and sum("tools/convert_gsm8k.py" in line for line in lines) == 5
    assert any("no readable config.json" in line for line in lines)


@each
def test_layout_is_the_one_that_is_meant_and_legal(name):
    config = composed(name)
    _, npus, training, infer, [node] = SHIPPED[name]
    recipe = read_recipe(config)
    plan = plan_of(recipe, ranks_per_node=node)
    memory = estimate(plan, settings_of(recipe))
    assert memory.fits, memory.faults
    it = plan.layout
    assert [it.world, it.tp, it.pp, it.ep, it.infer_tp, it.infer_ep] == npus + training + infer
    assert broken(plan) == [] and plan.lora and plan.share_backbone
    load = Path(config["actor_config"]["load"]).name
    # else they are the base weights of another layout
    assert load == Path(
        config["megatron_training"]["tokenizer_name_or_path"]
    ).name + f"-tp{it.tp}-pp{it.pp}" + (f"-ep{it.ep}" if plan.shape.moe else "")
    # all of a stage's layers
    assert config["megatron_training"].get("recompute_num_layers", plan.layers[0]) == plan.layers[0]
    # once through the training set
    assert config["megatron_training"]["train_iters"] * plan.batch.global_batch_size in range(
        7400, 7473 + 1
    )
    assert (
        config["rl_config"]["max_prompt_length"]
        + config["generate_config"]["sampling_config"]["max_tokens"]
        == config["megatron_training"]["seq_length"]
        == config["generate_config"]["max_model_len"]
    )


@each
def test_every_value_is_as_before_or_changed_for_a_reason(name):
    """With the thinking model the 30B configs are what they were; without it what differs is its
    own.
    """
    first, *_ = BEFORE
    before = BEFORE[first] | (BEFORE[name] if name != first else {})

    def changed(*overrides):
        config = compose(name, overrides)
        return {key: at(key, config) for key in before if at(key, config) != before[key]}

    if "30b" not in name:
        assert changed() == {}
        return
    assert changed("model=qwen3_30b_a3b") == {}
    renamed = {key: str(before[key]).replace("Qwen3-30B-A3B", INSTRUCT) for key in NAMED}
    assert changed() == CHANGED | renamed


@pytest.mark.parametrize("name", [name for name in SHIPPED if "qwen25" not in name])
def test_hccl_buffer_holds_the_tokens_of_a_decoding_step(name):
    """CANN's sum for the dispatch of tokens to experts, as its error prints it (vllm-ascend pull
    request 5287: 609 MiB for 512 tokens, hidden 2048, 128 experts, top 8): 2 x tokens x ((2h + 512)
    x experts + 2h x (top k + shared)). A token for each sequence at once, 512 at most.
    """
    config = composed(name)
    shape = shape_of_model(read_recipe(config))

    def needed(tokens, h, experts, k, shared):
        return 2 * tokens * ((2 * h + 512) * experts + 2 * h * (k + shared)) / 2**20

    assert 608 <= needed(512, 2048, 128, 8, 0) <= 609
    tokens = min(config["generate_config"]["max_num_seqs"], 512)
    assert (
        needed(tokens, shape.hidden_size, shape.num_experts, shape.num_experts_per_tok, 0)
        < config["rl_config"]["hccl_buffersize"]
    )


@pytest.mark.parametrize("model", MODELS)
def test_model_has_the_published_shape(model):
    """configs/model/ against the shapes of the published config.json files."""
    config = compose("grpo_qwen3_30b_a3b_gsm8k_16npu", [f"model={model}"])
    ((name, arguments),) = config["model"].items()
    assert name == config["actor_config"]["model"] == config["megatron_training"]["model"]
    shape = NAMED_SHAPES[model]
    published = {**family_of(shape).hf_config(shape), "model_type": shape.model_type}
    told = {**config["megatron_training"], **config["actor_config"], **arguments}
    assert compare_with_model(told, published | {"rope_theta": shape.rope_theta}) == []
    assert arguments["padded_vocab_size"] == shape.vocab_size


def test_the_guide_shows_these_configs_and_this_contract():
    guide = (ROOT / "docs" / "ascend.md").read_text()
    assert {path.stem for path in CONFIGS.glob("*npu*.yaml")} == set(SHIPPED)
    assert all(f"| `{name}` |" in guide for name in SHIPPED)
    for package, pin in PINS.items():
        count = sum(
            len(entries)
            for file, entries in ENTRIES.items()
            if file.split("/")[0].replace("cli", "mindspeed_rl") == package
        )
        assert (
            f"\n{pin.title} in ../{pin.title} is {pin}; {count} of {count} things that the engine "
            "relies on are unchanged\n"
        ) in guide
