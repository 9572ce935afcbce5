"""Quantised weights in the real vllm-ascend on emulated NPUs, as a process of its own for each
rank; the arguments are those of ascend_rollout.py, whose cases, prompts and answers these are.

Each format in turn, on the weights of the model's files: the parts of all ranks put together beside
the format of the whole tensors in the files; log-probs beside transformers with those; and what
`unlike` says of planted faults.
"""

import json
import os
import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch_npu  # noqa: F401
import w8a8
from ascend_rollout import Case, answers, prompts

INT8 = "int8_w8a8"
BY_INPUT = ("o_proj.weight", "down_proj.weight")


def linears(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Of a Hugging Face model."""
    return {name: weight for name, weight in weights.items() if name.endswith("_proj.weight")}


def rounded_twin(folder: str, dtype: torch.dtype, format: str, tp: int) -> torch.nn.Module:
    """transformers with the format's weights, and for int8 its formula."""
    from transformers import AutoModelForCausalLM

    from mindspeed_qerl.quantization.formats import FORMATS

    twin = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager"
    ).eval()
    for name, weight in linears(dict(twin.named_parameters())).items():
        if format == INT8:
            scale = weight.detach().float().abs().amax(1, keepdim=True) / 127
            module = twin.get_submodule(name.removesuffix(".weight"))
            integers = (weight.detach().float() / scale).round()
            twin.set_submodule(
                name.removesuffix(".weight"),
                w8a8.Linear(
                    {"weight": integers, "weight_scale": scale},
                    None if module.bias is None else module.bias.double(),
                    tp if name.endswith(BY_INPUT) else 1,
                ),
            )
        elif format:
            weight.data.copy_(FORMATS[format].weight(weight.detach().bfloat16()).bfloat16())
    return twin


def by_twin(twin: torch.nn.Module, found: list, case: Case, replica: int) -> list:
    """The same answers, with the twin's log-probs."""
    scored = []
    for ids, (tokens, _) in zip(prompts(case, replica), found):
        with torch.no_grad():
            of_tokens = (
                twin(torch.tensor([ids + tokens]))
                .logits[0, len(ids) - 1 : -1]
                .float()
                .log_softmax(-1)
            )
        scored.append((tokens, of_tokens.gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()))
    return scored


def distance(found: list, other: list) -> list[float]:
    """Of the log-probs of the same tokens."""
    return [
        abs(ours - theirs)
        for (_, of_ours), (_, of_theirs) in zip(found, other, strict=True)
        for ours, theirs in zip(of_ours, of_theirs, strict=True)
    ]


def of_layers(layers, methods: dict) -> dict[str, list[float]]:
    """The share of each layer's outputs, on random tokens, that are the formula's of its int8
    weights to the last bit of bfloat16, and the same of the layer with its own method. (Where an
    input is a tie, which half of amax is, the float32 and the float64 of the scale decide, and a
    token's outputs move.)
    """
    found: dict[str, list[float]] = {"of_layers": [], "of_layers_unquantised": []}
    for _, layer, weights in layers:
        x = torch.randn(
            7, layer.weight.shape[1], generator=torch.Generator().manual_seed(3)
        ).bfloat16()
        method, bias = layer.quant_method, layer.bias
        integers, scale = method.copy.weight.t(), method.copy.weight_scale[:, None]
        expected = w8a8.Linear(
            {"weight": integers, "weight_scale": scale}, None if bias is None else bias.double()
        )(x)
        for key, of_method in (("of_layers", method), ("of_layers_unquantised", methods[layer])):
            found[key].append((of_method.apply(layer, x, bias) == expected).float().mean().item())
    return found


def together(parts: dict[str, torch.Tensor], tp: int) -> dict[str, torch.Tensor]:
    """The weights of all ranks, of the tensors that tensor parallel ranks share joined."""
    of_ranks = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, parts)
    found = {}
    for name in {name for of_rank in of_ranks for name in of_rank}:
        holders = [of_rank[name] for of_rank in of_ranks if name in of_rank]
        dim = int(f"{name}.weight".endswith(BY_INPUT))
        found[f"{name}.weight"] = (
            holders[0] if ".experts." in name else torch.cat(holders[:tp], dim)
        )
    return found


