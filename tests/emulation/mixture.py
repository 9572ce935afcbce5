"""Mixtures of experts, one token at a time and as vllm-ascend computes them."""

import numpy as np

from mindspeed_qerl.emulation import operators


def mixture(x, w13, w2, expert_idx, weights):
    """Each token's experts one by one, float64 arrays; w13 (E, H, 2 FFN), gate and up, w2 (E, FFN,
    H); an expert below 0 is left out.
    """
    out = np.zeros_like(x)
    for t, k in np.argwhere(expert_idx >= 0):
        gate, up = np.split(x[t] @ w13[expert_idx[t, k]], 2)
        out[t] += weights[t, k] * (gate / (1 + np.exp(-gate)) * up @ w2[expert_idx[t, k]])
    return out


def expert_rows(x, w13, w2, group_list, group_list_type):
    """VA ops/moe/moe_mlp.py:185-220."""
    groups = dict(
        split_item=2, group_list_type=group_list_type, group_type=0, group_list=group_list
    )
    hidden = operators.npu_swiglu(operators.npu_grouped_matmul(x=[x], weight=[w13], **groups)[0])
    return operators.npu_grouped_matmul(x=[hidden], weight=[w2], **groups)[0]
