"""Which widths the blocks of a number format fill."""

import pytest

from mindspeed_qerl.families import NAMED_SHAPES
from mindspeed_qerl.layout.sizes import SHARED_INPUTS, unfilled


@pytest.mark.parametrize(
    "format, tp, shared, faults",
    [
        ("nvfp4", 4, SHARED_INPUTS, []),  # 4096 inputs of o_proj, experts of 768
        ("nvfp4", 32, SHARED_INPUTS, ["moe_intermediate_size = 768"]),
        ("nvfp4", 32, [], []),
        ("nvfp4", 32, SHARED_INPUTS[:1], []),
        (
            "mxfp4",
            256,
            SHARED_INPUTS,
            ["num_attention_heads x head_dim = 4096", "moe_intermediate_size = 768"],
        ),
        ("none", 7, SHARED_INPUTS, []),
        ("int8_w8a8", 7, SHARED_INPUTS, []),
        ("fp8", 7, [], []),
        ("fp8", 2, SHARED_INPUTS, []),
        ("fp8", 4, SHARED_INPUTS, ["moe_intermediate_size = 768"]),
    ],
)
def test_ranks_have_whole_blocks_of_what_they_share(format, tp, shared, faults):
    found = list(map(str, unfilled(format, NAMED_SHAPES["qwen3_30b_a3b"], tp, shared)))
    assert len(found) == len(faults) and all(fault in line for fault, line in zip(faults, found))
