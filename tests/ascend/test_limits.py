"""Configs of the MindSpeed-RL engine that cannot work are refused in words before anything is
started.
"""

import copy
import json

import pytest

from mindspeed_qerl.ascend import limits
from mindspeed_qerl.common.errors import ConfigError
from tests import checked, put
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


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_is_accepted(raw, family):
    recipe, _ = checked(raw(family))
    assert len(recipe.lora.targets) == 4
    assert limits.vllm_dp_size(recipe) == (2 if "moe" in family else 1)
    assert set(limits.upstream_sections(recipe)) == {
        "model",
        "megatron_training",
        "actor_config",
        "rl_config",
        "generate_config",
    }


@pytest.mark.parametrize(
    "key, value, message",
    [
        (
            "rl_config.verifier_function",
            ["gsm8k_strct"],
            (
                "rl_config.verifier_function: unknown verifier 'gsm8k_strct', "
                "did you mean 'gsm8k_strict'?"
            ),
        ),
        (
            "actor_config.moe_tp_extend_ep",
            False,
            "moe_tp_extend_ep = False must be True with num_experts: without it",
        ),
        (
            "model.tiny.moe_token_dispatcher_type",
            "alltoall",
            "the only dispatcher that MindSpeed-LLM has LoRA for",
        ),
        (
            "megatron_training.lora_alpha",
            16.5,
            "lora_alpha = 16.5 must be a whole number",
        ),
        (
            "actor_config.num_layers_per_virtual_pipeline_stage",
            1,
            "must be left out: exports, routing replay and the reference know one chunk",
        ),
        (
            "generate_config.enable_expert_parallel",
            False,
            "enable_expert_parallel = False must be True with num_experts: the sync",
        ),
        (
            "megatron_training.data_path",
            "nowhere",
            (
                "no file nowhere_packed_input_ids_document.bin. Make it with `python "
                "tools/convert_gsm8k.py"
            ),
        ),
        (
            "model.tiny.rotary_base",
            None,
            (
                "rotary_base is left out of the config, which is 10000 to Megatron, but "
                "the qwen3_moe model of "
            ),
        ),
        (
            "model.tiny.qk_layernorm",
            False,
            "qk_layernorm = False in the config, but the qwen3_moe model of ",
        ),
        (
            "task.prompt",
            "plain",
            "task.prompt must be left out: the packed training rows hold chat prompts",
        ),
        ("run.resume", "somewhere", "run.resume needs actor_config.load"),
        (
            "hardware_error.training",
            "gaussian",
            "hardware_error.training must be left out: errors are modelled on the local engine",
        ),
        (
            "rollout_quantization",
            {"format": "fp8"},
            "rollout_quantization.format = 'fp8' rounds activations",
        ),
        (
            "rollout_quantization",
            {"format": "int8_w8a8"},
            "rollout_quantization.format = 'int8_w8a8' with experts",
        ),
        (
            "rollout_quantization",
            {"format": "nvfp4", "lora": "beside"},
            "rollout_quantization.lora must be left out: a sync brings merged weights",
        ),
        (
            "rollout_quantization",
            {"format": "mxfp4"},
            ("the model's moe_intermediate_size = 48 is no multiple of its blocks of 32 inputs"),
        ),
        (
            "model.tiny.moe_aux_loss_coeff",
            None,
            "set model.tiny.moe_aux_loss_coeff=0.0, or the value that is meant",
        ),
        ("rl_config.use_remove_padding", True, "needs megatron_training.use_flash_attn: true"),
    ],
)
def test_a_fault_is_named_with_the_way_out(raw, key, value, message):
    config = raw()
    put(config, key, value)
    with pytest.raises(ConfigError) as refused:
        checked(config)
    assert message in str(refused.value)


@pytest.mark.parametrize("infer_tp, fault", [(2, None), (4, "intermediate_size = 192 is no")])
def test_rollouts_are_quantized_where_ranks_have_whole_blocks(raw, infer_tp, fault):
    """The tiny models are 128 wide, have 4 heads of 32, and MLPs of 192."""
    config = raw("qwen3", npus=4, tp=2, infer_tp=infer_tp)
    put(config, "rollout_quantization", {"format": "mxfp4", "evaluation": True})
    if fault is None:
        assert checked(config)[0].quantization.format == "mxfp4"
        return
    with pytest.raises(ConfigError, match=f"infer_tensor_parallel_size = {infer_tp}: .*{fault}"):
        checked(config)


@pytest.mark.parametrize(
    "key, value, message",
    [
        ("generate_config.enable_prefix_caching", True, "no routes for tokens that it finds"),
        ("model.tiny.num_experts", None, "with a model that has no experts"),
    ],
)
def test_routes_that_cannot_be_replayed(raw, key, value, message):
    """Named with routing replay, and with routing replay alone."""
    found = []
    for mode in ("rollout", "none"):
        config = raw()
        put(config, "algorithm.routing_replay", mode)
        checked(config)
        put(config, key, value)
        try:
            checked(config)
        except ConfigError as error:
            found.append([line for line in str(error).splitlines() if "routing_replay" in line])
        else:
            found.append([])
    assert [len(lines) for lines in found] == [1, 0] and message in found[0][0]


