"""FRACTAL_NZ, the layout of matrices in an NPU's memory: a tensor in it has other bytes, and
torch_npu converts.

Its rows are cut into 16, its columns into 32 bytes, and the blocks lie column of blocks by column
of blocks. As in torch_npu (v2.7.1) the format belongs to the storage
(csrc/core/npu/NPUStorageImpl.h:26), sizes and strides are those of the plain layout, ND, and an
operator that is given such a tensor reads and writes its values: one that knows ND alone is given a
converted copy, and what it wrote is converted back (CopyKernel.cpp:66-81, 309-334). What goes round
torch's operators (the storage's bytes, HCCL, a kernel given an address) sees the blocks.
"""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

# ACL_FORMAT_ND, ACL_FORMAT_FRACTAL_NZ
ND = 2
NZ = 29
# of a block
ROWS = 16
COLUMN_BYTES = 32


def columns(itemsize: int) -> int:
    """Of a block, for elements of `itemsize` bytes; float32 counts as half precision
    (FormatHelper.cpp:383).
    """
    return COLUMN_BYTES // min(itemsize, 2)


def to_blocks(x: Tensor) -> Tensor:
    """x [..., M, N] as [..., N / n, M / 16, 16, n], zeros where a block is not full, n = `columns`.

    >>> to_blocks(torch.arange(64.0).view(2, 32)).shape
    torch.Size([2, 1, 16, 16])
    """
    n = columns(x.element_size())
    padded = F.pad(x, (0, -x.shape[-1] % n, 0, -x.shape[-2] % ROWS))
    blocks = padded.unflatten(-1, (-1, n)).unflatten(-3, (-1, ROWS))  # [..., M / 16, 16, N / n, n]
    return blocks.movedim(-2, -4).contiguous()


def from_blocks(blocks: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The x of `shape` [..., M, N] that `to_blocks` made `blocks` of."""
    return (
        blocks.movedim(-4, -2)
        .flatten(-2)
        .flatten(-3, -2)[..., : shape[-2], : shape[-1]]
        .contiguous()
    )


def npu_format_cast(x: Tensor, acl_format: int, customize_dtype: int | None = None) -> Tensor:
    """x with its storage in `acl_format`, itself if it is (FormatCastKernelNpu.cpp).
    NotImplementedError: another format than ND and NZ, a dtype to convert to, less than two
    dimensions.
    """
    if acl_format not in (ND, NZ) or customize_dtype is not None or x.dim() < 2:
        raise NotImplementedError(
            f"npu_format_cast: emulated is ND ({ND}) and FRACTAL_NZ ({NZ}) of matrices, not "
            f"{acl_format} of {tuple(x.shape)}, customize_dtype {customize_dtype}"
        )
    if get_npu_format(x) == acl_format:
        return x
    if acl_format == ND:
        return x.clone()  # an operator like any other
    with torch.no_grad():
        blocks = to_blocks(x.detach())
    cast = torch.empty(0, dtype=x.dtype).set_(blocks.untyped_storage(), 0, x.shape)
    cast.untyped_storage().plain = tuple(x.shape), x.dtype
    _start()
    return cast


def npu_format_cast_(x: Tensor, acl_format: int, customize_dtype: int | None = None) -> Tensor:
    """x, its storage exchanged for one in `acl_format`."""
    x.data = npu_format_cast(x.data, acl_format, customize_dtype)
    return x


def get_npu_format(x: Tensor) -> int:
    """ND or NZ."""
    return ND if _plain_shape(x) is None else NZ


def on_host(x: Tensor) -> Tensor:
    """x as it is after a copy from the NPU to the host: in ND."""
    return x if get_npu_format(x) == ND else x.clone()


def _plain_shape(x: Tensor) -> tuple[int, ...] | None:
    """Of the whole that x is a part of, if that is in NZ and x is not its bytes in another dtype."""
    if x.layout is not torch.strided or x.is_meta:
        return None
    shape, dtype = getattr(x.untyped_storage(), "plain", (None, None))
    return shape if dtype == x.dtype else None


def _blocks(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The bytes of x's storage as the blocks of a whole of `shape`."""
    n = columns(x.element_size())
    whole = (*shape[:-2], -(-shape[-1] // n), -(-shape[-2] // ROWS), ROWS, n)
    return torch.empty(0, dtype=x.dtype).set_(x.untyped_storage(), 0, whole)


class _Conversions(TorchDispatchMode):
    """Gives every operator the values of tensors in NZ."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given = {id(x): x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)}
        in_blocks = {key: x for key, x in given.items() if _plain_shape(x) is not None}
        if not in_blocks or func.is_view or func._schema.name == "aten::set_":
            return func(*args, **kwargs)  # of the plain layout's sizes and strides
        if func.namespace == "c10d":
            raise NotImplementedError(
                f"{func} of a tensor in FRACTAL_NZ is not emulated: HCCL sends its bytes"
            )
        wholes = {}  # address of the storage -> its values
        for x in in_blocks.values():
            shape = _plain_shape(x)
            wholes.setdefault(x.untyped_storage().data_ptr(), from_blocks(_blocks(x, shape), shape))
        plain = {
            key: wholes[x.untyped_storage().data_ptr()].as_strided(
                x.shape, x.stride(), x.storage_offset()
            )
            for key, x in in_blocks.items()
        }
        replaced = tree_map(lambda x: plain.get(id(x), x), (args, kwargs))
        result = func(*replaced[0], **replaced[1])
        for x in in_blocks.values() if func._schema.is_mutable else ():
            _blocks(x, _plain_shape(x)).copy_(to_blocks(wholes[x.untyped_storage().data_ptr()]))
        original = {id(copy): in_blocks[key] for key, copy in plain.items()}
        return tree_map(lambda x: original.get(id(x), x), result)


_conversions = _Conversions()
_started = False


def _start() -> None:
    """For this thread, once there is a tensor in NZ."""
    global _started
    if not _started:
        _started = True
        _conversions.__enter__()


def converting(kernel: Callable) -> Callable:
    """`kernel`, an operator written in Python, with conversions inside it too: torch switches them
    off in there.
    """

    @functools.wraps(kernel)
    def wrapper(*args, **kwargs):
        if not _started:
            return kernel(*args, **kwargs)
        with _conversions:
            return kernel(*args, **kwargs)

    return wrapper
