"""The few torch.cuda names that megatron-core touches on its way through a forward pass, answered
by the CPU.

megatron-core 0.12 asks for a current device (router.py:64, layers.py:499), a side stream
(token_dispatcher.py:327,678), splits as numpy arrays once they "left the GPU" (moe_utils.py:748), a
synchronisation after point-to-point messages (p2p_communication.py:106), a zero on the GPU
(schedules.py:1828) and, under sequence parallelism, a random state for dropout, which is 0 here
(language_model_embedding.py:138; random.py:406, for layers that are computed again). Nothing else
is emulated: an operation that would really need a GPU still raises.
"""

import contextlib
from unittest.mock import patch

import torch


class Stream:
    """A stream on a machine where everything is already in order."""

    def __init__(self, *args, **kwargs):
        pass

    def wait_stream(self, stream):
        pass

    def synchronize(self):
        pass

    def __eq__(self, other):
        return isinstance(other, Stream)

    __hash__ = object.__hash__


def _maybe_move_tensor_to_cpu(tensor, as_numpy=False, record_stream=False):
    """megatron-core's own returns splits as numpy only if they came from a GPU; gloo needs them as
    lists too.
    """
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def install() -> None:
    """Patch torch.cuda and megatron-core's split conversion, in this process."""
    torch.cuda.Stream = Stream
    torch.cuda.current_stream = lambda *args, **kwargs: Stream()
    torch.cuda.stream = lambda stream: contextlib.nullcontext()
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda device=None: None
    torch.Tensor.cuda = lambda self, *args, **kwargs: self

    # Of megatron-core's functions for torch.compile none is called without its fusions, and the
    # decorator imports a compiler: two seconds of each rank's start.
    with patch.object(torch, "compile", lambda function: function):
        from megatron.core.tensor_parallel import random
        from megatron.core.transformer.moe import moe_utils, token_dispatcher

    random.CudaRNGStatesTracker.fork = lambda self, name="": contextlib.nullcontext()
    random._get_all_rng_states = lambda: ()
    random._set_all_rng_states = lambda: None
    random._fork_rng = contextlib.nullcontext

    moe_utils.maybe_move_tensor_to_cpu = _maybe_move_tensor_to_cpu
    token_dispatcher.maybe_move_tensor_to_cpu = _maybe_move_tensor_to_cpu
