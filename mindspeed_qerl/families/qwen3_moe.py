"""Qwen3-MoE: normalised queries and keys, heads of any width, experts in every layer."""

from mindspeed_qerl.families.base import Adaptor, Conversion, Family, ModelShape

QWEN3_MOE = Family(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    qk_norm=True,
    own_head_dim=True,
    experts=True,
    conversion=Conversion("convert_ckpt_v2.py", "qwen3-moe", ("--moe-grouped-gemm",)),
    adaptor=Adaptor("Qwen3MoeMVWeightAdaptor"),
    named=(
        ModelShape(
            "qwen3_30b_a3b",
            "qwen3_moe",
            48,
            2048,
            32,
            4,
            128,
            0,
            151936,
            1e6,
            False,
            40960,
            128,
            8,
            768,
            0,
            True,
        ),
        # rope_theta of the 2507 models is believed, not known: read_shape of the model's own
        # directory decides
        ModelShape(
            "qwen3_30b_a3b_2507",
            "qwen3_moe",
            48,
            2048,
            32,
            4,
            128,
            0,
            151936,
            1e7,
            False,
            262144,
            128,
            8,
            768,
            0,
            True,
        ),
    ),
)
