"""torch.cuda and torch.npu on a CPU: what code written for an accelerator asks of torch, answered
by the CPU.

The idea: a tensor of the emulated NPU *is* a CPU tensor. So every request for a device is turned
into the CPU, moving a tensor is doing nothing, and work is finished when the call returns.

| asked of torch | answer |
|---|---|
| a device "npu", "cuda", "npu:1", 0 in factories, .to, new_*, load(map_location), Generator | the CPU |
| Tensor and Module .cuda() .npu() .pin_memory() | the tensor itself |
| Tensor.is_npu, is_cuda | True |
| Tensor.type() | "torch.npu.FloatTensor", as torch_npu says |
| streams and events | objects that do nothing; time between events is 0 |
| random numbers | one generator: the device's seed and state are the CPU's |
| memory | 2 GiB in all, so that vLLM's share for its cache stays small; each question costs a page of it |
| process groups hccl and nccl | gloo; their options are dropped; `get_hccl_comm_name` is a name that mc2.py knows |
| batch_isend_irecv with oneself as peer, all_gather of different lengths | as HCCL does |
| histc of integers | as CANN does |
| kernels for NPU tensors (PrivateUse1) of the libraries vllm and mindspeed | kernels for CPU tensors |
| anything else of torch.cuda | torch's own answer, usually an error that says CUDA is missing |

`Tensor.device` stays "cpu": renaming torch's spare backend would make "npu" legal, and torch would
then take it for the machine's accelerator and ask it for hooks.
"""

import contextlib
import copyreg
import functools
import itertools
import types

import torch
import torch.distributed as dist

from mindspeed_qerl.emulation import cann_version, device_count, mc2
from mindspeed_qerl.emulation.formats import on_host

CPU = torch.device("cpu")
TOTAL_MEMORY = 2 << 30  # bytes
PAGE = 4096  # bytes

_FACTORIES = (
    "arange as_tensor asarray empty empty_like empty_strided eye full full_like linspace logspace "
    "normal ones ones_like rand rand_like randint randint_like randn randn_like randperm "
    "scalar_tensor tensor tril_indices triu_indices zeros zeros_like"
).split()
_TENSOR_TYPES = "BFloat16Tensor BoolTensor ByteTensor DoubleTensor FloatTensor HalfTensor IntTensor LongTensor".split()


class Stream:
    """A stream on a machine where everything is already in order."""

    def __init__(self, *args, **kwargs):
        self.stream_id = self.npu_stream = self.cuda_stream = 0

    def wait_stream(self, stream):
        pass

    def wait_event(self, event):
        pass

    def synchronize(self):
        pass

    def query(self):
        return True

    def record_event(self, event=None):
        return event or Event()

    def __eq__(self, other):
        return isinstance(other, Stream)

    __hash__ = object.__hash__

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        return False


class Event:
    """An event that has happened when it is recorded."""

    def __init__(self, *args, **kwargs):
        pass

    def record(self, stream=None):
        pass

    def wait(self, stream=None):
        pass

    def synchronize(self):
        pass

    def query(self):
        return True

    def elapsed_time(self, end):
        return 0.0


class _DefaultGenerators:
    """torch.cuda.default_generators: every device draws from the CPU's generator."""

    def __getitem__(self, index):
        return torch.default_generator

    def __len__(self):
        return device_count()


class _GeneratorType(type):
    """torch.Generator(device="npu") makes a CPU generator; isinstance still means torch's own type."""

    real = torch.Generator

    def __call__(cls, device="cpu"):
        return cls.real(on_cpu(device))

    def __instancecheck__(cls, instance):
        return isinstance(instance, cls.real)


class _Generator(metaclass=_GeneratorType):
    pass


class _DeviceType(type):
    """torch.device("npu:1") is the CPU; isinstance still means torch's own type."""

    real = torch.device

    def __call__(cls, *args, **kwargs):
        named = kwargs.get("type", args[0] if args else None)
        return CPU if _is_accelerator(named) else cls.real(*args, **kwargs)

    def __instancecheck__(cls, instance):
        return isinstance(instance, cls.real)


class _Device(metaclass=_DeviceType):
    pass


