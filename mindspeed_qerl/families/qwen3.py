"""Qwen3, dense: normalised queries and keys, heads of any width."""

from mindspeed_qerl.families.base import Adaptor, Conversion, Family, ModelShape

QWEN3 = Family(
    "qwen3",
    "Qwen3ForCausalLM",
    qk_norm=True,
    own_head_dim=True,
    conversion=Conversion("convert_ckpt_v2.py", "qwen3"),
    adaptor=Adaptor("Qwen3MvWeightAdaptor"),
    named=(
        ModelShape("qwen3_8b", "qwen3", 36, 4096, 32, 8, 128, 12288, 151936, 1e6, False, 40960),
        ModelShape("qwen3_32b", "qwen3", 64, 5120, 64, 8, 128, 25600, 151936, 1e6, False, 40960),
    ),
)
