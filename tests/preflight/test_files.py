"""Config, model, data and base weights: what is missing, cut, or of another model."""

import json
import re
import shlex
from pathlib import Path

import pytest

from mindspeed_qerl.ascend.resume import conversion_command
from mindspeed_qerl.common.errors import ConfigError
from mindspeed_qerl.preflight.case import FAILED, PASSED, SKIPPED, WARNING
from mindspeed_qerl.recipe.compose import compose
from mindspeed_qerl.recipe.reader import read, read_recipe
from mindspeed_qerl.tasks.rows import read_rows
from tests import ROOT
from tests.fake_box.broken_files import POINTER, WEIGHTS, write_packed
from tests.fake_box.prepared import write_base
from tests.families.public_models import MODELS
from tests.preflight.conftest import Box, look, not_passed, rewrite, said

LARGE = 30 * 10**9  # enough for a rank of any layout
QWEN3_MOE = MODELS["Qwen3-30B-A3B-Instruct-2507"]
TRACKER = "latest_checkpointed_iteration.txt"
NEEDS_LAYOUT = ("memory of an NPU", "disk for the run", "host memory")


# ---- config ----


def test_faults_of_the_config(ready):
    ready["rl_config"]["verifier_function"] = ["gsm8c"]
    ready["actor_config"]["save"] = "x"
    checks = look(ready)
    keys = {"rl_config.verifier_function", "actor_config.save"}
    assert not_passed(checks) == dict.fromkeys(keys, FAILED)
    assert "did you mean 'gsm8k'" in checks["rl_config.verifier_function"].found


@pytest.mark.parametrize(
    "key", ["generate_config.infer_tensor_parallel_size", "model.qwen3_30b_a3b.sequence_parallel"]
)
def test_no_layout_is_judged_by_the_defaults_of_values_that_cannot_be_read(ready, key):
    del ready["megatron_training"]["sequence_parallel"]  # would go before the model's
    place = ready
    *sections, name = key.split(".")
    for section in sections:
        place = place[section]
    place[name] = "four"
    checks = look(ready)
    assert [name for name, state in not_passed(checks).items() if state == FAILED] == [key]
    assert "'four': Input should be" in checks[key].found
    assert not {*NEEDS_LAYOUT} & checks.keys() and checks["layout"].state == SKIPPED


def test_an_illegal_layout(ready):
    """One line a rule, though the engine's own check names it too."""
    ready["generate_config"]["infer_expert_parallel_size"] = 8
    checks = look(ready)
    [broken] = [check for check in checks.values() if check.state == FAILED]
    assert broken.group == "config" and "is no multiple of training's TP 1 x EP 16" in broken.found
    assert "python tools/plan_layout.py --config-name" in broken.fix
    assert not {*NEEDS_LAYOUT} & checks.keys()
    ready["actor_config"] |= {"tensor_model_parallel_size": 3, "load": "not/converted"}
    assert "convert_ckpt" not in look(ready)["base weights"].fix


def test_a_rollout_that_leaves_no_cache(ready):
    ready["generate_config"]["gpu_memory_utilization"] = 0.2
    said(look(ready), "memory of an NPU", "left for its KV cache")


# ---- model ----


