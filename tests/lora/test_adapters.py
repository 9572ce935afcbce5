"""Adapters against PEFT's own layer, and their bookkeeping against counts by hand."""

import peft
import pytest
import torch
from torch import nn

from mindspeed_qerl.common.errors import ConfigError
from mindspeed_qerl.lora.adapters import LoRALinear, adapters_disabled, apply_lora, lora_layers


class TupleLinear(nn.Linear):
    """Megatron's linear layers return (output, bias)."""

    def forward(self, x):
        return super().forward(x), None


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear_qkv = TupleLinear(6, 10)
        self.linear_proj = TupleLinear(10, 6)
        self.other = TupleLinear(6, 6)
        self.local_experts = nn.ModuleList(
            nn.ModuleDict({"linear_fc1": TupleLinear(6, 8)}) for _ in range(2)
        )


def model(seed=0):
    torch.manual_seed(seed)
    return nn.ModuleDict({"layers": nn.ModuleList(Block() for _ in range(3))})


def test_forward_merge_and_gradients_are_pefts():
    torch.manual_seed(0)
    base = nn.Linear(6, 10, bias=False)
    theirs = peft.get_peft_model(
        nn.Sequential(base), peft.LoraConfig(r=4, lora_alpha=8, target_modules=["0"])
    ).base_model.model[0]
    tuple_base = TupleLinear(6, 10, bias=False)
    tuple_base.load_state_dict(base.state_dict())
    ours = LoRALinear(tuple_base, 4, 8, seed=1, is_expert=False)
    with torch.no_grad():
        ours.lora_B.normal_()
        theirs.lora_A["default"].weight.copy_(ours.lora_A)
        theirs.lora_B["default"].weight.copy_(ours.lora_B)
    x = torch.randn(5, 6)
    torch.testing.assert_close(ours(x)[0], theirs(x))
    ours(x)[0].square().sum().backward()
    theirs(x).square().sum().backward()
    torch.testing.assert_close(ours.lora_A.grad, theirs.lora_A["default"].weight.grad)
    torch.testing.assert_close(ours.lora_B.grad, theirs.lora_B["default"].weight.grad)
    theirs.merge()
    torch.testing.assert_close(ours.merged_weight(), theirs.base_layer.weight)


def test_only_adapters_train():
    m = model()
    apply_lora(m, ["linear_qkv", "linear_fc1"], r=2, alpha=4, seed=0)
    trained = {name for name, parameter in m.named_parameters() if parameter.requires_grad}
    assert len(trained) == 18 and all("lora_" in name for name in trained)
    assert all(
        layer.lora_A.allreduce is ("local_experts" not in name) for name, layer in lora_layers(m)
    )


def test_a_fresh_adapter_changes_nothing_and_a_disabled_one_neither():
    m, x = model(), torch.randn(4, 6)
    layer = m["layers"][0]
    before = layer.linear_qkv(x)[0]
    apply_lora(m, ["linear_qkv"], r=2, alpha=4, seed=0)
    assert torch.equal(layer.linear_qkv(x)[0], before)
    nn.init.normal_(layer.linear_qkv.lora_B)
    moved = layer.linear_qkv(x)[0]
    assert not torch.equal(moved, before)
    with adapters_disabled(m):
        assert torch.equal(layer.linear_qkv(x)[0], before)
    assert torch.equal(layer.linear_qkv(x)[0], moved)


def test_an_expert_starts_the_same_on_whichever_rank_it_lives():
    whole, second_rank = model(), model(1)
    apply_lora(whole, ["linear_fc1"], r=2, alpha=4, seed=5)
    apply_lora(second_rank, ["linear_fc1"], r=2, alpha=4, seed=5, expert_offset=1)
    a = [block.local_experts[1].linear_fc1.lora_A for block in whole["layers"]]
    b = [block.local_experts[0].linear_fc1.lora_A for block in second_rank["layers"]]
    assert all(torch.equal(x, y) for x, y in zip(a, b))
    assert (
        len({layer.lora_A.sum().item() for _, layer in lora_layers(whole)}) == 6
    )  # and no two the same


def test_a_target_that_matches_no_layer_is_refused():
    message = "linear_fc2 matches no layer of this model"
    with pytest.raises(ConfigError, match=message):
        apply_lora(model(), ["linear_qkv", "linear_fc2"], r=2, alpha=4, seed=0)
