"""The rows of a converted file and their prompts as token ids for one tokenizer; and the score of answers to them."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from mindspeed_qerl.config import ConfigError
from mindspeed_qerl.gsm8k.dataset import read_converted
from mindspeed_qerl.gsm8k.prompts import plain_prompt
from mindspeed_qerl.gsm8k.verifier import get_verifier


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


def score_answers(rows: Sequence[dict], texts: Sequence[str], n: int, verifier: str) -> tuple[dict[str, float], list[dict]]:
    """Accuracy of `n` answers to each row, `texts` in the order of the rows.

    Returns:
        accuracy, its standard_error over problems (NaN for one problem), n_problems and samples_per_problem; and per problem its
        question, answer, responses and scores.
    """
    scores = np.array(get_verifier(verifier)(texts, [row["answer"] for row in rows for _ in range(n)])).reshape(-1, n)
    per_problem = scores.mean(1)
    result = {
        "accuracy": per_problem.mean(),
        "standard_error": per_problem.std(ddof=1) / np.sqrt(len(per_problem)) if len(per_problem) > 1 else float("nan"),
        "n_problems": len(rows),
        "samples_per_problem": n,
    }
    answers = [{"question": row["question"], "answer": row["answer"], "responses": list(texts[i * n:(i + 1) * n]),
                "scores": scores[i].tolist()} for i, row in enumerate(rows)]
    return result, answers
