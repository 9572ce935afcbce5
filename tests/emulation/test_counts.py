"""What is counted of small programs, beside what one counts by hand."""

import os

import pytest

from mindspeed_qerl.emulation import environment
from mindspeed_qerl.emulation.counts import VARIABLE
from tests.emulation.forked import forking

PRELUDE = """
import torch, torch_npu
from mindspeed_qerl.emulation.counts import counting

def counted(program):
    counting.tallies.clear()
    with counting.phase("it"):
        program()
    return counting.tallies["it"]

matrix = torch.ones(4, 8, device="npu")
host = torch.ones(4, 8)
linear = torch.nn.Linear(8, 6, bias=False).npu()
counting.follow_layers([linear])
"""


@pytest.fixture(scope="module")
def forked():
    with forking(PRELUDE, {**os.environ, **environment(2), VARIABLE: "1"}) as run:
        yield run


def test_kernels_are_counted_and_views_and_the_hosts_own_work_are_not(forked):
    forked(
        """
def program():
    (matrix + 1).view(32).unsqueeze(0)
    torch.empty(3, device="npu")
    host @ host.T
    torch_npu.npu_swiglu(matrix)

it = counted(program)
assert it.outside == {"add": 1, "npu_swiglu": 1} and not it.layers, it
assert not it.waits and not it.collectives and it.flops == 0
assert it.bytes == 2 * 128 + 128 + 64  # read and written, float32
"""
    )


def test_a_layer_is_told_apart_forward_and_backward(forked):
    forked(
        """
it = counted(lambda: linear(matrix).sum())
assert it.layers == {"mm": 1} and it.outside == {"sum": 1}, it
assert it.flops == 2 * 4 * 8 * 6
it = counted(lambda: linear(matrix).sum().backward())
assert it.layers == {"mm": 2} and it.flops == 2 * 2 * 4 * 8 * 6, it  # the input has no gradient
"""
    )


def test_a_fused_operator_is_one_kernel_and_one_in_the_backward_pass(forked):
    forked(
        """
leaf = matrix.clone().requires_grad_()
it = counted(lambda: torch_npu.npu_swiglu(leaf).sum().backward())
kernels = {name: number for name, number in it.outside.items() if "swiglu" in name}
assert kernels == {"npu_swiglu": 1, "npu_swiglu backward": 1}, it
"""
    )


def test_the_host_waits_where_it_needs_a_number_or_a_size(forked):
    forked(
        """
waits = {
    "_local_scalar_dense": lambda: matrix.sum().item(),
    "copy to host": lambda: matrix.cpu(),
    "nonzero": lambda: torch.nonzero(matrix),
    "index": lambda: matrix[matrix > 0],
    "masked_select": lambda: torch.masked_select(matrix, matrix > 0),
    "tolist": lambda: matrix.tolist(),
    "synchronize": torch.npu.synchronize,
}
for why, program in waits.items():
    it = counted(program)
    assert why in it.waits, (why, it)
    assert not counted(lambda: host.sum().item()).waits
assert not counted(lambda: matrix[torch.tensor([0, 2], device="npu")]).waits
assert not counted(lambda: matrix.to("cpu", non_blocking=True)).waits
"""
    )


def test_a_collective_has_its_group_and_its_bytes(forked):
    forked(
        """
import tempfile, torch.distributed as dist

def rank(number, file):
    dist.init_process_group("hccl", init_method=f"file://{file}", rank=number, world_size=2)
    it = counted(lambda: dist.all_reduce(matrix))
    assert it.collectives == {("allreduce_", 2): 1} and it.sent == 128, it
    parts = torch.empty(8, 8, device="npu")
    it = counted(lambda: dist.all_gather_into_tensor(parts, matrix))
    assert it.collectives == {("_allgather_base_", 2): 1} and it.sent == 256, it
    dist.destroy_process_group()

import torch.multiprocessing as processes
with tempfile.TemporaryDirectory() as folder:
    processes.start_processes(rank, (f"{folder}/meet",), 2, start_method="fork")
"""
    )


def test_a_phase_inside_another_counts_for_itself(forked):
    forked(
        """
def program():
    matrix + 1
    with counting.phase("inner", 4):
        matrix * 2

it = counted(program)
assert it.outside == {"add": 1} and counting.tallies["inner"].outside == {"mul": 1}
assert it.calls == 1 and counting.tallies["inner"].calls == 4
"""
    )
