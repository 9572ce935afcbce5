"""Training weights to vLLM weights, adapters merged: what upstream's weight adaptors and container
lack.

Upstream's own LoRA sync fails for Qwen3 and Qwen3-MoE, whose adaptors do not know the names that
PEFT gives (weight_adaptor.py:648,689; KeyError in vllm_weight_container.py:465), copies grouped
experts without their adapters (:519), rounds B A and the sum separately to bfloat16, and has no
adaptor for Qwen2-MoE. Here the container sees a model without LoRA, by the names it has without,
and each weight it reads from it comes merged.
"""

from collections import UserDict
from collections.abc import Iterator

import torch
from mindspeed_rl.models.rollout.vllm_adapter import megatron_weight_loaders
from mindspeed_rl.workers.resharding import megatron_sharding_manager, weight_adaptor
from mindspeed_rl.workers.resharding.vllm_weight_container import MegatronStyleVllmWeightContainer
from torch import Tensor

from mindspeed_qerl.families import FAMILIES, Family
from mindspeed_qerl.lora.rounding import merged

from .merging import merge_experts


class MergedWeights(UserDict[str, Tensor]):
    """Training parameters by their names without LoRA; a weight comes merged with its adapter when
    it is asked for and not before: all of them at once would double the model's memory.
    """

    def __init__(self, parameters: dict[str, Tensor], rank: int, scaling: float):
        super().__init__(parameters)
        self.rank = rank
        self.scaling = scaling

    @torch.no_grad()
    def __getitem__(self, name: str) -> Tensor:
        weight = self.data[name]
        of_linear = name.removesuffix(".weight") + ".lora_{}.default.weight"
        if f"{name}_lora_a" in self:  # grouped experts
            a, b = (self.data[f"{name}_lora_{side}"] for side in "ab")
            result = merge_experts(weight, a, b, self.rank, self.scaling)
        elif of_linear.format("A") in self:
            a, b = (self.data[of_linear.format(side)] for side in "AB")
            result = merged(weight, b, a, self.scaling, getattr(weight, "dither", None))
        else:
            return weight
        for attribute in ("tensor_model_parallel", "partition_dim"):
            if hasattr(weight, attribute):
                setattr(result, attribute, getattr(weight, attribute))
        return result


def make_adaptor(family: Family) -> type:
    """Makes upstream's adaptor class of a family read merged weights, by further names.
    `model_config` has lora_r and lora_alpha (worker.py).
    """

    class FamilyAdaptor(getattr(weight_adaptor, family.adaptor)):
        def __init__(self, model_config):
            super().__init__(model_config)
            self.params_mapping = [*family.params_mapping, *self.params_mapping]

        def adjust_megatron_param_dict(self, param_dict, train_tp_size):
            """Called by the container before it reads (vllm_weight_container.py:459,516)."""
            parameters = super().adjust_megatron_param_dict(param_dict, train_tp_size)
            rank = self.model_config.lora_r
            return MergedWeights(parameters, rank, self.model_config.lora_alpha / rank)

        def replace_name_i2t(self, inference_name):
            name = super().replace_name_i2t(inference_name)
            # the gate of a shared expert is a parameter of its own, not the weight of a layer
            return name.replace(".gate_weight.weight", ".gate_weight")

    return FamilyAdaptor


class PlainNames:
    """A chunk of the training model by the names it has without LoRA (`.base_layer` left out); the
    adapters keep theirs.
    """

    def __init__(self, chunk: torch.nn.Module):
        # PEFT wraps the model
        self.chunk = chunk.base_model.model if hasattr(chunk, "base_model") else chunk
        self.named_buffers = self.chunk.named_buffers

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.chunk.named_parameters():
            yield name.replace(".base_layer.", "."), parameter


class WeightContainer(MegatronStyleVllmWeightContainer):
    """A container of upstream that reads the model through PlainNames."""

    def _unwrap_megatron_model(self, model):
        return [PlainNames(chunk) for chunk in super()._unwrap_megatron_model(model)]


def install() -> None:
    """Register the adaptors and the container in this process. vllm-ascend's model classes have the
    same names with Custom before.
    """
    adaptors = weight_adaptor.WEIGHT_ADAPTOR_REGISTRY
    loaders = megatron_weight_loaders.MODEL_MEGATRON_WEIGHT_LOADER_REGISTRY
    for family in FAMILIES.values():
        adaptor = make_adaptor(family)
        for name in (family.architecture, f"Custom{family.architecture}"):
            adaptors[name] = adaptor
            # upstream's own of Llama leaves lm_head out, tied or not
            loaders[name] = megatron_weight_loaders.qwen_megatron_weight_loader
    megatron_sharding_manager.MegatronStyleVllmWeightContainer = WeightContainer
