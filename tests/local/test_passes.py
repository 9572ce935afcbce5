"""What a rank makes of the results of its micro-batches."""

import math
from types import SimpleNamespace

import pytest
import torch

from mindspeed_qerl.local.passes import Passes
from mindspeed_qerl.recipe.types import Batch, Sampling

from .test_sampled import selected


def test_a_log_probability_of_the_trained_model_that_is_none_names_the_answer(tmp_path):
    batch, _ = selected([1, 0, 2, 2])
    settings = SimpleNamespace(
        model=SimpleNamespace(path=str(tmp_path)), sampling=Sampling(), batch=Batch()
    )
    passes = Passes(None, settings, None, None, None)
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
