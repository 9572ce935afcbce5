"""The ranking, the layouts near an illegal one, and the command line that shows them."""

import json
from dataclasses import replace
from functools import partial
from itertools import product

import pytest

from mindspeed_qerl.layout.planner import legal_layouts, new_plan, reasons
from mindspeed_qerl.layout.rules import broken
from mindspeed_qerl.layout.time import idle_share, stage_work
from mindspeed_qerl.recipe.types import Batch, Layout
from tests.families.public_models import MODELS
from tests.layout.dealing import DENSE, QWEN3, QWEN15, can_run
from tests.tables import cells
from tests.tasks.gsm8k.tool import run_tool

CONFIG = "grpo_qwen3_30b_a3b_gsm8k_16npu"
MODEL = ["--model", "qwen3_30b_a3b", "--ranks"]


def sizes(plan):
    return tuple(getattr(plan.layout, name) for name in ("tp", "pp", "ep", "infer_tp", "infer_ep"))


@pytest.mark.parametrize(
    "shape, world", [(QWEN3, 16), (QWEN3, 12), (QWEN15, 12), (DENSE, 8), (QWEN3, 6)]
)
def test_exactly_the_training_layouts_that_can_run(shape, world):
    """Every combination of sizes up to the ranks, judged by dealing: those for which some inference
    layout can run are listed.
    """
    listed = {sizes(entry.plan)[:3] for entry in legal_layouts(shape, world)}
    span = range(1, world + 1)
    possible = set()
    for tp, pp, ep in product(span, span, span if shape.moe else (1,)):
        if tp * pp * ep <= world and world % (tp * pp) == 0 and shape.num_attention_heads % tp == 0:
            for infer_tp, infer_ep in product(span, span if shape.moe else (1,)):
                layout = Layout(world, tp=tp, pp=pp, ep=ep, infer_tp=infer_tp, infer_ep=infer_ep)
                if infer_tp * infer_ep <= world and can_run(new_plan(shape, layout)):
                    possible.add((tp, pp, ep))
                    break
    assert listed == possible and listed


@pytest.mark.parametrize(
    "shape, world, best",
    [
        (QWEN3, 16, (1, 1, 16, 1, 16)),
        (QWEN3, 12, (1, 3, 4, 1, 4)),
        (QWEN15, 16, (1, 1, 4, 1, 4)),
        (DENSE, 8, (4, 1, 1, 2, 1)),
    ],
)
def test_the_first_choice(shape, world, best):
    ranked = legal_layouts(shape, world)
    assert sizes(ranked[0].plan) == best and ranked[0].fits
    assert not any(broken(entry.plan) for entry in ranked)
    fits = [entry.fits for entry in ranked]
    assert fits == sorted(fits, reverse=True)


def test_groups_across_nodes_come_last_and_are_named():
    ranked = legal_layouts(QWEN3, 16, ranks_per_node=8)
    across = ["across nodes" in " ".join(reasons(entry)) for entry in ranked if entry.fits]
    assert across == sorted(across) and any(across) and not across[0]
    assert sizes(ranked[0].plan)[:3] == (1, 1, 8)


@pytest.mark.parametrize(
    "wanted, world, expected",
    [(64, 12, 60), (64, 16, 64), (64, 48, 48), (1, 16, 16), (90, 12, 84), (64, 1024, 1024)],
)
def test_the_nearest_batch(wanted, world, expected):
    plan = new_plan(DENSE, Layout(world, ranks_per_node=world), prompts=wanted)
    assert plan.batch.global_batch_size == plan.batch.mini_batch_size == expected
    assert not broken(plan)


def test_pipeline_waits_for_its_slowest_stage():
    """A head that costs as much as four layers: 4 stages of 1 layer each wait for the last, besides
    the bubble.
    """
    shape = replace(DENSE, num_hidden_layers=4)
    plan = new_plan(shape, Layout(4, pp=4), Batch(32, 32, samples_per_prompt=2))
    work = stage_work(plan)
    assert work[0] == work[1] == work[2]
    assert work[3] - work[0] == shape.vocab_size * shape.hidden_size
    assert idle_share(plan) == pytest.approx(1 - sum(work) / 4 / work[3] * 64 / 67)
    assert idle_share(new_plan(DENSE, Layout(4))) == 0


# ---- the command line ----


plan_layout = partial(run_tool, "plan_layout")


def test_a_verdict_for_people():
    illegal = plan_layout(*MODEL, "12", "--check", "tp=3,pp=1,ep=4,infer_tp=6,infer_ep=2")
    for text in (
        "illegal: 8 rules are broken",
        "32 attention heads cannot be divided by TP 3",
        "transformer_config.py:559",
        "128 experts cannot be divided by TP 3 x EP 4 = 12",
        "--model MODEL --ranks 12 --ranks-per-node 16",
    ):
        assert text in " ".join(illegal.stdout.split()), text
    assert illegal.returncode == 1
    legal = plan_layout(*MODEL, "16", "--check", "tp=4,ep=4").stdout
    for text in ("legal, all", "never measured on an NPU", "vLLM TP 4 x EP 4", "1 node of 16"):
        assert text in legal
    assert "experts on their way: a second copy of a stage's experts, 48 layers" in legal


