"""What a trainer sends in float32 to a vLLM in bfloat16, rounded without bias."""

from collections.abc import Container

import torch
from torch import Tensor

from mindspeed_qerl.common.share import is_too_little
from mindspeed_qerl.lora.arrival import parts_of
from mindspeed_qerl.lora.rounding import dither_of

ROWS = 4096  # rounded at a time: their random bits are as large as they


def rounded_without_bias(name: str, tensor: Tensor, matrices: Container[str]) -> Tensor:
    """Returns a tensor in float32 in bfloat16, of which the `matrices` are rounded without bias,
    others (experts of other workers) to nearest; as it is, if none of these is in it.

    Args:
        name: of transformers, of PEFT, or of stacked experts. matrices: by the names of the parts.
    """
    is_concerned = any(part_name in matrices for part_name, _ in parts_of(name, tensor))
    if tensor.dtype != torch.float32 or not is_concerned:
        return tensor
    result = tensor.bfloat16()
    for (part_name, part), (_, rounded) in zip(parts_of(name, tensor), parts_of(name, result)):
        if part_name not in matrices:
            continue
        dither = dither_of(part_name, part.shape).to(part.device)
        for first in range(0, len(part), ROWS):
            rows = part[first : first + ROWS]
            chunk = dither.part((first, 0), rows.shape)
            rounded[first : first + ROWS] = chunk.rounded(rows)
    return result


def too_little(
    least: float, arrived: float | None = None, arrived_error: float = 0.0
) -> str | None:
    """Says how much of the update is missing, of which `least` has to arrive; None if enough did,
    or it is not known.
    """
    if arrived is None or not is_too_little(arrived, arrived_error, least):
        return None
    return (
        f"{100 * arrived:.2g} % of the update arrived in vLLM (standard error "
        f"{100 * arrived_error:.2g} %), and min_arrived = {least:g} asks for more: the rest was "
        'rounded away. Load the trainer in float32 and set rounding: "unbiased", or sync adapters '
        "alone; min_arrived: 0 accepts it"
    )
