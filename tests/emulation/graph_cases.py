"""What graphs do, case by case, in words that CUDA and the emulated NPU have in common.

    python graph_cases.py    on a machine with a GPU: writes graph_cases.json

test_graphs.py compares the emulated NPU with that file.
"""

import json
from pathlib import Path
from typing import Any

import torch

FOUND = Path(__file__).with_suffix(".json")


class Device:
    """torch.cuda or torch.npu. graph: class of a graph."""

    def __init__(self, module: Any, name: str):
        self.module, self.name = module, name
        self.graph = getattr(module, "NPUGraph", None) or module.CUDAGraph

    def tensor(self, *values: float) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32).to(self.name)

    def captured(self, function, pool=None):
        """A graph of `function`, and what it returned."""
        graph = self.graph()
        with torch.no_grad(), self.module.graph(graph, pool=pool):
            result = function()
        return graph, result


def numbers(tensor: torch.Tensor) -> list[float]:
    return tensor.detach().cpu().flatten().tolist()


def raised(function, *arguments) -> str:
    """ "" if it raises none."""
    try:
        function(*arguments)
    except Exception as error:  # noqa: BLE001 (whatever it is)
        return "RuntimeError" if isinstance(error, RuntimeError) else type(error).__name__
    return ""


def repointed_data(device):
    weight, x = torch.nn.Parameter(device.tensor(2, 2)), device.tensor(1, 3)
    old = weight.data
    graph, y = device.captured(lambda: weight * x)
    graph.replay()
    first = numbers(y)
    weight.data = device.tensor(10, 10)
    graph.replay()
    kept = numbers(y)
    old.fill_(5)
    graph.replay()
    return first, kept, numbers(y)


def written_in_place(device):
    weight, x = device.tensor(2, 2), device.tensor(1, 3)
    graph, y = device.captured(lambda: (weight * x).sum())
    graph.replay()
    first = numbers(y)
    weight.copy_(device.tensor(3, 4))
    x.mul_(2)
    graph.replay()
    return first, numbers(y)


def capture_runs_nothing(device):
    counter = device.tensor(1, 1)
    graph, _ = device.captured(lambda: counter.add_(1))
    after_capture = numbers(counter)
    graph.replay()
    graph.replay()
    return after_capture, numbers(counter)


def read_after_write(device):
    """A buffer from outside that is written and read in the graph."""
    cache, x = torch.zeros(4, 2).to(device.name), device.tensor(1, 2)
    slot = torch.tensor([2]).to(device.name)

    def step():
        cache.index_put_((slot,), x[None])
        return cache.sum(0) + cache[2] * 10

    graph, y = device.captured(step)
    graph.replay()
    first = numbers(y), numbers(cache)
    slot.fill_(0)
    x.fill_(7)
    graph.replay()
    return first, numbers(y), numbers(cache)


def views_of_inputs(device):
    """Slices of a buffer for more rows, written after the capture; views of results, too."""
    buffer = torch.arange(12.0).view(6, 2).to(device.name)

    def step():
        rows = buffer[:4]
        even = rows.view(2, 4)[:, ::2]
        doubled = (even + 1).t().contiguous()
        doubled[0].mul_(10)
        return doubled.flatten()[1:]

    graph, y = device.captured(step)
    buffer[:4].mul_(-1)
    graph.replay()
    return numbers(y)


def numbers_of_the_capture(device):
    """What Python computed is a constant."""
    x, factor = device.tensor(1, 2), [3]
    graph, y = device.captured(lambda: x * factor[0])
    factor[0] = 5
    graph.replay()
    return numbers(y)


def host_reads(device):
    x = device.tensor(1, 0, 2)
    found = {
        "item": raised(device.captured, x.sum().item),
        "nonzero": raised(device.captured, x.nonzero),
        "mask": raised(device.captured, lambda: x[x > 0]),
        "tolist": raised(device.captured, x.tolist),
        "cpu": raised(device.captured, x.cpu),
        "branch": raised(device.captured, lambda: 1 if x.sum() > 0 else 0),
        "unique": raised(device.captured, x.unique),
    }
    device.module.synchronize()
    return found


def without_a_capture(device):
    x = device.tensor(1)
    graph, _ = device.captured(lambda: x + 1)
    graph.reset()
    return raised(device.graph().replay), raised(graph.replay)


def results_that_are_held(device):
    """Two graphs of one pool, whose results are both held, keep them."""
    pool, x = device.module.graph_pool_handle(), device.tensor(1, 2)
    first, a = device.captured(lambda: x + 1, pool)
    second, b = device.captured(lambda: x * 5, pool)
    first.replay()
    second.replay()
    return numbers(a), numbers(b)


def asks_whether_it_captures(device):
    x, found = device.tensor(1), []

    def step():
        found.append(device.module.is_current_stream_capturing())
        return x + 1

    device.captured(step)
    return found, device.module.is_current_stream_capturing()


CASES = [
    repointed_data,
    written_in_place,
    capture_runs_nothing,
    read_after_write,
    views_of_inputs,
    numbers_of_the_capture,
    host_reads,
    without_a_capture,
    results_that_are_held,
    asks_whether_it_captures,
]

if __name__ == "__main__":
    device = Device(torch.cuda, "cuda")
    found = {"card": torch.cuda.get_device_name(), "torch": torch.__version__}
    for case in CASES:
        try:
            found[case.__name__] = case(device)
        except Exception as error:  # noqa: BLE001
            found[case.__name__] = f"{type(error).__name__}: {error}"[:200]
        print(case.__name__, found[case.__name__], flush=True)
    FOUND.write_text(json.dumps(found, indent=1) + "\n")
