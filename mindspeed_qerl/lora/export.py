"""Adapters as a PEFT adapter, or merged into a Hugging Face model: with the base model's tensor
names, which every tool knows.
"""

import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from mindspeed_qerl.common.files import json_text, new_directory
from mindspeed_qerl.families.checkpoint import Checkpoint
from mindspeed_qerl.families.fingerprint import weights_digest

from .checkpoint import Adapters
from .proof import join, movement
from .rounding import dither_of, rounded

WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"}


def save_peft(adapters: Adapters, base_model_dir: str | Path, out_dir: str | Path) -> None:
    """Write adapter_model.safetensors and adapter_config.json.

    Experts are written one by one (`mlp.experts.3.gate_proj`), as in the checkpoints of Qwen. PEFT
    with transformers 4 has a module for each; with transformers 5 PEFT stacks them on loading; vLLM
    packs them (lora/lora_weights.py:pack_moe), except in versions without LoRA for fused experts,
    such as 0.11. For the adapter of a Qwen2-MoE vLLM's max_lora_rank must be 2 r, and PEFT older
    than 0.17 refuses it, because of `target_parameters`: a merged model is of more use there.

    Args:
        base_model_dir: the Hugging Face model that was trained, in safetensors. out_dir: not there
            yet, or empty.

    Raises:
        ValueError: the adapters do not fit the base model; the message names the tensor.
        FileExistsError: `out_dir` holds something.
    """
    _check_fit(adapters, Checkpoint(base_model_dir))
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(Path(base_model_dir).resolve()),
        "r": adapters.rank,
        "lora_alpha": adapters.alpha,
        "inference_mode": True,
        "target_modules": sorted({module.rpartition(".")[2] for module in adapters.weights}),
    }
    if any(".shared_expert." in module for module in adapters.weights):
        # PEFT 0.21 with transformers 5 stacks the experts of Qwen2-MoE, finds no place for them and
        # drops them without a word. For Qwen3-MoE it adds these itself
        # (peft/utils/transformers_weight_conversion.py:_convert_peft_config_moe):
        config["target_parameters"] = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        config["rank_pattern"] = {r".*\.gate_up_proj": 2 * adapters.rank}
        config["alpha_pattern"] = {r".*\.gate_up_proj": 2 * adapters.alpha}
    # clone: the projections of one layer share their A, which safetensors refuses
    tensors = {
        f"base_model.model.{module}.lora_{side}.weight": tensor.contiguous().clone()
        for module, pair in adapters.weights.items()
        for side, tensor in zip("AB", pair, strict=True)
    }
    with new_directory(Path(out_dir)) as directory:
        save_file(
            tensors,
            directory / "adapter_model.safetensors",
            metadata={"format": "pt", **_origin(adapters)},
        )
        (directory / "adapter_config.json").write_text(json_text(config))


def save_merged(
    adapters: Adapters,
    base_model_dir: str | Path,
    out_dir: str | Path,
    dtype: torch.dtype | None = None,
) -> float:
    """Write the base model with W + (alpha / r) B A, computed in float32 and rounded once to
    `dtype` (None: W's), to bfloat16 as the rollout engine got it (rounding.py). Returns the share
    of the update that the written weights have (proof.py).

    Other tensors, the configuration and the tokenizer are copied as they are. Memory: the adapters
    and three times the largest file of the base. Arguments and errors as for `save_peft`.
    """
    base = Checkpoint(base_model_dir)
    _check_fit(adapters, base)
    with new_directory(Path(out_dir)) as directory:
        for file in sorted(base.directory.iterdir()):
            if file.is_file() and file.suffix not in WEIGHT_SUFFIXES:
                shutil.copyfile(file, directory / file.name)
        movements = []
        for name_of_file in sorted(set(base.files.values())):
            content = base.open(name_of_file)
            tensors = {name: content.get_tensor(name) for name in content.offset_keys()}
            for name, weight in tensors.items():
                module = name.removesuffix(".weight")
                if module in adapters.weights:
                    weight = weight.to(dtype or weight.dtype)
                    a, b = adapters.weights[module]
                    update = adapters.alpha / adapters.rank * (b.float() @ a.float())
                    dither = dither_of(name, weight.shape)
                    tensors[name] = rounded(weight.float() + update, weight.dtype, dither)
                    movements.append({"": movement(tensors[name], weight, update, dither)})
            save_file(
                tensors,
                directory / name_of_file,
                metadata={**(content.metadata() or {"format": "pt"}), **_origin(adapters)},
            )
            del tensors  # before the next file is read
    return join(movements)[""].get("arrived", 1.0)


def _origin(adapters: Adapters) -> dict[str, str]:
    """For the metadata of what is exported: which run made it, and in how many iterations."""
    return {"run": adapters.run or "", "iteration": str(adapters.iteration)}


def _check_fit(adapters: Adapters, base: Checkpoint) -> None:
    """ValueError unless the base model has the weights that were trained, as far as that is known,
    and for each adapter its weight, of its shape.
    """
    wrong_base = f"{base.directory} is not the model that was trained"
    if adapters.base and (digest := weights_digest(base.directory)) != adapters.base:
        raise ValueError(
            f"{wrong_base}: its weights are others (digest {digest[:12]}, the trained model's was "
            f"{adapters.base[:12]})"
        )
    for module, (a, b) in adapters.weights.items():
        name = f"{module}.weight"
        shape = [b.shape[0], a.shape[1]]
        if name not in base.files:
            raise ValueError(
                f"{wrong_base}: it has no {name}, for which the checkpoint holds an adapter"
            )
        there = base.open(base.files[name]).get_slice(name).get_shape()
        if there != shape:
            raise ValueError(
                f"{wrong_base}: {name} is {there} there, and the adapter is for {shape}"
            )
