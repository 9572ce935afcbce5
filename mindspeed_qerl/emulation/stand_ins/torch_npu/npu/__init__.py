"""torch_npu.npu, which is also torch.npu: torch.cuda under another name, and a few calls that
torch.cuda has not.
"""

from types import SimpleNamespace

import torch

from mindspeed_qerl.emulation import soc
from mindspeed_qerl.emulation.graphs import (  # noqa: F401
    ExternalEvent,
    NPUGraph,
    Pool,
    graph,
    graph_task_group_begin,
    graph_task_group_end,
    graph_task_update_begin,
    graph_task_update_end,
)
from torch_npu.npu import memory, streams  # noqa: F401

# Markers for the profiler.
mstx = SimpleNamespace(
    range_start=lambda *args, **kwargs: 0,
    range_end=lambda *args, **kwargs: None,
    mark=lambda *args, **kwargs: None,
)
config = SimpleNamespace(
    allow_internal_format=False
)  # set by vllm-ascend (worker/worker_v1.py), read by nobody here
graph_pool_handle = Pool


def set_option(option):
    """Options of the operator compiler: there is none."""


def set_compile_mode(jit_compile=False):
    """Modes of the operator compiler: there is none."""


def get_soc_version() -> int:
    """The die's number in torch_npu (csrc/core/npu/NpuVariables.h)."""
    return soc()[1]


def __getattr__(name: str):
    if name.startswith("__"):
        raise AttributeError(name)
    return getattr(torch.cuda, name)
