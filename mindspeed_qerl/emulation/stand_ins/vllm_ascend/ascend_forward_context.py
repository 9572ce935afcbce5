"""Names that MindSpeed-RL imports (vllm_adapter/fused_moe.py:27)."""


class FusedMoEState:
    pass
