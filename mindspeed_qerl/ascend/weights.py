"""Training weights to vLLM weights, adapters merged: what upstream's weight adaptors and container
lack.

Upstream's own LoRA sync fails for Qwen3 and Qwen3-MoE, whose adaptors do not know the names that
PEFT gives (weight_adaptor.py:648,689; KeyError in vllm_weight_container.py:465), copies grouped
experts without their adapters (:519), rounds B A and the sum separately to bfloat16, and has no
adaptor for Qwen2-MoE. Here the container sees a model without LoRA, by the names it has without,
and each weight it reads from it comes merged.
"""

import re
from collections.abc import Iterator

import torch
from mindspeed_rl.models.rollout.vllm_adapter import megatron_weight_loaders
from mindspeed_rl.workers.resharding import megatron_sharding_manager, weight_adaptor
from mindspeed_rl.workers.resharding.vllm_weight_container import MegatronStyleVllmWeightContainer

from mindspeed_qerl.families import FAMILIES
from mindspeed_qerl.families.base import Adaptor

EXPERT_WEIGHT = re.compile(r"mlp\.experts\.weight[12]$")


def merge_experts(
    name: str, weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, rank: int, scaling: float
) -> torch.Tensor:
    """W + scaling * A B for each local expert, in float32, rounded once to W's dtype; `name` ends
    in weight1 (up: h -> 2f, gate and up side by side) or weight2 (down: f -> h).

    MindSpeed-LLM keeps E experts in one matrix (tasks/posttrain/lora/moe/experts.py:437-468):
    weight1 [h, E*2f], a [h, r*E], b [r, E*2f]; weight2 [E*f, h], a [E*f, r], b [r*E, h], each the
    memory of [E, in, out].
    """
    if name.endswith("weight1"):
        stacked = weight.view(a.shape[1] // rank, weight.shape[0], -1)
    else:
        stacked = weight.view(b.shape[0] // rank, -1, weight.shape[1])
    experts = len(stacked)
    a, b = a.view(experts, -1, rank).float(), b.view(experts, rank, -1).float()
    return torch.baddbmm(stacked.float(), a, b, alpha=scaling).to(weight.dtype).view(weight.shape)


class MergedWeights(dict):
    """Training parameters by their names without LoRA; a weight comes merged with its adapter when
    it is asked for and not before: all of them at once would double the model's memory.
    """

    def __init__(self, parameters: dict[str, torch.Tensor], rank: int, scaling: float):
        super().__init__(parameters)
        self.rank, self.scaling = rank, scaling

    @torch.no_grad()
    def __getitem__(self, name: str) -> torch.Tensor:
        weight, linear = super().__getitem__(name), name.removesuffix(".weight")
        if EXPERT_WEIGHT.search(name) and f"{name}_lora_a" in self:
            a, b = self[f"{name}_lora_a"], self[f"{name}_lora_b"]
            merged = merge_experts(name, weight, a, b, self.rank, self.scaling)
        elif f"{linear}.lora_A.default.weight" in self:
            a = self[f"{linear}.lora_A.default.weight"].float()  # [r, in]
            b = self[f"{linear}.lora_B.default.weight"].float()  # [out, r]
            merged = torch.addmm(weight.float(), b, a, alpha=self.scaling).to(weight.dtype)
        else:
            return weight
        for attribute in ("tensor_model_parallel", "partition_dim"):
            if hasattr(weight, attribute):
                setattr(merged, attribute, getattr(weight, attribute))
        return merged


def make_adaptor(description: Adaptor) -> type:
    """Upstream's adaptor class of that name, with further names, reading merged weights.
    `model_config` has lora_r and lora_alpha (worker.py).
    """

    class FamilyAdaptor(getattr(weight_adaptor, description.base)):
        def __init__(self, model_config):
            super().__init__(model_config)
            self.params_mapping = [*description.params_mapping, *self.params_mapping]

        def adjust_megatron_param_dict(self, param_dict, train_tp_size):
            """Called by the container before it reads (vllm_weight_container.py:459,516)."""
            parameters = super().adjust_megatron_param_dict(param_dict, train_tp_size)
            rank = self.model_config.lora_r
            return MergedWeights(parameters, rank, self.model_config.lora_alpha / rank)

        def replace_name_i2t(self, inference_name):
            name = super().replace_name_i2t(inference_name)
            for wrong, right in description.corrections:
                name = name.replace(wrong, right)
            return name

    return FamilyAdaptor


class PlainNames:
    """A chunk of the training model by the names it has without LoRA (`.base_layer` left out); the
    adapters keep theirs.
    """

    def __init__(self, chunk: torch.nn.Module):
        # PEFT wraps the model
        self.chunk = chunk.base_model.model if hasattr(chunk, "base_model") else chunk
        self.named_buffers = self.chunk.named_buffers

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self.chunk.named_parameters():
            yield name.replace(".base_layer.", "."), parameter


class WeightContainer(MegatronStyleVllmWeightContainer):
    """Upstream's container, reading the model through PlainNames."""

    def _unwrap_megatron_model(self, model):
        return [PlainNames(chunk) for chunk in super()._unwrap_megatron_model(model)]


def install() -> None:
    """Register the adaptors and the container in this process. vllm-ascend's model classes have the
    same names with Custom before.
    """
    adaptors = weight_adaptor.WEIGHT_ADAPTOR_REGISTRY
    loaders = megatron_weight_loaders.MODEL_MEGATRON_WEIGHT_LOADER_REGISTRY
    for family in FAMILIES.values():
        if not family.adaptor:
            continue
        adaptor = make_adaptor(family.adaptor)
        for name in (family.architecture, f"Custom{family.architecture}"):
            adaptors[name] = adaptor
            loaders.setdefault(name, megatron_weight_loaders.qwen_megatron_weight_loader)
    megatron_sharding_manager.MegatronStyleVllmWeightContainer = WeightContainer
