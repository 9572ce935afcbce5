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


def requantize(engine, *settings, **more):
    """Another quantization of an engine; its weights are the base's again."""
    base = engine.quantized.weights.synced.keys()
    for module in engine.model.modules():
        if hasattr(module, "cpu_linear"):
            module.cpu_linear = PackedLinear()
    checkpoint = engine.checkpoint
    engine.quantized = QuantizedLayers(engine.model, checkpoint, Quantization(*settings, **more))
    sync(engine, {name: checkpoint.read(name) for name in base})


class Rounding(TorchFunctionMode):
    """Linear layers, those of experts included, round what they are given; `adapters`, a model of
    the same kind, have it as it is, and are added.
    """

    def __init__(self, model, activation, adapters=None):
        super().__init__()
        self.activation = activation
        others = dict(adapters.named_parameters()) if adapters else {}
        self.weights = [
            (parameter, others.get(name))
            for name, parameter in model.named_parameters()
            if "_proj" in name and not name.endswith("bias")
        ]

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is not torch.nn.functional.linear:
            return function(*args, **(kwargs or {}))
        x, weight, *bias = args
        for whole, adapters in self.weights:
            first = (
                weight.data_ptr() - whole.data_ptr()
            ) // 4  # one expert's is a part of the stacked
            if 0 <= first < whole.numel():
                y = function(self.activation(x), weight, *bias)
                if adapters is None:
                    return y
                return y + function(
                    x, adapters.view(-1)[first : first + weight.numel()].view(weight.shape)
                )
        return function(*args, **(kwargs or {}))


def transformers_logprobs(model_dir, weights, activation=None, adapters=None):
    """By `weights`; with layers that round what they are given, beside `adapters` that are given it
    as it is.
    """
    model = reference_model(model_dir, weights)
    model.set_experts_implementation("eager")
    if not activation:
        return reference_logprobs(model)
    with Rounding(model, activation, adapters and reference_model(model_dir, adapters)):
        return reference_logprobs(model)


def assert_same(found, expected, name, atol=1e-5):
    """Rounding of activations turns a last bit into a whole step, in a token here and there."""
    error = np.abs(np.array(found) - expected)
    if FORMATS[name].activation:
        assert np.mean(error < atol) > 0.75 and error.max() < 0.1, np.sort(error.flatten())[-10:]
    else:
        assert error.max() < atol


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


@pytest.mark.parametrize("name", SOME_FORMATS)
def test_beside_leaves_the_adapters_as_they_are(engine, model_dir, name):
    requantize(engine, name, lora="beside")
    weights, of_format = changed_weights(model_dir), FORMATS[name]
    sync(engine, weights)
    base = {of: Checkpoint(model_dir).read(of) for of in weights}
    rounded = {of: of_format.weight(weight) for of, weight in base.items()}
    adapters = {of: weights[of] - base[of] for of in weights}
    if of_format.activation:
        expected = transformers_logprobs(model_dir, rounded, of_format.activation, adapters)
    else:
        expected = transformers_logprobs(
            model_dir, {of: rounded[of] + adapters[of] for of in weights}
        )
    assert_same(engine_logprobs(engine, sequences()), expected, name, atol=2e-5)
    plain = transformers_logprobs(model_dir, weights)
    assert furthest(engine_logprobs(engine, sequences(), quantized=False), plain) < 1e-5


@pytest.mark.parametrize("name", ["int8_w8a8", "nvfp4"])
@pytest.mark.parametrize("lora", ["merged", "beside"])
def test_the_proof_of_a_sync_reads_what_the_kernels_have(engine, model_dir, name, lora):
    requantize(engine, name, lora=lora)
    update, weights = factors(model_dir, 0)
    sync(engine, weights)
    assert sync_faults(engine.movement(update)) == []
    engine._put(quantized=False)  # what is synced, and not quantized
    assert sync_faults(engine.movement(update))
    engine._put(quantized=True)
    assert sync_faults(engine.movement(update)) == []
    with torch.no_grad():
        layer = engine.model.model.layers[1].self_attn.o_proj
        held = engine.quantized.adapters or {"": layer.weight}
        list(held.values())[-1].view(-1)[:40] += 1e-3
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
