"""The rows of a task: what is asked, what is right, and whatever else the reward wants to know.

A file is .jsonl or .parquet, and each of its rows has

    prompt    what is asked, as text, or as messages [{"role": "user", "content": "..."}, ...], for
              the chat template
    messages  the same messages under another name; where both are there, a `prompt` of text is the
              plain form
    answer    a text or number; the reward compares with it

and more columns if you like: the reward gets them all. Rows of verl and TRL are such rows: the
answer may also be `reward_model.ground_truth`, or one of `GOLDS`. So are those of MATH and AIME, as
published: a `problem` is asked with `INSTRUCTION`, and without `answer` the last \\boxed of its
`solution` is right. GSM8K's converted rows
(`gsm8k.convert`) have `messages` for chat models and `question` for plain prompts. This module
imports in a bare Python.
"""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from mindspeed_qerl.common.errors import ConfigError
from mindspeed_qerl.common.files import row_files

from .math_answers import last_boxed

# in this order; of reward_model its ground_truth
GOLDS = ("answer", "reward_model", "ground_truth", "solution", "reference_answer", "completion")
# Behind a problem that is published without a prompt; the words of Qwen's authors.
INSTRUCTION = "Please reason step by step, and put your final answer within \\boxed{}."
# Whom the model answers: OpenAI's and ShareGPT's users; tools of OpenAI, Llama and ChatGLM.
ANSWERED_ROLES = ("user", "human", "tool", "function", "ipython", "observation")
AnyPath = str | Path
Columns = dict[str, Any]  # of a row, by name
# Arrow's types that keep fewer digits of a number than people write
NARROW = ("halffloat", "float")


@dataclass(frozen=True)
class Row:
    """One row of a task.

    Attributes:
        messages: what a chat template is applied to, each with "role" and "content".
        prompt: what a model without a chat template reads; None if `messages` are a conversation,
            which has no plain form.
        question: what is asked, for records and checks: the prompt, or all turns of a conversation.
        answer: what is right.
        columns: the row as it stands in the file, for the reward.
        where: "FILE:LINE", or "FILE: row N" of a parquet file.
    """

    messages: list[dict[str, str]]
    prompt: str | None
    question: str
    answer: str
    columns: Columns
    where: str = ""


Rows = Sequence[Row]


def read_rows(path: AnyPath) -> list[Row]:
    """The rows of a .jsonl or .parquet file, or of several (`row_files`); at least one.
    FileNotFoundError if there is no such file; ConfigError names the file, the line (or row) and
    the column that is wrong.
    """
    rows = []
    for file in row_files(path):
        for where, columns in numbered_rows(file):
            try:
                rows.append(row_of(columns, where))
            except ValueError as error:
                raise ConfigError(f"{where}: {error}") from None
    if not rows:
        raise ConfigError(f"{path}: no rows")
    return rows


def row_of(columns: Columns, where: str = "") -> Row:
    """The `Row` of a row's columns; ValueError names the column that is missing or wrong.

    >>> row_of({"prompt": "2+2?", "answer": 4, "level": 1}).messages
    [{'role': 'user', 'content': '2+2?'}]
    >>> turn = {"role": "user", "content": "2+2?"}
    >>> row_of({"prompt": [turn], "reward_model": {"ground_truth": "4"}}).answer
    '4'
    """
    read = _published(columns)
    answer = _gold(read)
    prompt: Any = read.get("prompt")
    messages: Any = read.get("messages")
    question: Any = read.get("question")
    if isinstance(prompt, list):
        prompt, messages = None, prompt
    if prompt is None and messages is None:
        raise ValueError(
            f"neither column 'prompt' nor column 'messages'; the row has {', '.join(columns)}. "
            "tools/convert_gsm8k.py makes such rows of GSM8K's own"
        )
    if prompt is not None:
        question = check_text(read, "prompt")
    elif question is not None:
        prompt = plain_prompt(check_text(read, "question"))
    if messages is None:
        messages = [{"role": "user", "content": prompt}]
    last = _turns(messages, "messages")[-1]["role"]
    if last.lower() not in ANSWERED_ROLES:
        raise ValueError(
            f"the messages end with a turn of the role {last!r}, which the model would read before "
            f"it answers; the last may be of {', '.join(ANSWERED_ROLES)}. Leave it out, and put "
            "what is right into the column 'answer'"
        )
    if prompt is None and len(messages) == 1:
        question = prompt = messages[0]["content"]
    elif prompt is None:
        question = "\n".join(f"{turn['role']}: {turn['content']}" for turn in messages)
    return Row(messages, prompt, question, answer, columns, where)


