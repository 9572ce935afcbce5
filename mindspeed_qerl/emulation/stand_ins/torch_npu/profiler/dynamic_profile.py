"""Imported by vllm-ascend's worker (worker/worker_v1.py:27), called with MSMONITOR_USE_DAEMON only."""

from mindspeed_qerl.emulation import not_emulated

step = not_emulated("torch_npu.profiler.dynamic_profile.step (MSMONITOR_USE_DAEMON)")
