"""What a real NPU would be sent: operators, collectives, bytes and matrix products, and when the
host waits for it; counted by phase, in the layers of a model and outside them.

With MINDSPEED_QERL_EMULATED_COUNTS set, `import torch_npu` makes `counting`; what is inside a
`counting.phase` is counted.

- A function npu_... of torch_npu or of an extension is one kernel, and one more where autograd goes
  through it. Of what it does inside only the operations of matrix products are counted.
- An operator of torch that is neither a view nor an allocation is one kernel.
- A collective on tensors of the NPU is one kernel; its bytes are those that go in or those that
  come out, whichever are more.
- At .item(), .cpu(), nonzero, an index by a mask and synchronize the host waits.

Tensors of the emulated NPU are CPU tensors, and so are the host's own (vLLM's batch, say). Here
they are told apart: a storage is the NPU's if it was made or moved there, or computed from one that
is. In a phase, .cpu() and .npu() therefore copy, as they do there.
"""

import bisect
import functools
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from mindspeed_qerl.emulation import extensions, facade

VARIABLE = "MINDSPEED_QERL_EMULATED_COUNTS"
NO_KERNEL = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"}
NO_KERNEL |= {
    "detach",
    "alias",
    "_unsafe_view",
    "_reshape_alias",
    "resize_",
    "set_",
    "record_stream",
}
# their results have a shape, or are a number, that only the NPU knows
WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "unique_dim"}
WAITS |= {"unique_consecutive", "is_nonzero"}
COMPOSITE = "CompositeImplicitAutograd"


@dataclass
class Tally:
    """Of a phase. calls: how often it was entered, or of how many parts it consisted.

    Attributes:
        layers, outside: launches by operator, in the model's layers and outside them. waits: of
            the host, by what makes it wait. collectives: by (operator, ranks). sent: bytes of
            those. flops: of matrix products. bytes: read and written by kernels.
    """

    calls: int = 0
    layers: Counter[str] = field(default_factory=Counter)
    outside: Counter[str] = field(default_factory=Counter)
    waits: Counter[str] = field(default_factory=Counter)
    collectives: Counter[tuple[str, int]] = field(default_factory=Counter)
    sent: int = 0
    flops: int = 0
    bytes: int = 0


class Spans:
    """What autograd recorded in a piece of the forward pass: ranges of its nodes' numbers."""

    def __init__(self):
        self.starts: list[int] = []
        self.ends: list[int] = []
        self.labels: list[str] = []

    def add(self, start: int, end: int, label: str = "") -> None:
        if end > start:
            self.starts.append(start)
            self.ends.append(end)
            self.labels.append(label)

    def find(self, node: int) -> int | None:
        """Index of the range that has `node`. A range that lies in another comes before it."""
        index = bisect.bisect_right(self.starts, node) - 1
        return index if index >= 0 and node < self.ends[index] else None


