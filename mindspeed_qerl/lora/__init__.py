"""Low-rank adapters on megatron-core layers."""

from mindspeed_qerl.lora.adapters import LoRALinear, adapters_disabled, apply_lora, lora_layers

__all__ = ["LoRALinear", "adapters_disabled", "apply_lora", "lora_layers"]
