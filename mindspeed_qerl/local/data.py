"""The task of a run as token ids."""

from dataclasses import dataclass
from typing import Any

from mindspeed_qerl.errors import ConfigError
from mindspeed_qerl.recipe.types import Recipe
from mindspeed_qerl.runs.progress import Progress
from mindspeed_qerl.tasks.checks import check_prompts
from mindspeed_qerl.tasks.prompts import Prompts


@dataclass(frozen=True)
class Data:
    """A task as one tokenizer reads it."""

    tokenizer: Any
    train: Prompts
    test: Prompts


def load_data(recipe: Recipe, progress: Progress) -> Data:
    """The tokenizer, and the prompts as its token ids. ConfigError if they do not fit, or lose their questions."""
    from transformers import AutoTokenizer

    task, path, longest = recipe.task, recipe.model.path, recipe.sampling.max_prompt_length
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} has no tokenizer that transformers can read: {error}") from error
    train = Prompts(task.train_file, tokenizer, task.prompt, longest)
    test = Prompts(task.test_file, tokenizer, task.prompt, longest, recipe.evaluation.n_problems)
    for name, prompts in (("training", train), ("evaluation", test)):
        if prompts.dropped:
            progress.message(prompts.left_out(name))
        faults, warnings = check_prompts(prompts, tokenizer, task.prompt == "chat")
        for warning in warnings:
            progress.message(f"Warning: {name}: {warning}")
        if faults:
            raise ConfigError("\n".join(faults))
    return Data(tokenizer, train, test)
