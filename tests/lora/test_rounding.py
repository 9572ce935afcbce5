"""Unbiased rounding against float64, the statistics of independent bits, and the regime that ships:
bfloat16, lr 5e-6, r 32, alpha 64.
"""

import math

import pytest
import torch
from torch.nn.functional import linear

from mindspeed_qerl.families import read_shape
from mindspeed_qerl.families.tensors import mappings
from mindspeed_qerl.lora.adapters import LoRALinear, adapters_disabled
from mindspeed_qerl.lora.proof import arrival_metrics, join, movement
from mindspeed_qerl.lora.rounding import dither_of, dither_of_part, merged, rounded
from tests.lora.test_adapters import TupleLinear

R, SCALING, LR = 32, 2.0, 5e-6
NAME = "model.layers.3.mlp.up_proj.weight"


def adapter(shape, updates, seed=0):
    """W [out, in] on bfloat16's grid, and what Adam makes of B and A in so many equal updates."""
    generator = torch.Generator().manual_seed(seed)
    weight = (0.02 * torch.randn(shape, generator=generator)).bfloat16()
    bound = 1 / math.sqrt(shape[1])
    a = torch.empty(R, shape[1]).uniform_(-bound, bound, generator=generator)
    b = LR * updates * torch.randn(shape[0], R, generator=generator).sign()
    return weight, b, a


@pytest.mark.parametrize("updates, most_lost", [(1, 0.95), (20, 0.2)])
def test_the_update_of_the_shipped_regime_arrives_and_to_nearest_it_does_not(updates, most_lost):
    shares = {}
    for rule in ("unbiased", "nearest"):
        found = []
        for number in range(4):
            name, (weight, b, a) = f"{number}.{NAME}", adapter((512, 384), updates, number)
            dither = dither_of(name, weight.shape)
            used = merged(weight, b, a, SCALING, dither if rule == "unbiased" else None)
            found.append({"linear_fc1": movement(used, weight, SCALING * b @ a, dither)})
        entry = join(found)["linear_fc1"]
        metrics = arrival_metrics({"linear_fc1": entry})
        assert metrics["sync/arrived"] == metrics["sync/arrived/linear_fc1"] == entry["arrived"]
        shares[rule] = entry["arrived"], entry["arrived_error"]
        assert (entry["lost"] < 1e-3) == (rule == "unbiased")
    share, error = shares["unbiased"]
    assert abs(share - 1) < 3 * error < 0.1
    share, error = shares["nearest"]
    assert share + 3 * error < 0.9 and share < 1 - most_lost


def test_rounding_is_right_in_the_mean_and_as_noisy_as_the_proof_says():
    """Of 200 tensors' shares of the same update: mean 1, and their spread the stated error."""
    weight, b, a = adapter((64, 48), 3)
    update, z = SCALING * b @ a, []
    for number in range(200):
        dither = dither_of(f"{number}", weight.shape)
        used = merged(weight, b, a, SCALING, dither)
        entry = join([{"x": movement(used, weight, update, dither)}])["x"]
        z.append((entry["arrived"] - 1) / entry["arrived_error"])
    z = torch.tensor(z)
    assert abs(z.mean()) < 3 / math.sqrt(200) and 0.85 < z.std() < 1.15


@pytest.mark.parametrize("distance", [1 / 64, 1 / 4, 1 / 2, 3 / 4, 63 / 64])
def test_a_value_is_rounded_with_the_probability_of_its_distance(distance):
    """Away from 0 as towards it, which the share, of updates of both signs, would not tell apart."""
    shape, spacing = (256, 192), 2**-7
    exact = torch.full(shape, 1 + distance * spacing)
    exact[::2] *= -1
    away = rounded(exact, torch.bfloat16, dither_of(NAME, shape)).abs() > 1
    error = math.sqrt(distance * (1 - distance) / away.numel())
    assert abs(away.double().mean() - distance) < 4 * error


def test_bits_are_as_independent_ones():
    """Uniform, uncorrelated between rows, columns and names, and without a direction of their own."""
    bits = []
    for name in ("x", "y"):
        dither = dither_of(name, (256, 192))
        product = dither.down[:, None].long() * dither.across  # int64 does not wrap
        bits.append((product >> 16 & 0xFFFF).double() / 2**16)
    x, y = (each - 0.5 for each in bits)
    for sample in (x, x[1:] * x[:-1] * 12**0.5, x[:, 1:] * x[:, :-1] * 12**0.5, x * y * 12**0.5):
        assert abs(sample.mean()) < 4 / math.sqrt(12 * sample.numel())
    assert x.square().mean() * 12 == pytest.approx(1, abs=0.02)
    random = torch.rand(256, 192, dtype=torch.double, generator=torch.Generator().manual_seed(0))
    of_random = torch.linalg.matrix_norm(random - 0.5, ord=2)
    assert torch.linalg.matrix_norm(x, ord=2) < 1.1 * of_random


