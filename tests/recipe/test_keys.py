"""The table of upstream's keys: each form of a decision, what must be refused, and that no value
breaks the check.
"""

import json
import math
import re
import runpy
from collections import Counter
from pathlib import Path

import pytest
import yaml

from mindspeed_qerl.recipe import keys
from mindspeed_qerl.recipe.compose import compose
from tests import ROOT
from tests.tables import cells

SHIPPED = sorted(path.stem for path in (ROOT / "configs").glob("*.yaml"))
BASE = {
    engine: compose(name)
    for engine, name in (
        ("local", "grpo_tiny_moe_cpu"),
        ("mindspeed_rl", "grpo_qwen3_30b_a3b_gsm8k_16npu"),
    )
}
SECTIONS = ("megatron_training", "actor_config", "rl_config", "generate_config")


def check(raw, engine):
    """(sentences of the faults, keys that change nothing)"""
    faults, neutral = keys.check(keys.Values(raw), engine)
    return list(map(str, faults)), neutral


def changed(engine, changes):
    """The engine's shipped config with dotted keys set, or with ... taken out."""
    raw = yaml.safe_load(yaml.safe_dump(BASE[engine]))
    for name, value in changes.items():
        *sections, last = name.split(".")
        section = raw
        for each in sections:
            section = section.setdefault(each, {})
        if value is ...:
            section.pop(last, None)
        else:
            section[last] = value
    return raw


def faults(engine, changes):
    return check(changed(engine, changes), engine)[0]


@pytest.mark.parametrize("name", SHIPPED)
def test_each_shipped_config_is_what_happens(name):
    raw = compose(name)
    assert check(raw, raw["engine"])[0] == []


def test_a_config_for_npus_needs_one_change_to_run_on_the_local_engine():
    raw = changed("mindspeed_rl", {"generate_config.sampling_config.seed": ...})
    (fault,) = check(BASE["mindspeed_rl"], "local")[0]
    assert fault.startswith("generate_config.sampling_config.seed = 1 must be left out")
    found, neutral = check(raw, "local")
    assert found == []
    assert {"actor_config.load", "model.qwen3_30b_a3b.spec", "rl_config.hccl_buffersize"} & set(
        neutral
    ) == {"actor_config.load", "rl_config.hccl_buffersize"}
    assert not {"actor_config.lr", "rl_config.clip_ratio_low"} & set(neutral)


@pytest.mark.parametrize(
    "engine, key, value, message",
    cells("""
both ¦ rl_config.advantage_whiten ¦ true ¦ must be left out: nothing in upstream reads it
both ¦ megatron_training.optimizer ¦ "muon" ¦ must be 'adam'
both ¦ rl_config.kl_ctrl_type ¦ "adaptive" ¦ \
must be 'fixed': GRPO never updates the adaptive controller
both ¦ rl_config.beta ¦ 0.04 ¦ must be left out: nothing in GRPO reads it; the weight of the KL term
both ¦ generate_config.sampling_config.top_p ¦ 0.9 ¦ \
must be 1: the policy that is trained is the whole
both ¦ megatron_training.stage ¦ "ray_dapo" ¦ must be 'ray_grpo'
both ¦ actor_config.save ¦ "somewhere" ¦ must be left out: checkpoints are kept in the run directory
both ¦ megatron_training.split ¦ "90,10,0" ¦ must be '100,0,0'
both ¦ actor_config.lr_decay_style ¦ "WSD" ¦ must be 'constant' or 'linear' or 'cosine'
both ¦ rl_config.async_engine ¦ true ¦ must be False: AQN and the seeds of prompts are in
both ¦ rl_config.token_level_loss ¦ false ¦ must be left out or True
local ¦ generate_config.sampling_config.seed ¦ 2 ¦ must be left out
local ¦ megatron_training.moe_aux_loss_coeff ¦ 0.01 ¦ must be 0
mindspeed_rl ¦ generate_config.torchair_graph ¦ true ¦ \
must be False: torchair's graphs keep stale weights
mindspeed_rl ¦ generate_config.dtype ¦ "float32" ¦ must be 'bfloat16'
mindspeed_rl ¦ megatron_training.recompute_method ¦ "uniform" ¦ \
must be left out or 'block' with lora_target_
mindspeed_rl ¦ actor_config.moe_alltoall_overlap_comm ¦ true ¦ \
must be False with num_experts and lora_
mindspeed_rl ¦ megatron_training.lora_ckpt_filter ¦ false ¦ must be True with lora_target_modules
mindspeed_rl ¦ actor_config.moe_token_dispatcher_type ¦ "alltoall" ¦ \
must be 'alltoall_seq' with num_experts
"""),
)
def test_a_value_that_would_not_happen_is_refused(engine, key, value, message):
    value = json.loads(value)
    for each in keys.ENGINES if engine == "both" else (engine,):
        (found,) = faults(each, {key: value})
        assert found.startswith(f"{key} = {value!r} {message}")


