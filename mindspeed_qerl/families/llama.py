"""Llama 2 and its relatives (SmolLM2), dense: no biases, plain queries and keys. The NPU engine
lacks it.
"""

from mindspeed_qerl.families.base import Family

LLAMA = Family("llama", "LlamaForCausalLM", own_head_dim=True)
