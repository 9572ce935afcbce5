"""torch_npu._C: options of HCCL groups, which gloo does not have, and the handle of a graph's task group."""  # noqa: N999

from types import SimpleNamespace

from mindspeed_qerl.emulation import soc
from mindspeed_qerl.emulation.graphs import TaskGroup as _NPUTaskGroupHandle  # noqa: F401


class _Options:
    """Takes what callers set (MindSpeed core/parallel_state.py:261) and is dropped by
    facade.new_group.
    """


def _npu_get_soc_version() -> int:
    return soc()[1]


_distributed_c10d = SimpleNamespace(ProcessGroupHCCL=SimpleNamespace(Options=_Options))
