"""The rows of a converted file and their prompts as token ids for one tokenizer."""

from typing import Any

from mindspeed_qerl.errors import ConfigError
from mindspeed_qerl.tasks.gsm8k.dataset import read_converted
from mindspeed_qerl.tasks.gsm8k.prompts import plain_prompt


class Task:
    """Rows of a converted file, and their prompts as token ids; `dropped` counts those longer than `max_prompt_length` tokens.

    ConfigError if the tokenizer cannot make a prompt of form `prompt` ("chat" or "plain"), or no prompt is short enough.
    """

    def __init__(self, path: str, tokenizer: Any, prompt: str, max_prompt_length: int, limit: int | None = None):
        if prompt == "chat" and not tokenizer.chat_template:
            raise ConfigError(f"gsm8k.prompt = 'chat', but the tokenizer of {tokenizer.name_or_path} has no chat template. "
                              "Give a chat model, or set gsm8k.prompt=plain")
        self.rows, self.prompts = [], []
        rows = read_converted(path)
        for row in rows[:limit]:
            if prompt == "chat":
                ids = tokenizer.apply_chat_template(row["messages"], add_generation_prompt=True, return_dict=False)
            else:
                ids = tokenizer.encode(plain_prompt(row["question"]), add_special_tokens=False)
            if len(ids) <= max_prompt_length:
                self.rows.append(row)
                self.prompts.append(ids)
        self.dropped = len(rows[:limit]) - len(self.rows)
        if not self.rows:
            raise ConfigError(f"every prompt of {path} is longer than rl_config.max_prompt_length = {max_prompt_length} tokens")
