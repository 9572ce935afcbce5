"""ACL graphs: torch.npu.NPUGraph, torch.npu.graph, task groups and external events.

A graph is what CANN records of a stream: operators and the addresses that they read and write. So
here it is a list of operators with the *storages* of their tensors, held weakly where they were
there before the capture. What Python points where is not seen by a replay, numbers and shapes are
those of the capture, and a storage that was freed or resized is an error, where an NPU reads what
lies there now.

- A capture runs nothing on an NPU. Here operators run, for their shapes, but what was there before
  keeps its values, and what they made is NaN until the first replay.
- The host may not wait while a graph is captured, nor ask for a shape that only the NPU knows.
- Attention's lengths lie on the host. It is recorded as a task group, whose arguments are exchanged
  while a replay waits for an event; a replay that nobody lets go on is an error at the next replay
  or synchronize, where an NPU hangs.
- Graphs of a pool share its memory: what is held by `weak_ref_tensor` alone is NaN when another
  graph of the pool is replayed.
- Collectives are operators like others, so every rank replays.

Sources: torch_npu v2.7.1 torch_npu/npu/graphs.py, csrc/core/npu/NPUGraph.cpp; what CUDA graphs were
seen to do on an H200 (tests/emulation/graph_cases.py). Callers: VA compilation/acl_graph.py,
attention/attention_v1.py:428.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed import Work
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from mindspeed_qerl.emulation import counts, extensions

# Operators of torch_npu that write into what was there before the capture, and those arguments.
WRITTEN = {"_npu_reshape_and_cache": ("key_cache", "value_cache")}
CHANGES_STORAGE = {"set_", "resize_"}


@dataclass
class Pool:
    """torch.npu.graph_pool_handle(): memory that graphs share; owner: the last that was replayed."""

    owner: "NPUGraph | None" = None


@dataclass(frozen=True)
class Place:
    """A tensor as a graph knows it. storage: a weak reference if it was there before the capture."""

    storage: torch.UntypedStorage | StorageWeakRef
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def tensor(self) -> torch.Tensor:
        """What lies there now. RuntimeError: the storage was freed, or is too small."""
        storage = self.storage
        if isinstance(storage, StorageWeakRef):
            storage = torch.UntypedStorage._new_with_weak_ptr(storage.cdata)
        if storage is None or storage.nbytes() < self._end and not hasattr(storage, "plain"):
            happened = "freed" if storage is None else f"resized to {storage.nbytes()} bytes"
            raise RuntimeError(
                f"a graph uses {self.dtype} {tuple(self.size)}, whose memory was {happened} since "
                "it was captured; an NPU uses what lies there now"
            )
        tensor = torch.empty(0, dtype=self.dtype)
        return tensor.set_(storage, self.offset, self.size, self.stride)

    @property
    def _end(self) -> int:
        """Bytes of a storage that has it."""
        last = self.offset + sum((n - 1) * step for n, step in zip(self.size, self.stride))
        return (last + 1) * self.dtype.itemsize if all(self.size) else 0


def place_of(tensor: torch.Tensor, made: dict[int, torch.UntypedStorage]) -> Place:
    """made: storages of the graph's own, by address of the C++ object."""
    storage = tensor.untyped_storage()
    if storage._cdata not in made:
        storage = StorageWeakRef(storage)
    return Place(storage, tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset())


def map_tensors(function: Callable, values: Any) -> Any:
    return tree_map(lambda x: function(x) if isinstance(x, torch.Tensor) else x, values)


@dataclass
class Call:
    """An operator that was recorded. made: where its new results go."""

    name: str
    function: Callable
    arguments: tuple
    made: list[tuple[int, Place]]

    def run(self) -> None:
        try:
            args, kwargs = tree_map(_tensor_of, self.arguments)
        except RuntimeError as error:
            raise RuntimeError(f"{self.name}: {error}") from None
        results = tree_leaves(self.function(*args, **kwargs))
        for result in results:
            if isinstance(result, torch.ScriptObject):  # of a collective
                Work.unbox(result).wait()
        for index, place in self.made:
            place.tensor().copy_(results[index])


