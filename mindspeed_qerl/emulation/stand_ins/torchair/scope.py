"""What vllm-ascend imports of it (torchair/utils.py)."""

from mindspeed_qerl.emulation import not_emulated

super_kernel, limit_core_num, npu_stream_switch, npu_wait_tensor = (
    not_emulated(f"torchair.scope.{name}")
    for name in ("super_kernel", "limit_core_num", "npu_stream_switch", "npu_wait_tensor")
)
