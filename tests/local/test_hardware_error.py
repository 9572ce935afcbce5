"""Each model of other hardware against its formula written out, forward and backward, and whether
it reaches every layer of every engine.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from mindspeed_qerl.local import rollout
from mindspeed_qerl.local.hardware_error import HardwareErrorMode
from mindspeed_qerl.recipe.types import HardwareError

from .conftest import FEW_FAMILIES, batch_of, engine_logprobs, furthest, run_ranks
from .test_megatron import ONE, layout_config, random_batch, transformers_logprobs


def matrices(m=3, k=100, n=5, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(m, k, generator=generator, dtype=dtype), torch.randn(
        k, n, generator=generator, dtype=dtype
    )


def bf16(x):
    return float(torch.tensor(x, dtype=torch.float32).bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_in_bfloat16_are_rounded_one_after_the_other(dtype):
    a, b = matrices(dtype=dtype)
    with HardwareErrorMode(["bf16_blocks"], block=32):
        found = a @ b
    assert found.dtype == dtype
    for row in range(len(a)):
        for column in range(b.shape[1]):
            total = 0.0
            for start in range(0, 100, 32):
                total = bf16(
                    total
                    + bf16(
                        np.dot(
                            a[row, start : start + 32].float().numpy(),
                            b[start : start + 32, column].float().numpy(),
                        )
                    )
                )
            assert found[row, column].item() == total


def test_gaussian_error_is_relative_and_drawn_anew():
    a, b = matrices(m=200, n=300)
    arithmetic = HardwareErrorMode(["gaussian"], gaussian_std=0.05, seed=1)
    with arithmetic:
        first, second = a @ b, a @ b
        arithmetic.generator.manual_seed(1)
        again = a @ b
    error = (first / (a @ b) - 1).double()
    assert error.std().item() == pytest.approx(0.05, rel=0.02) and abs(
        error.mean()
    ) < 4 * 0.05 / math.sqrt(error.numel())
    assert not torch.equal(first, second) and torch.equal(first, again)


def test_the_backward_pass_is_on_that_hardware_too():
    x, weight = matrices()
    weight = weight.requires_grad_()
    arithmetic = HardwareErrorMode(["gaussian"], seed=0)
    with arithmetic:
        (x @ weight).sum().backward()
    error = weight.grad / (x.T @ torch.ones(3, 5)) - 1
    assert error.std().item() == pytest.approx(0.05, rel=0.15)


class Scaled(HardwareErrorMode):
    """Every product 1 % too large: smooth, so that engines compare closely, and felt wherever it is
    applied.
    """

    def _product(self, a, b):
        return 1.01 * (a @ b)


@pytest.fixture(params=FEW_FAMILIES)
def family(request):
    return request.param


def foreign_transformers(model_dir, batch):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=torch.float32, experts_implementation="eager"
    )
    with Scaled([]):
        return transformers_logprobs(model, batch)


def megatron_rank(start, config, batch):
    from mindspeed_qerl.local import rank as module

    modes = []

    def start_mode(*arguments, **named):
        modes.append((HardwareErrorMode(*arguments, **named), named["seed"]))
        return modes[-1][0]

    trainer = start(config)
    with Scaled([]):
        found = trainer.logprobs(batch)
    module.HardwareErrorMode = start_mode
    trainer.train(batch)
    [(mode, seed)] = modes
    at_first = torch.Generator().manual_seed(seed).get_state()
    has_drawn = not torch.equal(mode.generator.get_state(), at_first)
    return found, has_drawn, trainer.logprobs(batch, reference=True)


def test_megatron_and_transformers_on_the_same_foreign_hardware_agree(model_dirs, data_dir, family):
    """So no layer of Megatron's is passed by; and a rank whose config says so trains on it, and
    leaves it after.
    """
    batch = random_batch()
    config = replace(
        layout_config(ONE, model_dirs[family], data_dir),
        hardware_error=HardwareError(training="gaussian"),
    )
    [(found, has_drawn, after)] = run_ranks(megatron_rank, 1, config, batch)
    clean = transformers_logprobs(model_dirs[family], batch)
    expected = foreign_transformers(model_dirs[family], batch)
    assert np.abs((found - expected) * batch.mask).max() < 1e-5
    assert np.abs((expected - clean) * batch.mask).max() > 1e-3
    assert has_drawn
    assert np.abs((after - clean) * batch.mask).max() < 1e-5


def test_vllm_and_transformers_on_the_same_foreign_hardware_agree(
    model_dirs, expert_group, family, monkeypatch
):
    """The fused experts' kernel included."""
    engine = rollout.RolloutEngine(
        str(model_dirs[family]), "float32", max_model_len=64, max_num_seqs=16, kv_cache_gib=1
    )
    sequences = np.random.default_rng(1).integers(0, 96, (6, 20)).tolist()
    batch = batch_of([row[:1] for row in sequences], [row[1:] for row in sequences])
    scaled = dict(kinds=[])
    with monkeypatch.context() as patch:
        patch.setattr(rollout, "HardwareErrorMode", Scaled)
        found = np.array(engine_logprobs(engine, sequences, hardware_error=scaled))
    assert furthest(found, foreign_transformers(model_dirs[family], batch)) < 1e-5
    clean = transformers_logprobs(model_dirs[family], batch)
    assert furthest(engine_logprobs(engine, sequences), clean) < 1e-5  # and it is gone again

    def sample(seed, temperature=1.0, kinds=("gaussian",)):
        sampling = dict(max_tokens=3, temperature=temperature)
        error = kinds and dict(kinds=kinds)
        n = 2 if temperature else 1
        request = rollout.RolloutRequest(sequences[:2], n, seed, sampling, hardware_error=error)
        return engine.generate(request)[0]

    once = sample(0)
    assert once == sample(0) != sample(0, kinds=()) and sample(1) != once
    # errors are drawn anew, where nothing else is
    assert sample(0, temperature=0.0) != sample(1, temperature=0.0)
