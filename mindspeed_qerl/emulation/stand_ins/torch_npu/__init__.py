"""Stands for torch_npu: importing it turns torch into an emulated NPU; its operators are the
functions called npu_... and _npu_... of emulation/.

One that is not emulated can be read, as code does that asks whether it exists, and raises
NotImplementedError when called.
"""

import sys
from types import ModuleType

import torch

from mindspeed_qerl.emulation import (
    attention,
    counts,
    experts,
    extensions,
    facade,
    formats,
    fused_infer,
    graphs,
    mc2,
    not_emulated,
    operators,
    paged,
    quantized,
    serving,
    soc,
)
from mindspeed_qerl.emulation.formats import get_npu_format  # noqa: F401

for _module in (
    attention,
    experts,
    formats,
    fused_infer,
    mc2,
    operators,
    paged,
    quantized,
    serving,
):
    globals().update(
        {name: value for name, value in vars(_module).items() if name.startswith(("npu_", "_npu_"))}
    )

facade.install()
extensions.install()
if counts.is_wanted:
    counts.install(globals())
graphs.install(globals())

from torch_npu import _C, npu, op_plugin, profiler, utils, version  # noqa: F401

torch.npu = npu
for _name in ("", ".streams", ".memory"):
    sys.modules[f"torch.npu{_name}"] = sys.modules[f"torch_npu.npu{_name}"]

__version__ = version.__version__

# Written where vllm-ascend is installed (setup.py:62); its compiled extension, which sleep mode
# needs, is not there.
_build_info = ModuleType("vllm_ascend._build_info")
_build_info.__soc_version__ = soc()[0]
_build_info.__sleep_mode_enabled__ = False
sys.modules["vllm_ascend._build_info"] = _build_info


def __getattr__(name: str):
    if not name.startswith(("npu_", "_npu_", "atb")):
        raise AttributeError(f"the emulated torch_npu has no {name} (docs/architecture.md)")
    return not_emulated(f"torch_npu.{name}")
