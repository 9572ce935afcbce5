"""Which widths the blocks of a number format fill."""

import pytest

from mindspeed_qerl.families import NAMED_SHAPES
from mindspeed_qerl.layout.sizes import unfilled


@pytest.mark.parametrize(
    "format, tp, faults",
    [
        ("nvfp4", 32, []),  # 4096 inputs of o_proj; experts of 768, which are whole
        ("mxfp4", 256, ["num_attention_heads x head_dim = 4096 over infer TP 256"]),
        ("int8_w8a8", 7, []),
        ("fp8", 7, []),
    ],
)
def test_ranks_have_whole_blocks_of_what_they_share(format, tp, faults):
    found = list(map(str, unfilled(format, NAMED_SHAPES["qwen3_30b_a3b"], tp)))
    assert len(found) == len(faults) and all(fault in line for fault, line in zip(faults, found))
