"""Configs of the MindSpeed-RL engine that cannot work are refused in words before anything is
started.
"""

import copy
import json
from contextlib import nullcontext

import pytest

from mindspeed_qerl.ascend import limits
from mindspeed_qerl.common.errors import ConfigError
from tests import checked, put
from tests.tables import cells
from tests.upstream.rehearsal import FAMILIES, make_config


@pytest.fixture
def raw(tmp_path):
    """raw(family, **layout): the rehearsal's config, with files that exist."""
    for folder in ("packed", "chat"):
        (tmp_path / folder).mkdir()
    for name in (
        "packed/gsm8k_train_packed_input_ids_document",
        "packed/gsm8k_train_packed_labels_document",
    ):
        for ending in (".bin", ".idx"):
            (tmp_path / f"{name}{ending}").touch()
    (tmp_path / "chat" / "test_chat.parquet").touch()

    def make(family="qwen3_moe", **layout):
        model = tmp_path / family
        model.mkdir(exist_ok=True)
        (model / "config.json").write_text(
            json.dumps({**FAMILIES[family][1], "model_type": family})
        )
        ranks = 2 if "moe" in family else 1
        layout = {"npus": 2, "ep": ranks, "infer_ep": ranks, **layout}
        return copy.deepcopy(make_config(family, model, tmp_path, tmp_path, **layout))

    return make


def changed(config, changes):
    for key, value in changes.items():
        put(config, key, value)
    return config


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_is_accepted(raw, family):
    recipe, _ = checked(raw(family))
    assert len(recipe.lora.targets) == 4
    groups = limits.worker_environment(recipe, {})["VLLM_DP_SIZE"]
    assert groups == ("2" if "moe" in family else "1")
    assert set(limits.upstream_sections(recipe)) == {
        "model",
        "megatron_training",
        "actor_config",
        "rl_config",
        "generate_config",
    }


# algorithm.routing_replay with what goes another way than its routes
REPLAY = {"algorithm.routing_replay": "rollout"}
FILTER = {"rl_config.filter_groups_enable": True}
GRAPHS = {"generate_config.enforce_eager": False}
# a schedule that every epoch would advance: upstream counts the answers of each
# (base_training_engine.py:531) and plans for those of one
EPOCHS = {"rl_config.epochs": 2}
TOO_FAST = "actor_config.lr_warmup_fraction = {}: upstream moves the schedule on in every epoch"
OF_ONE_KEY = cells("""
rl_config.verifier_function ¦ ["gsm8k_strct"] ¦ \
rl_config.verifier_function: unknown verifier 'gsm8k_strct', did you mean 'gsm8k_strict'?
actor_config.moe_tp_extend_ep ¦ false ¦ \
moe_tp_extend_ep = False must be True with num_experts: without it
model.tiny.moe_token_dispatcher_type ¦ "alltoall" ¦ \
the only dispatcher that MindSpeed-LLM has LoRA for
megatron_training.lora_alpha ¦ 16.5 ¦ lora_alpha = 16.5 must be a whole number
actor_config.num_layers_per_virtual_pipeline_stage ¦ 1 ¦ \
must be left out: exports, routing replay and the reference know one chunk
generate_config.enable_expert_parallel ¦ false ¦ \
enable_expert_parallel = False must be True with num_experts: the sync
megatron_training.data_path ¦ "nowhere" ¦ \
nowhere_packed_input_ids_document.bin. Make it with `python tools/convert_gsm8k.py
model.tiny.rotary_base ¦ null ¦ \
rotary_base is left out of the config, which is 10000 to Megatron, but the qwen3_moe
model.tiny.qk_layernorm ¦ false ¦ qk_layernorm = False in the config, but the qwen3_moe model of\u0020
task.prompt ¦ "plain" ¦ task.prompt must be left out: the packed training rows hold chat prompts
run.resume ¦ "somewhere" ¦ run.resume needs actor_config.load
hardware_error.training ¦ "gaussian" ¦ \
hardware_error.training must be left out: errors are modelled on the local engine
rollout_quantization.format ¦ "fp8" ¦ rollout_quantization.format = 'fp8' rounds activations
rollout_quantization.format ¦ "int8_w8a8" ¦ rollout_quantization.format = 'int8_w8a8' with experts
rollout_quantization.format ¦ "mxfp4" ¦ \
the model's moe_intermediate_size = 48 is no multiple of its blocks of 32 inputs
model.tiny.moe_aux_loss_coeff ¦ null ¦ \
Set model.tiny.moe_aux_loss_coeff=0.0, or the value that is meant
rl_config.use_remove_padding ¦ true ¦ needs megatron_training.use_flash_attn: true
""")
FAULTS = [
    *(({key: json.loads(value)}, message) for key, value, message in OF_ONE_KEY),
    (
        REPLAY | {"generate_config.enable_prefix_caching": True},
        "no routes for tokens that it finds",
    ),
    (REPLAY | {"model.tiny.num_experts": None}, "with a model that has no experts"),
    (
        FILTER | {"rl_config.filter_groups_train_batch_size": 2, "rl_config.mini_batch_size": 2},
        "filter_groups_train_batch_size must be global_batch_size = 4: the transfer dock",
    ),
    (
        FILTER
        | {
            "rl_config.filter_groups_metric": "gsm8k",
            "rl_config.verifier_function": ["gsm8k", "gsm8k_strict"],
            "rl_config.verifier_weight": [1.0, 1.0],
        },
        "filter_groups_metric must be left out with several verifiers",
    ),
    (
        FILTER | {"rl_config.filter_groups_max_batches": 0},
        "filter_groups_max_batches must be at least 1",
    ),
    (EPOCHS | {"actor_config.lr_decay_style": "cosine"}, TOO_FAST.format("0.0")),
    (EPOCHS | {"actor_config.lr_warmup_fraction": 0.1}, TOO_FAST.format("0.1")),
]


