"""The rows of a task and their prompts as token ids for one tokenizer."""

import hashlib
import json
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from mindspeed_qerl.common.errors import ConfigError, unknown

from .rows import AnyPath, Row, Rows, read_rows

Variables = Mapping[str, Any]  # of a chat template


class Prompts:
    """The rows of a file whose prompts are short enough, and these prompts as token ids, with the
    date of `at` and the variables of `template_kwargs` (`chat_ids`).

    Attributes:
        rows, prompts: as many of both. total: how many rows there were. dropped: how many of them
            are left out, because their prompt has more than `max_prompt_length` tokens.

    Raises:
        ConfigError: the file is wrong, a prompt of form `prompt` ("chat" or "plain") cannot be
            made, or none is short enough.
    """

    def __init__(
        self,
        path: AnyPath,
        tokenizer: Any,
        prompt: str,
        max_prompt_length: int,
        limit: int | None = None,
        at: datetime | None = None,
        template_kwargs: Variables | None = None,
    ):
        rows = read_rows(path)[:limit]
        prompts = token_ids(tokenizer, rows, prompt, at, template_kwargs)
        kept = [i for i, ids in enumerate(prompts) if len(ids) <= max_prompt_length]
        if not kept:
            raise ConfigError(
                f"every prompt of {path} is longer than rl_config.max_prompt_length = "
                f"{max_prompt_length} tokens"
            )
        self.rows = [rows[i] for i in kept]
        self.prompts = [prompts[i] for i in kept]
        self.total, self.dropped = len(rows), len(rows) - len(kept)
        self.max_prompt_length = max_prompt_length

    def digest(self) -> str:
        """SHA-256 of the token ids."""
        return hashlib.sha256(json.dumps(self.prompts).encode()).hexdigest()

    def left_out(self, kind: str) -> str:
        """Returns what to say about prompts of this `kind` ("training") that are too long."""
        return (
            f"{self.dropped:,} of {self.total:,} {kind} prompts are longer than "
            f"{self.max_prompt_length} tokens and are left out"
        )


def token_ids(
    tokenizer: Any, rows: Rows, prompt: str, at: datetime | None, template_kwargs: Variables | None
) -> list[list[int]]:
    """Token ids of each row's prompt of form `prompt`, "chat" (`chat_ids`) or "plain"; ConfigError
    names the row that has none.
    """
    if prompt == "plain":
        return [plain_ids(tokenizer, row) for row in rows]
    check_template(tokenizer, template_kwargs)
    return [chat_ids(tokenizer, row, at, template_kwargs) for row in rows]


def load_tokenizer(directory: AnyPath) -> Any:
    """The tokenizer of a model directory; ConfigError if there is none that transformers can read.
    Nothing is asked of a hub.
    """
    if not Path(directory).is_dir():
        raise ConfigError(
            f"{directory}: no such folder, and so no tokenizer: give that of a Hugging Face model"
        )
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except Exception as error:  # OSError and ValueError, and whatever a file of another form raises
        raise ConfigError(
            f"{directory} has no tokenizer that transformers can read: {type(error).__name__}: "
            f"{error}"
        ) from error


def check_template(tokenizer: Any, template_kwargs: Variables | None) -> None:
    """ConfigError for a key of `template_kwargs` that the chat template does not read, or that is
    not for a config to say.
    """
    if not template_kwargs:
        return
    from jinja2 import meta
    from transformers.utils import chat_template_utils

    try:
        template = tokenizer.get_chat_template()
        environment = chat_template_utils._compile_jinja_template(template).environment
        read = meta.find_undeclared_variables(environment.parse(template))
    except Exception as error:
        raise ConfigError(
            f"task.chat_template_kwargs: {tokenizer.name_or_path} has no chat template that can be "
            f"read: {error}"
        ) from error
    known = read - {"messages", "add_generation_prompt", "strftime_now", "raise_exception"}
    for key in template_kwargs:
        if key not in known:
            name = unknown("variable of the chat template", key, known)
            raise ConfigError(f"task.chat_template_kwargs: {name} ({tokenizer.name_or_path})")


def chat_ids(
    tokenizer: Any, row: Row, at: datetime | None, template_kwargs: Variables | None
) -> list[int]:
    """Token ids of the chat template applied to the row's messages, up to where the model's answer
    begins.

    A template that asks for the date (`strftime_now`) is told that of `at`, by default now, and its
    variables have the values of `template_kwargs` (`check_template`). ConfigError names the row
    that the template fails on.
    """
    variables = dict(template_kwargs or {})
    if at:
        variables["strftime_now"] = at.strftime
    try:
        return tokenizer.apply_chat_template(
            row.messages, add_generation_prompt=True, return_dict=False, **variables
        )
    except Exception as error:  # a template is a program: what it raises is its own
        raise ConfigError(
            f"{row.where}: the chat template of {tokenizer.name_or_path} makes no prompt of it: "
            f"{type(error).__name__}: {error}. A model without a template takes task.prompt=plain"
        ) from error


def plain_ids(tokenizer: Any, row: Row) -> list[int]:
    """Token ids of the row's plain prompt, without special tokens; ConfigError without one."""
    if row.prompt is None:
        raise ConfigError(
            f"{row.where}: its messages are a conversation, which has no plain form. Give a column "
            "'prompt', or use a chat model and task.prompt=chat"
        )
    try:
        ids = tokenizer.encode(row.prompt, add_special_tokens=False)
    except (TypeError, UnicodeError) as error:  # half a character, of a text cut within an emoji
        raise ConfigError(
            f"{row.where}: the tokenizer does not read its prompt: {error}"
        ) from error
    if not ids:  # transformers makes a tokenizer without a vocabulary of a folder that has none
        raise ConfigError(
            f"{row.where}: no token in its prompt. Is tokenizer.json in {tokenizer.name_or_path}?"
        )
    return ids
