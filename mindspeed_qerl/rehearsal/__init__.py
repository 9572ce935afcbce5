"""Rehearse a config for NPUs on this machine: its layout and arithmetic with a narrow model, for a
few steps (docs/ascend.md).
"""

from mindspeed_qerl.rehearsal.prepare import prepare
from mindspeed_qerl.rehearsal.report import report

__all__ = ["prepare", "report"]
