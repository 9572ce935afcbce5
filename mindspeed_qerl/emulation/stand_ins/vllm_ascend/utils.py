"""The classes that take the place of vLLM's, and names that MindSpeed-RL imports (vllm_adapter/fused_moe.py:32)."""

import contextlib
import enum


class AscendSocVersion(enum.Enum):
    A2 = 0
    A3 = 1
    UNDEFINED = 2


def get_ascend_soc_version() -> AscendSocVersion:
    return AscendSocVersion.A3


def dispose_tensor(tensor) -> None:
    """Frees device memory early; there is none."""


def npu_stream_switch(*args, **kwargs):
    return contextlib.nullcontext()


def register_ascend_customop(vllm_config=None) -> None:
    """Let vLLM make our class wherever a model asks for its own (VA utils.py, the same name)."""
    from vllm.model_executor.custom_op import CustomOp
    from vllm.model_executor.layers import linear, vocab_parallel_embedding

    from vllm_ascend.ops.common_fused_moe import AscendFusedMoE, AscendUnquantizedFusedMoEMethod
    from vllm_ascend.ops.layernorm import AscendRMSNorm
    from vllm_ascend.ops.linear import AscendUnquantizedEmbeddingMethod, AscendUnquantizedLinearMethod

    classes = {
        "RMSNorm": AscendRMSNorm,
        "FusedMoE": AscendFusedMoE,
        "UnquantizedFusedMoEMethod": AscendUnquantizedFusedMoEMethod,
    }
    for name, ours in classes.items():
        if name not in CustomOp.op_registry_oot:
            CustomOp.register_oot(_decorated_op_cls=ours, name=name)
    linear.UnquantizedLinearMethod = AscendUnquantizedLinearMethod
    vocab_parallel_embedding.UnquantizedEmbeddingMethod = AscendUnquantizedEmbeddingMethod
