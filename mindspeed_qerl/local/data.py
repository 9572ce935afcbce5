"""A task as token ids."""

from typing import Any, NamedTuple

from mindspeed_qerl.recipe.types import Recipe
from mindspeed_qerl.runs.directory import RunDirectory
from mindspeed_qerl.runs.progress import Progress
from mindspeed_qerl.tasks.checks import check_prompts
from mindspeed_qerl.tasks.prompts import Prompts, load_tokenizer


class Data(NamedTuple):
    """A task as one tokenizer reads it."""

    tokenizer: Any
    train: Prompts
    test: Prompts


def load_data(recipe: Recipe, run: RunDirectory, progress: Progress) -> Data:
    """The tokenizer, and the prompts as its token ids. ConfigError if they do not fit, lose their
    questions, or are not those that the run was started with.
    """
    task = recipe.task
    longest = recipe.sampling.max_prompt_length
    tokenizer = load_tokenizer(recipe.model.path)
    chat: dict[str, Any] = {"at": run.started, "template_kwargs": task.chat_template_kwargs}
    train = Prompts(task.train_file, tokenizer, task.prompt, longest, **chat)
    limit = recipe.evaluation.n_problems
    test = Prompts(task.test_file, tokenizer, task.prompt, longest, limit, **chat)
    for name, prompts in (("training", train), ("evaluation", test)):
        if prompts.dropped:
            progress.message(prompts.left_out(name))
        found = check_prompts(prompts, tokenizer)
        for warning in found.warnings:
            progress.message(f"Warning: {name}: {warning}")
        found.raise_faults()
    run.keep(prompts=train.digest(), evaluation_prompts=test.digest())
    return Data(tokenizer, train, test)
