"""The proof that adapters reached the rollout engine: what each LoRA target did to the weights that
its kernels read, beside (alpha / r) B A.
"""

import math
from collections.abc import Iterable

import torch

Movement = dict[str, dict[str, float]]  # LoRA target -> what `movement` says of its tensors


def movement(weight: torch.Tensor, base: torch.Tensor, update: torch.Tensor) -> dict[str, float]:
    """How far one weight, or a rank's part of it, is from its base, and from base + update rounded
    to its dtype.

    Args:
        weight: as the engine holds it. base: the same without adapters. update: (alpha / r) B A,
            float32. All of one shape.

    Returns:
        tensors, 1; the norms `moved` |weight - base| and `expected` |update|; max_error, the
        largest difference from base + update, beside resolution, the rounding of the largest
        weight; and lost, the share of the rounded move that did not arrive (1: it was never synced,
        also where bfloat16 hides that).

    >>> found = movement(torch.tensor([1.5]), torch.tensor([1.0]), torch.tensor([0.5]))
    >>> found["moved"], found["expected"], found["lost"]
    (0.5, 0.5, 0.0)
    """
    base = base.to(weight.dtype)
    expected = (base.float() + update).to(weight.dtype).float()
    resolution = torch.finfo(weight.dtype).eps * expected.abs().max().item()
    base, weight = base.float(), weight.float()
    error, move = (weight - expected).abs().max().item(), (expected - base).norm().item()
    return {
        "tensors": 1,
        "moved": (weight - base).norm().item(),
        "expected": update.norm().item(),
        "max_error": math.inf if math.isnan(error) else error,
        "resolution": resolution,
        "lost": (weight - expected).norm().item() / move if move else 0.0,
    }


def join(movements: Iterable[Movement]) -> Movement:
    """Those of several tensors, or of their parts on several ranks, as one."""
    by_target: dict[str, list[dict[str, float]]] = {}
    for movement_of_part in movements:
        for target, entry in movement_of_part.items():
            by_target.setdefault(target, []).append(entry)
    joined = {}
    for target, entries in by_target.items():
        values = {key: [entry[key] for entry in entries] for key in entries[0]}
        joined[target] = {
            "tensors": sum(values["tensors"]),
            "moved": math.hypot(*values["moved"]),
            "expected": math.hypot(*values["expected"]),
            "max_error": max(values["max_error"]),
            "resolution": max(values["resolution"]),
            "lost": max(values["lost"]),
        }
    return joined
