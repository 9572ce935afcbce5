"""Convert raw GSM8K rows to what training reads.

For each split, `{split}_chat.parquet` with the columns that `dataset` shows, and `{split}.jsonl` with one
`{"problem": question, "answer": canonical gold number}` a line, which MindSpeed-RL's `cli/preprocess_data.py` takes
(R1AlpacaStyleInstructionHandler; its prompt template brings its own instruction, so `problem` is the bare question).
`packed` writes the token ids that MindSpeed-RL's trainer itself reads, with the functions of this module.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from mindspeed_qerl.tasks.gsm8k.dataset import SPLITS, check_raw, load_raw, split_files
from mindspeed_qerl.tasks.gsm8k.prompts import chat_messages


@dataclass(frozen=True)
class WrittenFile:
    """A file that was written: its path, number of rows, size in bytes, and SHA-256 in hexadecimal."""

    path: Path
    rows: int
    bytes: int
    sha256: str

    def __str__(self) -> str:
        return f"{self.path}  {self.rows:,} rows  {self.bytes:,} bytes  sha256 {self.sha256}"


def convert(source: str | Path, output: str | Path, progress: bool = False) -> list[WrittenFile]:
    """Write the converted files of `source` to the folder `output`, which is made if needed; earlier ones are replaced.

    `source` is what `dataset.load_raw` takes: a folder or Hub dataset with both splits, or one file whose name begins with
    `train` or `test` and which is that split. All rows are checked before anything is written, and the files get their names
    after all are complete: whatever fails, `output` is as it was before. `progress` shows a bar per split.

    FileNotFoundError if a split is missing; ValueError for a bad row names the file and the line.
    """
    output = output_folder(output)
    rows = read_splits(source, progress)
    targets = {f"{split}{ending}": (split, write) for split in rows for ending, write in _WRITERS.items()}
    _refuse_to_replace(source, rows, {output / name for name in targets})
    write_together(output, {name: partial(write, rows=rows[split]) for name, (split, write) in targets.items()})
    return [describe(output / name, len(rows[split])) for name, (split, _) in targets.items()]


def output_folder(output: str | Path) -> Path:
    """`output` as a Path; ValueError if it is a file. Asked before the rows are read, to fail at once."""
    output = Path(output)
    if output.exists() and not output.is_dir():
        raise ValueError(f"output {output} is a file: name a folder")
    return output


def read_splits(source: str | Path, progress: bool = False) -> dict[str, list[dict]]:
    """{split: its converted rows}, all checked; for `source` and errors see `convert`."""
    return {split: _read_split(source, split, progress) for split in _splits(source)}


def write_together(output: Path, writers: dict[str, Callable[[Path], None]]) -> None:
    """Write the files `output`/name by calling each writer with a temporary path; they get their names after all are complete.

    Whatever fails before that, `output` and its parents are as they were. ValueError if a name is taken by a folder.
    """
    for name in writers:
        if (output / name).exists() and not (output / name).is_file():
            raise ValueError(f"{output / name} is in the way and is not a file: choose another output folder")
    made = [folder for folder in (output, *output.parents) if not folder.exists()]
    temporary = {name: output / f".{name}.{os.getpid()}.tmp" for name in writers}
    try:
        output.mkdir(parents=True, exist_ok=True)
        for name, write in writers.items():
            write(temporary[name])
        for name, path in temporary.items():
            os.replace(path, output / name)
    except BaseException:
        for path in temporary.values():
            path.unlink(missing_ok=True)
        for folder in made:  # innermost first
            if folder.exists() and not any(folder.iterdir()):
                folder.rmdir()
        raise


def describe(path: Path, rows: int) -> WrittenFile:
    """The `WrittenFile` of a file that holds `rows` rows."""
    content = path.read_bytes()
    return WrittenFile(path, rows, len(content), hashlib.sha256(content).hexdigest())


def _splits(source: str | Path) -> Iterable[str]:
    if not Path(source).is_file():
        return SPLITS
    for split in SPLITS:
        if Path(source).name.startswith(split):
            return (split,)
    raise ValueError(f"cannot tell the split of {source}: name the file train*.jsonl or test*.jsonl (or .parquet)")


def _read_split(source: str | Path, split: str, progress: bool) -> list[dict]:
    from tqdm import tqdm

    rows = []
    for where, raw in tqdm(load_raw(source, split), desc=f"reading {split}", unit=" rows", disable=not progress):
        try:
            question, solution, gold = check_raw(raw)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        rows.append({"messages": chat_messages(question), "question": question, "answer": gold, "solution": solution})
    if not rows:
        raise ValueError(f"{source}: no {split} rows")
    return rows


def _refuse_to_replace(source: str | Path, splits: Iterable[str], targets: set[Path]) -> None:
    """train.jsonl is a name of raw files too: converting a folder into itself would lose them."""
    if not Path(source).exists():
        return
    existing = [target for target in targets if target.exists()]
    for split in splits:
        for path in split_files(source, split):
            if any(path.samefile(target) for target in existing):
                raise ValueError(f"{path} is input and output: choose another output folder")


def _write_parquet(path: Path, rows: list[dict]) -> None:
    import pyarrow
    import pyarrow.parquet

    text = pyarrow.string()
    schema = pyarrow.schema({"messages": pyarrow.list_(pyarrow.struct({"role": text, "content": text})),
                             "question": text, "answer": text, "solution": text})
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows, schema), path)


def _write_jsonl(path: Path, rows: list[dict]) -> None:
    problems = ({"problem": row["question"], "answer": row["answer"]} for row in rows)
    with open(path, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(problem, ensure_ascii=False) + "\n" for problem in problems)


_WRITERS = {"_chat.parquet": _write_parquet, ".jsonl": _write_jsonl}