@pytest.mark.parametrize(
    "key, value",
    [
        ("rl_config.entropy_coeff", 0.01),
        ("rl_config.overlong_buffer_enable", True),
        ("rl_config.kl_penalty", "mse"),
        ("generate_config.sampling_config.seed", 7),
        ("megatron_training.no_shuffle", True),
        ("megatron_training.moe_aux_loss_coeff", 0.01),
    ],
)
def test_what_upstream_obeys_is_let_through(key, value):
    assert faults("mindspeed_rl", {key: value}) == []


def test_sizes_of_packed_rows_change_nothing_without_dynamic_batches():
    name = "rl_config.update_max_packing_token_size"
    assert name not in check(BASE["mindspeed_rl"], "mindspeed_rl")[1]
    padded = changed("mindspeed_rl", {"rl_config.use_dynamic_bsz": False})
    assert name in check(padded, "mindspeed_rl")[1]


def test_a_key_that_is_left_out_is_what_upstream_takes():
    left_out = {
        "generate_config.sampling_config.top_k": ...,
        "megatron_training.hidden_dropout": ...,
        "megatron_training.stage": None,
    }
    assert "\n".join(faults("mindspeed_rl", left_out)) == (
        "megatron_training.hidden_dropout is left out, and upstream would take 0.1; it must be 0: "
        "the updated policy would not be the one that sampled\nmegatron_training.stage is left "
        "out, and upstream would take None; it must be 'ray_grpo': the engines run GRPO\n"
        "generate_config.sampling_config.top_k "
        "is left out, and upstream would take 50; it must be -1: the policy that is trained is "
        "the whole distribution"
    )
    assert faults("local", left_out) == []


def test_a_condition_is_asked_of_the_merged_arguments():
    grouped = "model.qwen3_30b_a3b.moe_grouped_gemm"
    dense = {"model.qwen3_30b_a3b.num_experts": None, grouped: ...}
    assert faults("mindspeed_rl", dense) == []
    assert "must be True with num_experts" in faults("mindspeed_rl", {grouped: ...})[0]
    without_adapters = {
        "megatron_training.lora_target_modules": [],
        "megatron_training.lora_ckpt_filter": ...,
        "megatron_training.recompute_method": "uniform",
    }
    assert faults("mindspeed_rl", without_adapters) == []


def test_the_actor_goes_before_training_and_training_before_the_model():
    model = "model.qwen3_30b_a3b.swiglu"
    training = "megatron_training.swiglu"
    actor = "actor_config.swiglu"
    assert faults("mindspeed_rl", {model: False})[0].startswith(f"{model} = False must be True")
    assert faults("mindspeed_rl", {model: False, training: True}) == []
    assert faults("mindspeed_rl", {training: True, actor: False})[0].startswith(f"{actor} = False")


@pytest.mark.parametrize(
    "key, value, fits",
    [
        ("gamma", 1, True),
        ("gamma", 1.0, True),
        ("gamma", True, False),
        ("gamma", "1", False),
        ("gamma", math.nan, False),
        ("shuffle_mini_batch", False, True),
        ("shuffle_mini_batch", 0, False),
        ("shuffle_mini_batch", None, True),
    ],
)
def test_a_number_is_not_a_truth_value(key, value, fits):
    assert (faults("local", {f"rl_config.{key}": value}) == []) is fits


def test_no_value_makes_the_check_fall_over():
    endless = []
    endless.append(endless)
    for value in (True, 10**400, math.nan, "", b"x", [[]], endless, {1: 2}, object):
        sampling = dict.fromkeys(keys.TABLE["sampling_config"], value)
        raw = {
            section: dict.fromkeys(keys.TABLE.get(section, keys.TABLE["megatron"]), value)
            for section in SECTIONS
        }
        raw["generate_config"]["sampling_config"] = sampling
        raw["model"] = {"odd": raw["megatron_training"]}
        for engine in keys.ENGINES:
            found, neutral = keys.check(keys.Values(raw), engine)
            assert found and all(str(fault) and fault.key for fault in found)
            assert all(isinstance(key, str) for key in neutral)


def test_the_table_is_whole():
    text = Path(keys.__file__).with_suffix(".yaml").read_text()
    for part in re.split(r"^(?=\w+:$)", text, flags=re.MULTILINE)[1:]:
        lines = re.findall(r"^    (\w[\w, ]*):", part, flags=re.MULTILINE)
        section = part.split(":")[0]  # of two equal keys YAML keeps the last without a word
        assert Counter(", ".join(lines).split(", ")) == Counter(list(keys.TABLE[section]))
        for decisions in keys.TABLE[section].values():
            for decision in decisions.values():
                assert not (decision.neutral and decision.only)
                assert bool(decision.why) == bool(decision.only)
                assert set(decision.where.split()) <= set(keys.TABLE["megatron"])


def test_the_command_prints_every_key(capsys):
    runpy.run_module(keys.__name__, run_name="__main__")
    printed = capsys.readouterr().out
    known = {key for section in keys.TABLE.values() for key in section}
    assert set(re.findall(r"^(\w+)$", printed, re.MULTILINE)) == known
    assert "\n    mindspeed_rl: must be True with num_experts: moe_tp_extend_ep needs it" in printed
