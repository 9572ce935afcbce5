"""Stands for torchair: MindSpeed's op builders and vllm-ascend register graph converters when they
are imported; no graph is ever built.
"""

from mindspeed_qerl.emulation import not_emulated
from torchair import ge, scope  # noqa: F401

patch_for_hcom = not_emulated("torchair.patch_for_hcom")


def register_fx_node_ge_converter(*args, **kwargs):
    """A decorator that leaves the converter unregistered."""
    return lambda converter: converter
