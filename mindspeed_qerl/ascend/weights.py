"""Training weights to vLLM weights, with the adapters: what upstream's weight adaptors and container lack.

Upstream merges a LoRA linear (`.base_layer.weight` + (alpha/r) B A, vllm_weight_container.py:469-488), but only where the adaptor asks
for the name with `.base_layer`, which the adaptors of Qwen3 and Qwen3-MoE do not (weight_adaptor.py:648,689). It copies the experts as they
are (:519), and has no adaptor for Qwen2-MoE.
"""

import re
from typing import Any

import torch
from mindspeed_rl.models.rollout.vllm_adapter import megatron_weight_loaders
from mindspeed_rl.workers.resharding import megatron_sharding_manager, weight_adaptor
from mindspeed_rl.workers.resharding.vllm_weight_container import MegatronStyleVllmWeightContainer
from mindspeed_rl.workers.resharding.weight_adaptor import Qwen3MoeMVWeightAdaptor, Qwen3MvWeightAdaptor, QwenMVWeightAdaptor

EXPERT_WEIGHT = re.compile(r"mlp\.experts\.weight[12]$")


def merge_experts(name: str, weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, rank: int, scaling: float) -> torch.Tensor:
    """W + scaling * A B for each local expert, in float32, rounded once to W's dtype.

    Args:
        name: ends in weight1 (up: h -> 2f, gate and up side by side) or weight2 (down: f -> h).
        weight, a, b: as MindSpeed-LLM keeps E experts in one matrix (tasks/posttrain/lora/moe/experts.py:437-468):
            weight1 [h, E*2f], a [h, r*E], b [r, E*2f]; weight2 [E*f, h], a [E*f, r], b [r*E, h], each the memory of [E, in, out].
        rank: r, the adapters' rank.
        scaling: alpha / r.

    Returns:
        a new tensor of weight's shape.
    """
    up = name.endswith("weight1")
    experts = a.shape[1] // rank if up else b.shape[0] // rank
    stacked = weight.view(experts, weight.shape[0], -1) if up else weight.view(experts, -1, weight.shape[1])
    a, b = a.view(experts, -1, rank).float(), b.view(experts, rank, -1).float()
    merged = torch.baddbmm(stacked.float(), a, b, alpha=scaling)
    return merged.to(weight.dtype).view(weight.shape)


class MergedExperts(dict):
    """Training parameters by name; an expert weight comes merged with its adapters, when it is asked for and not before: all of them
    at once would double the experts' memory."""

    def __init__(self, parameters: dict[str, torch.Tensor], rank: int, scaling: float):
        super().__init__(parameters)
        self.rank, self.scaling = rank, scaling

    def __getitem__(self, name: str) -> torch.Tensor:
        weight = super().__getitem__(name)
        if not EXPERT_WEIGHT.search(name) or f"{name}_lora_a" not in self:
            return weight
        with torch.no_grad():
            return merge_experts(name, weight, super().__getitem__(f"{name}_lora_a"), super().__getitem__(f"{name}_lora_b"),
                                 self.rank, self.scaling)


class LoRAWeights:
    """Mixed into an upstream adaptor: the names of LoRA's base layers, and merged experts."""

    def replace_name_i2t(self, inference_name: str) -> str:
        """The training name of vLLM's `inference_name`, with `.base_layer` where LoRA wraps the linear."""
        name = super().replace_name_i2t(inference_name)
        for target in self.model_config.lora_target_modules or ():
            name = re.sub(rf"\.{target}\.(weight|bias)$", rf".{target}.base_layer.\1", name)
        return name

    def adjust_megatron_param_dict(self, param_dict: dict[str, torch.Tensor], train_tp_size: int) -> dict[str, torch.Tensor]:
        """What the container reads the training weights from."""
        param_dict = super().adjust_megatron_param_dict(param_dict, train_tp_size)
        if not self.model_config.lora_target_modules:
            return param_dict
        return MergedExperts(param_dict, self.model_config.lora_r, self.model_config.lora_alpha / self.model_config.lora_r)


class Qwen2Adaptor(LoRAWeights, QwenMVWeightAdaptor):
    """Qwen2 and Qwen2.5, dense."""


class Qwen3Adaptor(LoRAWeights, Qwen3MvWeightAdaptor):
    """Qwen3, dense."""


class Qwen3MoeAdaptor(LoRAWeights, Qwen3MoeMVWeightAdaptor):
    """Qwen3-MoE."""


class Qwen2MoeAdaptor(LoRAWeights, Qwen3MoeMVWeightAdaptor):
    """Qwen2-MoE (Qwen1.5-MoE-A2.7B): Qwen3-MoE without q_norm and k_norm, with qkv biases, and with a shared expert and its gate.

    vLLM's model_executor/models/qwen2_moe.py names them `mlp.shared_expert.*` and `mlp.shared_expert_gate`; megatron-core's
    transformer/moe/shared_experts.py:100 keeps the gate as a bare parameter `gate_weight`.
    """

    def __init__(self, model_config: Any):
        super().__init__(model_config)
        self.params_mapping = [
            ("mlp.shared_experts.linear_fc1", "mlp.shared_expert.gate_up_proj"),
            ("mlp.shared_experts.linear_fc2", "mlp.shared_expert.down_proj"),
            ("mlp.shared_experts.gate_weight", "mlp.shared_expert_gate"),
            *self.params_mapping,
        ]

    def replace_name_i2t(self, inference_name: str) -> str:
        return super().replace_name_i2t(inference_name).replace(".gate_weight.weight", ".gate_weight")


class WeightContainer(MegatronStyleVllmWeightContainer):
    """Upstream's container; it splits the halves of a gated linear right also when LoRA wraps it."""

    def split_tp_params(self, param: torch.Tensor, name: str) -> torch.Tensor:
        """Upstream tests for "linear_fc1.weight" in the name (vllm_weight_container.py:706), which `.base_layer` would hide."""
        return super().split_tp_params(param, name.replace(".base_layer", ""))


ADAPTORS = {
    "Qwen2ForCausalLM": Qwen2Adaptor,
    "Qwen3ForCausalLM": Qwen3Adaptor,
    "Qwen3MoeForCausalLM": Qwen3MoeAdaptor,
    "Qwen2MoeForCausalLM": Qwen2MoeAdaptor,
}


def install() -> None:
    """Register the adaptors and the container in this process. vllm-ascend's model classes have the same names with Custom before."""
    for architecture, adaptor in ADAPTORS.items():
        for name in (architecture, f"Custom{architecture}"):
            weight_adaptor.WEIGHT_ADAPTOR_REGISTRY[name] = adaptor
            megatron_weight_loaders.MODEL_MEGATRON_WEIGHT_LOADER_REGISTRY.setdefault(
                name, megatron_weight_loaders.qwen_megatron_weight_loader)
    megatron_sharding_manager.MegatronStyleVllmWeightContainer = WeightContainer
