"""Each family against transformers and vLLM; and the model that Megatron is told of against
config.json, whatever is in either.
"""

import json
from dataclasses import replace

import pytest

from mindspeed_qerl.common.errors import ConfigError
from mindspeed_qerl.families import FAMILIES, family_of, megatron, shape_of
from mindspeed_qerl.families.base import Llama3Rope, ModelShape
from mindspeed_qerl.families.megatron import MEGATRON_DEFAULTS
from mindspeed_qerl.layout.sizes import model_parameters
from tests.tables import cells
from tests.upstream.rehearsal import FAMILIES as REHEARSED


def compare_with_model(*arguments):
    """The sentences of its faults."""
    return [str(fault) for fault in megatron.compare_with_model(*arguments)]


GARBAGE = (
    None,
    True,
    False,
    0,
    1,
    -1,
    3.5,
    float("nan"),
    float("inf"),
    10**400,
    "",
    "yes",
    "1000000",
    [],
    [None],
    {},
    {"a": 1},
)


def small(family):
    """Sizes that no two of which are equal, so that none can be mistaken for another."""
    moe, own = FAMILIES[family].experts, FAMILIES[family].own_head_dim
    more = {"rms_norm_eps": 2e-5}
    if family == "llama":
        more["rope_scaling"] = Llama3Rope(8.0, 1.5, 4.5, 32)
    if moe:
        more |= dict(num_experts=8, num_experts_per_tok=3, moe_intermediate_size=40)
        more["shared_expert_intermediate_size"] = 120 if FAMILIES[family].shared_expert else 0
        more["norm_topk_prob"] = True
    head_dim, width = 24 if own else 16, 0 if moe else 80
    return ModelShape("small", family, 3, 96, 6, 2, head_dim, width, 112, 5e5, False, 64, **more)


def hf(shape):
    import transformers

    return transformers.AutoConfig.for_model(
        shape.model_type, **family_of(shape).hf_config(shape), rope_parameters=shape.rope
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_and_vllm_know_the_family_by_the_same_names(family):
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    from vllm import ModelRegistry

    assert MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family] == FAMILIES[family].architecture
    assert FAMILIES[family].architecture in ModelRegistry.get_supported_archs()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_config_that_transformers_writes_is_read_as_the_shape_it_was_made_of(family):
    shape = small(family)
    assert shape_of(json.loads(hf(shape).to_json_string(use_diff=False)), "small") == shape


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_those_of_transformers_one_by_one(family, tied):
    import torch
    import transformers

    shape = replace(small(family), tie_word_embeddings=tied)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(hf(shape))
    assert model_parameters(shape) == sum(parameter.numel() for parameter in model.parameters())


def rehearsed(family):
    """(config.json, arguments of Megatron) of the rehearsals, which run on upstream's code: both
    written by hand.
    """
    return (
        {**REHEARSED[family][1], "model_type": family},
        {**REHEARSED[family][2], "hidden_dropout": 0.0, "attention_dropout": 0.0},
    )


@pytest.mark.parametrize("family", REHEARSED)
def test_the_rehearsals_arguments_are_the_familys(family):
    config, arguments = rehearsed(family)
    expected = FAMILIES[family].megatron_arguments(shape_of(config, "rehearsed"))
    assert compare_with_model(arguments, config) == []
    assert {key: arguments.get(key, MEGATRON_DEFAULTS.get(key)) for key in expected} == expected


@pytest.mark.parametrize(
    "family, key, told",
    cells("""
qwen3_moe ¦ rotary_base ¦ 10000
qwen2 ¦ norm_epsilon ¦ 1e-05
qwen3_moe ¦ norm_topk_prob ¦ False
qwen3 ¦ qk_layernorm ¦ False
qwen2_moe ¦ add_qkv_bias ¦ False
qwen3_moe ¦ num_query_groups ¦ 1
qwen3_moe ¦ num_experts ¦ None
qwen2_moe ¦ n_shared_experts ¦ None
qwen2_moe ¦ spec ¦ None
qwen3 ¦ normalization ¦ 'LayerNorm'
qwen3 ¦ swiglu ¦ False
qwen3 ¦ disable_bias_linear ¦ False
qwen3 ¦ position_embedding_type ¦ 'learned_absolute'
qwen3 ¦ untie_embeddings_and_output_weights ¦ False
qwen3 ¦ group_query_attention ¦ False
qwen3 ¦ hidden_dropout ¦ 0.1
"""),
)
def test_a_key_that_is_left_out_counts_with_megatrons_default(family, key, told):
    config, arguments = rehearsed(family)
    del arguments[key]
    (fault,) = compare_with_model(arguments, config, "M/config.json")
    assert (
        fault.startswith(f"{key} is left out of the config, which is {told} to Megatron, but ")
        and " model of M/config.json has " in fault
    )
    assert f"Set {key}: " in fault