def _tensor_of(value: Any) -> Any:
    return value.tensor() if isinstance(value, Place) else value


@dataclass
class Wait:
    """A replay goes on when the event has happened."""

    event: "ExternalEvent"


@dataclass
class Reset:
    event: "ExternalEvent"


class NPUGraph:
    """torch.npu.NPUGraph.

    Attributes:
        steps: what `graph` recorded, None before. made: the storages of its results. names: of its
            operators.
    """

    def __init__(self):
        self.steps: list[Call | Wait | Reset] | None = None
        self.made: list[torch.UntypedStorage] = []
        self._pool = Pool()

    @property
    def names(self) -> list[str]:
        return [step.name for step in self.steps or [] if isinstance(step, Call)]

    def pool(self) -> Pool:
        return self._pool

    def reset(self) -> None:
        self.steps = None
        self.made = []

    def replay(self) -> None:
        """Compute it again, up to an event that has not happened. RuntimeError: it was not
        captured, an earlier replay still waits, or memory is gone.
        """
        require_finished()
        if self.steps is None:
            raise RuntimeError("replay of a graph that was not captured, or that was reset")
        if self._pool.owner not in (None, self):
            for storage in self._pool.owner.made:
                if getattr(storage, "is_weakly_held", False):
                    _overwrite(storage)
        self._pool.owner = self
        _state.replay = self._run()
        counts.counting.kernel("graph_replay", _go_on)

    def _run(self) -> Iterator[Wait]:
        for step in self.steps:
            if isinstance(step, Call):
                step.run()
            elif isinstance(step, Reset):
                step.event.has_happened = False
            else:
                while not step.event.has_happened:
                    yield step


class ExternalEvent:
    """torch.npu.ExternalEvent: what a graph waits for and a stream outside it records."""

    def __init__(self):
        self.has_happened = False

    def wait(self, stream: Any = None) -> None:
        if _state.capture:
            _state.capture.steps.append(Wait(self))

    def reset(self, stream: Any = None) -> None:
        if _state.capture:
            _state.capture.steps.append(Reset(self))
        else:
            self.has_happened = False

    def record(self, stream: Any = None) -> None:
        self.has_happened = True
        counts.counting.within_kernel(_go_on)


@dataclass
class TaskGroup:
    """What `graph_task_group_end` returns: operators whose arguments may be exchanged."""

    calls: list[Call] = field(default_factory=list)


