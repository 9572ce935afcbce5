r"""Read GSM8K as published, and write what training reads.

A raw row is `{"question": "Natalia sold ...", "answer": "Natalia sold 48/2 = ...\n#### 72"}`. For
each split, `{split}_chat.parquet` has rows that `tasks.rows` reads,

    messages  [{"role": "user", "content": "Natalia sold ... after \"####\"."}], for a chat template
    question  "Natalia sold ...", for plain prompts
    answer    "72", the canonical gold number
    solution  "Natalia sold 48/2 = ...\n#### 72"

and `{split}.jsonl` one `{"problem": question, "answer": canonical gold number}` a line, which
MindSpeed-RL's `cli/preprocess_data.py` takes (R1AlpacaStyleInstructionHandler; its prompt template
brings its own instruction, so `problem` is the bare question). `packed` writes the token ids that
MindSpeed-RL's trainer itself reads.
"""

import hashlib
import io
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    output, splits = Path(output), read_splits(source, progress, max_steps)
    contents = {}
    for split, rows in splits.items():
        contents[f"{split}_chat.parquet"] = _parquet(rows)
        contents[f"{split}.jsonl"] = _jsonl(rows)
    _refuse_to_replace(source, splits, {output / name for name in contents})
    write_together(output, contents)
    lines = []
    for split, rows in splits.items():
        for name in (f"{split}_chat.parquet", f"{split}.jsonl"):
            lines.append(described(output / name, len(rows)))
    return lines


# ---- reading ----


def read_splits(
    source: str | Path, progress: bool = False, max_steps: int | None = None
) -> dict[str, list[dict]]:
    """{split: its converted rows}, all checked; for the arguments and errors see `convert`."""
    splits: Sequence[str] = SPLITS
    path = Path(source)
    if path.is_file():
        splits = [split for split in SPLITS if path.name.startswith(split)]
        if not splits:
            raise ValueError(
                f"cannot tell the split of {source}: name the file train*.jsonl or test*.jsonl (or "
                ".parquet)"
            )
    rows = {split: _read_split(source, split, progress) for split in splits}
    if max_steps is None:
        return rows
    for split, every in rows.items():
        counts = [steps(row["solution"]) for row in every]
        if min(counts) > max_steps:
            raise ValueError(
                f"{source}: no {split} problem has at most {max_steps} steps; the fewest are "
                f"{min(counts)}"
            )
        rows[split] = [row for row, count in zip(every, counts) if count <= max_steps]
    return rows


def steps(solution: str) -> int:
    r"""How many a published solution takes: its lines before `####`, "between 2 and 8" (Cobbe et
    al., 2021).

    >>> steps("In May she sold 48/2 = 24 clips.\nTogether that is 48+24 = 72.\n#### 72")
    2
    """
    if "####" not in solution:
        raise ValueError(f"no published solution, whose steps can be counted: {solution[:80]!r}")
    return sum(bool(line.strip()) for line in solution.rpartition("####")[0].splitlines())


def _read_split(source: str | Path, split: str, progress: bool) -> list[dict]:
    from tqdm import tqdm

    rows = []
    numbered = load_raw(source, split)
    for where, raw in tqdm(numbered, f"reading {split}", unit=" rows", disable=not progress):
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
    extra = row.get("extra_info")
    if isinstance(extra, dict) and {"question", "answer"} <= extra.keys():
        row = extra
    is_conversation = row.get("prompt") is not None or row.get("messages") is not None
    if "question" not in row and is_conversation:
        made = row_of(row)
        messages, question, solution = made.messages, made.last_turn, made.answer
        gold = gold_answer(solution) if "####" in solution else canonical_number(solution)
    else:
        for column in ("question", "answer"):
            check_text(row, column)
        question, solution = row["question"], row["answer"]
        messages = chat_messages(question)
        try:
            gold = gold_answer(solution)
        except ValueError as error:
            raise ValueError(f"column 'answer': {error}") from None
    return {"messages": messages, "question": question, "answer": gold, "solution": solution}


def gold_answer(solution: str) -> str:
    r"""The gold number behind the last `####` of a solution, canonical: "1000" of "#### 1,000".

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
    for pattern in ("{}.jsonl", "{}.parquet", "{}-*.parquet", "main/{}-*.parquet"):
        if files := sorted(source.glob(pattern.format(split))):
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


def write_together(output: Path, contents: Mapping[str, bytes]) -> None:
    """Write the files {name: content} to the folder `output`; they get their names after all are
    complete. Whatever fails before that, `output` and its parents are as they were. ValueError if a
    folder is where a file should be, or a file where the folder should be.
    """
    if output.exists() and not output.is_dir():
        raise ValueError(f"output {output} is a file: name a folder")
    for path in map(output.joinpath, contents):
        if path.exists() and not path.is_file():
            raise ValueError(
                f"{path} is in the way and is not a file: choose another output folder"
            )
    nearest = next(folder for folder in (output, *output.absolute().parents) if folder.exists())
    with TemporaryDirectory(dir=nearest, prefix=".making-") as making:  # on the same file system
        for name, content in contents.items():
            Path(making, name).write_bytes(content)
        output.mkdir(parents=True, exist_ok=True)
        for name in contents:
            os.replace(Path(making, name), output / name)


def described(path: Path, rows: int) -> str:
    """A line on a file that holds `rows` rows: its path, number of rows, size and SHA-256."""
    content = path.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    return f"{path}  {rows:,} rows  {len(content):,} bytes  sha256 {digest}"


def _refuse_to_replace(source: str | Path, splits: Iterable[str], targets: set[Path]) -> None:
    """train.jsonl is a name of raw files too: converting a folder into itself would lose them."""
    if not Path(source).exists():
        return
    for split in splits:
        for path in _split_files(source, split):
            if any(path.samefile(target) for target in targets if target.exists()):
                raise ValueError(f"{path} is input and output: choose another output folder")


def _parquet(rows: list[dict]) -> bytes:
    import pyarrow
    import pyarrow.parquet

    text = pyarrow.string()
    messages = pyarrow.list_(pyarrow.struct({"role": text, "content": text}))
    columns = {"messages": messages, "question": text, "answer": text, "solution": text}
    table = pyarrow.Table.from_pylist(rows, pyarrow.schema(columns))
    file = io.BytesIO()
    pyarrow.parquet.write_table(table, file)
    return file.getvalue()


def _jsonl(rows: list[dict]) -> bytes:
    lines = []
    for row in rows:
        problem = {"problem": row["question"], "answer": row["answer"]}
        lines.append(json.dumps(problem, ensure_ascii=False) + "\n")
    return "".join(lines).encode()
