"""FRACTAL_NZ as a layout of bytes. Tests that convert run in a process of their own, forked from
one that has imported torch: conversions cannot be switched off again.
"""

import itertools
import textwrap

import pytest
import torch

from mindspeed_qerl.emulation.formats import from_blocks, to_blocks
from tests.emulation.forked import forking

PRELUDE = """
import ctypes, torch
from mindspeed_qerl.emulation import formats
from mindspeed_qerl.emulation.formats import ND, NZ, get_npu_format, npu_format_cast, npu_format_cast_

def bytes_of(x):
    storage = x.untyped_storage()
    return ctypes.string_at(storage.data_ptr(), storage.nbytes())

def in_nz(x):
    cast = npu_format_cast(x, NZ)
    assert (get_npu_format(x), get_npu_format(cast)) == (ND, NZ)
    return cast
"""


@pytest.fixture(scope="module")
def check():
    """A function that runs code in a process of its own, in which x is a tensor of that dtype."""
    with forking(PRELUDE) as run:

        def check(code: str, dtype: str = "float32") -> None:
            run(
                "x = torch.randn(3, 20, 37, "
                f"generator=torch.Generator().manual_seed(0)).to(torch.{dtype})\n"
                + textwrap.dedent(code)
            )

        yield check


@pytest.mark.parametrize(
    ("dtype", "columns"), [(torch.int8, 32), (torch.bfloat16, 16), (torch.float32, 16)]
)
def test_an_element_lies_where_the_format_says(dtype, columns):
    x = torch.arange(2 * 20 * 37).remainder(101).view(2, 20, 37).to(dtype)
    blocks = to_blocks(x)
    assert blocks.shape == (2, -(-37 // columns), 2, 16, columns)
    for b, i, j in itertools.product(range(2), range(20), range(37)):
        assert blocks[b, j // columns, i // 16, i % 16, j % columns] == x[b, i, j]
    assert blocks.count_nonzero() == x.count_nonzero()
    assert torch.equal(from_blocks(blocks, x.shape), x)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_operators_read_and_write_values(check, dtype):
    check(
        """
        y = in_nz(x)
        assert torch.equal(y.clone(), x) and get_npu_format(y.clone()) == ND and y.shape == x.shape
        assert torch.equal(y[1].t().contiguous(), x[1].t().contiguous())
        weight = torch.nn.Parameter(torch.zeros_like(x), requires_grad=False)
        weight.data = y                                            # as vllm-ascend does after loading
        assert get_npu_format(weight) == NZ
        for z in (weight.data, x):
            z[1, 3:7].copy_(torch.ones(4, 37))                     # a part, of another dtype
            z[2].t()[5].add_(1)
            z[0] = z[1]
        assert torch.equal(weight + 0, x) and get_npu_format(weight) == NZ
        weight.data.copy_(2 * x)
        assert torch.equal(weight + 0, 2 * x) and get_npu_format(weight) == NZ
        assert weight.data.mul_(1) is not None
        with torch.inference_mode():
            assert torch.equal(torch.cat([weight[0], weight[1]]), torch.cat([2 * x[0], 2 * x[1]]))
        npu_format_cast_(weight, ND)
        assert get_npu_format(weight) == ND and torch.equal(weight, 2 * x)
        """,
        dtype,
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_matrix_products_are_those_of_the_values(check, dtype):
    check(
        """
        y, a = in_nz(x), torch.ones(5, 37, dtype=x.dtype)
        assert torch.equal(torch.nn.functional.linear(a, y[1]), torch.nn.functional.linear(a, x[1]))
        assert torch.equal(a @ y.transpose(1, 2), a @ x.transpose(1, 2))
        """,
        dtype,
    )


def test_bytes_that_go_round_the_operators_are_seen(check):
    check("""
        plain = torch.randn(32, 64)
        blocks = in_nz(plain)
        assert bytes_of(blocks) != bytes_of(plain) and sorted(bytes_of(blocks)) == sorted(bytes_of(plain))
        ctypes.memmove(blocks.untyped_storage().data_ptr(), plain.data_ptr(), plain.nbytes)
        assert bytes_of(blocks) == bytes_of(plain) and not torch.equal(blocks + 0, plain)
        """)


def test_an_operator_written_in_python_sees_values_too(check):
    check("""
        held = in_nz(x)  # as a layer's weight, which vLLM's operators reach by the layer's name

        def kernel(n: int) -> torch.Tensor:
            return held + n
        library = torch.library.Library("vllm", "FRAGMENT")
        library.define("probe(int n) -> Tensor")
        library.impl("probe", formats.converting(kernel), "CompositeExplicitAutograd")
        assert torch.equal(torch.ops.vllm.probe(1), x + 1)
        """)


def test_what_the_format_cannot_say_is_refused(check):
    check("""
        for arguments in ((x, 3), (x.flatten(), NZ), (x, NZ, 1)):
            try:
                npu_format_cast(*arguments)
            except NotImplementedError as error:
                assert "emulated is ND (2) and FRACTAL_NZ (29)" in str(error)
            else:
                raise AssertionError(arguments)
        torch.distributed.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
        try:
            torch.distributed.all_reduce(in_nz(x))
        except NotImplementedError as error:
            assert "HCCL sends its bytes" in str(error)
        else:
            raise AssertionError("sent")
        """)