def _published(columns: Columns) -> Columns:
    """Returns the columns of a problem of MATH or AIME by our names; those of any other row as they
    are.
    """
    small = {
        name.lower(): value for name, value in columns.items()
    }  # Maxwell-Jia/AIME_2024: Problem
    if "problem" not in small or small.keys() & {"prompt", "messages"}:
        return columns
    problem = check_text(small, "problem")
    turn = {"role": "user", "content": f"{problem} {INSTRUCTION}"}
    answer = last_boxed(str(small.get("solution")))
    return small | {"messages": [turn], "question": problem, "solution": answer}


def plain_prompt(question: str) -> str:
    """Returns the question and a newline, for base models without a chat template: the answer is
    what comes next.
    """
    return f"{question}\n"


def _gold(columns: Columns) -> str:
    """The answer of a row as text; ValueError if there is none."""
    reward_model: Any = columns.get("reward_model")
    is_verls = isinstance(reward_model, dict)
    truth = reward_model.get("ground_truth") if is_verls else None
    values = columns | {"reward_model": truth}
    name = next((name for name in GOLDS if values.get(name) is not None), None)
    if name is None:
        raise ValueError(
            f"column 'answer' is missing; the row has {', '.join(columns)}. Known too: "
            f"reward_model.ground_truth, {', '.join(GOLDS[2:])} (of a problem its last \\boxed). Give "
            "it any text if the reward does not read it"
        )
    value: Any = values[name]
    if name == "reward_model" and isinstance(value, list | dict):
        return json.dumps(value, ensure_ascii=False, default=str)  # as verl's rewards compare with
    if name == "completion" and isinstance(value, list):
        value = _turns(value, name)[-1]["content"]
    kind = type(value)
    if kind is Rounded:
        raise ValueError(
            f"column {name!r}: {value} has more digits in the file than 64 bits keep: store it as "
            "text"
        )
    if kind is int or kind in (float, Decimal) and math.isfinite(value):
        return _as_written(value)
    return check_text({name: value}, name)


class Rounded(float):
    """A number of JSON that has more digits than 64 bits keep."""


def _float(text: str) -> float:
    """The number that `text` is, for `json.loads`; a `Rounded` if its digits are not kept."""
    value = float(text)
    is_kept = math.isinf(value) or Decimal(text) == Decimal(repr(value))
    return value if is_kept else Rounded(value)


def _as_written(value: float | Decimal) -> str:
    """Writes a number as a person would: digits, and a point only before a fraction.

    >>> _as_written(4.0), _as_written(-1e-7), _as_written(Decimal("33.30")), _as_written(-0.0)
    ('4', '-0.0000001', '33.3', '0')
    """
    text = format(Decimal(str(value)), "f")
    if "." in text:
        text = text.rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


def _turns(messages: Any, column: str) -> list[dict[str, str]]:
    """`messages`; ValueError unless they are turns, at least one, each with role and content."""
    try:
        roles = [check_text(turn, "role") for turn in messages if check_text(turn, "content")]
    except (TypeError, ValueError):
        roles = []
    if not roles:
        raise ValueError(
            f"{column}: expected a list of {{role, content}}, both of them text, got "
            f"{str(messages)[:80]}"
        )
    return messages


def check_text(row: Columns, column: str) -> str:
    """`row[column]`; ValueError unless it is a text that is not blank."""
    if column not in row:
        raise ValueError(f"column {column!r} is missing; the row has {', '.join(row)}")
    text = row[column]
    if not isinstance(text, str) or not text.strip():
        raise ValueError(
            f"column {column!r}: expected a non-empty string, got {text!r:.80} "
            f"({type(text).__name__})"
        )
    return text


def numbered_rows(path: Path) -> Iterator[tuple[str, Columns]]:
    """(where it stands, its columns) for each row of a .jsonl or .parquet file; ConfigError if it
    cannot be read.
    """
    if path.suffix == ".parquet":
        yield from _parquet_rows(path)
        return
    if path.suffix != ".jsonl":
        raise ConfigError(f"{path}: expected a .jsonl or .parquet file")
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            try:
                row = json.loads(line, parse_float=_float)
            except ValueError as error:
                raise ConfigError(f"{path}:{number}: invalid JSON ({error})") from None
            if type(row) is not dict:
                raise ConfigError(f"{path}:{number}: expected a JSON object, got {row!r:.80}")
            yield f"{path}:{number}", row


def _parquet_rows(path: Path) -> Iterator[tuple[str, Columns]]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(path)
        rows = table.to_pylist()
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not a readable parquet file ({error})") from None
    golds = table.select([name for name in GOLDS if name in table.column_names])
    for field in golds.flatten().schema:
        if str(field.type) in NARROW:
            raise ConfigError(
                f"{path}: column {field.name!r} has numbers in too few bits to tell what was "
                "written: store them as float64, or as text"
            )
    for number, row in enumerate(rows, 1):
        yield f"{path}: row {number}", row