def test_what_megatron_derives_may_be_left_out():
    """kv_channels, where it is hidden_size / num_attention_heads; groups, where each head has its
    own; the position embedding, by the older key.
    """
    config, arguments = rehearsed("qwen2")
    del arguments["kv_channels"], arguments["position_embedding_type"]
    assert compare_with_model({**arguments, "use_rotary_position_embeddings": True}, config) == []
    for key in ("group_query_attention", "num_query_groups"):
        del arguments[key]
    assert (
        compare_with_model(
            {**arguments, "use_rotary_position_embeddings": True},
            {**config, "num_key_value_heads": 4},
        )
        == []
    )
    config, arguments = rehearsed("qwen3")
    del arguments["kv_channels"]
    (fault,) = compare_with_model(arguments, {**config, "head_dim": 64})
    assert (
        fault.startswith("kv_channels is left out of the config")
        and "the qwen3 model of config.json has 64" in fault
    )


@pytest.mark.parametrize(
    "changed, message",
    [
        (
            {"rope_parameters": {"rope_type": "llama3"}},
            "Missing required keys in `rope_parameters` for",
        ),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; only 'silu' is built"),
        (
            {"rms_norm_eps": 1e-5},
            "norm_epsilon = 1e-06 in the config, but the qwen3 model of config.json has 1e-05",
        ),
        (
            {"tie_word_embeddings": True},
            (
                "untie_embeddings_and_output_weights = True in the config, but the qwen3 model of "
                "config.json has False"
            ),
        ),
        (
            {"model_type": "qwen2"},
            "qk_layernorm = True in the config, but the qwen2 model of config.json has False",
        ),
        ({"model_type": ["qwen3"]}, "model_type ['qwen3'] is an architecture of its own"),
    ],
)
def test_a_config_json_of_another_model(changed, message):
    config, arguments = rehearsed("qwen3")
    assert message in "\n".join(compare_with_model(arguments, {**config, **changed}))


def test_a_whole_number_written_as_a_float_does_not_reach_megatron():
    """argparse's int("1000000.0") would end the run after minutes."""
    config, arguments = rehearsed("qwen3")
    assert (
        "Set rotary_base: 1000000"
        in compare_with_model({**arguments, "rotary_base": 1e6}, config)[0]
    )


@pytest.mark.parametrize("family", REHEARSED)
def test_no_value_raises_and_each_other_value_is_a_fault(family):
    config, arguments = rehearsed(family)
    expected = FAMILIES[family].megatron_arguments(shape_of(config, "rehearsed"))
    for key in expected:
        for value in GARBAGE:
            faults = compare_with_model({**arguments, key: value}, config)
            told = MEGATRON_DEFAULTS.get(key) if value is None else value
            one = expected[key]
            derived = value is None and key == "kv_channels"
            expects_none = derived or (
                told == one and type(told) in (type(one), int if isinstance(one, float) else None)
            )
            assert (faults == []) == expects_none, (key, value)
    for key in (
        *config,
        "head_dim",
        "rms_norm_eps",
        "rope_scaling",
        "rope_parameters",
        "quantization_config",
    ):
        for value in GARBAGE:
            assert all(
                isinstance(fault, str)
                for fault in compare_with_model(arguments, {**config, key: value})
            )


@pytest.mark.parametrize(
    "kind, nearest",
    [
        ("qwen3_next", "qwen3_moe"),
        ("qwen3_5_moe", "qwen3_moe"),
        ("qwen3_vl", "qwen3"),
        ("Qwen3_moe", "qwen3_moe"),
        ("llama4", "llama"),
        ("mistral", None),
        (None, None),
    ],
)
def test_another_architecture_is_no_misspelt_one(kind, nearest):
    end = f"llama; the nearest is {nearest!r}" if nearest else "llama"
    with pytest.raises(
        ConfigError, match=f"model_type {kind!r} is an architecture of .*{end}$"
    ) as refused:
        shape_of({"model_type": kind}, "M")
    assert "did you mean" not in str(refused.value)