class Counting(TorchDispatchMode):
    """Counts what is inside a `phase`. tallies: by its name."""

    def __init__(self):
        super().__init__()
        self.tallies: dict[str, Tally] = defaultdict(Tally)
        self._phases: list[str] = []
        self._in_layer = self._in_kernel = 0
        self._placing = False
        self._kernels, self._layers = Spans(), Spans()
        self._went_back: set[int] = set()
        self._layer_parameters: set[int] = set()

    # ---- what is being done ----

    @contextmanager
    def phase(self, name: str, calls: int = 1) -> Iterator[None]:
        """All inside belongs to `name`, but for what is in a phase inside it."""
        self.tallies[name].calls += calls
        self._phases.append(name)
        try:
            if len(self._phases) > 1:
                yield
            else:
                with self:
                    yield
        finally:
            self._phases.pop()

    def follow_layers(self, layers: Iterable[torch.nn.Module]) -> None:
        """What these modules launch, forward and backward, is in a layer."""
        for layer in layers:
            self._layer_parameters |= {id(parameter) for parameter in layer.parameters()}
            layer.forward = functools.partial(self._layer, layer.forward)

    def _layer(self, forward: Callable, *args: Any, **kwargs: Any) -> Any:
        self._in_layer += 1
        start = torch.autograd._get_sequence_nr()
        try:
            return forward(*args, **kwargs)
        finally:
            self._in_layer -= 1
            self._layers.add(start, torch.autograd._get_sequence_nr())

    def kernel(self, name: str, function: Callable, *args: Any, **kwargs: Any) -> Any:
        """Call an emulated operator, which is one kernel."""
        if not self._phases or self._in_kernel:
            return function(*args, **kwargs)
        self._launch(name)
        self._in_kernel += 1
        start = torch.autograd._get_sequence_nr()
        try:
            result = function(*args, **kwargs)
        finally:
            self._in_kernel -= 1
        self._kernels.add(start, torch.autograd._get_sequence_nr(), name)
        place(result)
        self._tally.bytes += bytes_of((args, kwargs, result))
        return result

    def within_kernel(self, function: Callable) -> Any:
        """Call what belongs to a kernel that was counted."""
        self._in_kernel += 1
        try:
            return function()
        finally:
            self._in_kernel -= 1

    @contextmanager
    def placing(self, placed: bool) -> Iterator[None]:
        """What is made inside is on the NPU."""
        before = self._placing
        self._placing = placed
        try:
            yield
        finally:
            self._placing = before

    # ---- counting ----

    @property
    def current(self) -> str:
        """The phase."""
        return self._phases[-1]

    @property
    def _tally(self) -> Tally:
        return self.tallies[self.current]

    def _launch(self, name: str) -> None:
        """Once in the backward pass for all of a kernel's nodes."""
        node = torch._C._current_autograd_node()
        in_layer = self._in_layer > 0
        if node is not None and not in_layer:
            number = node._sequence_nr()
            in_layer = self._layers.find(number) is not None
            variable = getattr(node, "variable", None)
            if variable is not None:
                in_layer = id(variable) in self._layer_parameters
        counter = self._tally.layers if in_layer else self._tally.outside
        counter[name] += 1

    def wait(self, why: str) -> None:
        """The host waits for the NPU."""
        if self._phases and not self._in_kernel:
            self._tally.waits[why] += 1

    def _goes_back(self) -> str | None:
        """Within the backward pass of an emulated operator: its name, "" once it is counted; else
        None.
        """
        node = torch._C._current_autograd_node()
        index = None if node is None else self._kernels.find(node._sequence_nr())
        if index is None:
            return None
        if index in self._went_back:
            return ""
        self._went_back.add(index)
        return f"{self._kernels.labels[index]} backward"

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch._C._dispatch_has_kernel_for_dispatch_key(function.name(), COMPOSITE):
            with self:  # linear without autograd, say, which consists of others
                return function.decompose(*args, **kwargs)
        packet = function._overloadpacket
        name = packet.__name__
        placed = self._placing or is_placed((args, kwargs))
        result = function(*args, **kwargs)
        if packet in flop_registry and placed:
            self._tally.flops += flop_registry[packet](*args, **kwargs, out_val=result)
        if self._in_kernel or not placed or function.namespace in extensions.CPU_LIBRARIES:
            if placed:
                place(result)
            return result
        if function.namespace == "c10d":
            self._collective(name, args)
            return result
        if name in WAITS or has_mask(name, args):
            self.wait(name)
        if name == "copy_" and not is_placed(args[0]):
            if not kwargs.get("non_blocking"):
                self.wait("copy to host")
            return result
        place(result)
        if name in NO_KERNEL or name in WAITS and name.startswith(("_local", "is_")):
            return result
        if is_view(function):
            return result
        backward = self._goes_back()
        if backward is None:
            self._launch(name)
        elif backward:
            self._launch(backward)
        self._tally.bytes += bytes_of((args, kwargs, result))
        return result

    def _collective(self, name: str, args: tuple) -> None:
        ranks = 1
        for value in args:
            if isinstance(value, torch.ScriptObject):
                try:
                    ranks = dist.ProcessGroup.unbox(value).size()
                except RuntimeError:  # a ReduceOp
                    continue
        if ranks == 1:
            return
        for value in args:
            place(value)
        self._launch(name)
        self._tally.collectives[name, ranks] += 1
        self._tally.sent += max(bytes_of(value) for value in args)


def has_mask(name: str, args: tuple) -> bool:
    """An index by a mask, whose result has as many rows as the mask has True."""
    if name != "index":
        return False
    indices = [index for index in args[1] if index is not None]
    return any(index.dtype in (torch.bool, torch.uint8) for index in indices)


def is_view(function: Any) -> bool:
    returns = function._schema.returns
    aliases = [value.alias_info for value in returns]
    return bool(aliases) and all(alias and not alias.is_write for alias in aliases)


