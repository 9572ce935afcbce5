"""What a rank makes of the results of its micro-batches."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mindspeed_qerl.algorithm.metrics import Mean, merge
from mindspeed_qerl.local.passes import Passes, Trained, on_host
from mindspeed_qerl.local.sampled import select
from mindspeed_qerl.recipe.types import Batch, Sampling

from .test_sampled import recipe, sampled


def passes_of(model_dir):
    settings = SimpleNamespace(
        model=SimpleNamespace(path=str(model_dir)),
        sampling=Sampling(),
        batch=Batch(micro_batch_size=2),
    )
    return Passes(None, settings, None, None, None)


def test_the_loss_is_copied_to_the_host_once_a_step_and_not_for_each_micro_batch(tmp_path):
    passes, (batch, _) = passes_of(tmp_path), select(sampled([1, 0, 2, 2]), np.arange(2), recipe())
    logprobs = torch.full(batch.mask.shape, -0.5).split(2)
    results = [
        Trained({"loss/total": Mean(0.0, 3)}, torch.tensor(loss), part)
        for loss, part in zip((0.25, 0.5), logprobs)
    ]
    passes._run = lambda shard, size, divisor: results
    merged = merge(passes.train(batch, divisor=4.0))
    assert isinstance(merged["loss/total"].total, torch.Tensor)
    assert on_host(merged) == {"loss/total": Mean(3.0, 6)}


def test_a_log_probability_of_the_trained_model_that_is_none_names_the_answer(tmp_path):
    batch, _ = select(sampled([1, 0, 2, 2]), np.arange(2), recipe())
    passes = passes_of(tmp_path)
    logprobs = torch.full(batch.mask.shape, -0.5)
    logprobs[~torch.from_numpy(batch.mask)] = math.nan  # of prompts and padding
    passes._assembled(batch, 2, logprobs.split(2))
    for value in (math.nan, -math.inf, 0.5):
        logprobs[3, 1] = value
        with pytest.raises(
            RuntimeError,
            match=rf"gave {value} as the log probability of token 2 of 3 of the answer "
            r"'\[1 1 1\]'",
        ):
            passes._assembled(batch, 2, logprobs.split(2))
