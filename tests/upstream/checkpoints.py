"""Megatron checkpoints of tiny models, made from the Hugging Face model without the package's help."""

from itertools import product
from pathlib import Path

import torch
from reference import Place, full_weights, shard


def held(full: dict[str, torch.Tensor], stage: int, stages: int) -> list[str]:
    """Names, with the stage's own layer numbers, of what a pipeline stage holds."""
    layers = (
        len({name.split(".")[2] for name in full if name.startswith("decoder.layers.")}) // stages
    )
    names = ["embedding.word_embeddings.weight"] if stage == 0 else []
    for layer in range(layers):
        prefix = f"decoder.layers.{stage * layers + layer}."
        names += [
            f"decoder.layers.{layer}.{name.removeprefix(prefix)}"
            for name in full
            if name.startswith(prefix)
        ]
    return names + ["decoder.final_layernorm.weight", "output_layer.weight"] * (stage == stages - 1)


def rank_files(
    folder: Path, tp: int, pp: int, ep: int, layers: int
) -> list[tuple[Path, int, Place]]:
    """(file, pipeline stage, place) of each rank of a checkpoint
    (megatron/training/checkpointing.py:get_checkpoint_name).
    """
    files = []
    for t, p, e in product(range(tp), range(pp), range(ep)):
        name = (
            f"mp_rank_{t:02d}" + (f"_{p:03d}" if pp > 1 else "") + (f"_{e:03d}" if ep > 1 else "")
        )
        files.append(
            (
                folder / name / "model_optim_rng.pt",
                p,
                Place(t, tp, e, ep, first_layer=p * layers // pp),
            )
        )
    return files


def write_base_checkpoint(
    hf_dir: Path, out_dir: Path, tp: int = 1, pp: int = 1, ep: int = 1
) -> Path:
    """An untied Hugging Face model for `actor_config.load`; with `finetune: true` nothing but
    weights is read of a checkpoint.

    Experts are dealt whole to the tensor ranks too (`moe_tp_extend_ep: true`).
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(hf_dir, dtype="auto")
    full = full_weights(model)
    for file, stage, place in rank_files(
        out_dir / "iter_0000001", tp, pp, ep, model.config.num_hidden_layers
    ):
        weights = {name: shard(name, full, {}, place).clone() for name in held(full, stage, pp)}
        file.parent.mkdir(parents=True)
        torch.save({"checkpoint_version": 3.0, "iteration": 1, "model": weights}, file)
    (out_dir / "latest_checkpointed_iteration.txt").write_text("1")
    return out_dir
