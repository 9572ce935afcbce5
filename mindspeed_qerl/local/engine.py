"""The local engine's door: its processes start first, and this one reads the task while they import
what they need.
"""

from typing import Any, NamedTuple

from mindspeed_qerl.families import end_tokens
from mindspeed_qerl.families.checkpoint import Checkpoint, refuse_beside_single
from mindspeed_qerl.recipe.types import Recipe
from mindspeed_qerl.runs.directory import RunDirectory
from mindspeed_qerl.runs.metrics import MetricsWriter
from mindspeed_qerl.runs.observer import RunObserver
from mindspeed_qerl.runs.progress import Progress
from mindspeed_qerl.tasks.checks import check_prompts
from mindspeed_qerl.tasks.prompts import Prompts, load_tokenizer

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


class Data(NamedTuple):
    """A task as one tokenizer reads it. ends: ids of the tokens that end an answer."""

    tokenizer: Any
    train: Prompts
    test: Prompts
    ends: set[int]


def load_data(recipe: Recipe, run: RunDirectory, progress: Progress) -> Data:
    """The tokenizer, and the prompts as its token ids. ConfigError if they do not fit, lose their
    questions, or are not those that the run was started with.
    """
    task = recipe.task
    longest = recipe.sampling.max_prompt_length
    tokenizer = load_tokenizer(recipe.model.path)
    template = (run.started, task.chat_template_kwargs)
    train = Prompts(task.train_file, tokenizer, task.prompt, longest, None, *template)
    limit = recipe.evaluation.n_problems
    test = Prompts(task.test_file, tokenizer, task.prompt, longest, limit, *template)
    for name, prompts in (("training", train), ("evaluation", test)):
        if prompts.dropped:
            progress.message(prompts.left_out(name))
        found = check_prompts(prompts, tokenizer)
        for warning in found.warnings:
            progress.message(f"Warning: {name}: {warning}")
        found.raise_faults()
    run.keep(prompts=train.digest(), evaluation_prompts=test.digest())
    ends = end_tokens(recipe.model.path, tokenizer)
    return Data(tokenizer, train, test, ends)
