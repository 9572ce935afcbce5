"""Stands for CANN's Python binding: how many NPUs there are (Ray's and MindSpeed-RL's
launcher.py:67) and which.
"""

import sys
from types import SimpleNamespace

from mindspeed_qerl.emulation import device_count, not_emulated, soc

rt = SimpleNamespace(
    get_device_count=lambda: (device_count(), 0), memcpy=not_emulated("acl.rt.memcpy (sleep mode)")
)
sys.modules["acl.rt"] = rt


def get_soc_name() -> str:
    """The die of an 910C names itself Ascend910_93; MindSpeed-LLM looks for 910B only
    (training/utils.py:508).
    """
    return soc()[0]
