r"""Read GSM8K as published, and write what training reads.

A raw row is `{"question": "Natalia sold ...", "answer": "Natalia sold 48/2 = ...\n#### 72"}`. For
each split, `{split}_chat.parquet` has rows that `tasks.rows` reads,

    messages  [{"role": "user", "content": "Natalia sold ... after \"####\"."}], for a chat template
    question  "Natalia sold ...", for plain prompts
    answer    "72", the canonical gold number
    solution  "Natalia sold 48/2 = ...\n#### 72"

`packed` writes the token ids that MindSpeed-RL's trainer itself reads.
"""

import io
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mindspeed_qerl.tasks.rows import AnyPath, check_text, numbered_rows

from .verifier import canonical_number

# The wording of verl (examples/data_preprocess/gsm8k.py): it asks for the form that the strict
# verifier wants.
INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
# The files of a split, in a folder or in what the Hub has of it.
PATTERNS = ("{}.jsonl", "{}.parquet", "{}-*.parquet", "main/{}-*.parquet")


def convert(source: AnyPath, output: AnyPath, max_steps: int | None = None) -> dict[str, int]:
    """Write the converted files of `source` to the folder `output`, which is made if needed;
    earlier ones are replaced. Returns how many rows each split has.

    `source` is a folder with both splits (`PATTERNS`), or a dataset of the Hugging Face Hub that is
    laid out like `openai/gsm8k`. All rows are checked before anything is written, and whatever
    fails, the files in `output` are as they were before. `max_steps` leaves out problems of more
    `steps`.

    FileNotFoundError if a split is missing; ValueError for a bad row names the file and the line.
    """
    import pyarrow
    import pyarrow.parquet

    contents = {}
    counts = {}
    for split, rows in read_splits(source, max_steps).items():
        parquet = io.BytesIO()
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), parquet)
        contents[f"{split}_chat.parquet"] = parquet.getvalue()
        counts[split] = len(rows)
    write_together(Path(output), contents)
    return counts


# ---- reading ----


def read_splits(source: AnyPath, max_steps: int | None) -> dict[str, list[dict]]:
    """{split: its converted rows}, all checked; for the arguments and errors see `convert`."""
    splits = {}
    for split in ("train", "test"):
        rows = []
        for where, raw in load_raw(source, split):
            try:
                row = converted(raw)
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from None
            if max_steps is None or steps(row["solution"]) <= max_steps:
                rows.append(row)
        if not rows:
            raise ValueError(f"{source}: no {split} rows, or none of so few steps")
        splits[split] = rows
    return splits


def steps(solution: str) -> int:
    r"""Returns how many steps a published solution takes: its lines before `####`, "between 2 and
    8" (Cobbe et al., 2021).

    >>> steps("In May she sold 48/2 = 24 clips.\nTogether that is 48+24 = 72.\n#### 72")
    2
    """
    return sum(bool(line.strip()) for line in solution.rpartition("####")[0].splitlines())


def converted(raw: dict[str, Any]) -> dict[str, Any]:
    """The row that training reads of a raw one; a model with a chat template is asked the question
    and the instruction. ValueError says what is wrong with it.

    >>> row = converted({"question": "What is 3+4?", "answer": "#### 7"})
    >>> row["answer"], row["messages"][0]["content"][:35]
    ('7', "What is 3+4? Let's think step by st")
    """
    question = check_text(raw, "question")
    solution = check_text(raw, "answer")
    return {
        "messages": [{"role": "user", "content": f"{question} {INSTRUCTION}"}],
        "question": question,
        "answer": gold_answer(solution),
        "solution": solution,
    }


def gold_answer(solution: str) -> str:
    """The gold number behind the last `####` of a solution, canonical: "1000" of "#### 1,000".
    ValueError if anything but one number is there.
    """
    return canonical_number(solution.rpartition("####")[2])


def load_raw(source: AnyPath, split: str) -> Iterator[tuple[str, dict]]:
    """Yield (where the row stands, row) for each row of one split, "train" or "test", unchecked.

    FileNotFoundError and ValueError name the path and the way out.
    """
    folder = Path(source)
    if not folder.is_dir():
        import datasets

        try:
            rows = datasets.load_dataset(str(source), "main", split=split)
        except Exception as error:  # of many kinds: offline, unknown name, unknown split
            raise FileNotFoundError(
                f"{source} is neither a folder here nor a dataset that could be loaded from the "
                f"Hub ({error}); offline, give a folder with train.jsonl and test.jsonl"
            ) from error
        for number, row in enumerate(rows, 1):
            yield f"{source} {split}: row {number}", row
        return
    for pattern in PATTERNS:
        files = sorted(folder.glob(pattern.format(split)))
        if files:
            break
    else:
        raise FileNotFoundError(f"no {split}.jsonl or {split}.parquet in {source}")
    for file in files:
        yield from numbered_rows(file)


# ---- writing ----


def write_together(output: Path, contents: Mapping[str, bytes]) -> None:
    """Write the files {name: content} to the folder `output`; they get their names after all are
    complete, and whatever fails before that, those that are there are as they were.
    """
    output.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=output, prefix=".making-") as making:  # on the same file system
        for name, content in contents.items():
            Path(making, name).write_bytes(content)
        for name in contents:
            os.replace(Path(making, name), output / name)
