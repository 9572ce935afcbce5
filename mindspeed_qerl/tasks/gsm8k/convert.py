r"""Read GSM8K as published, and write what training reads.

A raw row is `{"question": "Natalia sold clips to 48 ...", "answer": "Natalia sold 48/2 = ...\n####
72"}`. For each split, `{split}_chat.parquet` has rows that `tasks.rows` reads,

    {"messages": [{"role": "user", "content": "Natalia sold ... after \"####\"."}],   # for a chat
     template "question": "Natalia sold clips to 48 ...",                                      # for
     plain prompts "answer": "72",
     # canonical gold number "solution": "Natalia sold 48/2 = ...\n#### 72"}

and `{split}.jsonl` one `{"problem": question, "answer": canonical gold number}` a line, which
MindSpeed-RL's `cli/preprocess_data.py` takes (R1AlpacaStyleInstructionHandler; its prompt template
brings its own instruction, so `problem` is the bare question). `packed` writes the token ids that
MindSpeed-RL's trainer itself reads.
"""

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from mindspeed_qerl.tasks.gsm8k.prompts import chat_messages
from mindspeed_qerl.tasks.gsm8k.verifier import canonical_number
from mindspeed_qerl.tasks.rows import check_text, numbered, numbered_rows, row_of

SPLITS = ("train", "test")


def convert(
    source: str | Path, output: str | Path, progress: bool = False, max_steps: int | None = None
) -> list[str]:
    """Write the converted files of `source` to the folder `output`, which is made if needed;
    earlier ones are replaced. Returns a line on each file (`described`).

    `source` is what `load_raw` takes: a folder or Hub dataset with both splits, or one file whose
    name begins with `train` or `test` and which is that split. All rows are checked before anything
    is written, and whatever fails, `output` is as it was before. `progress` shows a bar per split.
    `max_steps` leaves out problems of more `steps`.

    FileNotFoundError if a split is missing; ValueError for a bad row names the file and the line.
    """
    output, rows = Path(output), read_splits(source, progress, max_steps)
    targets = {
        f"{split}{ending}": (split, write) for split in rows for ending, write in _WRITERS.items()
    }
    _refuse_to_replace(source, rows, {output / name for name in targets})
    write_together(
        output, {name: partial(write, rows=rows[split]) for name, (split, write) in targets.items()}
    )
    return [described(output / name, len(rows[split])) for name, (split, _) in targets.items()]


# ---- reading ----


def read_splits(
    source: str | Path, progress: bool = False, max_steps: int | None = None
) -> dict[str, list[dict]]:
    """{split: its converted rows}, all checked; for the arguments and errors see `convert`."""
    splits, name = SPLITS, Path(source).name
    if Path(source).is_file() and not (
        splits := tuple(split for split in SPLITS if name.startswith(split))
    ):
        raise ValueError(
            f"cannot tell the split of {source}: name the file train*.jsonl or test*.jsonl (or "
            ".parquet)"
        )
    found = {split: _read_split(source, split, progress) for split in splits}
    if max_steps is None:
        return found
    kept = {
        split: [row for row in rows if steps(row["solution"]) <= max_steps]
        for split, rows in found.items()
    }
    if lacking := next((split for split in kept if not kept[split]), None):
        fewest = min(steps(row["solution"]) for row in found[lacking])
        raise ValueError(
            f"{source}: no {lacking} problem has at most {max_steps} steps; the fewest are {fewest}"
        )
    return kept


def steps(solution: str) -> int:
    r"""How many a published solution takes: its lines before `####`, "between 2 and 8" (Cobbe et
    al., 2021).

    >>> steps("In May she sold 48/2 = <<48/2=24>>24 clips.\nTogether that is 48+24 = <<48+24=72>>72.\n#### 72")
    2
    """
    if "####" not in solution:
        raise ValueError(f"no published solution, whose steps can be counted: {solution[:80]!r}")
    return sum(bool(line.strip()) for line in solution.rpartition("####")[0].splitlines())


def _read_split(source: str | Path, split: str, progress: bool) -> list[dict]:
    from tqdm import tqdm

    rows = []
    for where, raw in tqdm(
        load_raw(source, split), desc=f"reading {split}", unit=" rows", disable=not progress
    ):
        try:
            rows.append(converted(raw))
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
    if not rows:
        raise ValueError(f"{source}: no {split} rows")
    return rows


def converted(row: dict) -> dict:
    """The row that training reads of a raw one, or of what verl or TRL make of it: verl keeps it in
    `extra_info`, and messages stay as they are. ValueError says what is wrong with it.
    """
    kept = row.get("extra_info")
    if isinstance(kept, dict) and {"question", "answer"} <= kept.keys():
        row = kept
    if "question" not in row and any(
        row.get(column) is not None for column in ("prompt", "messages")
    ):
        made = row_of(row)
        gold = gold_answer(made.answer) if "####" in made.answer else canonical_number(made.answer)
        asked = next(turn["content"] for turn in reversed(made.messages) if turn["role"] == "user")
        return {
            "messages": made.messages,
            "question": asked,
            "answer": gold,
            "solution": made.answer,
        }
    for column in ("question", "answer"):
        check_text(row, column)
    try:
        gold = gold_answer(row["answer"])
    except ValueError as error:
        raise ValueError(f"column 'answer': {error}") from None
    return {
        "messages": chat_messages(row["question"]),
        "question": row["question"],
        "answer": gold,
        "solution": row["answer"],
    }


