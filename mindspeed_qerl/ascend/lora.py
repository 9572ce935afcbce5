"""LoRA on linear layers and on grouped experts: MindSpeed-LLM's classes, with merged weights in
bfloat16 (lora/adapters.py says why).

Import it only after Megatron is initialised: importing mindspeed_llm applies its patches by
sys.argv.

What is wrong with its experts (tasks/posttrain/lora/moe/experts.py,
core/transformer/moe/moe_layer.py):
- with expert parallelism two of the four adapter tensors (:505-506) would be averaged over ranks of
  other experts;
- `disable_adapter()` of PEFT does not reach them, so a reference that shares the backbone would
  keep them on;
- with tensor parallelism and moe_tp_extend_ep the experts would be split twice, and
  moe_layer.py:258 installs a dispatcher that knows nothing of it; the gradient norm would count
  adapter gradients of TP rank 0 only;
- a rank whose experts get no token fails on a shape (:627), since the base output is left out
  there;
- every target list adds adapters to the experts, also one without linear_fc1 and linear_fc2.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core import parallel_state
from mindspeed.core.transformer.moe.grouped_gemm_util import Ops
from mindspeed.core.transformer.moe.moe_feature.adaptor import (
    MindSpeedMOEAlltoAllSEQTptoEpTokenDispatcher,
)
from mindspeed_llm.core.transformer.moe import moe_layer
from mindspeed_llm.tasks.posttrain.lora import lora_moe
from mindspeed_llm.tasks.posttrain.lora.moe import experts
from torch import Tensor

from mindspeed_qerl.lora.adapters import StraightThrough, call_merged
from mindspeed_qerl.lora.checkpoint import EXPERTS
from mindspeed_qerl.lora.rounding import merged

from .merging import merge_experts


class LinearLoRA(lora_moe.LoraParallelLinearMoE):
    """A linear layer and its adapter; where its weight has random bits (merging.py) it multiplies
    with what the weight sync sends to vLLM.
    """

    # W + (alpha / r) B A of this rank's part, once merged
    merged_weight: Tensor | None = None

    def forward(self, x: Tensor, *args: Any, **kwargs: Any):
        if self.disable_adapters or not hasattr(self.base_layer.weight, "dither"):
            return super().forward(x, *args, **kwargs)
        self.merge_once()
        return call_merged(self.base_layer, self.merged_weight, self._update, x, *args, **kwargs)

    def _update(self, x: Tensor) -> Tensor:
        low = _output(self.lora_A["default"](x))
        return _output(self.lora_B["default"](self.scaling["default"] * low))

    @torch.no_grad()
    def merge_once(self) -> None:
        """Merge, unless it was done since `forget_merged`."""
        weight = self.base_layer.weight
        if self.merged_weight is None and hasattr(weight, "dither"):
            b = self.lora_B["default"].weight
            a = self.lora_A["default"].weight
            self.merged_weight = merged(weight, b, a, self.scaling["default"], weight.dither)

    def forget_merged(self) -> None:
        """Free it: the adapter changes."""
        self.merged_weight = None


def _output(result: Any) -> Tensor:
    """Returns a linear layer's output: torch's return it, Megatron's return (output, bias)."""
    return result[0] if isinstance(result, tuple) else result


