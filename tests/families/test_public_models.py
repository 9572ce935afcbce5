"""config.json of public models, in the forms of transformers 4 and 5 and in mixed ones: read as
AutoConfig reads it, or refused in words.
"""

import itertools
import json
import subprocess
import sys

import pytest
import transformers

from mindspeed_qerl.common.errors import ConfigError
from mindspeed_qerl.families import family_of, read_config, read_shape, shape_of
from mindspeed_qerl.families.built import not_built
from mindspeed_qerl.families.config import resolve, unread_by_4

from .public_models import MODELS, OTHERS, newer
from .test_families import compare_with_model

FORMS = {"transformers 4": dict, "transformers 5": newer}
SAME = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "tie_word_embeddings",
    "max_position_embeddings",
    "rms_norm_eps",
)


def expected(directory):
    """Sizes and rotary base by AutoConfig and the rotary module that transformers makes of it."""
    config = transformers.AutoConfig.from_pretrained(directory)
    values = {name: getattr(config, name) for name in SAME}
    values["head_dim"] = (
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )
    rope = {key: value for key, value in config.rope_parameters.items() if key != "type"}
    values["rope_theta"] = rope["rope_theta"]
    if rope["rope_type"] in ("default", "llama3"):  # else it is refused
        values["rope"] = rope
    if hasattr(config, "num_experts"):
        for name in (
            "num_experts",
            "num_experts_per_tok",
            "moe_intermediate_size",
            "norm_topk_prob",
        ):
            values[name] = getattr(config, name)
        values["shared_expert_intermediate_size"] = getattr(
            config, "shared_expert_intermediate_size", 0
        )
    else:
        values["intermediate_size"] = config.intermediate_size
    return values


def written(tmp_path, config):
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def agrees(directory):
    shape, values = read_shape(directory), expected(directory)
    return {name: getattr(shape, name) for name in values} == values


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", MODELS)
def test_a_public_model_is_read_as_transformers_reads_it(tmp_path, name, form):
    directory = written(tmp_path, FORMS[form](MODELS[name]))
    shape = read_shape(directory)
    assert agrees(directory)
    assert not_built(read_config(directory / "config.json"), family_of(shape)) == []


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", OTHERS)
def test_what_is_not_built_is_refused_in_words(name, form):
    config, words = OTHERS[name]
    try:
        shape = shape_of(FORMS[form](config), "M")
        said = "\n".join(not_built(FORMS[form](config), family_of(shape)))
    except ConfigError as error:
        said = str(error)
    assert words in said
    assert words in "\n".join(compare_with_model({}, FORMS[form](config)))


LLAMA3 = MODELS["Llama-3.2-1B"]["rope_scaling"]
ROPE = {  # what a file may say of rotary positions, all of it or some
    "rope_theta": [..., None, 1e6, 10000],
    "rope_scaling": [
        ...,
        None,
        {},
        {"type": "default"},
        {"rope_type": "default", "rope_theta": 3e5},
        {"type": "linear", "factor": 2.0},
        LLAMA3,
    ],
    "rope_parameters": [
        ...,
        None,
        {},
        {"rope_theta": 5e5},
        {"rope_type": "default", "rope_theta": 2e6},
        {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e6},
        {**LLAMA3, "factor": 4.0, "rope_theta": 1e6},
    ],
}
DEFAULTS = {
    "head_dim": [..., None, 64, 96],
    "num_key_value_heads": [..., None, 4],
    "norm_topk_prob": [..., True],
    "max_position_embeddings": [..., 512],
}


def variants(choices):
    return [
        {key: value for key, value in zip(choices, values) if value is not ...}
        for values in itertools.product(*choices.values())
    ]


