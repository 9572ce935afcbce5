"""Qwen2 and Qwen2.5, dense: biases on the projections of queries, keys and values. MindSpeed-LLM
converts them as Llama 2 with biases.
"""

from mindspeed_qerl.families.base import Adaptor, Conversion, Family

OPTIONS = ("--use-mcore-models", "--model-type", "GPT", "--add-qkv-bias", "--params-dtype", "bf16")
QWEN2 = Family(
    "qwen2",
    "Qwen2ForCausalLM",
    qkv_bias=True,
    conversion=Conversion("convert_ckpt.py", "llama2", OPTIONS),
    adaptor=Adaptor("QwenMVWeightAdaptor"),
)
