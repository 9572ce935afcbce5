"""The proof that adapters reached the rollout engine: what each LoRA target did to the weights that
its kernels read, beside (alpha / r) B A, and which share of it arrived.

    share = <M, U> / <U, U>        M: what the weights moved from their base, U = (alpha / r) B A

0: nothing arrived; 1: all of it did, in the mean. A rounding without bias adds noise to M, from
which the share has a standard error.
"""

import math
from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor

from .arrival import share_of, variance_of_rounding
from .rounding import Dither, rounded

Movement = dict[str, dict[str, float]]  # LoRA target -> what `movement` says of its tensors
LARGEST = ("max_error", "resolution", "lost")  # of several tensors the largest counts
NORMS = ("moved", "expected")
SHARE = ("arrived", "arrived_error")  # of joined ones, which are joined anew


def movement(
    weight: Tensor,
    base: Tensor,
    update: Tensor,
    dither: Dither,
    quantized: tuple[Tensor, Tensor] | None = None,
) -> dict[str, float]:
    """Compares one weight, or a rank's part of it, with its base and with base + update rounded to
    its dtype.

    Args:
        weight: as the engine holds it. base: the same without adapters. update: (alpha / r) B A,
            float32. All of one shape. dither: by which bfloat16 is rounded.
        quantized: what kernels multiply with in their places, with adapters and without.

    Returns:
        tensors, 1; the norms `moved` |weight - base| and `expected` |update|; max_error, the
        largest difference from base + update, beside resolution, the rounding of the largest
        weight; lost, the share of the rounded move that did not arrive (1: it was never synced);
        and of what is multiplied with product <M, U>, square <U, U> and the variance that rounding
        gives the product.

    >>> one = torch.ones(1, 1)
    >>> found = movement(1.5 * one, one, 0.5 * one, Dither(one.int()[0], one.int()[0]))
    >>> found["moved"], found["expected"], found["lost"], found["product"], found["square"]
    (0.5, 0.5, 0.0, 0.25, 0.25)
    """
    base = base.to(weight.dtype)
    expected = rounded(base.float() + update, weight.dtype, dither).float()
    epsilon = torch.finfo(weight.dtype).eps
    resolution = epsilon * expected.abs().max().item()
    base = base.float()
    weight = weight.float()
    missing = weight - expected
    error = missing.abs().max().item()
    move = (expected - base).norm().item()
    moved = weight - base
    variance = variance_of_rounding(expected, update, epsilon)
    if quantized:
        used, used_base = (tensor.float() for tensor in quantized)
        moved = used - used_base
        # |rounding| of weights that lie anywhere on a grid is a quarter of its spacing in the mean
        variance += update.abs() * 4 * (used_base - base).abs()
    return {
        "tensors": 1,
        "moved": (weight - base).norm().item(),
        "expected": update.norm().item(),
        "max_error": math.inf if math.isnan(error) else error,
        "resolution": resolution,
        "lost": missing.norm().item() / move if move else 0.0,
        "product": _sum(moved * update),
        "square": _sum(update * update),
        "variance": _sum(variance * update * update),
    }


def join(movements: Iterable[Movement]) -> Movement:
    """Returns those of several tensors, or of their parts on several ranks, as one of each target;
    where there is an update with `arrived`, the share of it that arrived, and `arrived_error`, its
    standard error.
    """
    by_target = defaultdict(list)
    for movement_of_part in movements:
        for target, entry in movement_of_part.items():
            by_target[target].append(entry)
    joined = {}
    for target, entries in by_target.items():
        whole = {}
        for key in entries[0]:
            if key in SHARE:
                continue
            values = [entry[key] for entry in entries]
            whole[key] = max(values) if key in LARGEST else sum(values)
            if key in NORMS:
                whole[key] = math.hypot(*values)
        joined[target] = whole | share_of(whole["product"], whole["square"], whole["variance"])
    return joined


def arrival_metrics(movement: Movement) -> dict[str, float]:
    """Returns the metrics `sync/arrived` (runs/metrics.py) of what `join` found: of each target,
    and of the one with the least; nothing before the first update.
    """
    arrived = {target: entry for target, entry in movement.items() if "arrived" in entry}
    if not arrived:
        return {}
    metrics = {"sync/arrived": min(entry["arrived"] for entry in arrived.values())}
    for name in SHARE:
        for target, entry in arrived.items():
            metrics[f"sync/{name}/{target}"] = entry[name]
    return metrics


def _sum(tensor: Tensor) -> float:
    """Sums all elements; an NPU does so in float32, a row at a time."""
    return tensor.sum(-1).cpu().double().sum().item()