@pytest.mark.parametrize("choices", [ROPE, DEFAULTS], ids=["rope", "defaults"])
@pytest.mark.parametrize(
    "name",
    [
        "Qwen2-7B-Instruct",
        "Qwen3-0.6B",
        "Qwen3-30B-A3B",
        "Qwen1.5-MoE-A2.7B-Chat",
        "TinyLlama-1.1B-Chat",
    ],
)
def test_every_mixture_is_read_as_transformers_reads_it_or_refused(tmp_path, name, choices):
    left_out = {*choices, "tie_word_embeddings", "rms_norm_eps"}
    base = {key: value for key, value in MODELS[name].items() if key not in left_out}
    read = 0
    for variant in variants(choices):
        directory = written(tmp_path, {**base, **variant})
        try:
            shape = read_shape(directory)
        except ConfigError as error:
            words = (
                "head_dim = ",
                "refuses config.json",
                "rope_theta = None",
                "num_key_value_heads is missing",
            )
            assert any(word in str(error) for word in words), (variant, error)
            continue
        read += 1
        assert agrees(directory), variant
        kinds = [
            rope.get("rope_type", rope.get("type"))
            for rope in (variant.get("rope_scaling") or {}, variant.get("rope_parameters") or {})
        ]
        faults = "\n".join(not_built({**base, **variant}, family_of(shape)))
        assert ("rope_type" in faults) == any(kind in ("linear", "dynamic") for kind in kinds), (
            variant
        )
    assert read > 10


@pytest.mark.parametrize("name", MODELS)
def test_npus_are_told_what_their_transformers_does_not_read(name):
    """MindSpeed-RL's environment has transformers 4.57 and vLLM 0.11: without a word they took the
    default.
    """
    assert unread_by_4(MODELS[name]) == []
    faults = compare_with_model({}, newer(MODELS[name]), "M/config.json")
    theta = MODELS[name].get("rope_theta", 10000)
    scaling = MODELS[name].get("rope_scaling")
    assert any(json.dumps(scaling) in fault for fault in faults) == (scaling is not None)
    assert any(f'"rope_theta": {theta!r}' in fault for fault in faults) == (theta != 10000)
    assert any("num_local_experts" in fault for fault in faults) == (
        MODELS[name]["model_type"] == "qwen3_moe"
    )
    repaired = {
        **newer(MODELS[name]),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "num_experts": MODELS[name].get("num_experts"),
    }
    assert unread_by_4(repaired) == []


def test_a_key_that_says_what_the_family_builds_is_accepted():
    for name, config in MODELS.items():
        family = family_of(config["model_type"])
        for key, built in (
            ("qkv_bias", family.qkv_bias),
            ("qk_norm", family.qk_norm),
            ("mlp_bias", False),
            ("attention_bias", False),
            ("is_causal", True),
        ):
            assert not_built({**config, key: built}, family) == [], (name, key)
            if key != "attention_bias":
                assert f"{key} is {not built}" in "\n".join(
                    not_built({**config, key: not built}, family)
                )


PROGRAM = """
import json, sys
from mindspeed_qerl.families.config import resolve
config = json.loads(sys.stdin.read())
print(json.dumps(resolve(config)))
assert not {"torch", "transformers"} & sys.modules.keys()
"""


def test_without_torch_it_is_read_alike():
    """In a process that has imported neither, another one asks transformers."""
    for config in (MODELS["Qwen3-30B-A3B"], newer(MODELS["TinyLlama-1.1B-Chat"])):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM],
            input=json.dumps(config),
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout) == json.loads(json.dumps(resolve(config)))


def test_where_transformers_is_missing_a_sentence_says_so(monkeypatch):
    from mindspeed_qerl.families import config

    config._answer_of.cache_clear()
    monkeypatch.delitem(sys.modules, "transformers")
    monkeypatch.setattr(config, "ASK", "import a_package_that_is_missing")
    with pytest.raises(ConfigError, match="M: .* transformers, which is missing or does not start"):
        shape_of(MODELS["Qwen3-0.6B"], "M")
    assert read_shape("qwen3_8b").hidden_size == 4096
