"""Target selection on real transformers models, and on classes named like vLLM's and Ascend's; on
vLLM's own models: tests/local/test_rollout.py.
"""

import subprocess
import sys

import pytest
import torch
from torch import nn

from mindspeed_qerl.aqn.targets import (
    check_multipliers,
    check_targets,
    is_mixture_of_experts,
    layer_of,
    multipliers_of,
    role_of,
    select_targets,
)

SIZES = {
    "vocab_size": 16,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 16,
}
MOE_SIZES = {
    **SIZES,
    "moe_intermediate_size": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 3,
}


def hf_model(name, **config):
    import transformers

    return getattr(transformers, f"{name}ForCausalLM")(
        getattr(transformers, f"{name}Config")(**config)
    )


def roles(selected):
    return sorted(set(map(role_of, selected)))


class RMSNorm(nn.Module):
    """Named like vLLM's, whose class shares no base with transformers' or torch's."""

    def __init__(self, size=8, has_weight=True):
        super().__init__()
        self.weight = torch.ones(size)
        if has_weight:
            self.weight = nn.Parameter(self.weight)


class AscendRMSNorm(RMSNorm):
    """Named like vllm-ascend's, which replaces vLLM's."""


class Block(nn.Module):
    def __init__(self, norm, mlp):
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = norm(), norm()
        self.self_attn = nn.ModuleDict({"q_norm": norm(), "k_norm": norm()})
        self.mlp = mlp


def dense_mlp():
    return nn.ModuleDict(
        {
            "gate_up_proj": nn.Linear(8, 16),
            "gate_proj": nn.Linear(8, 8),
            "down_proj": nn.Linear(8, 8),
        }
    )


def engine_model(norm=RMSNorm, make_mlp=dense_mlp, layers=2):
    """The names of vLLM's qwen3 and qwen3_moe."""
    blocks = nn.ModuleList(Block(norm, make_mlp()) for _ in range(layers))
    return nn.ModuleDict(
        {"model": nn.ModuleDict({"layers": blocks, "norm": norm()}), "lm_head": nn.Linear(8, 8)}
    )


class AscendFusedMoE(nn.Module):
    pass


class RoutedExperts(nn.Module):
    def __init__(self):
        super().__init__()
        self.w13_weight = nn.Parameter(torch.zeros(4, 16, 8))


class SharedExperts(nn.Module):
    """Every token passes through it: no mixture."""

    def __init__(self):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.zeros(16, 8))


def test_qwen2_of_28_layers_has_57_targets():
    selected = select_targets(hf_model("Qwen2", num_hidden_layers=28, **SIZES))
    assert len(selected) == 57 and roles(selected) == ["final", "input", "post_attention"]
    names = list(selected)
    assert [names[0], names[-1]] == ["model.layers.0.input_layernorm", "model.norm"]


@pytest.mark.parametrize("name", ["Llama", "Qwen3"])
def test_dense_models_with_gate_proj_are_no_mixture_of_experts(name):
    model = hf_model(name, num_hidden_layers=3, **SIZES)
    assert any(path.endswith("gate_proj") for path, _ in model.named_modules())
    assert not is_mixture_of_experts(model)
    selected = select_targets(model)
    assert len(selected) == 7 and "qk" not in roles(selected)


@pytest.mark.parametrize(
    "name, extra",
    [
        ("Qwen3Moe", {}),
        ("Qwen2Moe", {"shared_expert_intermediate_size": 8, "decoder_sparse_step": 2}),
    ],
)
def test_mixture_of_experts_gets_the_post_attention_norms_only(name, extra):
    model = hf_model(name, **MOE_SIZES, **extra)
    assert is_mixture_of_experts(model)
    assert [*select_targets(model)] == [
        f"model.layers.{i}.post_attention_layernorm" for i in range(3)
    ]
    assert len(select_targets(model, "all")) == 7
    assert not is_mixture_of_experts(
        hf_model(name, **{**MOE_SIZES, **extra, "mlp_only_layers": [0, 1, 2]})
    )


@pytest.mark.parametrize("norm", [RMSNorm, AscendRMSNorm, lambda: nn.RMSNorm(8)])
@pytest.mark.parametrize(
    "make_mlp, is_mixture",
    [
        (dense_mlp, False),
        (lambda: nn.ModuleDict({"shared": SharedExperts()}), False),
        (lambda: nn.ModuleDict({"experts": nn.ModuleList([dense_mlp(), dense_mlp()])}), True),
        (lambda: nn.ModuleDict({"experts": AscendFusedMoE()}), True),
        (
            lambda: nn.ModuleDict({"experts": nn.ModuleDict({"routed_experts": RoutedExperts()})}),
            True,
        ),
    ],
)
def test_engine_models_by_auto(norm, make_mlp, is_mixture):
    model = engine_model(norm, make_mlp)
    assert select_targets(model) == select_targets(model, "post_attention" if is_mixture else "all")


@pytest.mark.parametrize(
    "targets, exclude, count",
    [
        ("all", (), 5),
        ("block", (), 4),
        ("input", (), 2),
        ("post_attention", [], 2),
        ("final", (), 1),
        ("qk", (), 4),
        (["all", "qk"], (), 9),
        ("*", (), 9),
        ("model.layers.1.input_layernorm", (), 1),
        (["*.q_norm", "final"], (), 3),
        ("all", "final", 4),
        ("all", ["model.layers.0.*", "final"], 2),
        ("auto", "qk", 5),  # what is not selected, and exists
    ],
)
def test_names_patterns_and_excludes(targets, exclude, count):
    model = engine_model()
    selected = select_targets(model, targets, exclude)
    assert len(selected) == count


