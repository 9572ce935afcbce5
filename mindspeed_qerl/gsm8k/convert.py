"""Convert raw GSM8K rows to what training reads.

For each split, `{split}_chat.parquet` with the columns of `dataset.read_converted`, and `{split}.jsonl` with one
`{"problem": question, "answer": canonical gold number}` a line, which MindSpeed-RL's `cli/preprocess_data.py` takes
(R1AlpacaStyleInstructionHandler; its prompt template brings its own instruction, so `problem` is the bare question).
"""

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from mindspeed_qerl.gsm8k.dataset import SPLITS, check_raw, load_raw, split_files
from mindspeed_qerl.gsm8k.prompts import chat_messages


@dataclass(frozen=True)
class WrittenFile:
    """A file that `convert` wrote: its path, number of rows, size in bytes, and SHA-256 in hexadecimal."""

    path: Path
    rows: int
    bytes: int
    sha256: str


def convert(source: str | Path, output: str | Path, progress: bool = False) -> list[WrittenFile]:
    """Write the converted files of `source` to the folder `output`, which is made if needed; earlier ones are replaced.

    `source` is what `dataset.load_raw` takes: a folder or Hub dataset with both splits, or one file whose name begins with
    `train` or `test` and which is that split. All rows are checked before anything is written, and the files get their names
    after all are complete: whatever fails, `output` is as it was before. `progress` shows a bar per split.

    FileNotFoundError if a split is missing; ValueError for a bad row names the file and the line.
    """
    output = Path(output)
    if output.exists() and not output.is_dir():
        raise ValueError(f"output {output} is a file: name a folder")
    rows = {split: _read_split(source, split, progress) for split in _splits(source)}
    targets = {f"{split}{ending}": (split, write) for split in rows for ending, write in _WRITERS.items()}
    _refuse_to_replace(source, rows, {output / name for name in targets})

    made = [folder for folder in (output, *output.parents) if not folder.exists()]
    temporary = {name: output / f".{name}.{os.getpid()}.tmp" for name in targets}
    try:
        output.mkdir(parents=True, exist_ok=True)
        for name, (split, write) in targets.items():
            write(temporary[name], rows[split])
        for name, path in temporary.items():
            os.replace(path, output / name)
    except BaseException:
        for path in temporary.values():
            path.unlink(missing_ok=True)
        for folder in made:  # innermost first
            if folder.exists() and not any(folder.iterdir()):
                folder.rmdir()
        raise
    return [_describe(output / name, len(rows[split])) for name, (split, _) in targets.items()]


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
    existing = [target for target in targets if target.exists()]
    for target in existing:
        if not target.is_file():
            raise ValueError(f"{target} is in the way and is not a file: choose another output folder")
    if not Path(source).exists():
        return
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


def _describe(path: Path, rows: int) -> WrittenFile:
    content = path.read_bytes()
    return WrittenFile(path, rows, len(content), hashlib.sha256(content).hexdigest())
