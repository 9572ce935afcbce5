"""torch_npu._C: options of HCCL groups, which gloo does not have."""  # noqa: N999

from types import SimpleNamespace


class _Options:
    """Takes what callers set (MindSpeed core/parallel_state.py:261) and is dropped by facade.new_group."""


_distributed_c10d = SimpleNamespace(ProcessGroupHCCL=SimpleNamespace(Options=_Options))
