"""MindSpeed's C++ extensions for CANN: what `torch.utils.cpp_extension.load` would compile is
answered from operators.py.

MindSpeed registers its operators for the dispatch key of NPU tensors, PrivateUse1; tensors of the
emulated NPU are CPU tensors.
"""

from types import SimpleNamespace

import torch.library
import torch.utils.cpp_extension

from mindspeed_qerl.emulation import not_emulated, operators
from mindspeed_qerl.emulation.formats import converting

_GMM = SimpleNamespace(
    npu_gmm=operators.npu_gmm,
    npu_gmm_backward=operators.npu_gmm_backward,
    npu_gmm_backward_fusion=operators.npu_gmm_backward_fusion,
)
# Name of the extension (OP_NAME of MindSpeed's op_builder/*.py) -> what its module offers.
EXTENSIONS = {
    "grouped_matmul": _GMM,
    "grouped_matmul_v2": _GMM,
    "npu_rotary_position_embedding": SimpleNamespace(
        npu_rotary_position_embedding=operators.npu_rotary_position_embedding
    ),
    "npu_groupmatmul_add_fp32": SimpleNamespace(
        npu_groupmatmul_add_fp32=operators.npu_groupmatmul_add_fp32
    ),
    "npu_matmul_add_fp32": SimpleNamespace(npu_matmul_add_fp32=operators.npu_matmul_add_fp32),
    # MindSpeed-RL's offloader fetches it when it is made (megatron_off_loader.py:42) and calls it
    # with reuse_fp32_param only.
    "algorithm": SimpleNamespace(reuse_data_ptr=not_emulated("reuse_data_ptr (reuse_fp32_param)")),
}

CPU_LIBRARIES = (
    "mindspeed",
    "vllm",
)  # whose kernels for NPU tensors are Python, and run on CPU tensors


def load(name, *args, **kwargs):
    """Stands for torch.utils.cpp_extension.load.

    Raises:
        NotImplementedError: the extension is not emulated.
    """
    if name not in EXTENSIONS:
        known = ", ".join(sorted(EXTENSIONS))
        raise NotImplementedError(
            f"the Ascend extension {name!r} is not emulated: {known} are (docs/architecture.md)"
        )
    return EXTENSIONS[name]


def install() -> None:
    """Answer cpp_extension.load, and register kernels of `CPU_LIBRARIES` for CPU tensors. A second
    call does nothing.
    """
    if torch.utils.cpp_extension.load is load:
        return
    real_impl = torch.library.Library.impl
    cpu_key = {"PrivateUse1": "CPU", "AutogradPrivateUse1": "AutogradCPU"}

    def impl(self, op_name, fn, dispatch_key="", **kwargs):
        if self.ns in CPU_LIBRARIES:
            dispatch_key = cpu_key.get(dispatch_key, dispatch_key)
        return real_impl(
            self,
            op_name,
            converting(fn) if self.ns in CPU_LIBRARIES else fn,
            dispatch_key,
            **kwargs,
        )

    torch.library.Library.impl = impl
    torch.utils.cpp_extension.load = load
