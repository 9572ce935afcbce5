"""vllm-ascend's configuration, read only by a class of MindSpeed-RL that nothing makes
(vllm_adapter/fused_moe.py:386)."""

from mindspeed_qerl.emulation.extensions import not_emulated

get_ascend_config = not_emulated("vllm_ascend.ascend_config.get_ascend_config")
