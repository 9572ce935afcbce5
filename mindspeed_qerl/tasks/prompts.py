"""The rows of a task and their prompts as token ids for one tokenizer."""

from pathlib import Path
from typing import Any

from mindspeed_qerl.errors import ConfigError
from mindspeed_qerl.tasks.rows import Row, read_rows


class Prompts:
    """The rows of a file whose prompts are short enough, and these prompts as token ids.

    Attributes:
        rows, prompts: as many of both. total: how many rows there were. dropped: how many of them are left out,
        because their prompt has more than `max_prompt_length` tokens.

    Raises:
        ConfigError: the file is wrong, a prompt of form `prompt` ("chat" or "plain") cannot be made, or none is short
        enough.
    """

    def __init__(self, path: str | Path, tokenizer: Any, prompt: str, max_prompt_length: int,
                 limit: int | None = None):
        if prompt == "chat" and not tokenizer.chat_template:
            raise ConfigError(f"task.prompt = 'chat', but the tokenizer of {tokenizer.name_or_path} has no chat "
                              "template. Give a chat model, or set task.prompt=plain")
        rows = read_rows(path)[:limit]
        encode = chat_ids if prompt == "chat" else plain_ids
        prompts = [encode(tokenizer, row) for row in rows]
        kept = [i for i, ids in enumerate(prompts) if len(ids) <= max_prompt_length]
        if not kept:
            raise ConfigError(f"every prompt of {path} is longer than rl_config.max_prompt_length = "
                              f"{max_prompt_length} tokens")
        self.rows, self.prompts = [rows[i] for i in kept], [prompts[i] for i in kept]
        self.total, self.dropped, self.max_prompt_length = len(rows), len(rows) - len(kept), max_prompt_length

    def left_out(self, kind: str) -> str:
        """What to say about prompts of this `kind` ("training") that are too long; empty if there are none."""
        if not self.dropped:
            return ""
        return (f"{self.dropped:,} of {self.total:,} {kind} prompts are longer than {self.max_prompt_length} tokens "
                "and are left out")


def chat_ids(tokenizer: Any, row: Row) -> list[int]:
    """Token ids of the chat template applied to the row's messages, up to where the model's answer begins.

    ConfigError names the row that the template refuses.
    """
    from jinja2 import TemplateError

    try:
        return tokenizer.apply_chat_template(row.messages, add_generation_prompt=True, return_dict=False)
    except TemplateError as error:
        raise ConfigError(f"{row.where}: the tokenizer's chat template refuses its messages: {error}") from error


def plain_ids(tokenizer: Any, row: Row) -> list[int]:
    """Token ids of the row's plain prompt, without special tokens. ConfigError if the row has none."""
    if row.prompt is None:
        raise ConfigError(f"{row.where}: its messages are a conversation, which has no plain form. Give a column "
                          "'prompt', or use a chat model and task.prompt=chat")
    return tokenizer.encode(row.prompt, add_special_tokens=False)


def text_of(model_dir: str | Path, tokens: Any) -> str:
    """Token ids in words, for a message; the numbers where the model has no tokenizer."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model_dir).decode(tokens)
    except (OSError, ValueError):
        return str(tokens)
