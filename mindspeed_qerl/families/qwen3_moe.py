"""Qwen3-MoE: normalised queries and keys, heads of any width, experts in every layer."""

from mindspeed_qerl.families.base import Adaptor, Conversion, Family

QWEN3_MOE = Family(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    qk_norm=True,
    own_head_dim=True,
    experts=True,
    conversion=Conversion("convert_ckpt_v2.py", "qwen3-moe", ("--moe-grouped-gemm",)),
    adaptor=Adaptor("Qwen3MoeMVWeightAdaptor"),
)