class ExpertLoRA(experts.LoraParallelGroupedMLP):
    """E local experts, y = W2 act(W1 x) with W + (alpha/r) A B in the place of W; A, B per expert.
    With the config's moe_tp_extend_ep whole experts are spread over the TP ranks, and nothing is
    split.
    """

    adapters_enabled = True

    def __init__(self, num_local_experts: int, config: Any, lora_config: Any):
        with _whole_experts(config.moe_tp_extend_ep):
            super().__init__(num_local_experts, config, lora_config)
        self.merged_weights = {}  # by name, W + (alpha / r) A B, once merged
        self.adapted = [
            weight for weight, target in EXPERTS.items() if target in lora_config.target_modules
        ]
        for name, parameter in self.named_parameters():
            if "lora" in name:
                parameter.allreduce = not self.expert_parallel
                # no TP rank holds a copy: each rank's share counts in the gradient norm
                parameter.tensor_model_parallel = True
                parameter.requires_grad_(name.split("_")[0] in self.adapted)

    def forward(self, hidden, tokens_per_expert, probs, ctx=None):
        """Computes what upstream does, without its fused variants: ([tokens, h], None). hidden:
        [tokens, h], sorted by expert. tokens_per_expert: int64 [E]. probs: [tokens], applied before
        the down projection, as Megatron does.
        """
        up = self._linear(hidden, "weight1", tokens_per_expert)
        activated = self.activation_func_with_probs(up, probs.unsqueeze(-1))
        return self._linear(activated, "weight2", tokens_per_expert), None

    def _linear(self, x: Tensor, name: str, tokens_per_expert: Tensor) -> Tensor:
        experts = self.num_local_experts
        width = x.shape[1]
        weight = getattr(self, name)
        is_adapted = name in self.adapted and self.adapters_enabled
        is_merged = is_adapted and hasattr(weight, "dither")
        if is_merged:
            self.merge_once()
            weight = self.merged_weights[name]
        y = _grouped(x, weight.view(experts, width, -1), tokens_per_expert)
        if not is_adapted or (is_merged and not torch.is_grad_enabled()):
            return y
        a = getattr(self, f"{name}_lora_a").view(experts, width, self.lora_r)
        b = getattr(self, f"{name}_lora_b").view(experts, self.lora_r, -1)
        low = _grouped(x.detach() if is_merged else x, a, tokens_per_expert)
        update = _grouped(self.scaling * low, b, tokens_per_expert)
        return StraightThrough.apply(y, update) if is_merged else y + update

    @torch.no_grad()
    def merge_once(self) -> None:
        """Merge, unless it was done since `forget_merged`."""
        for name in self.adapted:
            weight = getattr(self, name)
            if name not in self.merged_weights and hasattr(weight, "dither"):
                a = getattr(self, f"{name}_lora_a")
                b = getattr(self, f"{name}_lora_b")
                self.merged_weights[name] = merge_experts(weight, a, b, self.lora_r, self.scaling)

    def forget_merged(self) -> None:
        """Free them: the adapters change."""
        self.merged_weights.clear()


def _grouped(x: Tensor, weights: Tensor, tokens_per_expert: Tensor) -> Tensor:
    """x [tokens, in] by each token's expert in weights [E, in, out]. Without tokens too the
    parameters get a gradient, of zeros: the gradient reduction waits for it.
    """
    if x.shape[0] == 0:
        return x @ weights[0]
    return Ops.gmm(x, weights, tokens_per_expert, trans_b=False)


@contextmanager
def _whole_experts(tp_extends_ep: bool) -> Iterator[None]:
    """Expert tensor parallel size 1 while experts are built, as MindSpeed does for those without
    LoRA (core/transformer/moe/moe_feature/tp_extend_ep/experts.py:31-35).
    """
    size = parallel_state._MPU_EXPERT_TENSOR_PARALLEL_WORLD_SIZE
    if tp_extends_ep:
        parallel_state._MPU_EXPERT_TENSOR_PARALLEL_WORLD_SIZE = 1
    try:
        yield
    finally:
        parallel_state._MPU_EXPERT_TENSOR_PARALLEL_WORLD_SIZE = size


def install(tensor_parallel: int, has_experts: bool) -> None:
    """Put the classes, and with tensor parallelism the dispatcher that fits, where
    `model_provider_func_wrapper` and `lora_moe_layer_init` look them up when they run. (With one
    rank of TP x EP that dispatcher fails, token_dispatcher.py:154; the one that upstream installs
    is right at TP = 1.)
    """
    lora_moe.LoraParallelLinearMoE = LinearLoRA
    experts.LoraParallelGroupedMLP = ExpertLoRA
    if has_experts and tensor_parallel > 1:
        moe_layer.MoEAlltoAllSEQTokenDispatcher = MindSpeedMOEAlltoAllSEQTptoEpTokenDispatcher
