"""The rows of a task: what is asked, what is right, and whatever else the reward wants to know.

A file is .jsonl or .parquet, and each of its rows has

    prompt      what is asked, as text; or
    messages    [{"role": "user", "content": "..."}, ...], for the chat template
    answer      any text; the reward compares with it

and more columns if you like: the reward gets them all. GSM8K's converted rows (`gsm8k.convert`) are such rows, with
`messages` for chat models and `question` for plain prompts. This module imports in a bare Python.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_qerl.errors import ConfigError
from mindspeed_qerl.tasks.gsm8k.prompts import plain_prompt


@dataclass(frozen=True)
class Row:
    """One row of a task.

    Attributes:
        messages: what a chat template is applied to, each with "role" and "content".
        prompt: what a model without a chat template reads; None if `messages` are a conversation, which has no plain
            form.
        question: what is asked, for records and checks: the prompt, or what the user says last.
        answer: what is right.
        columns: the row as it stands in the file, for the reward.
        where: "FILE:LINE", or "FILE: row N" of a parquet file.
    """

    messages: list[dict[str, str]]
    prompt: str | None
    question: str
    answer: str
    columns: dict[str, Any]
    where: str = ""


def read_rows(path: str | Path) -> list[Row]:
    """The rows of a .jsonl or .parquet file; at least one. FileNotFoundError if there is no such file; ConfigError
    names the file, the line (or row) and the column that is wrong."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no data file {path}: docs/own_task.md says what it holds; for GSM8K, make it with "
                                "tools/convert_gsm8k.py --input openai/gsm8k --output DIR")
    rows = []
    for where, columns in numbered_rows(path):
        try:
            rows.append(row_of(columns, where))
        except ValueError as error:
            raise ConfigError(f"{where}: {error}") from None
    if not rows:
        raise ConfigError(f"{path}: no rows")
    return rows


def row_of(columns: dict[str, Any], where: str = "") -> Row:
    """The `Row` of a row's columns; ValueError names the column that is missing or wrong.

    >>> row_of({"prompt": "2+2?", "answer": "4", "level": 1}).messages
    [{'role': 'user', 'content': '2+2?'}]
    """
    check_text(columns, "answer")
    if all(columns.get(name) is None for name in ("prompt", "messages")):
        raise ValueError(f"neither column 'prompt' nor column 'messages'; the row has {', '.join(map(str, columns))}")
    plain = next((name for name in ("prompt", "question") if columns.get(name) is not None), None)
    if plain:
        check_text(columns, plain)
    messages = columns.get("messages")
    if messages is None:
        messages = [{"role": "user", "content": columns[plain]}]
    _check_messages(messages)
    asked = next((turn["content"] for turn in reversed(messages) if turn["role"] == "user"), "")
    if plain:
        prompt = columns["prompt"] if plain == "prompt" else plain_prompt(columns["question"])
    else:
        prompt = asked if len(messages) == 1 else None
    return Row(messages, prompt, columns.get(plain, asked), columns["answer"], columns, where)


def _check_messages(messages: Any) -> None:
    turns = messages if isinstance(messages, list) else []
    texts = [turn.get(key) for turn in turns if isinstance(turn, dict) for key in ("role", "content")]
    if not turns or len(texts) != 2 * len(turns) or not all(isinstance(text, str) and text for text in texts):
        raise ValueError("column 'messages': expected a list of {role, content}, both of them text, got "
                         f"{str(messages)[:80]}")
    try:
        "".join(texts).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"column 'messages': not valid Unicode text ({error.reason})") from None
    if all(turn["role"] != "user" for turn in turns):
        raise ValueError("column 'messages': no turn of the role 'user', so nothing is asked")


def check_text(row: dict[str, Any], column: str) -> None:
    """ValueError unless `row[column]` is a text that a file can hold and that is not blank."""
    if column not in row:
        raise ValueError(f"column {column!r} is missing; the row has {', '.join(map(str, row)) or 'no columns'}")
    if not isinstance(row[column], str) or not row[column].strip():
        raise ValueError(f"column {column!r}: expected a non-empty string, got {str(row[column])[:80]!r}")
    try:
        row[column].encode()
    except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair, no file can hold it
        raise ValueError(f"column {column!r}: not valid Unicode text ({error.reason})") from None


def numbered_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(where it stands, its columns) for each row of a .jsonl or .parquet file; ConfigError if it cannot be read."""
    if path.suffix not in (".jsonl", ".parquet"):
        raise ConfigError(f"{path}: expected a .jsonl or .parquet file")
    return _jsonl_rows(path) if path.suffix == ".jsonl" else _parquet_rows(path)


def _jsonl_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            where = f"{path}:{number}"
            if not line.strip():
                raise ConfigError(f"{where}: empty line; expected one JSON object per line")
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"{where}: invalid JSON ({error})") from None
            if type(row) is not dict:
                raise ConfigError(f"{where}: expected a JSON object, got {type(row).__name__}")
            yield where, row


def _parquet_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(f"{path}: not a readable parquet file ({error})") from None
    return numbered(f"{path}", table.to_pylist())


def numbered(source: str, rows: Iterable[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """("SOURCE: row N", row) for each row, from 1."""
    return ((f"{source}: row {number}", row) for number, row in enumerate(rows, 1))
