"""Emulated ACL graphs: beside CUDA graphs where the two have words in common (graph_cases.py), else
beside the same operators without a graph.
"""

import json
import os

import pytest

from mindspeed_qerl.emulation import environment
from mindspeed_qerl.emulation.counts import VARIABLE
from tests.emulation.forked import forking
from tests.emulation.graph_cases import CASES, FOUND

PRELUDE = """
import gc, json
import torch, torch_npu
from mindspeed_qerl.emulation import graphs
from tests.emulation import graph_cases
from tests.emulation.graph_cases import Device, numbers, raised

device = Device(torch.npu, "npu")
device.captured(lambda: torch.ones(2) + 1)  # what torch imports for it, once

def refuses(words, function, *arguments):
    try:
        function(*arguments)
    except (RuntimeError, ValueError) as error:
        assert words in str(error), error
    else:
        raise AssertionError(f"no error about {words!r}")

# one sequence of three tokens in a paged cache, and one of two
query = torch.randn(2, 2, 16)
cache = torch.randn(2, 4, 16, 2, 16)
table, lengths = torch.tensor([[1], [2]], dtype=torch.int32), torch.tensor([3, 2], dtype=torch.int32)

def attention(lengths, out, **more):
    torch_npu._npu_paged_attention(
        query=query, key_cache=cache[0], value_cache=cache[1], num_kv_heads=2, num_heads=2,
        scale_value=0.25, block_table=table, context_lens=lengths, out=out, **more)

def attended(lengths):
    out = torch.empty(2, 2, 16)
    attention(lengths, out)
    return out

def captured_attention():
    # as vllm-ascend captures it: graph, output, handle, event
    graph, event = torch.npu.NPUGraph(), torch.npu.ExternalEvent()
    stream = torch.npu.current_stream()
    with torch.npu.graph(graph):
        doubled = torch.empty(2, 2, 16)
        event.wait(stream)
        event.reset(stream)
        torch.npu.graph_task_group_begin(stream)
        out = torch.empty(2, 2, 16)
        attention(lengths, out)
        handle = torch.npu.graph_task_group_end(stream)
        doubled = out * 2
    return graph, doubled, handle, event, out

def updated(handle, function):
    stream = torch.npu.Stream()
    torch.npu.graph_task_update_begin(stream, handle)
    function()
    torch.npu.graph_task_update_end(stream)
"""


@pytest.fixture(scope="module")
def forked():
    path = {**environment(2), VARIABLE: "1"}
    path["PYTHONPATH"] += os.pathsep + os.getcwd()
    with forking(PRELUDE, {**os.environ, **path}) as run:
        yield run


@pytest.mark.parametrize("case", [case.__name__ for case in CASES])
def test_it_does_what_cuda_graphs_were_seen_to_do(case, forked):
    seen = json.loads(FOUND.read_text())[case]
    assert not isinstance(seen, str) or len(seen) < 40  # the case itself did not fail there
    forked(f"""
found = json.loads(json.dumps(graph_cases.{case}(device)))
assert found == {seen!r}, found
""")


def test_memory_that_was_freed_or_resized_is_an_error(forked):
    """A GPU reads what others have put there."""
    forked("""
weight, x = torch.nn.Parameter(device.tensor(2, 2)), device.tensor(1, 3)
graph, y = device.captured(lambda: weight * x)
weight.data = device.tensor(9, 9)
gc.collect()
refuses("mul: a graph uses torch.float32 (2,), whose memory was freed", graph.replay)

kept = torch.ones(4, 4)
graph, y = device.captured(lambda: kept[1:3] + 1)
kept.untyped_storage().resize_(0)
refuses("whose memory was resized to 0 bytes", graph.replay)
""")


def test_a_replay_waits_for_the_update_of_its_task_group(forked):
    """And computes with the arguments of the update, host lengths included."""
    forked("""
graph, doubled, handle, event, out = captured_attention()
for now in ([1, 2], [3, 1]):
    now = torch.tensor(now, dtype=torch.int32)
    graph.replay()
    updated(handle, lambda: attention(now, out))
    event.record(torch.npu.Stream())
    torch.npu.synchronize()
    assert torch.equal(doubled, 2 * attended(now))
    assert not torch.equal(doubled, 2 * attended(lengths))
""")


def test_a_replay_whose_event_nobody_records_hangs(forked):
    for wait in ("graph.replay()", "torch.npu.synchronize()", "device.captured(lambda: query + 1)"):
        forked(f"""
graph, doubled, handle, event, out = captured_attention()
graph.replay()
refuses("An NPU waits for ever", lambda: {wait})
graph.replay()  # it can be tried again
event.record()
torch.npu.synchronize()
assert torch.equal(doubled, 2 * attended(lengths))
""")


