"""Stands for CANN's Python binding: how many NPUs there are (Ray's and MindSpeed-RL's launcher.py:67) and which."""

from types import SimpleNamespace

from mindspeed_qerl.emulation import device_count

rt = SimpleNamespace(get_device_count=lambda: (device_count(), 0))


def get_soc_name() -> str:
    """The die of an 910C names itself Ascend910_93; MindSpeed-LLM looks for 910B only (training/utils.py:508)."""
    return "Ascend910_9392"
