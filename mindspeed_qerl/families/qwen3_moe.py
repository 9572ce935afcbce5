"""Qwen3-MoE: normalised queries and keys, heads of any width, experts in every layer."""

from dataclasses import replace

from mindspeed_qerl.families.base import Adaptor, Conversion, Family, ModelShape

QWEN3_30B_A3B = ModelShape(
    "qwen3_30b_a3b",
    "qwen3_moe",
    num_hidden_layers=48,
    hidden_size=2048,
    num_attention_heads=32,
    num_key_value_heads=4,
    head_dim=128,
    intermediate_size=0,
    vocab_size=151936,
    rope_theta=1e6,
    tie_word_embeddings=False,
    max_position_embeddings=40960,
    num_experts=128,
    num_experts_per_tok=8,
    moe_intermediate_size=768,
    norm_topk_prob=True,
)
# rope_theta of the 2507 models is believed, not known: read_shape of the model's own directory
# decides
QWEN3_30B_A3B_2507 = replace(
    QWEN3_30B_A3B, name="qwen3_30b_a3b_2507", rope_theta=1e7, max_position_embeddings=262144
)
QWEN3_MOE = Family(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    qk_norm=True,
    own_head_dim=True,
    experts=True,
    conversion=Conversion("convert_ckpt_v2.py", "qwen3-moe", ("--moe-grouped-gemm",)),
    adaptor=Adaptor("Qwen3MoeMVWeightAdaptor"),
    named=(QWEN3_30B_A3B, QWEN3_30B_A3B_2507),
)
