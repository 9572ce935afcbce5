"""Quantized rollouts in vLLM against transformers, whose layers are handed the rounded weights and
activations.
"""

import os

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

from mindspeed_qerl.families.checkpoint import Checkpoint
from mindspeed_qerl.local.packing import PackedLinear
from mindspeed_qerl.local.quantized import QuantizedLayers
from mindspeed_qerl.quantization.formats import FORMATS
from mindspeed_qerl.recipe.types import Quantization
from mindspeed_qerl.runs.checks import sync_faults

from .conftest import FEW_FAMILIES, engine_logprobs, furthest
from .test_rollout import (
    assert_answers_are_of_the_noisy_policy,
    changed_weights,
    factors,
    noisy_engine,
    reference_logprobs,
    reference_model,
    sample,
    sequences,
    sync,
)

pytest.importorskip("vllm")
pytestmark = pytest.mark.usefixtures("expert_group")


@pytest.fixture(scope="module", params=FEW_FAMILIES)
def model_dir(request, model_dirs):
    return model_dirs[request.param]


@pytest.fixture(scope="module")
def engine(model_dir):
    os.environ["OMP_NUM_THREADS"] = "2"
    return noisy_engine(model_dir, "float32", quantization=Quantization("int8_w8a8"))


def requantize(engine, name):
    """Another quantization of an engine; its weights are the base's again."""
    base = engine.quantized.weights.synced.keys()
    for module in engine.model.modules():
        if hasattr(module, "cpu_linear"):
            module.cpu_linear = PackedLinear()
    checkpoint = engine.checkpoint
    engine.quantized = QuantizedLayers(engine.model, checkpoint, Quantization(name))
    sync(engine, {name: checkpoint.read(name) for name in base})


class Rounding(TorchFunctionMode):
    """Linear layers, those of experts included, round what they are given."""

    def __init__(self, model, activation):
        super().__init__()
        self.activation = activation
        self.weights = [
            parameter
            for name, parameter in model.named_parameters()
            if "_proj" in name and not name.endswith("bias")
        ]

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is not torch.nn.functional.linear:
            return function(*args, **(kwargs or {}))
        x, weight, *bias = args
        for whole in self.weights:
            # one expert's is a part of the stacked
            first = (weight.data_ptr() - whole.data_ptr()) // 4
            if 0 <= first < whole.numel():
                return function(self.activation(x), weight, *bias)
        return function(*args, **(kwargs or {}))


def transformers_logprobs(model_dir, weights, activation=None):
    """By `weights`; with layers that round what they are given."""
    model = reference_model(model_dir, weights)
    model.set_experts_implementation("eager")
    if not activation:
        return reference_logprobs(model)
    with Rounding(model, activation):
        return reference_logprobs(model)


def assert_same(found, expected, name):
    """Rounding of activations turns a last bit into a whole step, in a token here and there."""
    error = np.abs(np.array(found) - expected)
    if FORMATS[name].activation:
        assert np.mean(error < 1e-5) > 0.75 and error.max() < 0.1, np.sort(error.flatten())[-10:]
    else:
        assert error.max() < 1e-5


# the others in `make test-full`; tests/quantization has the formats themselves
SOME_FORMATS = [
    name if name in ("int8_w8a8", "nvfp4") else pytest.param(name, marks=pytest.mark.full)
    for name in FORMATS
]


@pytest.mark.parametrize("name", SOME_FORMATS)
def test_logprobs_are_transformers_with_the_rounded_weights(engine, model_dir, name):
    requantize(engine, name)
    weights, of_format = changed_weights(model_dir), FORMATS[name]
    sync(engine, weights)
    expected = transformers_logprobs(
        model_dir,
        {of: of_format.weight(weight) for of, weight in weights.items()},
        of_format.activation,
    )
    found = np.array(engine_logprobs(engine, sequences()))
    assert_same(found, expected, name)
    plain = transformers_logprobs(model_dir, weights)
    assert np.mean(np.abs(expected - plain) > 1e-3) > 0.5
    assert furthest(engine_logprobs(engine, sequences(), quantized=False), plain) < 1e-5
    assert np.array_equal(
        engine_logprobs(engine, sequences()), found
    )  # quantized again, bit for bit


@pytest.mark.parametrize("name", ["int8_w8a8", "nvfp4"])
def test_the_proof_of_a_sync_reads_what_the_kernels_have(engine, model_dir, name):
    requantize(engine, name)
    update, weights = factors(model_dir, 0)
    sync(engine, weights)
    assert sync_faults(engine.movement(update)) == []
    engine._put(quantized=False)  # what is synced, and not quantized
    assert sync_faults(engine.movement(update))
    engine._put(quantized=True)
    assert sync_faults(engine.movement(update)) == []
    with torch.no_grad():
        layer = engine.model.model.layers[1].self_attn.o_proj
        layer.weight.view(-1)[:40] += 1e-3
        if isinstance(layer.cpu_linear, PackedLinear):
            layer.cpu_linear.forget()
    assert len(sync_faults(engine.movement(update))) == 1
    sync(engine, weights)


def test_answers_carry_the_logprobs_of_the_quantized_policy_with_its_noise(engine, model_dir):
    requantize(engine, "nvfp4")
    sync(engine, changed_weights(model_dir))
    prompts, _ = assert_answers_are_of_the_noisy_policy(engine)
    as_synced, _ = sample(engine, prompts, 2, seed=4, quantized=False)
    quantized, engine.quantized = engine.quantized, None
    try:
        sync(engine, changed_weights(model_dir))
        assert sample(engine, prompts, 2, seed=4)[0] == as_synced
    finally:
        engine.quantized = quantized
    sync(engine, changed_weights(model_dir))


def test_files_of_another_dtype_round_nothing_that_is_synced(engine, model_dir):
    class Half(Checkpoint):
        def read(self, name):
            return super().read(name).bfloat16()

    weights = QuantizedLayers(engine.model, Half(model_dir), Quantization("nvfp4")).weights
    for name, weight in changed_weights(model_dir).items():
        weights.receive(name, weight)
        assert torch.equal(weights.synced[name], weight)
        assert torch.equal(weights.used[name], FORMATS["nvfp4"].weight(weight))
