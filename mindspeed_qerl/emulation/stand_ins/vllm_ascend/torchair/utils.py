"""Names that MindSpeed-RL imports (vllm_adapter/fused_moe.py:33)."""

from mindspeed_qerl.emulation.extensions import not_emulated

npu_wait_tensor = not_emulated("npu_wait_tensor (torchair graphs)")
super_kernel = not_emulated("super_kernel (torchair graphs)")
