"""Linear layers whose weights stay as they were loaded.

vLLM's CPU platform packs them after loading and drops the original, which the weight sync could then not write. And
vLLM gives v2 weight loaders to classes that it knows by name: the name of these is not among them, as on an NPU, and
MindSpeed-RL replaces the v1 loaders (megatron_weight_loaders.py).
"""

import torch.nn.functional as F
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod


class AscendUnquantizedLinearMethod(UnquantizedLinearMethod):
    def process_weights_after_loading(self, layer) -> None:
        pass

    def apply(self, layer, x, bias=None):
        return F.linear(x, layer.weight, bias)


class AscendUnquantizedEmbeddingMethod(UnquantizedEmbeddingMethod):
    def process_weights_after_loading(self, layer) -> None:
        pass

    def apply(self, layer, x, bias=None):
        return F.linear(x, layer.weight, bias)
