"""float32 and float64 are an extension of what CANN's pages have, which can be switched off."""

import pytest
import torch

from mindspeed_qerl.emulation import contract, paged, quantized, serving
from tests.emulation.sequences import KV_HEADS, Paged, int32
from tests.emulation.test_fused_infer import chunks, fused
from tests.emulation.test_operators import normal
from tests.emulation.test_paged import decode, in_chunks
from tests.emulation.test_prefill import over_found_blocks, prefill
from tests.emulation.test_serving import rotary

ONES = torch.ones(3, 4)
HALF = "float16 or bfloat16"


def batch(dtype=torch.float32, block_size=16):
    return Paged([1], [3], block_size, dtype)


def reshape_and_cache():
    caches, (k, v) = batch(), (normal(3, KV_HEADS, 16, dtype=torch.float32) for _ in range(2))
    slots = int32([1, 2, 3])
    paged._npu_reshape_and_cache(k, v, caches.key_cache, caches.value_cache, slots)


def top_p(dtype):
    serving.npu_top_k_top_p(torch.zeros(1, 4, dtype=dtype), torch.tensor([0.5], dtype=dtype))


@pytest.mark.parametrize(
    ("words", "call"),
    [
        (HALF, lambda: decode(batch())),
        (HALF, lambda: in_chunks(batch(torch.float64), torch.zeros(1, 3).double())),
        (HALF, reshape_and_cache),
        (HALF, lambda: prefill(torch.float64, torch.zeros(7, 7).double())),
        (HALF, lambda: over_found_blocks(batch(block_size=128), torch.zeros(128, 128))),
        ("must be bfloat16, not float32", lambda: fused(chunks(torch.float32))),
        ("must be bfloat16, not float16", lambda: fused(chunks(torch.float16))),
        (f"{HALF}, not float32", lambda: rotary(torch.float32, True, torch.arange(3))),
        ("not float64", lambda: top_p(torch.float64)),
        ("bfloat16, not float", lambda: quantized.npu_dynamic_quant(ONES)),
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