def test_a_legal_layout_of_a_config_that_the_engine_refuses():
    key = "megatron_training.lora_alpha=16.5"
    told = plan_layout("--config-name", CONFIG, key)
    assert told.returncode == 1 and "legal, all" in told.stdout
    assert "engine refuses this config: actor_config.lora_alpha = 16.5" in told.stdout


LLAMA3 = MODELS["Llama-3.1-8B"]["rope_scaling"]


@pytest.mark.parametrize(
    "changed, reason",
    [
        ({"model_type": "llama", "rope_scaling": LLAMA3}, None),
        (
            {"model_type": "llama", "head_dim": 48, "mlp_bias": True},
            "mlp_bias is True; only None or False is built; head_dim = 48 must be one of 32, 64, 80",
        ),
        (
            {"rope_parameters": LLAMA3},
            'which transformers 4 does not read. Write "rope_scaling": {',
        ),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, "rope_type is 'linear'"),
        (
            {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}},
            "which transformers 4 does not read",
        ),
        ({}, None),
    ],
)
def test_a_model_that_no_npu_runs_has_no_layout(tmp_path, changed, reason):
    config = {
        "model_type": "qwen2",
        "num_hidden_layers": 4,
        "hidden_size": 512,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "intermediate_size": 1024,
        "vocab_size": 1024,
        "max_position_embeddings": 4096,
    }
    (tmp_path / "config.json").write_text(json.dumps({**config, **changed}))
    for more in ([], ["--check", "tp=2"]):
        told = plan_layout("--model", str(tmp_path), "--ranks", "8", *more)
        assert told.returncode == (1 if reason else 0)
        first = told.stdout.partition("\n")[0]
        assert (
            first.startswith("No layout runs on NPUs: ") == bool(reason) and (reason or "") in first
        )


def test_no_layout_is_explained():
    seven = plan_layout(*MODEL, "7")
    assert seven.returncode == 1
    assert "128 experts cannot be divided by TP 1 x EP 7 = 7" in seven.stdout
    nodes = plan_layout("--model", "qwen25_7b", "--ranks", "20")
    assert nodes.returncode == 1 and "20 ranks cannot be divided by 16 ranks a node" in nodes.stdout


@pytest.mark.parametrize(
    "arguments, message",
    cells("""
--model qwen3_30b_a3b --ranks 16 --check tpp=3 ¦ unknown key in --check: 'tpp', did you mean
--model qwen3_30b_a3b --ranks 16 --check tp=three ¦ --check tp=three: the size must be a whole
--model qwen3_30b_a3b --ranks 16 --check tp=0 ¦ must be a whole number of at least 1
--model qwen3_30b_a3b --ranks 16 --check tp=4,tp=2 ¦ --check tp=4,tp=2: tp is given twice
--model qwen3_30b --ranks 16 ¦ unknown model 'qwen3_30b', did you mean
--model tests --ranks 16 ¦ tests has no config.json
--model qwen3_30b_a3b ¦ --model and --ranks are needed
--ranks sixteen ¦ invalid int value
--model qwen3_30b_a3b --ranks 0 ¦ --ranks 0 must be at least 1
--model qwen3_30b_a3b --ranks 1000000007 ¦ --ranks 1000000007 must be at least 1 and at most 100,000
--model qwen3_30b_a3b --ranks 16 --memory-gb=nan ¦ --memory-gb nan must be finite and above 0
--model qwen3_30b_a3b --ranks 16 --memory-gb=0 ¦ --memory-gb 0 must be finite and above 0
--model qwen3_30b_a3b --ranks 16 --tokens 1,2 ¦ --tokens 1,2 must be three numbers
--model qwen3_30b_a3b --ranks 16 --tokens 100,900,300 ¦ must be three numbers
--model qwen3_30b_a3b --ranks 16 actor_config.lr=1 ¦ is an override of a config
--config-name grpo_qwen3 ¦ unknown config name 'grpo_qwen3'
--config-name grpo_qwen3_30b_a3b_gsm8k_16npu --ranks 12 ¦ rl_config.actor_resource.num_npus=12
--config-name grpo_qwen3_30b_a3b_gsm8k_16npu ++foo.bar=1 ¦ unknown key 'foo'
"""),
)
def test_a_wrong_command_line(arguments, message):
    result = plan_layout(*arguments.split())
    assert result.returncode == 2 and message in result.stderr and "Traceback" not in result.stderr


def test_when_nothing_fits_the_nearest_to_fitting_is_first():
    ranked = legal_layouts(QWEN3, 8, memory_gb=24)
    over = [entry.excess for entry in ranked]
    assert over == sorted(over) and over[0] > 0 and not any(entry.fits for entry in ranked)
    assert over[0] == ranked[0].total("weight sync") - 24 * 10**9
    printed = plan_layout(*MODEL, "8", "--memory-gb", "24", "--top", "1").stdout
    assert "none fits into 24 GB. The 1 nearest to it" in " ".join(printed.split())
