"""Qwen2 and Qwen2.5, dense: biases on the projections of queries, keys and values. MindSpeed-LLM
converts them as Llama 2 with biases.
"""

from mindspeed_qerl.families.base import Adaptor, Conversion, Family, ModelShape

OPTIONS = ("--use-mcore-models", "--model-type", "GPT", "--add-qkv-bias", "--params-dtype", "bf16")
QWEN2 = Family(
    "qwen2",
    "Qwen2ForCausalLM",
    qkv_bias=True,
    conversion=Conversion("convert_ckpt.py", "llama2", OPTIONS),
    adaptor=Adaptor("QwenMVWeightAdaptor"),
    named=(
        ModelShape("qwen25_1_5b", "qwen2", 28, 1536, 12, 2, 128, 8960, 151936, 1e6, True, 32768),
        ModelShape("qwen25_7b", "qwen2", 28, 3584, 28, 4, 128, 18944, 152064, 1e6, False, 32768),
        ModelShape("qwen25_32b", "qwen2", 64, 5120, 40, 8, 128, 27648, 152064, 1e6, False, 32768),
    ),
)