def gold_answer(solution: str) -> str:
    r"""The gold number behind the last `####` of a solution, canonical: "... = 1,000\n#### 1,000" ->
    "1000".

    ValueError if there is no `####`, or anything but one number behind it.
    """
    _, marker, tail = solution.rpartition("####")
    if not marker:
        raise ValueError("no '#### n' at the end of the solution")
    return canonical_number(tail)


def load_raw(source: str | Path, split: str) -> Iterator[tuple[str, dict]]:
    """Yield (where the row stands, row) for each row of one split, "train" or "test", unchecked.

    `source` is a folder (see `_split_files`), a .jsonl or .parquet file, or a dataset of the
    Hugging Face Hub that is laid out like `openai/gsm8k`. FileNotFoundError and ValueError name the
    path and the way out.
    """
    if Path(source).exists():
        for path in _split_files(source, split):
            yield from numbered_rows(path)
    else:
        yield from _hub_rows(str(source), split)


def _split_files(source: str | Path, split: str) -> list[Path]:
    """The files under `source` that hold `split`; `source` itself if it is a file.

    In a folder these are `train.jsonl` or `train.parquet`, or the Hub's
    `train-00000-of-00001.parquet`, there or in `main/`.
    """
    source = Path(source)
    if source.is_file():
        return [source]
    for pattern in (
        f"{split}.jsonl",
        f"{split}.parquet",
        f"{split}-*.parquet",
        f"main/{split}-*.parquet",
    ):
        if files := sorted(source.glob(pattern)):
            return files
    raise FileNotFoundError(
        f"no {split} rows in {source}: expected {split}.jsonl or {split}.parquet"
    )


def _hub_rows(name: str, split: str) -> Iterator[tuple[str, dict]]:
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        raise FileNotFoundError(
            f"no file or folder {name}, and it is not a Hub name such as openai/gsm8k"
        )
    import datasets

    try:
        rows = datasets.load_dataset(name, "main", split=split)
    except Exception as error:  # datasets raises many kinds: offline, unknown name, unknown split
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise FileNotFoundError(
            f"{name} is neither a file or folder here nor a dataset that could be loaded from the "
            f"Hub ({reason}); offline, give a folder with train.jsonl and test.jsonl"
        ) from error
    return numbered(f"{name} {split}", rows)


# ---- writing ----


def write_together(output: Path, writers: dict[str, Callable[[Path], None]]) -> None:
    """Write the files `output`/name by calling each writer with a temporary path; they get their
    names after all are complete. Whatever fails before that, `output` and its parents are as they
    were. ValueError if a folder is where a file should be, or a file where the folder should be.
    """
    if output.exists() and not output.is_dir():
        raise ValueError(f"output {output} is a file: name a folder")
    for name in writers:
        if (output / name).exists() and not (output / name).is_file():
            raise ValueError(
                f"{output / name} is in the way and is not a file: choose another output folder"
            )
    nearest = next(folder for folder in (output, *output.absolute().parents) if folder.exists())
    with TemporaryDirectory(dir=nearest, prefix=".making-") as making:  # on the same file system
        for name, write in writers.items():
            write(Path(making, name))
        output.mkdir(parents=True, exist_ok=True)
        for name in writers:
            os.replace(Path(making, name), output / name)


def described(path: Path, rows: int) -> str:
    """A line on a file that holds `rows` rows: its path, number of rows, size and SHA-256."""
    content = path.read_bytes()
    return f"{path}  {rows:,} rows  {len(content):,} bytes  sha256 {hashlib.sha256(content).hexdigest()}"


def _refuse_to_replace(source: str | Path, splits: Iterable[str], targets: set[Path]) -> None:
    """train.jsonl is a name of raw files too: converting a folder into itself would lose them."""
    inputs = (
        [path for split in splits for path in _split_files(source, split)]
        if Path(source).exists()
        else []
    )
    for path in inputs:
        if any(path.samefile(target) for target in targets if target.exists()):
            raise ValueError(f"{path} is input and output: choose another output folder")


def _write_parquet(path: Path, rows: list[dict]) -> None:
    import pyarrow
    import pyarrow.parquet

    text = pyarrow.string()
    schema = pyarrow.schema(
        {
            "messages": pyarrow.list_(pyarrow.struct({"role": text, "content": text})),
            "question": text,
            "answer": text,
            "solution": text,
        }
    )
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows, schema), path)


def _write_jsonl(path: Path, rows: list[dict]) -> None:
    problems = ({"problem": row["question"], "answer": row["answer"]} for row in rows)
    with open(path, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(problem, ensure_ascii=False) + "\n" for problem in problems)


_WRITERS = {"_chat.parquet": _write_parquet, ".jsonl": _write_jsonl}
