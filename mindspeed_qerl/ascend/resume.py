"""Checkpoints of a run on their way back into upstream, and what lies beside them to prove that
they are whole and this run's; and the command that makes the base weights which a run starts with.
"""

import json
import shutil
from pathlib import Path
from typing import Any

from mindspeed_qerl.common.errors import ConfigError, EngineError
from mindspeed_qerl.common.files import (
    POSITION,
    TRACKER,
    checkpoint_iterations,
    describe_files,
    fault_of_files,
    write_whole,
)
from mindspeed_qerl.families import family_of
from mindspeed_qerl.layout.plan import shape_of_model
from mindspeed_qerl.recipe.types import Recipe
from mindspeed_qerl.runs.directory import RunDirectory

# of a rank, by Megatron's names
WEIGHTS = "model_optim_rng.pt"
OPTIMIZER = "distrib_optim.pt"


def checkpoint_folder(run: RunDirectory, step: int) -> Path:
    return run.checkpoints_dir / f"iter_{step:07d}"


def write_position(run: RunDirectory, step: int, batches_asked: int, is_saved: bool) -> None:
    """Beside checkpoint `step`: the batches of prompts that were asked so far, before it is saved,
    so that whatever Megatron's tracker names has them; once it is on disk (`is_saved`) also what
    its files hold, other machines' disks aside.
    """
    folder = checkpoint_folder(run, step)
    folder.mkdir(parents=True, exist_ok=True)
    position = {"batches_asked": batches_asked, **run.identity()}
    if is_saved:
        position["files"] = describe_files(folder, folder.glob("mp_rank_*/*"))
    write_whole(folder / POSITION, json.dumps(position))


def read_position(run: RunDirectory, step: int) -> dict[str, Any]:
    """Reads what was written beside checkpoint `step`; FileNotFoundError if nothing was."""
    return json.loads((checkpoint_folder(run, step) / POSITION).read_text())


def last_checkpoint(recipe: Recipe) -> int:
    """The step that the run in `recipe.run.resume` can resume after; ValueError if it saved none,
    or the last one is another run's, or not what was saved.
    """
    run = RunDirectory.open(recipe.run.resume)
    steps = checkpoint_iterations(run.checkpoints_dir)
    tracker = run.checkpoints_dir / TRACKER
    try:
        step = int(tracker.read_text())
    except (OSError, ValueError) as error:  # Megatron was killed while it wrote the number
        raise ValueError(
            f"{recipe.run.resume} has no checkpoint to resume from ({error}). Start a new run, or "
            f"write the number of one of these into {tracker}: {steps}"
        ) from error
    checkpoint = checkpoint_folder(run, step)
    try:
        position = read_position(run, step)
        run.check_owner(checkpoint, position["run"])
        fault = fault_of_files(checkpoint, position.get("files", {}))
    except FileNotFoundError:
        fault = f"{POSITION}, which has the position in the data, is missing"
    if fault:
        raise ValueError(
            f"the checkpoint {checkpoint} is damaged: {fault}. Bring the file back, or write the "
            f"number of an earlier one into {tracker}: {steps}"
        )
    return step


def base_for_resuming(base: Path, recipe: Recipe, run: RunDirectory) -> Path:
    """The base checkpoint once more, as links, under the step of the run's last checkpoint and with
    that one's optimizer state: Megatron takes the step and the distributed optimizer's state from
    `load` (training/checkpointing.py:1400-1411), never from `lora_load`.
    """
    step = last_checkpoint(recipe)
    tracker = (base / TRACKER).read_text().strip()
    weights = base / ("release" if tracker == "release" else f"iter_{int(tracker):07d}")
    view = run.path / "resume"
    shutil.rmtree(view, ignore_errors=True)
    for rank in checkpoint_folder(run, step).glob("mp_rank_*"):
        source = weights / rank.name / WEIGHTS
        if not source.is_file():
            raise EngineError(
                f"actor_config.load = {base} has no {rank.name}/{WEIGHTS}, which the run's "
                "checkpoint has: it is for another layout"
            )
        links = view / f"iter_{step:07d}" / rank.name
        links.mkdir(parents=True)
        (links / WEIGHTS).symlink_to(source.resolve())
        optimizer = rank / OPTIMIZER
        if optimizer.is_file():
            (links / OPTIMIZER).symlink_to(optimizer.resolve())
    (view / TRACKER).write_text(str(step))
    return view.resolve()


def conversion_command(recipe: Recipe) -> list[str]:
    """The words of the command, to be run in the folder of MindSpeed-LLM; paths are absolute.

    From `megatron_training.tokenizer_name_or_path` into `actor_config.load`. With experts and a
    tensor parallel size above 1 experts are dealt whole to the tensor ranks (`--moe-tp-extend-ep`);
    at 1 convert_ckpt_v2.py refuses the option (convert_hf2mg.py:70).

    Raises:
        ConfigError: no `load`, or a model of no known family.
    """
    model = recipe.model
    layout = recipe.layout
    if not model.load:
        raise ConfigError(
            "actor_config.load is not set: there is nowhere to convert the base weights to"
        )
    source, target = (str(Path(path).absolute()) for path in (model.path, model.load))
    family = family_of(shape_of_model(recipe))
    conversion = family.conversion
    words = ["python", conversion.script, "--load-model-type", "hf", "--save-model-type", "mg"]
    words += ["--model-type-hf", conversion.name, *conversion.options]
    if family.experts and layout.tp > 1:
        words.append("--moe-tp-extend-ep")
    v2 = conversion.script != "convert_ckpt.py"
    options = {
        "--target-tensor-parallel-size": layout.tp,
        "--target-pipeline-parallel-size": layout.pp,
        "--target-expert-parallel-size": family.experts and layout.ep,
        "--num-layer-list": ",".join(map(str, layout.num_layer_list)),
        "--load-dir": source,
        "--save-dir": target,
        "--tokenizer-model": None if v2 else f"{source}/tokenizer.json",
    }
    for option, value in options.items():
        words += [option, str(value)] if value else []
    return words
