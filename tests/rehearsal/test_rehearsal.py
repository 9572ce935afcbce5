"""A rehearsal keeps what a layout divides, catches what is wrong with a config, and runs from the
command line.
"""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from mindspeed_qerl.common.errors import ConfigError
from mindspeed_qerl.families import NAMED_SHAPES, read_shape
from mindspeed_qerl.layout.plan import plan_of
from mindspeed_qerl.layout.rules import broken
from mindspeed_qerl.local import limits as local
from mindspeed_qerl.recipe.compose import CONFIGS, compose
from mindspeed_qerl.recipe.reader import read, read_recipe
from mindspeed_qerl.recipe.types import Layout
from mindspeed_qerl.recipe.writer import to_config
from mindspeed_qerl.rehearsal.model import make_model, narrow
from mindspeed_qerl.rehearsal.prepare import prepare
from mindspeed_qerl.runs.metrics import read_jsonl
from mindspeed_qerl.tasks.rows import read_rows
from tests import ROOT
from tests.word_problems import converted

NPU_CONFIGS = sorted(path.stem for path in CONFIGS.glob("*npu*.yaml"))
FEW = ["rehearsal.enabled=true", "engine=local"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Where the configs look for models (none) and data (word problems in GSM8K's form)."""
    return converted(tmp_path_factory.mktemp("data"), 400, 20).parent


@pytest.fixture
def variables(data, tmp_path, monkeypatch):
    monkeypatch.setenv("DATA", str(data))
    monkeypatch.setenv("MODELS", str(tmp_path / "no_models"))


@pytest.fixture
def composed(variables, tmp_path):
    return lambda name, *overrides: compose(
        name, [*FEW, f"rehearsal.models={tmp_path}/models", *overrides]
    )


@pytest.mark.parametrize("name", NPU_CONFIGS)
def test_the_rehearsed_config_keeps_layout_batch_lora_and_noise(composed, name):
    recipe, found = read(composed(name))
    before = plan_of(recipe)
    small = read_recipe(to_config(prepare(recipe, found)))  # as train.py runs it
    assert [*local.validate(small)] == []
    shape = read_shape(small.model.path)
    kept = (
        "num_attention_heads num_key_value_heads num_experts num_experts_per_tok norm_topk_prob "
        "tie_word_embeddings model_type rope_theta"
    )
    sizes = "global_batch_size mini_batch_size samples_per_prompt micro_batch_size"
    for after, planned, names in (
        (shape, before.shape, kept),
        (small.layout, before.layout, "world tp pp ep"),
        (small.batch, before.batch, sizes),
        (small.lora, recipe.lora, "r alpha targets"),
        (small.noise, recipe.noise, "enabled sigma_start sigma_end targets"),
    ):
        for key in names.split():
            assert getattr(after, key) == getattr(planned, key), key
    assert shape.num_hidden_layers == small.layout.pp and small.lora.r == 32 and small.noise.enabled
    schedule = small.noise.noise_schedule(small.run.train_iters)
    # the last step has noise
    assert schedule.sigma(small.run.train_iters - 1) > 0
    sampled = replace(
        small, layout=replace(small.layout, infer_tp=recipe.layout.infer_tp)
    )  # one vLLM samples here
    plan = replace(plan_of(sampled, shape), padded_vocab_size=shape.vocab_size)
    # the narrow model obeys every rule
    assert broken(plan) == []


@pytest.mark.parametrize("name", NPU_CONFIGS)
def test_what_the_blocks_of_a_format_fill_they_fill_in_the_narrow_model(composed, name):
    for format in ("nvfp4", "mxfp4"):
        raw = composed(name, f"rollout_quantization={format}")
        assert prepare(*read(raw)).quantization.format == format


@pytest.mark.parametrize(
    "name", [pytest.param("qwen3_30b_a3b", marks=pytest.mark.full), "qwen25_1_5b"]
)
def test_a_model_of_all_layers_answers_with_numbers(data, tmp_path, name):
    """Else no answer is ever right, no reward differs, and no gradient reaches an adapter: 48
    layers drown what the embedding says.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    shape = narrow(NAMED_SHAPES[name], Layout(world=1), NAMED_SHAPES[name].num_hidden_layers)
    if shape.moe:
        shape = replace(shape, num_experts=4, num_experts_per_tok=2)
    rows = read_rows(data / "gsm8k" / "train_chat.parquet")
    directory = make_model(shape, rows, tmp_path)
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(directory),
        AutoTokenizer.from_pretrained(directory),
    )
    assert model.config.num_hidden_layers == shape.num_hidden_layers >= 28
    prompts = tokenizer.apply_chat_template(
        [row.messages for row in rows[:8]],
        add_generation_prompt=True,
        padding=True,
        padding_side="left",
        return_tensors="pt",
        return_dict=True,
    )
    torch.manual_seed(0)
    tokens = model.generate(**prompts, do_sample=True, max_new_tokens=4, num_return_sequences=4)[
        :, prompts["input_ids"].shape[1] :
    ]
    answers = tokenizer.batch_decode(tokens, skip_special_tokens=True)
    assert (
        sum(any(character.isdigit() for character in answer) for answer in answers)
        > len(answers) / 2
    ), answers
    # another task
    assert make_model(shape, rows, tmp_path) == directory != make_model(shape, rows[:100], tmp_path)


def test_every_fault_is_found_before_anything_is_made(composed, tmp_path):
    raw = composed(
        "grpo_qwen3_30b_a3b_gsm8k_16npu",
        "actor_config.expert_model_parallel_size=6",
        "rl_config.verifier_function=[gsm8]",
        "rehearsal.steps=0",
    )
    raw["megatron_training"]["lora_target_modules"] = ["linear_qvk"]
    raw["task"]["train_file"] = "nowhere.parquet"
    with pytest.raises(ConfigError) as error:
        prepare(*read(raw))
    message = str(error.value)
    for fault in (
        "experts_by_training_ranks",
        "did you mean 'gsm8k'",
        "Input should be 'linear_qkv'",
        "rehearsal.steps = 0",
        "nowhere.parquet",
    ):
        assert fault in message, message
    assert not (tmp_path / "models").exists()


def test_what_the_engine_of_npus_refuses(composed):
    raw = composed("grpo_qwen25_7b_gsm8k_8npu", "megatron_training.lora_alpha=64.5")
    with pytest.raises(ConfigError, match="lora_alpha = 64.5 must be a whole number"):
        prepare(*read(raw))


def test_upstream_without_the_emulation_cannot_be_rehearsed(composed):
    with pytest.raises(ConfigError, match="needs emulate_npu=true; or engine=local"):
        prepare(*read(composed("grpo_qwen25_7b_gsm8k_8npu", "engine=mindspeed_rl")))


def test_all_layers_keep_stages_of_different_sizes(composed, monkeypatch):
    """The model itself is not made here."""
    monkeypatch.setattr(
        "mindspeed_qerl.rehearsal.prepare.make_model",
        lambda shape, *_: Path(str(shape.num_hidden_layers)),
    )
    monkeypatch.setattr(local, "rehearsed", lambda recipe, *_: recipe)
    monkeypatch.setattr(local, "validate", lambda recipe: [])
    stages = "+megatron_training.num_layer_list='16,17,14'"
    shape = replace(NAMED_SHAPES["qwen3_30b_a3b"], num_hidden_layers=47)
    for module in ("rehearsal.prepare", "ascend.limits"):
        planned = f"mindspeed_qerl.{module}.plan_of"
        monkeypatch.setattr(planned, lambda recipe: plan_of(recipe, shape))
    small = prepare(
        *read(composed("grpo_qwen3_30b_a3b_gsm8k_12npu_tp4_pp3", "rehearsal.layers=all", stages))
    )
    assert small.layout.num_layer_list == (16, 17, 14) and small.model.path == "47"


@pytest.mark.parametrize("stages", [1, pytest.param(2, marks=pytest.mark.full)])
def test_from_the_command_line_to_the_report(variables, tmp_path, stages):
    """Stages of two tensor parallel ranks, with experts spread over them."""
    command = [
        sys.executable,
        str(ROOT / "cli" / "train_grpo.py"),
        "--config-name",
        "grpo_qwen3_30b_a3b_gsm8k_12npu_tp4_pp3",
        *FEW,
        f"rl_config.actor_resource.num_npus={2 * stages}",
        "actor_config.tensor_model_parallel_size=2",
        f"actor_config.pipeline_model_parallel_size={stages}",
        "generate_config.infer_tensor_parallel_size=2",
        "megatron_training.global_batch_size=4",
        "rl_config.mini_batch_size=2",
        "actor_config.micro_batch_size=4",
        "rollout_quantization=nvfp4",
    ]
    done = subprocess.run(command, check=False, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = (tmp_path / "runs" / "rehearsals" / "grpo_qwen3_30b_a3b_gsm8k_12npu_tp4_pp3").iterdir()
    text = (run / "rehearsal.md").read_text()
    assert text in done.stdout
    for line in (
        f"{2 * stages} processes ran it: TP 2 x PP {stages} x DP 1, EP 1; 4 prompts x 8 answers a",
        "32 on each of 1 data-parallel ranks in micro-batches of 4.",
        "one vLLM process in the place of infer TP 2 x EP 1.",
        f"Depth: {stages} of 48 layers",
    ):
        assert line in text, text
    last = read_jsonl(run / "metrics.jsonl")[-1]
    assert last["aqn/layers"] == stages and last["aqn/sigma"] == 0.05
    assert 0.09 < last["quantization/weight_error"] < 0.1
    facts = json.loads((run / "facts.json").read_text())
    assert {target: count["modules"] for target, count in facts["lora"].items()} == {
        "linear_qkv": stages,
        "linear_proj": stages,
        "linear_fc1": 128 * stages,
        "linear_fc2": 128 * stages,
    }
