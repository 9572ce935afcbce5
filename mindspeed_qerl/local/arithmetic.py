"""What torch computes on a CPU, the same at every start."""

import torch

# torch's functions that call MKL's vector library: IMPLEMENT_VML_MKL in its ATen/cpu/vml.h
OF_MKL = "acos asin atan cos erf erfc erfinv exp log log10 log2 sin sqrt tan tanh trunc".split()


def settle() -> None:
    """Call each function of `OF_MKL` once, on one thread. MKL 2024.2, which torch is built with,
    chooses a function's kernel at its first call; where several threads make that at once, some get
    half of the digits (github.com/pytorch/pytorch/issues/188792): of a run and its twin one number
    differed in the ninth digit.
    """
    for dtype in (torch.float32, torch.float64):
        half = torch.tensor([0.5], dtype=dtype)
        for name in OF_MKL:
            getattr(torch, name)(half)