@pytest.mark.parametrize(
    "described",
    [
        {"rope_theta": 1e6},
        {"rope_theta": None, "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}},
    ],
    ids=["transformers 4", "transformers 5"],
)
def test_the_rotary_base_of_another_model(own, model, described):
    """The YAML has the Instruct-2507 model's, the directory is the original's."""
    config = {**QWEN3_MOE, **described}
    kept = {key: value for key, value in config.items() if value is not None}
    rewrite(model / "config.json", json.dumps(kept))
    words = "rotary_base = 10000000 in the config, but the qwen3_moe model"
    check = said(look(own), "config.json", words)
    unread = described["rope_theta"] is None  # by the transformers of NPUs, which is 4
    assert ('Write "rope_theta": 1000000.0' in check.found) == unread
    assert "rotary_base: 1000000" in check.fix


SAME = """ffn_hidden_size max_position_embeddings make_vocab_size_divisible_by
attention_softmax_in_fp32 no_gradient_accumulation_fusion moe_router_load_balancing_type
use_mcore_models""".split()


def test_keys_that_the_models_yaml_leaves_out(ready):
    """Megatron's own default takes its place: a failed line, unless that is what config.json says,
    or it says nothing of the model.
    """
    arguments = ready["model"]["qwen3_30b_a3b"]
    for key in list(arguments):
        value = arguments.pop(key)
        failed = [check for check in look(ready).values() if check.state == FAILED]
        arguments[key] = value
        assert bool(failed) != (key in SAME), failed
        assert all(key in check.found for check in failed)


def test_a_model_that_is_not_there(own, model, tmp_path):
    for name, found in ((WEIGHTS, "0 of 1 files"), ("tokenizer_config.json", "no ")):
        (model / name).unlink()
    checks = look(own)
    assert not_passed(checks) == {"weights": WARNING, "tokenizer": WARNING}
    found = checks["weights"].found
    assert "lacks 1 of 1 files" in found and WEIGHTS in found
    (model / "config.json").unlink()
    checks = look(own)
    assert checks["config.json"].state == FAILED and "export MODELS=" in checks["config.json"].fix


# ---- data ----


def test_data_that_is_not_there(own):
    train, test = Path(own["megatron_training"]["data_path"]), Path(own["task"]["test_file"])
    for file in (*train.parent.glob("*"), test):
        file.unlink()
    checks = look(own)
    missing = {"training files": FAILED, "test rows": FAILED}
    assert not_passed(checks) == missing
    convert = f"python tools/convert_gsm8k.py --input openai/gsm8k --output {train.parent}"
    model = own["megatron_training"]["tokenizer_name_or_path"]
    more = f"--format mindspeed --tokenizer {model} --max-prompt-length 512"
    assert checks["training files"].fix == f"{convert} {more}"
    assert checks["training files"].found.startswith("no file ")
    assert checks["test rows"].fix == convert.replace(str(train.parent), str(test.parent))


@pytest.mark.parametrize(
    "rows, state, found",
    [
        # upstream keeps what is shorter than 512: a half
        (
            {"input_ids": [[1] * (511 + i % 2) for i in range(200)], "labels": [[1]] * 200},
            WARNING,
            "100 of 200 prompts have less than max_prompt_length = 512 tokens",
        ),
        (
            {"input_ids": [[1] * 600] * 137 + [[1]] * 63, "labels": [[1]] * 200},
            FAILED,
            "63 of 200 prompts",
        ),
        ({"labels": [[1]] * 79}, FAILED, "80 prompts and 79 labels"),
        ({"labels": [[1]] * 79 + [[]]}, FAILED, "1 of 80 labels are empty"),
        (
            {"input_ids": [[1, 151936]] * 80, "labels": [[1]] * 80},
            FAILED,
            "up to 151,936; padded_vocab_size",
        ),
    ],
)
def test_data_that_does_not_fit(own, rows, state, found):
    for column, values in rows.items():
        write_packed(Path(own["megatron_training"]["data_path"]).parent, column, values)
    checks = look(own)
    said(checks, "training files", found, state)
    others = {"test rows": WARNING} if len(rows["labels"]) == 200 else {}  # of 80 training rows
    assert not_passed(checks) == {"training files": state} | others


def test_a_packed_test_split_is_not_trained_on(own):
    count = len(read_rows(own["task"]["test_file"]))
    for column in ("input_ids", "labels"):
        folder = Path(own["megatron_training"]["data_path"]).parent
        write_packed(folder, column, {"input_ids": [[1]], "labels": [[1]]}[column] * count)
    words = f"{count} packed prompts, 80 training rows, {count} test rows: they are not of one"
    said(look(own), "test rows", words)


def test_questions_of_both_files(own):
    """A fault, unless it is meant."""
    own["task"]["train_file"] = own["task"]["test_file"]
    assert not_passed(look(own)) == {"test rows": FAILED}
    own["task"]["allow_overlap"] = True
    assert not_passed(look(own)) == {"test rows": WARNING}


def test_data_that_was_cut(own):
    prefix = Path(f"{own['megatron_training']['data_path']}_packed_labels_document")
    rewrite(prefix.with_name(f"{prefix.name}.bin"), "1234")
    assert "has 1 tokens, its index 80" in look(own)["training files"].found


# ---- base weights and their conversion ----


def test_the_room_that_checkpoints_need(ready):
    """Five saves of 116 steps, every 20: adapters of 30B-A3B by hand, bfloat16 and AdamW's 12
    bytes, in 16 files.
    """
    dense = 48 * 32 * ((2048 + 5120) + (4096 + 2048))
    experts = 48 * 128 * 32 * ((2048 + 2 * 768) + (768 + 2048))
    size = 14 * (16 * dense + experts)
    assert f"({116 // 20} x {size / 1e9:.1f} GB)" in look(ready)["disk for the run"].found
    for free, state in ((5 * size, PASSED), (5 * size - 1, WARNING), (size - 1, FAILED)):
        assert look(ready, Box(free=free))["disk for the run"].state == state


def test_what_a_conversion_needs(own):
    """3.1 GB of dense weights in each of 16 files and 58 GB of experts once; a place that can be
    written.
    """
    load = own["actor_config"]["load"]
    (Path(load) / TRACKER).unlink()
    check = look(own)["disk for the base"]
    need = float(re.search(r"about (\d+) GB", check.found)[1])
    assert need == pytest.approx(16 * 3.09 + 58, rel=0.01) and check.state == PASSED
    for box in (Box(free=10**11), Box(shut_folders=(load,))):
        assert look(own, box)["disk for the base"].state == FAILED


def test_pointers_and_halves(own, model):
    """Weights are read while the base is converted, and no more then."""
    base = next(Path(own["actor_config"]["load"]).glob("*/mp_rank_00_003/*.pt"))
    for file, check in ((model / WEIGHTS, "weights"), (base, "base weights")):
        rewrite(file, POINTER)
        assert look(own)[check].state == (WARNING if check == "weights" else FAILED)
    rewrite(model / "tokenizer.json", POINTER)
    assert "pointer of git-lfs" in look(own)["tokenizer"].found
    (Path(own["actor_config"]["load"]) / TRACKER).unlink()
    assert look(own)["weights"].state == FAILED


def test_the_memory_of_files_that_all_ranks_read_at_once(ready):
    """16 ranks, expert parallel: the experts once, all else 16 times; 4 GB a process."""
    # layers, experts, matrices, hidden, intermediate; bytes of bfloat16
    experts = 48 * 128 * 3 * 2048 * 768 * 2
    files = experts + 16 * (61.1e9 - experts)
    for room, state in ((files + 66e9, PASSED), (files + 2e9, WARNING), (files - 2e9, FAILED)):
        assert look(ready, Box(room=room))["host memory"].state == state


@pytest.mark.parametrize(
    "sizes, names",
    [
        ((1, 1, 8), [f"mp_rank_00_{e:03d}" for e in range(8)]),
        ((4, 3, 1), [f"mp_rank_0{t}_00{p}" for t in range(4) for p in range(3)]),
        (
            (2, 2, 2),
            [f"mp_rank_0{t}_00{p}_00{e}" for t in range(2) for p in range(2) for e in range(2)],
        ),
    ],
)
def test_the_files_of_a_layout(ready, tmp_path, sizes, names):
    """As megatron/training/checkpointing.py:get_checkpoint_name names them."""
    for kind, size in zip(("tensor", "pipeline", "expert"), sizes):
        ready["actor_config"][f"{kind}_model_parallel_size"] = size
    for tracker in ("1", "release"):
        ready["actor_config"]["load"] = str(tmp_path / tracker)
        write_base(tmp_path / tracker, dict.fromkeys(names, LARGE), tracker)
        assert look(ready)["base weights"].state == PASSED


def test_base_weights_of_another_layout(ready, tmp_path):
    for count in (8, 32):  # too few; all that are needed, and others
        load = tmp_path / str(count)
        ready["actor_config"]["load"] = str(load)
        write_base(load, {f"mp_rank_00_{e:03d}": LARGE for e in range(count)})
        checks = look(ready)
        assert not_passed(checks) == {"base weights": FAILED}
        words = (
            f"has {count} files, TP 1 PP 1 EP 16 needs 16 files, mp_rank_00_000 to mp_rank_00_015"
        )
        assert words in checks["base weights"].found
        assert "--target-expert-parallel-size 16" in checks["base weights"].fix


def test_base_weights_that_are_missing_or_cut(own):
    load = Path(own["actor_config"]["load"])
    rewrite(load / "iter_0000001" / "mp_rank_00_003" / "model_optim_rng.pt", "PK")
    assert "mp_rank_00_003/model_optim_rng.pt is not whole" in look(own)["base weights"].found
    (load / TRACKER).unlink()
    check = said(look(own), "base weights", "not converted yet")
    assert shlex.join(conversion_command(read(own)[0])) in check.fix


def page_conversions():
    """config -> the command that docs/ascend.md gives (tests/upstream/test_configs.py runs them)."""
    text = (ROOT / "docs" / "ascend.md").read_text().replace("\\\n", " ")
    return {
        name: shlex.split(command)
        for name, command in re.findall(
            r"^# (grpo_\w+):.*\n(python convert_ckpt.*)$", text, re.MULTILINE
        )
    }


@pytest.mark.parametrize("name", page_conversions())
def test_the_conversion_is_the_guides(name, monkeypatch):
    monkeypatch.setenv("MODELS", "/models")
    words = [word.replace("$MODELS", "/models") for word in page_conversions()[name]]
    assert conversion_command(read_recipe(compose(name))) == words


def test_a_conversion_for_tensor_parallel_experts_and_stages(ready):
    """Whole experts on tensor ranks have an option of their own; at TP 1 convert_ckpt_v2.py refuses
    it.
    """
    assert "--moe-tp-extend-ep" not in conversion_command(read(ready)[0])
    ready["actor_config"] |= {
        "tensor_model_parallel_size": 4,
        "pipeline_model_parallel_size": 2,
        "expert_model_parallel_size": 2,
        "num_layer_list": "23,25",
    }
    command = " ".join(conversion_command(read(ready)[0]))
    assert (
        "--moe-tp-extend-ep --target-tensor-parallel-size 4 --target-pipeline-parallel-size 2 "
        "--target-expert-parallel-size 2 --num-layer-list 23,25"
    ) in command


def test_the_family_is_that_of_the_config_json(own, model):
    """Of the Megatron arguments only while there is none."""
    rewrite(model / "config.json", json.dumps({**QWEN3_MOE, "model_type": "gemma2"}))
    with pytest.raises(
        ConfigError,
        match="Qwen3-30B-A3B-Instruct-2507: model_type 'gemma2' is an architecture of its own",
    ):
        conversion_command(read(own)[0])
    (model / "config.json").unlink()
    assert "qwen3-moe" in conversion_command(read(own)[0])
