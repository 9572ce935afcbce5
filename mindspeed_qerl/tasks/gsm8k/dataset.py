r"""Read GSM8K as published, and find the gold number in a solution.

A raw row is `{"question": "Natalia sold clips to 48 ...", "answer": "Natalia sold 48/2 = ...\n#### 72"}`.
`convert.convert` makes of it a row that `tasks.rows` reads,

    {"messages": [{"role": "user", "content": "Natalia sold ... after \"####\"."}],   # for a chat template
     "question": "Natalia sold clips to 48 ...",                                      # for plain prompts
     "answer": "72",                                                                  # canonical gold number
     "solution": "Natalia sold 48/2 = ...\n#### 72"}
"""

import re
from collections.abc import Iterator
from pathlib import Path

from mindspeed_qerl.tasks.gsm8k.verifier import canonical_number
from mindspeed_qerl.tasks.rows import check_text, numbered, numbered_rows

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

    `source` is a folder (see `split_files`), one .jsonl or .parquet file, or a dataset of the Hugging Face Hub that is
    laid out like `openai/gsm8k` (loaded with `datasets`). FileNotFoundError and ValueError name the path and the way
    out.
    """
    if Path(source).exists():
        for path in split_files(source, split):
            yield from numbered_rows(path)
    else:
        yield from _hub_rows(str(source), split)


def split_files(source: str | Path, split: str) -> list[Path]:
    """The files under `source` that hold `split`; `source` itself if it is a file.

    In a folder these are `train.jsonl` or `train.parquet`, or the Hub's `train-00000-of-00001.parquet`, there or in
    `main/`.
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
        check_text(row, column)
    try:
        gold = gold_answer(row["answer"])
    except ValueError as error:
        raise ValueError(f"column 'answer': {error}") from None
    return row["question"], row["answer"], gold


def _hub_rows(name: str, split: str) -> Iterator[tuple[str, dict]]:
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        raise FileNotFoundError(f"no file or folder {name}, and it is not a Hub name such as openai/gsm8k")
    import datasets

    try:
        rows = datasets.load_dataset(name, "main", split=split)
    except Exception as error:  # datasets raises many kinds: offline, unknown name, unknown split
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise FileNotFoundError(f"{name} is neither a file or folder here nor a dataset that could be loaded from the "
                                f"Hub ({reason}); offline, give a folder with train.jsonl and test.jsonl") from error
    return numbered(f"{name} {split}", rows)
