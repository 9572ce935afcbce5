"""Rehearse a config for NPUs on this machine: its layout and arithmetic with a narrow model, for a
few steps (docs/ascend.md).
"""
