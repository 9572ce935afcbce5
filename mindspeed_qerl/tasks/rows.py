"""The rows of a task: what is asked, what is right, and whatever else the reward wants to know.

A file is .jsonl or .parquet, and each of its rows has

    prompt      what is asked, as text, or as messages [{"role": "user", "content": "..."}, ...],
    for the chat template messages    the same messages under another name; where both are there, a
    `prompt` of text is the plain form answer      a text or number; the reward compares with it

and more columns if you like: the reward gets them all. Rows of verl and TRL are such rows: the
answer may also be `reward_model.ground_truth`, or one of `GOLDS`. GSM8K's converted rows
(`gsm8k.convert`) have `messages` for chat models and `question` for plain prompts. This module
imports in a bare Python.
"""

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from numbers import Real
from pathlib import Path
from typing import Any

from mindspeed_qerl.common.errors import ConfigError
from mindspeed_qerl.tasks.gsm8k.prompts import plain_prompt

GOLDS = ("answer", "ground_truth", "solution", "reference_answer", "completion")  # in this order
# Who may speak last before the model does; Llama's, GLM's and OpenAI's names for tools are among
# them.
BEFORE_AN_ANSWER = ("user", "tool", "function", "ipython", "observation", "system", "developer")


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
    columns: dict[str, Any]
    where: str = ""

    @property
    def last_turn(self) -> str:
        """The last that the user says."""
        return next(turn["content"] for turn in self.messages[::-1] if turn["role"] == "user")


def read_rows(path: str | Path) -> list[Row]:
    """The rows of a .jsonl or .parquet file; at least one. FileNotFoundError if there is no such
    file; ConfigError names the file, the line (or row) and the column that is wrong.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(
            f"no data file {path}: docs/own_task.md says what it holds; for GSM8K, make it with "
            "tools/convert_gsm8k.py --input openai/gsm8k --output DIR"
        )
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

    >>> row_of({"prompt": "2+2?", "answer": 4, "level": 1}).messages
    [{'role': 'user', 'content': '2+2?'}]
    >>> turn = {"role": "user", "content": "2+2?"}
    >>> row_of({"prompt": [turn], "reward_model": {"ground_truth": "4"}}).answer
    '4'
    """
    answer = _gold(columns)
    conversation = "prompt" if isinstance(columns.get("prompt"), list) else "messages"
    messages = columns.get(conversation)
    if messages is None and columns.get("prompt") is None:
        raise ValueError(
            f"neither column 'prompt' nor column 'messages'; {_has(columns)}. "
            "tools/convert_gsm8k.py makes such rows of GSM8K's own"
        )
    plain = "question" if columns.get("question") is not None else None
    if conversation == "messages" and columns.get("prompt") is not None:
        plain = "prompt"
    if plain:
        check_text(columns, plain)
    if messages is None:
        messages = [{"role": "user", "content": columns["prompt"]}]
    _check_messages(messages, conversation)
    prompt = None
    if plain:
        question = columns[plain]
        prompt = question if plain == "prompt" else plain_prompt(question)
    elif len(messages) == 1:
        question = prompt = messages[0]["content"]
    else:
        question = "\n".join(f"{turn['role']}: {turn['content'] or ''}" for turn in messages)
    return Row(messages, prompt, question, answer, columns, where)


def _gold(columns: dict[str, Any]) -> str:
    """The answer of a row as text; ValueError if there is none."""
    values: dict[str, Any] = {"answer": columns.get("answer")}
    if isinstance(columns.get("reward_model"), dict):
        values["reward_model.ground_truth"] = columns["reward_model"].get("ground_truth")
    values |= {name: columns.get(name) for name in GOLDS}
    name = next((name for name, value in values.items() if value is not None), None)
    if name is None:
        raise ValueError(
            f"column 'answer' is missing; {_has(columns)}. Known too: "
            f"reward_model.ground_truth, {', '.join(GOLDS[1:])}. Give it any text if the reward "
            "does not read it"
        )
    value = values[name]
    if isinstance(value, Real | Decimal) and not isinstance(value, bool) and math.isfinite(value):
        whole = int(value)  # type: ignore[arg-type]  # takes any real number
        return str(whole) if value == whole else format(Decimal(str(value)), "f")
    # as verl's rewards compare with
    if name == "reward_model.ground_truth" and isinstance(value, list | dict):
        return json.dumps(value, ensure_ascii=False, default=str)
    if name == "completion" and isinstance(value, list):
        _check_turns(value, name)
        value = value[-1]["content"]
    check_text({name: value}, name)
    return value


def _check_messages(messages: Any, column: str) -> None:
    """ValueError unless `messages` are a conversation that the model is to go on with."""
    _check_turns(messages, column)
    last = messages[-1]["role"]
    if last not in BEFORE_AN_ANSWER:
        raise ValueError(
            f"column {column!r} ends with a turn of the role {last!r}, which the model would read "
            f"before it answers. The last turn is one of {', '.join(BEFORE_AN_ANSWER)}: leave out "
            "what follows, and put what is right into the column 'answer'"
        )
    if all(turn["role"] != "user" for turn in messages):
        raise ValueError(f"column {column!r}: no turn of the role 'user', so nothing is asked")


def _check_turns(messages: Any, column: str) -> None:
    turns = messages if isinstance(messages, list) else []
    if not turns or not all(isinstance(turn, dict) and _is_turn(turn) for turn in turns):
        raise ValueError(
            f"column {column!r}: expected a list of {{role, content}}, both of them text, got "
            f"{str(messages)[:80]}"
        )
    _check_unicode("".join(turn["role"] + (turn["content"] or "") for turn in turns), column)


def _is_turn(turn: dict[str, Any]) -> bool:
    role, content = turn.get("role"), turn.get("content")
    says_nothing = content in (None, "") and bool(turn.get("tool_calls")) and "content" in turn
    return (
        isinstance(role, str)
        and role != ""
        and (says_nothing or isinstance(content, str) and content != "")
    )


def check_text(row: dict[str, Any], column: str) -> None:
    """ValueError unless `row[column]` is a text that a file can hold and that is not blank."""
    if column not in row:
        raise ValueError(f"column {column!r} is missing; {_has(row)}")
    text = row[column]
    if not isinstance(text, str) or not text.strip():
        raise ValueError(
            f"column {column!r}: expected a non-empty string, got {str(text)[:80]!r} "
            f"({type(text).__name__})"
        )
    _check_unicode(text, column)


def _has(columns: dict[str, Any]) -> str:
    return f"the row has {', '.join(map(str, columns)) or 'no columns'}"


def _check_unicode(text: str, column: str) -> None:
    """JSON can spell half of a surrogate pair, no file can hold it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"column {column!r}: not valid Unicode text ({error.reason})") from None


def numbered_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(where it stands, its columns) for each row of a .jsonl or .parquet file; ConfigError if it
    cannot be read.
    """
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
