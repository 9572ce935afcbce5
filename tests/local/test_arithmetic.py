"""MKL's kernels are chosen on one thread, before anything is computed with several."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.overrides import TorchFunctionMode

from mindspeed_qerl.local import arithmetic
from mindspeed_qerl.local.loop import LocalEngine
from mindspeed_qerl.local.rank import TrainRank
from mindspeed_qerl.local.serving import start_vllm


class Calls(TorchFunctionMode):
    """Inside, `seen` gets what is called with one number, by name and dtype."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if args and isinstance(args[0], torch.Tensor) and args[0].numel() == 1:
            self.seen.add((func.__name__, args[0].dtype))
        return func(*args, **(kwargs or {}))


def test_every_function_that_torch_leaves_to_mkl_is_called_once_on_one_thread():
    """By torch's own header."""
    header = Path(torch.__file__).parent / "include/ATen/cpu/vml.h"
    names = re.findall(r"^IMPLEMENT_VML_MKL\((\w+),", header.read_text(), re.MULTILINE)
    assert "exp" in names
    with Calls() as calls:
        arithmetic.settle()
    assert calls.seen == {(name, dtype) for name in names for dtype in (torch.float, torch.double)}


@pytest.mark.parametrize(
    "begin",
    [
        lambda: LocalEngine(
            SimpleNamespace(
                run=SimpleNamespace(seed=1),
                noise=SimpleNamespace(enabled=False),
                algorithm=SimpleNamespace(routing_replay="none"),
                model=SimpleNamespace(path="qwen3_30b_a3b"),
            ),
            SimpleNamespace(earlier=()),
            None,
            SimpleNamespace(train=SimpleNamespace(rows=[1])),
        ),
        lambda: TrainRank(None, None, 0, ""),
        lambda: start_vllm("", "", 1, 1, 1),
    ],
    ids=["driver", "rank", "vLLM"],
)
def test_each_process_does_that_before_it_computes(monkeypatch, begin):
    class Settled(Exception):
        pass

    def settled():
        raise Settled

    monkeypatch.setattr(arithmetic, "settle", settled)
    with pytest.raises(Settled):
        begin()
