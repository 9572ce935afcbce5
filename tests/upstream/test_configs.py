"""The configs for NPUs before upstream's own checks; rehearsed with tiny models; and
docs/ascend.md's conversions of their base weights.
"""

import json
import re
import shlex
from pathlib import Path

import pytest
import torch
import yaml
from checkpoints import write_base_checkpoint
from rehearsal import (
    LAYERS,
    NOISY_NORMS,
    ROOT,
    emulated,
    finished,
    make_model,
    run_module,
    run_python,
    shrink,
)

from mindspeed_qerl.families import NAMED_SHAPES
from mindspeed_qerl.layout.planner import legal_layouts
from mindspeed_qerl.layout.time import DEFAULT, LAUNCHES
from mindspeed_qerl.layout.written import Wanted, config_text, model_text
from mindspeed_qerl.recipe.compose import compose
from mindspeed_qerl.runs.metrics import read_jsonl

# config -> family of its tiny model, and the layout of the rehearsal where four ranks cannot hold
# the config's own.
SHIPPED = {
    "grpo_qwen3_30b_a3b_gsm8k_16npu": (
        "qwen3_moe",
        {
            "actor_config.expert_model_parallel_size": 4,
            "generate_config.infer_expert_parallel_size": 4,
        },
    ),
    "grpo_qwen15_moe_a27b_gsm8k_16npu": ("qwen2_moe", {"generate_config.enforce_eager": "true"}),
    "grpo_qwen25_7b_gsm8k_8npu": ("qwen2", {}),
}
# config -> vLLM replicas, answers a replica, answers a training rank, answers an update
DISPATCHED = {
    "grpo_qwen3_30b_a3b_gsm8k_16npu": [16, 32, 32, 512],
    "grpo_qwen3_30b_a3b_gsm8k_16npu_tp4_ep4": [4, 128, 128, 512],
    "grpo_qwen3_30b_a3b_gsm8k_12npu": [12, 40, 40, 480],
    "grpo_qwen3_30b_a3b_gsm8k_12npu_tp4": [3, 160, 160, 480],
    "grpo_qwen3_30b_a3b_gsm8k_12npu_tp4_pp3": [3, 160, 480, 480],
    "grpo_qwen3_30b_a3b_gsm8k_2x8npu": [16, 32, 32, 512],
    "grpo_qwen15_moe_a27b_gsm8k_16npu": [16, 32, 32, 512],
    "grpo_qwen15_moe_a27b_gsm8k_12npu": [12, 40, 40, 480],
    "grpo_qwen15_moe_a27b_gsm8k_8npu": [8, 64, 64, 512],
    "grpo_qwen25_7b_gsm8k_8npu": [8, 64, 128, 512],
    "grpo_qwen25_1_5b_gsm8k_8npu": [8, 64, 64, 512],
}
# config -> family, and what a tiny model needs to be dealt as its command says
CONVERTED = {
    "grpo_qwen3_30b_a3b_gsm8k_16npu": ("qwen3_moe", {"num_experts": 16}),
    "grpo_qwen3_30b_a3b_gsm8k_16npu_tp4_ep4": (
        "qwen3_moe",
        {"num_experts": 16, "num_key_value_heads": 4},
    ),
    "grpo_qwen3_30b_a3b_gsm8k_12npu_tp4_pp3": (
        "qwen3_moe",
        {"num_hidden_layers": 3, "num_key_value_heads": 4},
    ),
    "grpo_qwen15_moe_a27b_gsm8k_16npu": ("qwen2_moe", {}),
    "grpo_qwen25_7b_gsm8k_8npu": ("qwen2", {}),
    "grpo_qwen25_1_5b_gsm8k_8npu": ("qwen2", {"tie_word_embeddings": True}),
}


ACCEPT = """
import sys
from pathlib import Path
from hydra import compose, initialize_config_dir
from importlib.util import module_from_spec, spec_from_file_location
from mindspeed_rl.config_cls import validate_config
spec = spec_from_file_location("upstream_cli", Path(sys.argv[1]) / "cli" / "train_grpo.py")
cli = module_from_spec(spec)
spec.loader.exec_module(cli)
for name in sys.argv[4:]:
    name, _, nodes = name.partition(":")
    validate_config.get_node_nums = lambda: int(nodes or 1)  # it asks Ray
    with initialize_config_dir(sys.argv[3], version_base=None):
        config = compose(name, [f"hydra.searchpath=[file://{sys.argv[2]}]"])
    parts = cli.parse_training_config(config)
    rl, generate = parts["rl_config"], parts["generate_config"]
    print("ACCEPTED", name, generate.data_parallel_size, rl.actor_rollout_dispatch_size,
          rl.actor_update_dispatch_size, rl.mini_batch_size)
"""