def test_an_update_is_of_the_same_operators_and_of_memory_that_is_there(forked):
    forked("""
graph, doubled, handle, event, out = captured_attention()
stream = torch.npu.Stream()
refuses("updated with npu_rms_norm", updated, handle,
        lambda: torch_npu.npu_rms_norm(query[0], query[0, 0]))
refuses("1 operators that were not updated", updated, handle, lambda: None)

keys, values = cache.clone()
keys.untyped_storage().resize_(4)
graph.replay()
def wrong():
    torch_npu._npu_paged_attention(
        query=query, key_cache=keys, value_cache=values, num_kv_heads=2, num_heads=2,
        scale_value=0.25, block_table=table, context_lens=lengths, out=out)
updated(handle, wrong)
refuses("resized to 4 bytes", event.record)
""")


def test_a_capture_writes_no_keys_into_the_cache(forked):
    forked("""
before, slots = cache.clone(), torch.tensor([17, 40], dtype=torch.int32)
def write():
    torch_npu._npu_reshape_and_cache(
        key=query, value=query + 1, key_cache=cache[0], value_cache=cache[1], slot_indices=slots)
graph, _ = device.captured(write)
assert torch.equal(cache, before)
slots[1] = 2
graph.replay()
assert torch.equal(cache[1].flatten(0, 1)[2], query[1] + 1)
assert torch.equal(cache[0].flatten(0, 1)[40], before[0].flatten(0, 1)[40])
""")


def test_results_are_nan_until_the_first_replay(forked):
    forked("""
x = device.tensor(1, 2)
graph, (y, n) = device.captured(lambda: (x + 1, x.int() + 1))
assert y.isnan().all() and n.tolist() == [-1, -1]
graph.replay()
assert numbers(y) == [2, 3] and n.tolist() == [2, 3]
""")


def test_a_result_that_is_held_weakly_goes_with_the_next_graph_of_its_pool(forked):
    forked("""
x, pool = device.tensor(1, 2), torch.npu.graph_pool_handle()
first, a = device.captured(lambda: x + 1, pool)
weak = torch.ops._C_ascend.weak_ref_tensor(a)
second, b = device.captured(lambda: x * 5, pool)
other, c = device.captured(lambda: x * 7, torch.npu.graph_pool_handle())
first.replay()
other.replay()
assert numbers(weak) == [2, 3]
second.replay()
assert weak.isnan().all() and numbers(b) == [5, 10] and numbers(c) == [7, 14]
first.replay()
assert numbers(weak) == [2, 3]
""")


def test_memory_may_not_move_while_it_is_captured(forked):
    forked("""
x = device.tensor(1, 2)
for move in (lambda: x.resize_(8), lambda: x.set_(torch.ones(3))):
    refuses("memory would move", device.captured, move)
""")


def test_a_weight_in_fractal_nz_is_read_as_it_is_now(forked):
    forked("""
weight, x = torch_npu.npu_format_cast(torch.randn(32, 16), 29), torch.randn(2, 32)
graph, y = device.captured(lambda: x @ weight)
new = torch.randn(32, 16)
weight.copy_(new)
graph.replay()
assert torch.allclose(y, x @ new) and torch_npu.get_npu_format(weight) == 29
""")


def test_a_replay_is_one_launch_and_an_update_another(forked):
    forked("""
from mindspeed_qerl.emulation.counts import counting, place
place((query, cache, table))
graph, doubled, handle, event, out = captured_attention()
with counting.phase("it"):
    graph.replay()
    updated(handle, lambda: attention(lengths, out))
    event.record()
assert counting.tallies["it"].outside == {"graph_replay": 1, "graph_task_update": 1}
assert not counting.tallies["it"].waits
""")


def test_collectives_are_sent_by_each_replay():
    """Of two ranks, each with its own numbers."""
    code = """
import os, sys, torch, torch_npu
import torch.distributed as dist
rank = int(sys.argv[1])
dist.init_process_group("hccl", init_method=sys.argv[2], rank=rank, world_size=2)
x, parts, part = torch.ones(2) * (rank + 1), torch.zeros(4), torch.zeros(1)
graph = torch.npu.NPUGraph()
with torch.npu.graph(graph):
    total = x + 0
    dist.all_reduce(total)
    dist.all_gather_into_tensor(parts, total * (rank + 1))
    dist.reduce_scatter_tensor(part, parts[1:3] + rank)
for factor in (1, 10):
    x.fill_(factor * (rank + 1))
    graph.replay()
    assert total.tolist() == [3 * factor] * 2, total
    assert parts.tolist() == [3 * factor] * 2 + [6 * factor] * 2, parts
    assert part.tolist() == [2 * (3 + 3 * rank) * factor + 1], part
"""
    import subprocess
    import sys
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", code, str(rank), f"file://{folder}/store"],
                env={**os.environ, **environment(2)},
            )
            for rank in range(2)
        ]
        assert [rank.wait() for rank in ranks] == [0, 0]
