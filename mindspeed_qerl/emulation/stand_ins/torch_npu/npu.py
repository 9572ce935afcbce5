"""torch_npu.npu, which is also torch.npu: torch.cuda under another name, and a few calls that torch.cuda has not."""

from types import SimpleNamespace

import torch

# Markers for the profiler.
mstx = SimpleNamespace(
    range_start=lambda *args, **kwargs: 0, range_end=lambda *args, **kwargs: None, mark=lambda *args, **kwargs: None
)


def set_option(option):
    """Options of the operator compiler: there is none."""


def set_compile_mode(jit_compile=False):
    """Modes of the operator compiler: there is none."""


def __getattr__(name: str):
    if name.startswith("__"):
        raise AttributeError(name)
    return getattr(torch.cuda, name)