@pytest.mark.parametrize("changes, message", FAULTS)
def test_a_fault_is_named_with_the_way_out(raw, changes, message):
    with pytest.raises(ConfigError) as refused:
        checked(changed(raw(), changes))
    assert message in str(refused.value)


MXFP4 = {"rollout_quantization.format": "mxfp4"}
INT8 = {"rollout_quantization.format": "int8_w8a8"}


@pytest.mark.parametrize(
    "infer_tp, changes, fault",
    [
        (2, MXFP4, None),
        (4, MXFP4, "intermediate_size = 192 over infer TP 4 is no"),
        (2, INT8, None),
        (2, GRAPHS | INT8, "enforce_eager must be True with int8_w8a8"),
        (8, GRAPHS, "enforce_eager must be True with infer TP 8"),
    ],
)
def test_a_dense_model(raw, infer_tp, changes, fault):
    """128 wide, with 4 heads of 32, and MLPs of 192."""
    config = changed(raw("qwen3", npus=8, tp=2, infer_tp=infer_tp), changes)
    with pytest.raises(ConfigError, match=fault) if fault else nullcontext():
        checked(config)


@pytest.mark.parametrize("changes", [FILTER, REPLAY, EPOCHS])
def test_what_others_go_with_is_accepted(raw, changes):
    checked(changed(raw(), changes))


def test_decode_graphs_where_they_were_tried(raw):
    config = raw("qwen3", npus=2)
    put(config, "generate_config.enforce_eager", False)
    shell = {"TASK_QUEUE_ENABLE": "2", "HCCL_EXEC_TIMEOUT": "7"}
    environment = limits.worker_environment(checked(config)[0], shell)
    assert (environment["TASK_QUEUE_ENABLE"], environment["TORCHDYNAMO_DISABLE"]) == ("1", "1")
    assert environment["HCCL_EXEC_TIMEOUT"] == "7"
    put(config, "generate_config.enforce_eager", True)
    environment = limits.worker_environment(checked(config)[0], shell)
    assert environment["TASK_QUEUE_ENABLE"] == "2" and "TORCHDYNAMO_DISABLE" not in environment


SAVE = "megatron_training.save_interval"
PADS = "megatron_training.no_pad_to_seq_lengths"


@pytest.mark.parametrize(
    "changes, key, value",
    [
        # the selection is ours: upstream's own keys for it have their defaults
        (FILTER, "filter_groups_enable", False),
        (
            {"rl_config.overlong_buffer_enable": True, "rl_config.overlong_buffer": 4},
            "overlong_buffer_enable",
            False,
        ),
        # else its trainer computes `iteration % None` (grpo_trainer_hybrid.py:291)
        ({SAVE: None, "megatron_training.train_iters": 7}, "save_interval", 7),
        ({SAVE: 3, "megatron_training.train_iters": 7}, "save_interval", 3),
        # True would switch variable_seq_lengths on, too (MindSpeed-LLM
        # features_manager/finetune/finetune.py:45)
        ({PADS: None}, "no_pad_to_seq_lengths", False),
    ],
)
def test_what_upstream_is_given(raw, changes, key, value):
    config = changed(raw("qwen3"), changes)
    config["actor_config"].pop("save_interval", None)
    given = limits.upstream_sections(checked(config)[0])
    assert (given["actor_config"] | given["rl_config"])[key] == value
