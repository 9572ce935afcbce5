"""Checkpoints of the local engine: adapters and their optimizer, whole, by the names of the
undivided model, so that a run can resume in any layout.

    checkpoints/iter_0000010/
        state.json           iteration, updates, prompts_asked (the position in the data), the
                             run's id, the digest of the base weights, the model's shape, LoRA's
                             settings, and each file's bytes and SHA-256
        shard-*.safetensors  of a rank: <layer>.lora_A [r, in], .lora_B [out, r], and AdamW's two
                             moments of both (.exp_avg, .exp_avg_sq), float32

A folder with that name is complete: it is written under another name, forced to the disk, and
renamed. Reading it executes nothing, it is safetensors and JSON. There are no random states: each
draw of a run has a seed of its own, made of the run's seed, its purpose and the step (seeds.py).
"""

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mindspeed_qerl.common.files import (
    checkpoint_iterations,
    describe_files,
    fault_of_files,
    json_text,
    new_directory,
    write_whole,
)
from mindspeed_qerl.families import ModelShape, read_shape
from mindspeed_qerl.families.tensors import mappings
from mindspeed_qerl.lora import checkpoint as megatron
from mindspeed_qerl.recipe.types import LoRA

STATE = "state.json"


def folder(checkpoints: Path, iteration: int) -> Path:
    """Returns where the checkpoint of `iteration` is."""
    return checkpoints / f"iter_{iteration:07d}"


def save(
    checkpoints: Path,
    iteration: int,
    state: Mapping[str, Any],
    write: Callable[[Path], Any],
    keep: int,
) -> None:
    """Make the checkpoint of `iteration`, then remove all but the last `keep`, and what a killed
    process left half made or half removed: who saves holds the run's lock. After an OSError those
    that were there still are, and nothing half made. state: JSON values that `read_state` will give
    back. write: writes the tensor files into a folder.
    """
    final = folder(checkpoints, iteration)
    for left in checkpoints.glob(".iter_*"):
        shutil.rmtree(left, ignore_errors=True)
    with new_directory(final) as making:
        write(making)
        for file in making.iterdir():
            _force(file)
        files = describe_files(making, making.iterdir())
        content = {"iteration": iteration, **state, "files": files}
        write_whole(making / STATE, json_text(content))
        _force(making)
    _force(checkpoints)
    for old in checkpoint_iterations(checkpoints)[:-keep]:
        path = folder(checkpoints, old)
        removing = path.rename(checkpoints / f".{path.name}.removing")
        shutil.rmtree(removing, ignore_errors=True)  # what somebody still reads goes with the next


def read_state(checkpoints: Path, iteration: int | None = None) -> dict[str, Any]:
    """Returns what `save` was told of the checkpoint of `iteration` (None: the last one), with
    "iteration" and "files". ValueError: there is none, or a part of it is missing or not what was
    written; it names the part.
    """
    iterations = checkpoint_iterations(checkpoints)
    if not iterations:
        raise ValueError(
            f"{checkpoints} has no checkpoint; one is made at the end of a run, and every "
            "megatron_training.save_interval steps"
        )
    if iteration is None:
        iteration = iterations[-1]
    if iteration not in iterations:
        raise ValueError(f"{checkpoints} has no checkpoint of iteration {iteration}: {iterations}")
    directory = folder(checkpoints, iteration)
    try:
        state = json.loads((directory / STATE).read_text(encoding="utf-8"))
        fault = fault_of_files(directory, state["files"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        fault = f"its {STATE} cannot be read ({error})"
    if fault:
        raise ValueError(
            f"the checkpoint {directory} is damaged: {fault}. Bring the file back, or move "
            f"{directory.name} away to resume from the one before; without one start a new run"
        )
    return state


def describe(shape: ModelShape, lora: LoRA) -> dict[str, Any]:
    """Returns what a checkpoint says of the adapters in it."""
    return {"model": asdict(shape), "lora": asdict(lora)}


def read_tensors(directory: Path) -> dict[str, Any]:
    """All tensors of a checkpoint's folder, by their names there."""
    from safetensors.torch import load_file

    tensors: dict = {}
    for file in directory.glob("*.safetensors"):
        tensors |= load_file(file)
    return tensors


def load_adapters(
    checkpoints: Path, model_dir: str, iteration: int | None = None
) -> megatron.Adapters:
    """The adapters of either engine's checkpoint under Hugging Face's names, for export. ValueError
    or FileNotFoundError if it is not there, or not whole. model_dir: of the model that was trained.
    """
    if not any(checkpoints.glob(f"iter_*/{STATE}")):
        return megatron.load_adapters(checkpoints, read_shape(model_dir), iteration)
    state = read_state(checkpoints, iteration)
    shape = ModelShape(**state["model"])
    tensors = read_tensors(folder(checkpoints, state["iteration"]))
    weights: megatron.Pairs = {}
    for mapping in mappings(shape, range(shape.num_hidden_layers), range(shape.num_experts)):
        layer = mapping.megatron.removesuffix(".weight")
        if f"{layer}.lora_A" in tensors:
            weights |= megatron.parts(
                mapping, tensors[f"{layer}.lora_A"], tensors[f"{layer}.lora_B"]
            )
    return megatron.Adapters(
        weights,
        state["lora"]["r"],
        state["lora"]["alpha"],
        state["iteration"],
        state.get("base"),
        state.get("run"),
    )


def _force(path: Path) -> None:
    """A file or a folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