def main(case: Case, folder: str, results: Path) -> None:
    dist.init_process_group("hccl")
    replica = int(os.environ["RANK"]) // case.tp
    os.environ["VLLM_DP_RANK"] = str(replica)
    from safetensors.torch import load_file
    from vllm import LLM

    from mindspeed_qerl.ascend.proof import held_layers, held_weights
    from mindspeed_qerl.ascend.quantized import (
        Int8Linear,
        QuantizedModel,
        set_method,
        used_weights,
    )
    from mindspeed_qerl.quantization.formats import FORMATS
    from mindspeed_qerl.quantization.weights import weight_errors
    from mindspeed_qerl.recipe.types import Quantization

    engine = LLM(
        folder,
        dtype=case.dtype,
        enforce_eager=True,
        max_model_len=1200,
        max_num_seqs=4,
        seed=0,
        skip_tokenizer_init=True,
        gpu_memory_utilization=0.3,
        distributed_executor_backend="external_launcher",
        enable_expert_parallel="moe" in case.family,
        tensor_parallel_size=case.tp,
        additional_config={"ascend_scheduler_config": {"enabled": True}},
    )
    model = engine.llm_engine.model_executor.driver_worker.worker.model_runner.get_model()
    files = linears(load_file(Path(folder) / "model.safetensors"))
    synced = {name: weight.clone() for name, weight in held_weights(model)}
    ask = partial(answers, engine, case, replica)
    plain, report = ask()[0], {}
    twin = partial(rounded_twin, folder, tp=case.tp)
    unrounded = twin(torch.float32, "")
    for format in case.quantised.split(","):
        quantized = QuantizedModel(model, Quantization(format))
        quantized.quantize()
        engine.reset_prefix_cache()
        found = ask()[0]
        exact, half = (
            by_twin(twin(dtype, format), found, case, replica)
            for dtype in (torch.float32, torch.bfloat16)
        )
        whole = linears(
            together({name: weight.clone() for name, weight in used_weights(model)}, case.tp)
        )
        expected = {
            name: FORMATS[format].weight(weight).to(whole[name].dtype)
            for name, weight in files.items()
        }
        squares = [None] * dist.get_world_size()
        dist.all_gather_object(squares, quantized.squares)
        parts = {key: value for of_rank in squares for key, value in of_rank.items()}
        of_report = report[format] = {
            "unequal": [name for name in expected if not torch.equal(expected[name], whole[name])],
            "missing": sorted(expected.keys() ^ whole.keys()),
            "worst": distance(found, exact),
            "own": distance(half, exact),
            "unmatched": distance(found, by_twin(unrounded, found, case, replica)),
            "errors": weight_errors((name, value) for (name, _), value in parts.items()),
            "unlike": quantized.unlike(synced),
            "int8_layers": sum(
                isinstance(getattr(module, "quant_method", None), Int8Linear)
                for module in model.modules()
            ),
        }
        if format == INT8:
            of_report |= of_layers(held_layers(model), quantized.methods)
        # planted: one weight that is not rounded, on this rank alone; one layer on its own method
        planted = [name for name in synced if name.endswith("_proj")][-1 - dist.get_rank()]
        _, layer, weights = next(entry for entry in held_layers(model) if planted in entry[2])
        if format == INT8:
            method = layer.quant_method
            set_method(layer, quantized.methods[layer])
            of_report["planted"] = [sorted(weights), sorted(quantized.unlike(synced))]
            set_method(layer, method)
        else:
            before = weights[planted].clone()
            weights[planted].copy_(synced[planted])
            of_report["planted"] = [[planted], quantized.unlike(synced)]
            weights[planted].copy_(before)
        of_report["unlike_after"] = quantized.unlike(synced)
        quantized.free()
        for name, weight in held_weights(model):
            weight.copy_(synced[name])
        engine.reset_prefix_cache()
        of_report["plain_again"] = ask()[0] == plain
    (results / f"{os.environ['RANK']}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main(Case(**json.loads(sys.argv[1])), sys.argv[2], Path(sys.argv[3]))