def test_a_value_is_one_of_its_two_neighbours_and_a_weight_on_the_grid_stays():
    exact = torch.cat([torch.randn(64, 64) * 10.0**power for power in (-30, -3, 0, 30)])
    dither = dither_of(NAME, exact.shape)
    result = rounded(exact, torch.bfloat16, dither)
    assert torch.equal(rounded(result.float(), torch.bfloat16, dither), result)
    spacing = torch.exp2(exact.double().abs().log2().floor()) * 2**-7
    assert ((result.double() - exact.double()).abs() < spacing).all()
    assert torch.equal(rounded(exact, torch.float16, dither), exact.half())


@pytest.mark.parametrize("family", ["qwen3_30b_a3b", "qwen15_moe_a2_7b"])
def test_a_ranks_part_has_the_bits_of_the_whole_tensors(family):
    """Parts of two tensor parallel ranks, joined and split into Hugging Face's tensors."""
    shape, hidden = read_shape(family), 64
    for mapping in mappings(shape, range(1), range(2), first=False, last=False):
        target = mapping.megatron.split(".")[-2]
        if not target.startswith("linear") or mapping.megatron.endswith("bias"):
            continue
        outputs = {"linear_qkv": shape.num_attention_heads + 2 * shape.num_key_value_heads}
        whole = outputs.get(target, 1) * shape.head_dim, hidden
        size = 2 if mapping.shared else 1
        part = list(whole)
        part[mapping.shared.dim if mapping.shared else 0] //= size
        dithers = [dither_of_part(mapping, part, rank, size) for rank in range(size)]
        products = [each.down[:, None] * each.across for each in dithers]
        joined = mapping.shared.join(products) if mapping.shared else products[0]
        for name, found in zip(mapping.hf, mapping.split(joined), strict=True):
            expected = dither_of(name, found.shape)
            assert torch.equal(found, expected.down[:, None] * expected.across), name


def test_a_layer_multiplies_with_the_merged_weight_and_gradients_go_straight_through():
    weight, b, a = adapter((40, 24), 500)
    base = TupleLinear(24, 40, bias=False, dtype=torch.bfloat16).requires_grad_(False)
    base.weight.copy_(weight)
    base.weight.dither = dither_of(NAME, weight.shape)
    layer = LoRALinear(base, R, R * SCALING, seed=1, is_expert=False)
    with torch.no_grad():
        layer.lora_A.copy_(a)
        layer.lora_B.copy_(b)
    used = merged(weight, b, a, SCALING, base.weight.dither)
    x, gradient = torch.randn(7, 24).bfloat16().requires_grad_(), torch.randn(7, 40).bfloat16()
    output, _ = layer(x)
    assert torch.equal(output, linear(x, used)) and layer.merged_weight() is layer.merged_weight()
    assert not torch.equal(used, weight)
    output.backward(gradient)
    g, inputs = gradient.double(), x.detach().double()
    for found, exact in (
        (x.grad, g @ used.double()),
        (layer.lora_B.grad, SCALING * g.T @ (inputs @ a.double().T)),
        (layer.lora_A.grad, SCALING * (g @ b.double()).T @ inputs),
    ):
        torch.testing.assert_close(found.double(), exact, rtol=0.03, atol=0.02 * exact.abs().max())
    with adapters_disabled(layer), torch.no_grad():
        assert torch.equal(layer(x)[0], linear(x, weight))
    with torch.no_grad():
        layer.lora_B.zero_()
        layer.forget_merged()
        assert torch.equal(layer.merged_weight(), weight) and torch.equal(
            layer(x)[0], linear(x, weight)
        )


def test_layers_with_and_without_an_update_are_joined_again():
    """As an NPU's rank joins its layers: those of a layer may have no update yet."""
    one = torch.ones(8, 8).bfloat16()
    dither = dither_of("x", (8, 8))
    still = {"x": movement(one, one, torch.zeros(8, 8), dither)}
    moved = {"x": movement(one + 0.5, one, torch.full((8, 8), 0.5), dither)}
    for parts in ([still, moved], [moved, still]):
        layers = [join([part]) for part in parts]
        assert join(layers) == join(parts) and join(parts)["x"]["arrived"] == 1