def tensors(values: Any) -> list[torch.Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


def bytes_of(values: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors(values))


def is_placed(values: Any) -> bool:
    """Whether one of the tensors is the NPU's. A number in a tensor of the host is none."""
    return any(hasattr(tensor.untyped_storage(), "on_npu") for tensor in tensors(values))


def place(values: Any) -> None:
    """The tensors are the NPU's from now on."""
    for tensor in tensors(values):
        tensor.untyped_storage().on_npu = True


def on_npu(device: Any) -> bool:
    """Whether a device names the NPU; facade.CPU, the object, is what it makes of one."""
    return device is facade.CPU or facade._is_accelerator(device)


# ---- what torch is asked for ----


def _factory(function: Callable) -> Callable:
    @functools.wraps(function)
    def make(*args, **kwargs):
        if "device" not in kwargs:
            return function(*args, **kwargs)
        on = on_npu(kwargs["device"])
        with counting.placing(on):
            made = function(*args, **kwargs)
        if on:  # outside a phase nothing else says so
            place(made)
        return made

    return make


def _to(function: Callable) -> Callable:
    @functools.wraps(function)
    def move(self, *args, **kwargs):
        moved = function(self, *args, **kwargs)
        device = kwargs.get("device", args[0] if args else None)
        if not isinstance(device, str | int | torch.device) or isinstance(device, bool):
            return moved
        return _moved(moved, on_npu(device), kwargs.get("non_blocking", False))

    return move


def _moved(tensor: torch.Tensor, to_npu: bool, non_blocking: bool) -> torch.Tensor:
    """A copy on the other side; `tensor` if it is there."""
    if is_placed(tensor) == to_npu or counting._in_kernel or not counting._phases:
        if to_npu:
            place(tensor)
        return tensor
    counting._launch("copy to NPU" if to_npu else "copy to host")
    if not to_npu and not non_blocking:
        counting.wait("copy to host")
    counting._in_kernel += 1
    copy = tensor.clone()
    counting._in_kernel -= 1
    if to_npu:
        place(copy)
    else:
        del copy.untyped_storage().on_npu
    return copy


def _to_npu(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Tensor.npu and Module.npu."""
    if isinstance(self, torch.Tensor):
        return _moved(self, True, False)
    place([*self.parameters(), *self.buffers()])
    return self


def _module_to(function: Callable) -> Callable:
    @functools.wraps(function)
    def move(self, *args, **kwargs):
        if on_npu(kwargs.get("device", args[0] if args else None)):
            place([*self.parameters(), *self.buffers()])
        counting._in_kernel += 1
        moved = function(self, *args, **kwargs)
        counting._in_kernel -= 1
        return moved

    return move


def _waiting(function: Callable, why: str) -> Callable:
    @functools.wraps(function)
    def call(*args, **kwargs):
        counting.wait(why)
        return function(*args, **kwargs)

    return call


def _reading(function: Callable, why: str) -> Callable:
    @functools.wraps(function)
    def read(self, *args, **kwargs):
        if is_placed(self):
            counting.wait(why)
        return function(self, *args, **kwargs)

    return read


def install(torch_npu: dict[str, Any]) -> None:
    """Into torch, after facade.install, and into the operators of `torch_npu`."""
    for name in facade._FACTORIES:
        setattr(torch, name, _factory(getattr(torch, name)))
    for name in ("new_tensor", "new_empty", "new_zeros", "new_ones", "new_full"):
        setattr(torch.Tensor, name, _factory(getattr(torch.Tensor, name)))
    torch.Tensor.to = _to(torch.Tensor.to)
    torch.nn.Module.to = _module_to(torch.nn.Module.to)
    torch.Tensor.tolist = _reading(torch.Tensor.tolist, "tolist")
    for kind in (torch.Tensor, torch.nn.Module):
        kind.cuda = kind.npu = _to_npu
    device = torch.Tensor.device
    torch.Tensor.device = property(
        lambda self: facade.CPU if is_placed(self) else device.__get__(self)
    )
    torch.cuda.synchronize = _waiting(torch.cuda.synchronize, "synchronize")
    for kind in (facade.Stream, facade.Event):
        kind.synchronize = _waiting(kind.synchronize, "synchronize")
    operators = [torch_npu] + [vars(extension) for extension in extensions.EXTENSIONS.values()]
    for namespace in operators:
        for name, function in list(namespace.items()):
            if name.startswith(("npu_", "_npu_")):
                namespace[name] = functools.partial(counting.kernel, name.lstrip("_"), function)
    impl = torch.library.Library.impl

    def counted_impl(self, op_name, fn, dispatch_key="", **kwargs):
        """A kernel of Python's of vLLM or MindSpeed: what it calls is counted, not itself."""
        if self.ns in extensions.CPU_LIBRARIES and callable(fn):
            fn = _inside(fn)
        return impl(self, op_name, fn, dispatch_key, **kwargs)

    torch.library.Library.impl = counted_impl


def _inside(kernel: Callable) -> Callable:
    @functools.wraps(kernel)
    def call(*args, **kwargs):
        if not counting._phases:
            return kernel(*args, **kwargs)
        with counting:
            return kernel(*args, **kwargs)

    return call


counting = Counting()
is_wanted = VARIABLE in os.environ
