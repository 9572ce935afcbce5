"""Tiny models in W8A8 as msmodelslim writes them for vllm-ascend, and their formula for
transformers.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import linear

OFFSET = 3  # of the input's integers


def quantise(model: Path, folder: Path, kind: str) -> Path:
    """The model with its layers' linear weights in int8, a scale a row. kind: vllm-ascend's name.
    W8A8: inputs by one scale and offset, calibrated here. W8A8_DYNAMIC: inputs by a scale a row;
    and the norms of the layers have a bias, as msmodelslim's anti_method m4 makes.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    twin = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    largest, generator = _largest_inputs(twin), torch.Generator().manual_seed(1)
    weights, description = {}, {}
    for name, weight in twin.state_dict().items():
        module, _, part = name.rpartition(".")
        description[name] = "FLOAT"
        weights[name] = weight.bfloat16()
        if module in largest and part == "weight":
            description[name] = kind
            scale = (weight.abs().amax(1, keepdim=True) / 127).bfloat16()
            rows = (weight / scale.float()).round().clamp(-127, 127)
            weights |= {
                name: rows.to(torch.int8),
                f"{module}.weight_scale": scale,
                f"{module}.weight_offset": torch.zeros_like(scale),
            }
            if kind == "W8A8":
                of_input = (2 * largest[module] / 127).bfloat16().reshape(1)
                dequantise = of_input.float() * scale.float()[:, 0]
                bias = (
                    twin.state_dict().get(f"{module}.bias", torch.zeros(len(weight))) / dequantise
                )
                weights |= {
                    f"{module}.input_scale": of_input,
                    f"{module}.deq_scale": dequantise,
                    f"{module}.input_offset": torch.tensor([OFFSET], dtype=torch.int8),
                    f"{module}.quant_bias": (bias - OFFSET * rows.sum(1)).round().int(),
                }
        if kind == "W8A8_DYNAMIC" and part == "weight" and module.endswith("_layernorm"):
            weights[f"{module}.bias"] = (
                0.1 * torch.randn(weight.shape, generator=generator).bfloat16()
            )
            description["norm.bias"] = "FLOAT"
    twin.config.save_pretrained(folder)
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    save_file(
        {name: weight.contiguous() for name, weight in weights.items()},
        folder / "model.safetensors",
    )
    (folder / "quant_model_description.json").write_text(json.dumps(description))
    return folder


def _largest_inputs(twin: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Name of each linear layer inside the layers -> its largest input over some tokens, the same
    for the parts of what vLLM makes one layer of.
    """
    largest, hooks = {}, []
    for name, module in twin.named_modules():
        if isinstance(module, torch.nn.Linear) and ".layers." in name:
            hooks.append(
                module.register_forward_pre_hook(
                    lambda _, inputs, name=name: largest.update({name: inputs[0].abs().max()})
                )
            )
    with torch.no_grad():
        twin(torch.arange(1, 101)[None])
    for hook in hooks:
        hook.remove()
    return largest


class Linear(torch.nn.Module):
    """W8A8 as a formula: in and out in the input's dtype, in between float64. parts: of the inputs,
    each of which a rank rounds by a scale of its own.
    """

    def __init__(self, weights: dict[str, torch.Tensor], bias: torch.Tensor | None, parts: int = 1):
        super().__init__()
        self.parts = parts
        self.of, self.bias = {name: weight.double() for name, weight in weights.items()}, bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide, of = x.double(), self.of
        if "deq_scale" in of:
            integers = (wide / of["input_scale"] + of["input_offset"]).round().clamp(-128, 127)
            return ((linear(integers, of["weight"]) + of["quant_bias"]) * of["deq_scale"]).to(
                x.dtype
            )
        out = 0
        for part, weight in zip(
            wide.chunk(self.parts, -1), of["weight"].chunk(self.parts, -1), strict=True
        ):
            scale = part.abs().amax(-1, keepdim=True) / 127
            out = out + linear((part / scale).round(), weight) * of["weight_scale"][:, 0] * scale
        return (out if self.bias is None else out + self.bias).to(x.dtype)


def load(folder: Path, dtype: torch.dtype) -> torch.nn.Module:
    """transformers' model with the weights in `folder`, and the formula in the place of its linear
    layers.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    twin = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager").eval()
    weights = load_file(Path(folder) / "model.safetensors")
    for name, module in list(twin.named_modules()):
        of = {
            key.rpartition(".")[2]: weights.pop(key)
            for key in list(weights)
            if key.rpartition(".")[0] == name
        }
        if of.get("weight") is not None and of["weight"].dtype == torch.int8:
            bias = of.pop("bias", None)
            twin.set_submodule(name, Linear(of, None if bias is None else bias.double()))
            continue
        if name.endswith("layernorm") and "bias" in of:
            bias = of.pop("bias")
            module.register_forward_hook(lambda _, inputs, out, bias=bias: out + bias.to(out.dtype))
        for part, weight in of.items():
            getattr(module, part).data.copy_(weight)
    assert not weights, sorted(weights)
    return twin
