"""The local engine's door: its processes start first, and this one reads the task while they import
what they need.
"""

from mindspeed_qerl.families.checkpoint import Checkpoint, refuse_beside_single
from mindspeed_qerl.recipe.types import Recipe
from mindspeed_qerl.runs.directory import RunDirectory
from mindspeed_qerl.runs.metrics import MetricsWriter
from mindspeed_qerl.runs.observer import RunObserver
from mindspeed_qerl.runs.progress import Progress

from .data import load_data
from .processes import launch


def last_checkpoint(recipe: Recipe) -> int:
    """The iteration after which the run in `recipe.run.resume` can resume; ValueError if it has no
    checkpoint, a damaged one, or one of another run.
    """
    from . import checkpoint

    assert recipe.run.resume, "a run is resumed"
    run = RunDirectory.open(recipe.run.resume)
    state = checkpoint.read_state(run.checkpoints_dir)
    run.check_owner(checkpoint.folder(run.checkpoints_dir, state["iteration"]), state.get("run"))
    return state["iteration"]


def train(recipe: Recipe, run: RunDirectory, metrics: MetricsWriter, progress: Progress) -> None:
    """Run `recipe` on the local engine. Raises WorkerError if a process fails, ConfigError if the
    model's files are not whole, or the data does not fit the model.
    """
    # transformers and vLLM must read the weights alike; tensors are each rank's business (model.py)
    checkpoint = Checkpoint(recipe.model.path, "np")
    refuse_beside_single(checkpoint.directory)
    progress.phase("starting engines")
    with launch(recipe, run) as processes:
        from .loop import LocalEngine  # torch: seconds

        data = load_data(recipe, run, progress)
        observer = RunObserver(recipe, run, metrics, progress)
        LocalEngine(recipe, observer, processes, data).train()
