"""Configs that the planner writes: read, legal, fitting, of the model and the sizes they are for."""

import json
import re
from functools import partial

import pytest

from mindspeed_qerl.families import NAMED_SHAPES
from mindspeed_qerl.layout.memory import estimate, settings_of
from mindspeed_qerl.layout.plan import plan_of
from mindspeed_qerl.layout.planner import new_plan, with_memory
from mindspeed_qerl.layout.rules import broken
from mindspeed_qerl.recipe.compose import compose
from mindspeed_qerl.recipe.reader import read
from mindspeed_qerl.recipe.types import Layout
from tests.families.public_models import MODELS as PUBLIC
from tests.layout.dealing import can_run
from tests.tasks.gsm8k.tool import run_tool

plan_layout = partial(run_tool, "plan_layout")
WORLDS = 8, 12, 16, 32, 64
# models without a layout that fits
NONE = {("qwen25_72b", 12), *(("qwen3_235b_a22b", world) for world in (8, 12, 16))}
CASES = [(model, world) for model in NAMED_SHAPES for world in WORLDS]
FEW = {  # those that every run of the tests writes
    ("qwen3_30b_a3b_2507", 16),
    ("qwen15_moe_a2_7b", 12),
    ("qwen3_14b", 8),
    ("qwen25_7b", 64),
    ("qwen25_72b", 12),
}


def written(folder, *arguments):
    """Writes folder/mine.yaml; what was said, and the config."""
    done = plan_layout("--top", "1", "--write", folder / "mine.yaml", *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout, compose("mine", config_dir=str(folder))


@pytest.mark.parametrize(
    "model, world",
    [pytest.param(*case, marks=() if case in FEW else pytest.mark.full) for case in CASES],
)
def test_each_model_on_each_box(model, world, tmp_path):
    if (model, world) in NONE:
        done = plan_layout("--model", model, "--ranks", world, "--write", tmp_path / "mine.yaml")
        assert done.returncode == 2 and "GB" in done.stderr and not [*tmp_path.iterdir()]
        return
    _, config = written(tmp_path, "--model", model, "--ranks", world)
    recipe, found = read(config)
    assert not found.faults
    plan = plan_of(recipe)
    shape = NAMED_SHAPES[model]
    assert plan.shape == shape
    (arguments,) = config["model"].values()
    told = arguments["rotary_base"], arguments["max_position_embeddings"]
    assert told == (shape.rope_theta, shape.max_position_embeddings)
    assert plan.layout.world == world and plan.layout.nodes == -(-world // 16)
    assert broken(plan) == [] and can_run(plan)
    memory = estimate(plan, settings_of(recipe))
    assert memory.fits, memory.faults
    load = f"{recipe.model.path}-tp{plan.layout.tp}-pp{plan.layout.pp}"
    assert recipe.model.load == load + f"-ep{plan.layout.ep}" * plan.shape.moe
    assert recipe.run.train_iters == 7473 // plan.batch.global_batch_size
    text = (tmp_path / "mine.yaml").read_text()
    values = re.findall(r"^ +\w+: \S.*$", text.partition("_self_")[2], re.MULTILINE)
    plain = {line.split(":")[0].strip() for line in values if "  # " not in line}
    assert len(values) > 8 and plain <= {
        "offload_train_grad",
        "offload_train_param",
        "recompute_method",
    }


def test_a_model_of_ones_own(tmp_path):
    """Lengths, rows and a part of configs/model/ from its config.json; nothing is overwritten."""
    model = tmp_path / "My-30B"
    model.mkdir()
    changed = PUBLIC["Qwen3-30B-A3B"] | {"rope_theta": 5e6, "vocab_size": 151_669}
    (model / "config.json").write_text(json.dumps(changed))
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1 + 1 =", "answer": "2"}\n' * 200)
    arguments = ["--model", model, "--ranks", 12, "--check", "tp=4,infer_tp=4"]
    lengths = ["--max-prompt", 700, "--max-answer", 4000, "--train-file", rows]
    said, config = written(tmp_path, *arguments, *lengths)
    assert f"written: {tmp_path / 'model' / 'my_30b.yaml'}" in said
    told = config["model"]["my_30b"]
    assert (told["rotary_base"], told["padded_vocab_size"]) == (5_000_000, 151_680)
    recipe, _ = read(config)
    batch = recipe.batch
    assert batch.seq_length == batch.max_model_len == 4700 <= batch.update_max_packing_token_size
    assert (recipe.sampling.max_prompt_length, recipe.sampling.max_tokens) == (700, 4000)
    assert recipe.run.train_iters * batch.global_batch_size in range(120, 201)
    assert recipe.task.train_file == str(rows) and recipe.model.path == str(model)
    before = {file: file.read_text() for file in tmp_path.rglob("*.yaml")}
    again = plan_layout("--write", tmp_path / "mine.yaml", *arguments)
    assert again.returncode == 2 and "--overwrite replaces it" in again.stderr
    assert before == {file: file.read_text() for file in tmp_path.rglob("*.yaml")}
    written(tmp_path, *arguments, "--overwrite")
    assert (tmp_path / "mine.yaml").read_text() != before[tmp_path / "mine.yaml"]
    # another model of the same name
    (model / "config.json").write_text(json.dumps(changed | {"num_hidden_layers": 24}))
    refused = plan_layout("--write", tmp_path / "other.yaml", *arguments)
    assert refused.returncode == 2 and "num_layers = 48 in the config" in refused.stderr
    assert not (tmp_path / "other.yaml").exists()


def test_a_published_model_takes_the_part_that_is_there(tmp_path):
    """The thinking model has longer answers; the N-th of the list is written."""
    model = ["--model", "qwen3_30b_a3b", "--ranks", "16"]
    _, config = written(tmp_path, *model, "--pick", "2")
    assert [file.name for file in tmp_path.iterdir()] == ["mine.yaml"]
    own = compose("grpo_qwen3_30b_a3b_gsm8k_16npu", ["model=qwen3_30b_a3b"])
    for section in ("model", "task", "eval", "aqn", "run"):
        assert config[section] == own[section]
    assert config["generate_config"]["sampling_config"] == own["generate_config"]["sampling_config"]
    listed = plan_layout(*model, "--top", "2").stdout
    second = re.search(r"^ +2 +(\d+) +(\d+) +(\d+) ", listed, re.MULTILINE).groups()
    actor = config["actor_config"]
    names = ("tensor_model", "pipeline_model", "expert_model")
    assert [str(actor[f"{name}_parallel_size"]) for name in names] == list(second)


def test_decoding_is_captured_where_it_may_be_and_fits():
    """As in the configs: infer TP 8 has no graphs, and on 12 dies with TP 1 there is no room."""
    shape = NAMED_SHAPES["qwen3_32b"]
    for tp, eager in ((4, False), (8, True)):
        memory = with_memory(new_plan(shape, Layout(16, tp=8, infer_tp=tp)), 64.0)
        assert memory.settings.enforce_eager == memory.settings.offload_train_param == eager
    a3b = NAMED_SHAPES["qwen3_30b_a3b"]
    assert with_memory(new_plan(a3b, Layout(12, ep=4, infer_ep=4)), 64.0).settings.enforce_eager