def _is_accelerator(value) -> bool:
    if isinstance(value, torch.device):
        return value.type in ("cuda", "npu")
    if isinstance(value, str):
        return value.partition(":")[0] in ("cuda", "npu")
    return isinstance(value, int) and not isinstance(
        value, bool
    )  # an index means the current kind of accelerator


def on_cpu(device):
    """The CPU if device (a torch.device, a string, an index) names an accelerator, else what was
    given.
    """
    return CPU if _is_accelerator(device) else device


def _with_cpu_device(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        if "device" in kwargs:
            kwargs["device"] = on_cpu(kwargs["device"])
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return function(*args, **kwargs)

    return wrapper


def _with_cpu_destination(to):
    """Tensor.to and Module.to take the device as the first argument or by name."""

    @_with_cpu_device
    @functools.wraps(to)
    def wrapper(self, *args, **kwargs):
        moved = to(self, *map(on_cpu, args), **kwargs)
        to_host = any(
            isinstance(given, str) and given == "cpu" for given in (*args[:1], kwargs.get("device"))
        )
        return on_host(moved) if to_host and isinstance(moved, torch.Tensor) else moved

    return wrapper


def _itself(self, *args, **kwargs):
    return self


def _nothing(*args, **kwargs):
    return None


def _install_devices() -> None:
    for name in _FACTORIES:
        setattr(torch, name, _with_cpu_device(getattr(torch, name)))
    for name in ("new_tensor", "new_empty", "new_zeros", "new_ones", "new_full"):
        setattr(torch.Tensor, name, _with_cpu_device(getattr(torch.Tensor, name)))
    for kind in (torch.Tensor, torch.nn.Module):
        kind.to = _with_cpu_destination(kind.to)
        kind.cuda = kind.npu = _itself
    torch.Tensor.cpu = lambda self, *args, **kwargs: self.to("cpu")
    torch.Tensor.pin_memory = _itself
    torch.Tensor.record_stream = _nothing
    # as torch_npu.contrib.transfer_to_npu has it
    torch.Tensor.is_npu = torch.Tensor.is_cuda = property(lambda self: True)
    torch.Generator = _Generator
    torch.device = _Device
    copyreg.pickle(
        _DeviceType.real, lambda device: (torch.device, (str(device),))
    )  # by the name of torch.device

    real_histc = torch.histc

    @functools.wraps(real_histc)
    def histc(x, bins=100, min=0, max=0, **kwargs):
        return real_histc(x if x.is_floating_point() else x.double(), bins, min, max, **kwargs).to(
            x.dtype
        )

    torch.histc = histc
    torch.version.cann = cann_version()

    real_type = torch.Tensor.type
    real_load = torch.load

    @functools.wraps(real_type)
    def tensor_type(self, dtype=None, *args, **kwargs):
        if dtype is None:
            return real_type(self).replace("torch.", "torch.npu.", 1)
        if isinstance(dtype, str):
            dtype = dtype.replace(".npu.", ".").replace(".cuda.", ".")
        return real_type(self, dtype, *args, **kwargs)

    @functools.wraps(real_load)
    def load(file, map_location=None, *args, **kwargs):
        return real_load(file, on_cpu(map_location), *args, **kwargs)

    torch.Tensor.type = tensor_type
    torch.load = load


def _install_cuda() -> None:
    properties = types.SimpleNamespace(
        name="emulated NPU", total_memory=TOTAL_MEMORY, major=9, minor=0, multi_processor_count=1
    )
    current = [0]
    questions = itertools.count(1)

    def mem_get_info(device=None):
        """vllm-ascend asserts that what it loaded took memory (worker/worker_v1.py:222)."""
        return TOTAL_MEMORY - PAGE * next(questions), TOTAL_MEMORY

    def set_device(device):
        current[0] = int(str(device).rpartition(":")[2]) if str(device)[-1].isdigit() else 0

    answers = {
        "Stream": Stream, "Event": Event, "stream": lambda stream: contextlib.nullcontext(),
        "current_stream": lambda device=None: Stream(), "default_stream": lambda device=None: Stream(),
        "set_stream": _nothing,
        "synchronize": _nothing, "is_current_stream_capturing": lambda: False,
        "is_available": lambda: True, "is_initialized": lambda: True, "init": _nothing, "_lazy_init": _nothing,
        "_lazy_call": lambda function, **kwargs: function(),
        "device_count": device_count, "current_device": lambda: current[0], "set_device": set_device,
        "device": lambda device: contextlib.nullcontext(),
        "get_device_properties": lambda device=None: properties,
        "get_device_name": lambda device=None: properties.name,
        "get_device_capability": lambda device=None: (9, 0), "is_bf16_supported": lambda *args, **kwargs: True,
        "default_generators": _DefaultGenerators(), "initial_seed": torch.default_generator.initial_seed,
        "seed": torch.seed,
        "manual_seed": torch.default_generator.manual_seed, "manual_seed_all": torch.default_generator.manual_seed,
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
        "empty_cache": _nothing, "ipc_collect": _nothing,
        "reset_peak_memory_stats": _nothing, "reset_max_memory_allocated": _nothing,
        "memory_allocated": lambda device=None: 0, "max_memory_allocated": lambda device=None: 0,
        "memory_reserved": lambda device=None: 0, "max_memory_reserved": lambda device=None: 0,
        "memory_stats": lambda device=None: {"allocated_bytes.all.peak": 0, "allocated_bytes.all.current": 0},
        "memory_summary": lambda *args, **kwargs: "", "mem_get_info": mem_get_info,
        **{name: getattr(torch, name) for name in _TENSOR_TYPES},
    }  # fmt: skip
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    for name in ("get_rng_state", "set_rng_state", "manual_seed", "_lazy_call", "_lazy_init"):
        setattr(torch.cuda.random, name, answers[name])


def _gloo(backend: str | None) -> str | None:
    return "gloo" if backend and ("hccl" in backend or "nccl" in backend) else backend


def _install_distributed() -> None:
    real_init = dist.init_process_group
    real_new_group = dist.new_group
    real_batch = dist.batch_isend_irecv
    real_all_gather = dist.all_gather

    @functools.wraps(real_init)
    def init_process_group(backend=None, *args, **kwargs):
        kwargs.pop("device_id", None)
        kwargs.pop("pg_options", None)
        return real_init(_gloo(backend) or "gloo", *args, **kwargs)

    @functools.wraps(real_new_group)
    def new_group(ranks=None, timeout=None, backend=None, pg_options=None, *args, **kwargs):
        kwargs.pop("device_id", None)
        return real_new_group(ranks, timeout, _gloo(backend), None, *args, **kwargs)

    @functools.wraps(real_batch)
    def batch_isend_irecv(operations):
        me = dist.get_rank()
        mine = [op for op in operations if op.peer == me]
        sends = [op for op in mine if op.op is dist.isend]
        receives = [op for op in mine if op.op is not dist.isend]
        for send, receive in zip(sends, receives, strict=True):
            receive.tensor.copy_(send.tensor)
        others = [op for op in operations if op.peer != me]
        return real_batch(others) if others else []

    @functools.wraps(real_all_gather)
    def all_gather(tensor_list, tensor, group=None, async_op=False):
        lengths = [len(part) for part in tensor_list] if tensor.dim() else [1]
        if len(set(lengths)) == 1:
            return real_all_gather(tensor_list, tensor, group, async_op)
        padded = tensor.new_zeros(max(lengths), *tensor.shape[1:])
        padded[: len(tensor)] = tensor
        gathered = [torch.empty_like(padded) for _ in lengths]
        real_all_gather(gathered, padded, group)
        for part, whole in zip(tensor_list, gathered):
            part.copy_(whole[: len(part)])
        return None

    def get_hccl_comm_name(self, rank, init_comm=True):
        name = f"hccl_{id(self)}"
        mc2.register_group(name, self)
        return name

    dist.ProcessGroupGloo.get_hccl_comm_name = get_hccl_comm_name
    for module in (dist, dist.distributed_c10d):
        module.init_process_group = init_process_group
        module.new_group = new_group
        module.batch_isend_irecv = batch_isend_irecv
        module.all_gather = all_gather


_installed = False


def install() -> None:
    """Patch torch in this process. A second call does nothing."""
    global _installed
    if _installed:
        return
    _installed = True
    _install_devices()
    _install_cuda()
    _install_distributed()
