"""Quantized weights in the real vllm-ascend on emulated NPUs (test_quantized.py): each format in
turn, on the weights of the model's files: the parts of all ranks put together beside the format of
the whole tensors in the files; log-probs beside transformers with those; and what the proof's
comparison says of planted faults.
"""

from pathlib import Path

import torch
import torch.distributed as dist
from ascend_rollout import Case, Served
from safetensors.torch import load_file
from torch.nn.functional import linear
from transformers import AutoModelForCausalLM

from mindspeed_qerl.ascend.proof import copied_weights, held_weights
from mindspeed_qerl.ascend.quantized import (
    Int8Linear,
    QuantizedModel,
    layer_of,
    set_method,
    used_weights,
)
from mindspeed_qerl.quantization.formats import FORMATS
from mindspeed_qerl.quantization.weights import weight_errors

INT8 = "int8_w8a8"
BY_INPUT = ("o_proj.weight", "down_proj.weight")


class Linear(torch.nn.Module):
    """W8A8 as a formula: in and out in the input's dtype, in between float64. parts: of the inputs,
    each of which a rank rounds by a scale of its own.
    """

    def __init__(self, integers, scale, bias: torch.Tensor | None, parts: int = 1):
        super().__init__()
        self.integers, self.scale, self.parts = integers.double(), scale.double()[:, 0], parts
        self.bias = 0.0 if bias is None else bias.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.bias
        chunks = (wide.chunk(self.parts, -1) for wide in (x.double(), self.integers))
        for part, integers in zip(*chunks, strict=True):
            scale = part.abs().amax(-1, keepdim=True) / 127
            out = out + linear((part / scale).round(), integers) * self.scale * scale
        return out.to(x.dtype)


def linears(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Of a Hugging Face model."""
    return {name: weight for name, weight in weights.items() if name.endswith("_proj.weight")}


def rounded_twin(folder: str, dtype: torch.dtype, format: str, tp: int) -> torch.nn.Module:
    """transformers with the format's weights, and for int8 its formula."""
    twin = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager"
    ).eval()
    for name, weight in linears(dict(twin.named_parameters())).items():
        if format == INT8:
            scale = weight.detach().float().abs().amax(1, keepdim=True) / 127
            integers, parts = (weight.detach().float() / scale).round(), 1
            if name.endswith(BY_INPUT):
                parts = tp
            module = name.removesuffix(".weight")
            bias = twin.get_submodule(module).bias
            twin.set_submodule(module, Linear(integers, scale, bias, parts))
        elif format:
            weight.data.copy_(FORMATS[format].weight(weight.detach().bfloat16()).bfloat16())
    return twin


def gathered(value):
    """That of each rank."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def together(parts: dict[str, torch.Tensor], tp: int) -> dict[str, torch.Tensor]:
    """The weights of all ranks, of the tensors that tensor parallel ranks share joined."""
    ranks, whole = gathered(parts), {}
    for name in set().union(*ranks):
        held = [rank[name] for rank in ranks if name in rank]
        dim = int(name.endswith(BY_INPUT))
        whole[name] = held[0] if ".experts." in name else torch.cat(held[:tp], dim)
    return linears(whole)


def unlike(quantized: QuantizedModel, synced: dict[str, torch.Tensor]) -> list[str]:
    """As worker.py's proof finds weights that are not the rounding of `synced`."""
    used, rounded = quantized.used(), quantized.rounded(synced)
    return [name for name in used if not torch.equal(used[name], rounded[name])]


def main(case: Case, folder: str) -> dict:
    served, report = Served(case, folder), {}
    model, files = served.model, linears(load_file(Path(folder) / "model.safetensors"))
    synced = copied_weights(model)
    plain, unrounded = served.answers()[0], rounded_twin(folder, torch.float32, "", case.tp)
    for format in case.formats:
        quantized = QuantizedModel(model, format)
        quantized.quantize()
        answers = served.answers()[0]
        exact, half = (
            rounded_twin(folder, dtype, format, case.tp)
            for dtype in (torch.float32, torch.bfloat16)
        )
        whole = together({name: weight.clone() for name, weight in used_weights(model)}, case.tp)
        unequal = []
        for name, weight in files.items():
            expected = FORMATS[format].weight(weight).to(whole[name].dtype)
            if not torch.equal(expected, whole[name]):
                unequal.append(name)
        squares = {
            key: value for rank in gathered(quantized.squares) for key, value in rank.items()
        }
        methods = [getattr(module, "quant_method", None) for module in model.modules()]
        found = report[format] = {
            "unequal": unequal,
            "missing": sorted(files.keys() ^ whole.keys()),
            "worst": served.distance(answers, exact).tolist(),
            "own": served.distance(answers, half, exact).tolist(),
            "unmatched": served.distance(answers, unrounded).tolist(),
            "errors": weight_errors((name, value) for (name, _), value in squares.items()),
            "unlike": unlike(quantized, synced),
            "int8_layers": sum(isinstance(method, Int8Linear) for method in methods),
        }
        # planted: one weight that is not rounded, on this rank alone; one layer on its own method
        planted = [name for name in synced if name.endswith("_proj.weight")][-1 - dist.get_rank()]
        held = {each.name: each for each in held_weights(model)}
        parameter = held[planted].parameter
        layer, weight = layer_of(model, parameter), held[planted].part
        method, before = layer.quant_method, weight.clone()
        if format == INT8:
            set_method(layer, quantized.methods[layer])
            fused = sorted(name for name, each in held.items() if each.parameter == parameter)
            found["planted"] = [fused, sorted(unlike(quantized, synced))]
            set_method(layer, method)
        else:
            weight.copy_(synced[planted])
            found["planted"] = [[planted], unlike(quantized, synced)]
            weight.copy_(before)
        quantized.free()
        for each in held_weights(model):
            each.part.copy_(synced[each.name])
        found["plain_again"] = served.answers()[0] == plain
    return report
