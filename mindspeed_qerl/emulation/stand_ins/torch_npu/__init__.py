"""Stands for torch_npu: importing it turns torch into an emulated NPU; its operators are emulation/operators.py and
attention.py.

One that is not emulated can be read, as code does that asks whether it exists, and raises NotImplementedError when
called.
"""

import sys

import torch

from mindspeed_qerl.emulation import extensions, facade
from mindspeed_qerl.emulation.attention import npu_fusion_attention  # noqa: F401
from mindspeed_qerl.emulation.operators import (  # noqa: F401
    _npu_moe_token_unpermute_with_routing_map,
    npu_add_rms_norm,
    npu_grouped_matmul,
    npu_moe_gating_top_k_softmax,
    npu_moe_token_permute_with_routing_map,
    npu_moe_token_permute_with_routing_map_grad,
    npu_moe_token_unpermute_with_routing_map_grad,
    npu_rms_norm,
    npu_rotary_mul,
    npu_swiglu,
)

facade.install()
extensions.install()

from torch_npu import _C, npu, profiler, utils  # noqa: F401

torch.npu = npu
sys.modules["torch.npu"] = npu

__version__ = "2.7.1"


def __getattr__(name: str):
    if not name.startswith(("npu_", "_npu_")):
        raise AttributeError(f"the emulated torch_npu has no {name} (docs/emulation.md)")
    return extensions.not_emulated(f"torch_npu.{name}")
