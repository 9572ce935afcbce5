"""Routing is in ops/common_fused_moe.py; this name is for a class MindSpeed-RL never makes
(vllm_adapter/fused_moe.py:30)."""

from mindspeed_qerl.emulation.extensions import not_emulated

select_experts = not_emulated("vllm_ascend.ops.moe.experts_selector.select_experts")