def test_decode_graphs_where_they_were_tried(raw):
    config = raw("qwen3", npus=2)
    put(config, "generate_config.enforce_eager", False)
    shell = {"TASK_QUEUE_ENABLE": "2", "HCCL_EXEC_TIMEOUT": "7"}
    environment = limits.worker_environment(checked(config)[0], shell)
    assert (environment["TASK_QUEUE_ENABLE"], environment["TORCHDYNAMO_DISABLE"]) == ("1", "1")
    assert environment["HCCL_EXEC_TIMEOUT"] == "7"
    put(config, "rollout_quantization", {"format": "int8_w8a8", "evaluation": True})
    with pytest.raises(ConfigError, match="enforce_eager must be True with int8_w8a8"):
        checked(config)
    put(config, "generate_config.enforce_eager", True)
    environment = limits.worker_environment(checked(config)[0], shell)
    assert environment["TASK_QUEUE_ENABLE"] == "2" and "TORCHDYNAMO_DISABLE" not in environment


def test_decode_graphs_with_another_tensor_parallel_size(raw):
    config = raw("qwen3", npus=8, infer_tp=8)
    put(config, "generate_config.enforce_eager", False)
    with pytest.raises(ConfigError, match="enforce_eager must be True with infer TP 8"):
        checked(config)


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"filter_groups_train_batch_size": 2, "mini_batch_size": 2},
            "filter_groups_train_batch_size must be global_batch_size = 4: the transfer dock",
        ),
        (
            {
                "filter_groups_metric": "gsm8k",
                "verifier_function": ["gsm8k", "gsm8k_strict"],
                "verifier_weight": [1.0, 1.0],
            },
            "filter_groups_metric must be left out with several verifiers",
        ),
        ({"filter_groups_max_batches": 0}, "filter_groups_max_batches must be at least 1"),
    ],
)
def test_dynamic_sampling_that_the_transfer_dock_has_no_room_for(raw, changes, message):
    config = raw()
    config["rl_config"] |= {"filter_groups_enable": True}
    checked(config)
    config["rl_config"] |= changes
    with pytest.raises(ConfigError, match=message):
        checked(config)


def test_upstream_filters_and_costs_nothing_itself(raw):
    """The selection is ours: upstream's own keys for it have their defaults in what it is given."""
    config = raw()
    config["rl_config"] |= {
        "filter_groups_enable": True,
        "overlong_buffer_enable": True,
        "overlong_buffer": 4,
    }
    recipe, *_ = checked(config)
    given = limits.upstream_sections(recipe)["rl_config"]
    assert not given["filter_groups_enable"] and not given["overlong_buffer_enable"]


@pytest.mark.parametrize(
    "changes",
    [
        {"lr_decay_style": "cosine"},
        {"lr_decay_style": "linear", "lr_warmup_fraction": 0.1},
        {"lr_warmup_fraction": 0.1},
    ],
)
def test_a_schedule_that_every_epoch_would_advance(raw, changes):
    """Upstream counts the answers of each epoch (base_training_engine.py:531) and plans for those
    of one.
    """
    config = raw()
    config["actor_config"] |= {"lr_decay_style": "constant", "lr_warmup_fraction": 0.0} | changes
    checked(config)
    config["rl_config"]["epochs"] = 2
    message = (
        r"^rl_config.epochs = 2 with actor_config.lr_decay_style = .* 2 times too fast. Set rl_config.epochs=1"
        ", or actor_config.lr_decay_style=constant"
    )
    with pytest.raises(ConfigError, match=message) as refused:
        checked(config)
    assert len(str(refused.value).splitlines()) == 1
    config["actor_config"] |= {"lr_decay_style": "constant", "lr_warmup_fraction": 0.0}
    checked(config)


def test_upstream_gets_a_save_interval(raw):
    """Else its trainer computes `iteration % None` (grpo_trainer_hybrid.py:291)."""
    config = raw()
    config["megatron_training"] |= {"train_iters": 7, "save_interval": None}
    config["actor_config"].pop("save_interval", None)
    upstream = limits.upstream_sections(checked(config)[0])
    assert upstream["actor_config"]["save_interval"] == 7
    config["megatron_training"]["save_interval"] = 3
    assert limits.upstream_sections(checked(config)[0])["actor_config"]["save_interval"] == 3


def test_what_is_left_out_pads_as_upstream_does(raw):
    """True would switch variable_seq_lengths on, too (MindSpeed-LLM
    features_manager/finetune/finetune.py:45).
    """
    config = raw("qwen3")
    del config["megatron_training"]["no_pad_to_seq_lengths"]
    assert (
        limits.upstream_sections(checked(config)[0])["actor_config"]["no_pad_to_seq_lengths"]
        is False
    )