def accepted(upstream, folder, names, place):
    """{config of `folder`: what validate_rl_args of MindSpeed-RL made of its batch}, through its own
    parse_training_config.
    """
    words = ["-c", ACCEPT, upstream / "MindSpeed-RL", ROOT / "configs", folder, *names]
    result = run_python(words, emulated(upstream, 16), place)
    rows = [line.split()[1:] for line in result.stdout.splitlines() if "ACCEPTED" in line]
    return {name: [int(number) for number in numbers] for name, *numbers in rows}, result.stderr


def test_upstream_accepts_the_configs(upstream, tmp_path):
    names = [name + ":2" * ("2x8" in name) for name in DISPATCHED]
    found, errors = accepted(upstream, ROOT / "configs", names, tmp_path)
    assert {path.stem for path in (ROOT / "configs").glob("*npu*.yaml")} == set(DISPATCHED)
    assert found == DISPATCHED, errors[-3000:]


def test_upstream_accepts_what_the_planner_writes(upstream, tmp_path):
    """For each model and box the best layout that fits."""
    folder = tmp_path / "configs"
    expected = {}
    for model, shape in NAMED_SHAPES.items():
        for world in (8, 12, 16, 32, 64):
            memory = legal_layouts(shape, world)[0]
            if not memory.fits:
                continue
            name = f"{model}_{world}"
            part = folder / "model" / f"{model}.yaml"
            part.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(model_text(shape, model, model, f"/models/{model}", 2048))
            text = config_text(memory, Wanted(model, model, 7473), DEFAULT)
            (folder / f"{name}.yaml").write_text(text)
            plan = memory.plan
            replicas = plan.layout.infer_dp
            answers = plan.batch.answers
            expected[name] = [replicas, answers // replicas, plan.share, answers]
    names = [f"{name}:{-(-int(name.rpartition('_')[2]) // 16)}" for name in expected]
    found, errors = accepted(upstream, folder, names, tmp_path)
    assert found == expected, errors[-3000:]
    print(len(found), "configs accepted")


@pytest.mark.parametrize("name", SHIPPED)
def test_rehearsal(name, upstream, tiny, tmp_path, monkeypatch):
    """Two iterations on four emulated NPUs, from a base checkpoint, with everything that the config
    switches on.
    """
    monkeypatch.setenv("MINDSPEED_QERL_EMULATED_COUNTS", "1")
    family, layout = SHIPPED[name]
    config = compose(name)
    model, data = tiny(family)
    actor = config["actor_config"] | {key.split(".")[1]: layout[key] for key in layout}
    base = write_base_checkpoint(
        model,
        tmp_path / "base",
        tp=actor["tensor_model_parallel_size"],
        ep=actor.get("expert_model_parallel_size", 1),
    )
    overrides = {
        **shrink(family, config["actor_config"]["model"]),
        **layout,
        "emulate_npu": "true",
        "rl_config.init_kl_coef": 0.001,  # for a pass of the reference
        "actor_config.load": base,
        "megatron_training.tokenizer_name_or_path": model,
        "megatron_training.data_path": data / "packed" / "gsm8k_train",
        "task.test_file": data / "chat" / "test_chat.parquet",
        "run.root": tmp_path,
        "rl_config.verifier_function": "[gsm8k,varied_reward:varied]",
        "rl_config.verifier_weight": "[1.0,1.0]",
    }
    resolved = compose(name, [f"{key}={value}" for key, value in overrides.items()])
    run = finished(run_module("counts", resolved, upstream, tmp_path), tmp_path / "probe")
    assert run.status()["state"] == "finished" and run.status()["step"] == 2
    assert [row["step"] for row in read_jsonl(run.eval_file)] == [0, 2]
    for row in read_jsonl(run.metrics_file):
        assert row["reward/groups_with_signal"] == 1 and row["grad_norm"] > 0
        assert row["aqn/layers"] == NOISY_NORMS[family]
    assert (run.checkpoints_dir / "latest_checkpointed_iteration.txt").read_text() == "2"
    counted = launches(json.loads((tmp_path / "found.json").read_text()))
    print(f"{family}: {counted}")
    table = yaml.safe_load(LAUNCHES.read_text())
    step = "decode" if "generate_config.enforce_eager" in layout else "graph"
    assert counted.keys() == {step, "prefill", "forward", "update", "sync", "merge"}
    for kind, (layer, outside) in counted.items():
        if actor["tensor_model_parallel_size"] > 1 and kind in (
            "forward",
            "update",
            "sync",
            "merge",
        ):
            layer -= table["tensor_parallel"][kind]
        if kind == "update" and "recompute_granularity" not in config["megatron_training"]:
            layer += table[family]["forward"][0]
            layer += table["tensor_parallel"]["forward"] * (actor["tensor_model_parallel_size"] > 1)
        if kind == "sync" and step == "decode":
            layer -= 1  # buffers that are made anew
        assert layer == table[family][kind][0], kind
        assert outside == pytest.approx(table[family][kind][1], rel=0.25), kind


def launches(ranks: list[dict]) -> dict[str, list[float]]:
    """Kind of pass -> launches in a layer and outside, of a step or a micro-batch, on the rank
    with the most.
    """
    kinds = {
        "decode": "decode",
        "prefill": "prefill",
        "log-probs, micro-batches": "forward",
        "reference, micro-batches": "forward",
        "update, micro-batches": "update",
        "sync": "sync",
        "merge": "merge",
    }
    counted = {}
    for tally in ranks:
        for phase, kind in kinds.items():
            if phase in tally:
                # of an iteration's passes the first one merges
                calls = 1 if kind == "merge" else tally[phase]["calls"]
                layer = sum(tally[phase]["layers"].values()) / calls / LAYERS
                # a sequence draws by a seed of its own
                draws = tally[phase]["outside"].get("exponential_", 0)
                outside = (sum(tally[phase]["outside"].values()) - draws) / calls
                if updates := tally[phase]["outside"].get("graph_task_update"):
                    kind, layer = "graph", updates / calls / LAYERS
                    outside -= updates / calls
                if kind in ("sync", "merge"):  # of no module's forward pass
                    layer, outside = outside / LAYERS, 0
                counted[kind] = max(counted.get(kind, [0, 0]), [round(layer), round(outside)])
    return counted


def conversions() -> dict[str, list[str]]:
    """config -> the command that docs/ascend.md gives for its base weights."""
    text = (ROOT / "docs" / "ascend.md").read_text().replace("\\\n", " ")
    return {
        name: shlex.split(command)
        for name, command in re.findall(
            r"^# (grpo_\w+):.*\npython (convert_ckpt.*)$", text, re.MULTILINE
        )
    }


@pytest.mark.parametrize("name", CONVERTED)
def test_conversion(name, upstream, tmp_path, monkeypatch):
    """MindSpeed-LLM, told what docs/ascend.md says, gives each rank the tensors that we take from
    the Hugging Face model by ourselves.
    """
    assert set(conversions()) == set(CONVERTED)
    family, changes = CONVERTED[name]
    model = make_model(family, tmp_path / "model", **changes)
    config_file = model / "config.json"
    # docs/ascend.md says why
    config_file.write_text(
        json.dumps({**json.loads(config_file.read_text()), "torch_dtype": "bfloat16"})
    )
    config = compose(name)
    load = Path(config["actor_config"]["load"]).name
    places = {
        f"$MODELS/{load}": str(tmp_path / load),
        f"$MODELS/{Path(config['megatron_training']['tokenizer_name_or_path']).name}": str(model),
    }
    command = conversions()[name]
    for place, here in places.items():
        command = [
            here + word.removeprefix(place)
            if word == place or word.startswith(f"{place}/")
            else word
            for word in command
        ]
    assert not any("$" in word for word in command)
    variables = {**emulated(upstream, 16), "PYTHONDONTWRITEBYTECODE": "1"}
    done = run_python(command, variables, upstream / "MindSpeed-LLM")
    assert (tmp_path / load / "latest_checkpointed_iteration.txt").is_file(), done.stderr[-3000:]

    actor = config["actor_config"]
    expected = write_base_checkpoint(
        model,
        tmp_path / "expected",
        tp=actor["tensor_model_parallel_size"],
        pp=actor["pipeline_model_parallel_size"],
        ep=actor.get("expert_model_parallel_size", 1),
    )
    files = {
        folder: sorted(file.relative_to(folder) for file in folder.rglob("*.pt"))
        for folder in (expected, tmp_path / load)
    }
    assert files[expected] == files[tmp_path / load] != []
    monkeypatch.syspath_prepend(upstream / "Megatron-LM")  # the files hold enums of megatron.core
    for file in files[expected]:
        wanted, given = (torch.load(folder / file, weights_only=False)["model"] for folder in files)
        # empty, for Transformer Engine
        given = {key: value for key, value in given.items() if not key.endswith("._extra_state")}
        if changes.get("tie_word_embeddings"):
            del wanted[
                "output_layer.weight"
            ]  # Megatron's output layer has no weight of its own then
        assert wanted.keys() == given.keys()
        assert all(torch.equal(wanted[key], given[key]) for key in wanted)
