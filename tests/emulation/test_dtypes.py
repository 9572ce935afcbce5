"""float32 and float64 are an extension of what CANN's pages have, which can be switched off."""

import pytest
import torch

from mindspeed_qerl.emulation import contract, quantized, serving
from tests.emulation.sequences import Paged
from tests.emulation.test_fused_infer import chunks, fused
from tests.emulation.test_paged import decode
from tests.emulation.test_prefill import over_found_blocks

HALF = "float16 or bfloat16"


def batch(dtype=torch.float32, block_size=16):
    return Paged([1], [3], block_size, dtype)


def top_p(dtype):
    serving.npu_top_k_top_p(torch.zeros(1, 4, dtype=dtype), torch.tensor([0.5], dtype=dtype))


@pytest.mark.parametrize(
    ("words", "call"),
    [
        (HALF, lambda: decode(batch())),
        (HALF, lambda: over_found_blocks(batch(block_size=128), torch.zeros(128, 128))),
        ("must be bfloat16, not float32", lambda: fused(chunks(torch.float32))),
        ("not float64", lambda: top_p(torch.float64)),
        ("bfloat16, not float", lambda: quantized.npu_dynamic_quant(torch.ones(3, 4))),
    ],
)
def test_what_no_page_has_is_refused(words, call, monkeypatch):
    monkeypatch.setattr(contract, "ONLY_DOCUMENTED_DTYPES", True)
    with pytest.raises(ValueError, match=words):
        call()


def test_what_a_page_has_is_computed(monkeypatch):
    monkeypatch.setattr(contract, "ONLY_DOCUMENTED_DTYPES", True)
    half = batch(torch.float16)
    decode(half)
    half.check()
    top_p(torch.float32)