def test_other_block_norms_count_as_block_but_norms_inside_attention_do_not():
    model = hf_model("Gemma2", num_hidden_layers=2, **SIZES)  # four norms in a block
    assert (
        len(select_targets(model, "block")) == 8
        and len(select_targets(model, "post_attention")) == 2
    )
    block = nn.ModuleDict(
        {
            "self_attn": nn.ModuleDict({"kv_a_layernorm": RMSNorm()}),
            "post_attention_layernorm": RMSNorm(),
        }
    )
    selected = select_targets(nn.ModuleDict({"layers": nn.ModuleList([block])}))
    assert [*selected] == ["layers.0.post_attention_layernorm"]


@pytest.mark.parametrize("bad", ["blok", ["all", "q_norm"], None, False])
def test_unknown_target_lists_the_known_ones(bad):
    with pytest.raises(
        ValueError,
        match="unknown AQN target .*known: auto, block, input, post_attention, final, all, qk",
    ):
        check_targets(bad)
    with pytest.raises(ValueError, match="unknown AQN target"):
        select_targets(engine_model(), "all", exclude=bad)


@pytest.mark.parametrize(
    "name, targets, exclude, message",
    [
        # the right names, but not RMSNorms
        ("GPTNeoX", "auto", (), r"'auto' matches no norm .*LayerNorm \(e.g. gpt_neox.layers.0.inp"),
        ("Qwen2", "qk", (), r"'qk' matches no norm .*Qwen2RMSNorm \(e.g. model.layers.0.input_"),
        ("Qwen2", "all", "*.layers.7.*", r"AQN exclude '\*.layers.7.\*' matches no norm"),
        ("Qwen2", "final", "model.norm", "leave no norm"),
        (None, "auto", (), "Norms seen: none; is this"),
    ],
)
def test_nothing_matches_lists_the_norm_classes_seen(name, targets, exclude, message):
    model = hf_model(name, num_hidden_layers=2, **SIZES) if name else nn.Linear(2, 2)
    with pytest.raises(ValueError, match=message):
        select_targets(model, targets, exclude)


@pytest.mark.parametrize(
    "norm",
    [
        RMSNorm(has_weight=False),  # as vLLM does it: a plain tensor
        nn.RMSNorm(8, elementwise_affine=False),
        nn.RMSNorm((2, 4)),
    ],
)
def test_a_selected_norm_without_a_usable_weight_is_an_error(norm):
    model = engine_model()
    model["model"]["layers"][1].input_layernorm = norm
    name = "model.layers.1.input_layernorm"
    message = f"{name} .* has no 1-D float weight parameter.*aqn.exclude"
    with pytest.raises(ValueError, match=message):
        select_targets(model)
    assert len(select_targets(model, exclude=name)) == 4


def test_target_names_are_checked_without_torch():
    code = (
        "import sys; sys.modules['torch'] = None\nfrom mindspeed_qerl.aqn.targets import "
        "check_targets; from mindspeed_qerl.aqn.schedule import "
        "NoiseSchedule\nprint(check_targets(['auto', '*.q_norm']), "
        "NoiseSchedule(total_steps=10).sigma(1))"
    )
    output = subprocess.run(
        [sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, text=True
    ).stdout
    assert output.strip() == "['auto', '*.q_norm'] 0.05"


def test_multipliers_by_layer_target_and_both():
    """Each norm's factor worked out by hand, for a dense model of 3 layers with vLLM's names."""
    norms = select_targets(engine_model(layers=3))
    given = check_multipliers({"0-1": 2, 2: 0.5, "input": 3, "post_attention@1-2": 5, "*.norm": 0})
    expected = {
        "model.layers.0.input_layernorm": 6,
        "model.layers.0.post_attention_layernorm": 2,
        "model.layers.1.input_layernorm": 6,
        "model.layers.1.post_attention_layernorm": 10,
        "model.layers.2.input_layernorm": 1.5,
        "model.layers.2.post_attention_layernorm": 2.5,
        "model.norm": 0,
    }
    assert multipliers_of(norms, given) == expected
    assert multipliers_of(norms, []) == dict.fromkeys(norms, 1.0)
    assert [*map(layer_of, norms)] == [0, 0, 1, 1, 2, 2, None]


@pytest.mark.parametrize(
    "given, message",
    [
        ({"postattention": 2}, "unknown AQN target 'postattention'"),
        ({"inputs@0-3": 2}, "unknown AQN target 'inputs'"),
        ({"auto": 2}, "scale aqn.sigma_start"),
        ({"3-1": 2}, "the range of layers is empty"),
        ({"0": -1}, "'0' must be a finite number >= 0, not -1"),
        ({"0": "2"}, "must be a finite number"),
        ({"0": float("nan")}, "must be a finite number"),
    ],
)
def test_multipliers_that_cannot_be_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        check_multipliers(given)


@pytest.mark.parametrize("selector", ["3", "3-9", "input@3", "qk", "*.q_norm", "final@0"])
def test_a_multiplier_of_nothing_lists_what_there_is(selector):
    norms = select_targets(engine_model(layers=3))
    with pytest.raises(
        ValueError,
        match=r"selects none of the 7 norms that get noise: model\.layers\.0\.input_layernorm",
    ):
        multipliers_of(norms, check_multipliers({selector: 2.0}))
