r"""Read GSM8K: the raw rows as published, and the converted rows that training and evaluation use.

A raw row is `{"question": "Natalia sold clips to 48 ...", "answer": "Natalia sold 48/2 = ...\n#### 72"}`.
A converted row (`convert.convert` writes them) is

    {"messages": [{"role": "user", "content": "Natalia sold ... after \"####\"."}],   # for a chat template
     "question": "Natalia sold clips to 48 ...",                                      # for plain prompts
     "answer": "72",                                                                  # canonical gold number
     "solution": "Natalia sold 48/2 = ...\n#### 72"}
"""

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from mindspeed_qerl.tasks.gsm8k.verifier import canonical_number

SPLITS = ("train", "test")


def gold_answer(solution: str) -> str:
    r"""The gold number behind the last `####` of a solution, canonical: "... = 1,000\n#### 1,000" -> "1000".

    ValueError if there is no `####`, or anything but one number behind it.
    """
    _, marker, tail = solution.rpartition("####")
    if not marker:
        raise ValueError("no '#### n' at the end of the solution")
    return canonical_number(tail)


def load_raw(source: str | Path, split: str) -> Iterator[tuple[str, dict]]:
    """Yield (where the row stands, row) for each row of one split, "train" or "test"; rows are checked by `check_raw`.

    `source` is a folder (see `split_files`), one .jsonl or .parquet file, or a dataset of the Hugging Face Hub that is laid
    out like `openai/gsm8k` (loaded with `datasets`). FileNotFoundError and ValueError name the path and the way out.
    """
    if Path(source).exists():
        for path in split_files(source, split):
            yield from _numbered_rows(path)
    else:
        yield from _hub_rows(str(source), split)


def split_files(source: str | Path, split: str) -> list[Path]:
    """The files under `source` that hold `split`; `source` itself if it is a file.

    In a folder these are `train.jsonl` or `train.parquet`, or the Hub's `train-00000-of-00001.parquet`, there or in `main/`.
    """
    source = Path(source)
    if source.is_file():
        return [source]
    for pattern in (f"{split}.jsonl", f"{split}.parquet", f"{split}-*.parquet", f"main/{split}-*.parquet"):
        files = sorted(source.glob(pattern))
        if files:
            return files
    raise FileNotFoundError(f"no {split} rows in {source}: expected {split}.jsonl or {split}.parquet")


def check_raw(row: dict) -> tuple[str, str, str]:
    """(question, solution, canonical gold number) of a raw row. ValueError says what is wrong with it."""
    for column in ("question", "answer"):
        _check_text(row, column)
    try:
        gold = gold_answer(row["answer"])
    except ValueError as error:
        raise ValueError(f"column 'answer': {error}") from None
    return row["question"], row["answer"], gold


def read_converted(path: str | Path) -> list[dict]:
    """The rows of a converted .parquet file, or of a .jsonl with the same columns; at least one.

    FileNotFoundError if there is no such file; ValueError names the file, the row or line, and the column that is wrong.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no data file {path}: make it with tools/convert_gsm8k.py --input openai/gsm8k --output DIR")
    rows = []
    for where, row in _numbered_rows(path):
        try:
            _check_converted(row)
        except ValueError as error:
            raise ValueError(f"{where}: {error}; make the file again with tools/convert_gsm8k.py") from None
        rows.append(row)
    if not rows:
        raise ValueError(f"{path}: no rows")
    return rows


def _check_converted(row: dict) -> None:
    for column in ("question", "answer", "solution"):
        _check_text(row, column)
    messages = row.get("messages")
    turns = messages if isinstance(messages, list) else []
    if not turns or not all(isinstance(turn, dict) and turn.get("role") and turn.get("content") for turn in turns):
        raise ValueError(f"column 'messages': expected a list of {{role, content}}, got {str(messages)[:80]}")
    try:
        canonical_number(row["answer"])
    except ValueError as error:
        raise ValueError(f"column 'answer': {error}") from None


def _check_text(row: dict, column: str) -> None:
    if column not in row:
        raise ValueError(f"column {column!r} is missing; the row has {', '.join(map(str, row)) or 'no columns'}")
    if not isinstance(row[column], str) or not row[column].strip():
        raise ValueError(f"column {column!r}: expected a non-empty string, got {str(row[column])[:80]!r}")
    try:
        row[column].encode()
    except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair, no file can hold it
        raise ValueError(f"column {column!r}: not valid Unicode text ({error.reason})") from None


def _numbered_rows(path: Path) -> Iterator[tuple[str, dict]]:
    if path.suffix == ".jsonl":
        return _jsonl_rows(path)
    if path.suffix == ".parquet":
        return _parquet_rows(path)
    raise ValueError(f"{path}: expected a .jsonl or .parquet file")


def _jsonl_rows(path: Path) -> Iterator[tuple[str, dict]]:
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            where = f"{path}:{number}"
            if not line.strip():
                raise ValueError(f"{where}: empty line; expected one JSON object per line")
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{where}: invalid JSON ({error})") from None
            if type(row) is not dict:
                raise ValueError(f"{where}: expected a JSON object, got {type(row).__name__}")
            yield where, row


def _parquet_rows(path: Path) -> Iterator[tuple[str, dict]]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path}: not a readable parquet file ({error})") from None
    return _numbered(f"{path}", table.to_pylist())


def _hub_rows(name: str, split: str) -> Iterator[tuple[str, dict]]:
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        raise FileNotFoundError(f"no file or folder {name}, and it is not a Hub name such as openai/gsm8k")
    import datasets

    try:
        rows = datasets.load_dataset(name, "main", split=split)
    except Exception as error:  # datasets raises many kinds: offline, unknown name, unknown split
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise FileNotFoundError(f"{name} is neither a file or folder here nor a dataset that could be loaded from the Hub "
                                f"({reason}); offline, give a folder with train.jsonl and test.jsonl") from error
    return _numbered(f"{name} {split}", rows)


def _numbered(source: str, rows: Iterable[dict]) -> Iterator[tuple[str, dict]]:
    return ((f"{source}: row {number}", row) for number, row in enumerate(rows, 1))
