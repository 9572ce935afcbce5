"""Qwen3, dense: normalised queries and keys, heads of any width."""

from mindspeed_qerl.families.base import Adaptor, Conversion, Family

QWEN3 = Family(
    "qwen3",
    "Qwen3ForCausalLM",
    qk_norm=True,
    own_head_dim=True,
    conversion=Conversion("convert_ckpt_v2.py", "qwen3"),
    adaptor=Adaptor("Qwen3MvWeightAdaptor"),
)
