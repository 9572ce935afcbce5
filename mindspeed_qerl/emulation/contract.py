"""What the operators of serving (paged, fused_infer, serving, quantization) check before they
compute: an NPU that is given what its contract refuses reads or writes wherever its kernel happens
to, or stops with a number; here it is a ValueError that names the value and the rule.
"""

import torch
from torch import Tensor

ONLY_DOCUMENTED_DTYPES = False
"""False: where CANN takes half precision, float32 and float64 are taken too and computed in their own precision. It is
an extension for tests of exactness, which bfloat16 is too coarse for; no NPU has it. True: they are refused as CANN
refuses them. It is read at every call."""

HALF = torch.float16, torch.bfloat16
_EXTENSION = torch.float32, torch.float64


def require(operator: str, holds: bool, rule: str, value: object) -> None:
    """Refuse value unless the rule holds.

    Raises:
        ValueError: it does not.

    >>> require("npu_f", True, "n must be positive", 1)
    >>> require("npu_f", False, "n must be positive", -1)
    Traceback (most recent call last):
        ...
    ValueError: npu_f: n must be positive, not -1
    """
    if not holds:
        raise ValueError(f"{operator}: {rule}, not {value}")


def require_dtype(operator: str, documented: tuple[torch.dtype, ...], **tensors: Tensor) -> None:
    """Refuse tensors that are not all of one dtype, or of none of the documented ones (see
    ONLY_DOCUMENTED_DTYPES).

    Raises:
        ValueError: so they are.

    >>> require_dtype("npu_f", HALF, x=torch.ones(1).half(), y=torch.ones(1).half())
    >>> require_dtype("npu_f", HALF, x=torch.ones(1).half(), y=torch.ones(1))
    Traceback (most recent call last):
        ...
    ValueError: npu_f: tensors must have one dtype, not x float16, y float32
    """
    given = {name: _name(tensor.dtype) for name, tensor in tensors.items()}
    require(
        operator,
        len(set(given.values())) == 1,
        "tensors must have one dtype",
        ", ".join(f"{name} {dtype}" for name, dtype in given.items()),
    )
    allowed = documented if ONLY_DOCUMENTED_DTYPES else documented + _EXTENSION
    first = next(iter(tensors))
    require(
        operator,
        tensors[first].dtype in allowed,
        f"{first} must be {' or '.join(map(_name, documented))}",
        given[first],
    )


def require_integers(operator: str, dim: int, **tensors: Tensor) -> None:
    """Refuse index tensors that are not int32 of so many dimensions.

    Raises:
        ValueError: so they are.
    """
    for name, tensor in tensors.items():
        require(
            operator,
            tensor.dtype == torch.int32 and tensor.dim() == dim,
            f"{name} must be int32 and {dim}-D",
            f"{_name(tensor.dtype)} and {tensor.dim()}-D",
        )


def require_written(operator: str, shape: tuple[int, ...], **tensors: Tensor) -> None:
    """Refuse tensors to write into that are not contiguous or have another shape.

    Raises:
        ValueError: so they are.
    """
    for name, tensor in tensors.items():
        require(
            operator,
            tensor.shape == shape,
            f"{name} must have shape {tuple(shape)}",
            tuple(tensor.shape),
        )
        require(
            operator,
            tensor.is_contiguous(),
            f"{name} is written in place and must be contiguous",
            f"a view with strides {tensor.stride()}: pass x.contiguous() and copy back",
        )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