class Capture(TorchDispatchMode):
    """Records the operators of a graph, in order."""

    def __init__(self):
        super().__init__()
        self.steps: list[Call | Wait | Reset] = []
        self.made: dict[int, torch.UntypedStorage] = {}  # by address of the C++ object
        self.group: TaskGroup | None = None
        self.is_in_operator = False

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function.namespace in extensions.CPU_LIBRARIES or self.is_in_operator:
            return function(*args, **kwargs)
        if torch._C._dispatch_has_kernel_for_dispatch_key(function.name(), counts.COMPOSITE):
            with self:
                return function.decompose(*args, **kwargs)
        name = function._overloadpacket.__name__
        if name in counts.WAITS or counts.has_mask(name, args):
            raise RuntimeError(
                f"{function} while a graph is captured: the host would wait for a number or a "
                "shape that only the NPU knows, and a capture runs nothing"
            )
        if name in CHANGES_STORAGE:
            raise RuntimeError(f"{function} while a graph is captured: memory would move")
        if counts.is_view(function):
            return function(*args, **kwargs)
        results = self._written(function, args, kwargs)
        if results is None:
            results = function(*args, **kwargs)
        self._record(name, function, args, kwargs, results)
        return results[0] if isinstance(results, Kept) else results

    def operator(self, name: str, function: Callable, args: tuple, kwargs: dict) -> Any:
        """An operator of torch_npu."""
        written = [kwargs.get(argument) for argument in WRITTEN.get(name, ())]
        results = None
        if not written or any(map(self._is_made, written)):
            results = self.unseen(function, *args, **kwargs)
        self._record(name, function, args, kwargs, results)
        return results

    def unseen(self, function: Callable, *args: Any, **kwargs: Any) -> Any:
        """Call what an operator consists of."""
        before = self.is_in_operator
        self.is_in_operator = True
        try:
            return function(*args, **kwargs)
        finally:
            self.is_in_operator = before

    def _written(self, function: Any, args: tuple, kwargs: dict) -> "Kept | None":
        """What an operator that writes into memory from before the capture returns; None for
        another one, which has to run.
        """
        if not function._schema.is_mutable or function.namespace == "c10d":
            return None
        arguments = dict(zip((a.name for a in function._schema.arguments), args)) | kwargs
        sets = {}
        for argument in function._schema.arguments:
            if argument.alias_info and argument.alias_info.is_write:
                sets[frozenset(argument.alias_info.before_set)] = arguments[argument.name]
        if any(self._is_made(x) for x in counts.tensors(list(sets.values()))):
            return None
        returned = [sets.get(frozenset(r.alias_info.before_set)) for r in function._schema.returns]
        return Kept([returned[0] if len(returned) == 1 else tuple(returned) or None])

    def _is_made(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self.made

    def _record(self, name: str, function: Any, args: tuple, kwargs: dict, results: Any) -> None:
        arguments = map_tensors(lambda x: place_of(x, self.made), (args, kwargs))
        given = {x.untyped_storage()._cdata for x in counts.tensors((args, kwargs))}
        made = []
        for index, result in enumerate(tree_leaves(results)):
            if isinstance(result, torch.Tensor):
                storage = result.untyped_storage()
                if storage._cdata not in given:
                    self.made[storage._cdata] = storage
                    made.append((index, place_of(result, self.made)))
        if name in counts.NO_KERNEL:
            return
        call = Call(name, function, arguments, made)
        self.steps.append(call)
        if self.group is not None:
            self.group.calls.append(call)


class Kept(list):
    """The result of an operator that was recorded and not run."""


@dataclass
class State:
    """Of this process: the capture, the replay that is under way, and the group that is updated."""

    capture: Capture | None = None
    replay: Iterator[Wait] | None = None
    updated: list[Call] | None = None


_state = State()


def is_capturing(*unused: Any) -> bool:
    return _state.capture is not None


def require_finished() -> None:
    """RuntimeError: a replay waits for an event that nobody recorded."""
    if _state.replay is not None:
        _state.replay = None
        raise RuntimeError(
            "a graph waits for an event that was not recorded: its task groups were not updated. "
            "An NPU waits for ever"
        )


def _go_on() -> None:
    """To the next event that has not happened, or to the end."""
    replay = _state.replay
    _state.replay = None
    if replay is not None and next(replay, None) is not None:
        _state.replay = replay


def _overwrite(storage: torch.UntypedStorage) -> None:
    """All bits: NaN in every floating dtype, -1 in an integer."""
    torch.empty(0, dtype=torch.uint8).set_(storage).fill_(255)


class graph:
    """torch.npu.graph: a context in which operators are recorded into an NPUGraph."""

    def __init__(self, npu_graph: NPUGraph, pool: Pool | None = None, stream: Any = None, **unused):
        self.graph = npu_graph
        self.pool = pool

    def __enter__(self):
        require_finished()
        if _state.capture is not None:
            raise RuntimeError("a graph is captured already")
        self.graph.reset()
        if self.pool is not None:
            self.graph._pool = self.pool
        _state.capture = Capture()
        _state.capture.__enter__()

    def __exit__(self, kind, error, traceback):
        capture = _state.capture
        _state.capture = None
        capture.__exit__(kind, error, traceback)
        if error is None:
            self.graph.steps, self.graph.made = capture.steps, list(capture.made.values())
            for storage in self.graph.made:
                _overwrite(storage)
        return False


def graph_task_group_begin(stream: Any) -> None:
    _state.capture.group = TaskGroup()


def graph_task_group_end(stream: Any) -> TaskGroup:
    group = _state.capture.group
    _state.capture.group = None
    return group


def graph_task_update_begin(stream: Any, handle: TaskGroup) -> None:
    """The operators that are called until `graph_task_update_end` take the places of the group's."""
    _state.updated = list(handle.calls)


def graph_task_update_end(stream: Any) -> None:
    left = _state.updated
    _state.updated = None
    if left:
        raise RuntimeError(f"a task group has {len(left)} operators that were not updated")


def _update(name: str, args: tuple, kwargs: dict) -> None:
    wanted = [call.name for call in _state.updated]
    if not wanted or wanted[0] != name:
        _state.updated = None
        raise RuntimeError(f"a task group of {wanted} is updated with {name}")
    _state.updated.pop(0).arguments = map_tensors(lambda x: place_of(x, {}), (args, kwargs))


def recorded(name: str, function: Callable) -> Callable:
    """`function`, an operator of torch_npu, as graphs see it."""

    def operator(*args, **kwargs):
        if _state.updated is not None:
            return counts.counting.kernel("graph_task_update", _update, name, args, kwargs)
        if _state.capture is None or _state.capture.is_in_operator:
            return function(*args, **kwargs)
        return _state.capture.operator(name, function, args, kwargs)

    return operator


def within(kernel: Callable) -> Callable:
    """`kernel`, an operator written in Python whose own operators are recorded."""

    def call(*args, **kwargs):
        if _state.capture is None or _state.capture.is_in_operator:
            return kernel(*args, **kwargs)
        with _state.capture:
            return kernel(*args, **kwargs)

    return call


def weak_ref_tensor(x: torch.Tensor) -> torch.Tensor:
    """torch.ops._C_ascend.weak_ref_tensor (VA csrc/torch_binding.cpp): x, which does not keep its
    memory in a graph's pool.
    """
    x.untyped_storage().is_weakly_held = True
    return x.view(x.shape) if x.is_contiguous() else x.as_strided(x.shape, x.stride())


_library = torch.library.Library("_C_ascend", "FRAGMENT")


def install(torch_npu: dict[str, Any]) -> None:
    """Into the operators of `torch_npu`, and torch's library of Python kernels."""
    for name, function in list(torch_npu.items()):
        if name.startswith(("npu_", "_npu_")):
            torch_npu[name] = recorded(name, function)
    impl = torch.library.Library.impl

    def recorded_impl(self, op_name, fn, dispatch_key="", **kwargs):
        if self.ns in extensions.CPU_LIBRARIES and callable(fn):
            fn = within(fn)
        return impl(self, op_name, fn, dispatch_key, **kwargs)

    torch.library.Library.impl = recorded_impl
    _library.define("weak_ref_tensor(Tensor(a) x) -> Tensor(a)")
    _library.impl("weak_ref_tensor", weak_ref_tensor, "CPU")
    Work.wait = _part_of_an_operator(Work.wait)  # gloo's copies its results
    torch.cuda.is_current_stream_capturing = is_capturing
    torch.cuda.synchronize = _after(require_finished, torch.cuda.synchronize)
    for name in ("tolist", "cpu"):
        setattr(torch.Tensor, name, _after(_require_no_capture, getattr(torch.Tensor, name)))


def _require_no_capture() -> None:
    if _state.capture is not None and not _state.capture.is_in_operator:
        raise RuntimeError("the host reads from the NPU while a graph is captured")


def _part_of_an_operator(function: Callable) -> Callable:
    def call(*args, **kwargs):
        if _state.capture is None:
            return function(*args, **kwargs)
        return _state.capture.unseen(function, *args, **kwargs)

    return call


def _after(check: Callable, function: Callable) -> Callable:
    @functools.wraps(function)
    def call(*args, **kwargs):
        check()
        return function(*args, **kwargs)

    return call
