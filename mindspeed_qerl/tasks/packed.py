r"""Write a task as MindSpeed-RL's trainer reads it: token ids in Megatron's indexed format. Needs
numpy and transformers, no torch.

With `data_path: DIR/gsm8k_train` the trainer opens
DIR/gsm8k_train_packed_{field}_document.{bin,idx} for every field it finds
(mindspeed_rl/datasets/indexed_dataset.py:23-43 at commit 05a90d7). We write two, a row each for
every problem, in the order of the source:

    input_ids   the prompt: the chat template applied to the row's messages, with the header of the
                assistant's turn
    labels      without special tokens; all that the reward process, which decodes them, gets to
                know of a row. GSM8K (`convert_packed`): the canonical gold answer, "72". Any other
                task (`pack_rows`): the number of the row, "0" for the first, in
                DIR/NAME_rows.jsonl, which holds all columns, so that a reward gets any answer
                exactly, and its whole row.

.bin is the tokens of all rows as int32, one after the other. .idx is, little-endian
(indexed_dataset.py:749-812):

    offset     type          content
    0          9 bytes       MMIDIDX, two zeros
    9          uint64        version: 1
    17         uint8         type of the tokens: 4 = int32
    18         uint64        n, the number of rows
    26         uint64        n + 1
    34         int32[n]      length of each row in tokens
    34 + 4n    int64[n]      where each row begins in .bin, in bytes
    34 + 12n   int64[n+1]    where each document begins, and the end: 0, 1, ..., n, since a document
                             is a row
"""

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from mindspeed_qerl.common.errors import ConfigError
from mindspeed_qerl.tasks import prompts
from mindspeed_qerl.tasks.gsm8k.convert import described, read_splits, write_together
from mindspeed_qerl.tasks.rows import Row, read_rows, row_of

INT32 = 4  # DType.int32, indexed_dataset.py:416


@dataclass(frozen=True)
class PackedSplit:
    """What was written for one `data_path`, which is absolute and goes into MindSpeed-RL's config
    as it is.
    """

    data_path: Path
    files: list[str]  # a line on each, for the terminal
    prompt_lengths: list[int]  # in tokens
    # prompts that hold the tokenizer's unknown token: the model cannot read a part of them
    prompts_with_unknown: int

    def dropped(self, max_prompt_length: int) -> int:
        """How many rows MindSpeed-RL leaves out: it keeps prompts shorter than `max_prompt_length`
        (indexed_dataset.py:545).
        """
        return sum(length >= max_prompt_length for length in self.prompt_lengths)

    def report(self, max_prompt_length: int | None) -> str:
        """Lines for the terminal; with the `max_prompt_length` of a config, how many rows it leaves
        out.
        """
        rows, lengths = len(self.prompt_lengths), self.prompt_lengths
        lines = [*self.files, f"  prompts of {min(lengths)} to {max(lengths)} tokens"]
        if max_prompt_length is not None:
            lines.append(
                f"  {self.dropped(max_prompt_length):,} of {rows:,} have {max_prompt_length} "
                f"tokens or more: with max_prompt_length: {max_prompt_length} MindSpeed-RL leaves "
                "them out"
            )
        if self.prompts_with_unknown:
            lines.append(
                f"  warning: {self.prompts_with_unknown:,} of {rows:,} prompts hold the "
                "tokenizer's unknown token: is it the right one?"
            )
        return "\n".join(
            [*lines, f"  data_path: {json.dumps(str(self.data_path), ensure_ascii=False)}"]
        )


def convert_packed(
    source: str | Path,
    output: str | Path,
    tokenizer: str | Path,
    progress: bool = False,
    max_steps: int | None = None,
) -> list[PackedSplit]:
    """Write gsm8k_{train,test}_packed_{input_ids,labels}_document.{bin,idx} to the folder `output`;
    earlier ones are replaced.

    `source` and `max_steps` are what `convert.convert` takes, `tokenizer` the directory of a
    Hugging Face model with a chat template. Everything is read, checked and tokenised before
    anything is written: whatever fails, `output` is as it was before.

    FileNotFoundError if the tokenizer or a split is missing. ValueError for a bad row, for a
    tokenizer without a chat template or one that does not give an answer back, and for an `output`
    that MindSpeed-RL would not read as written.
    """
    splits, tokenizer = {}, load_tokenizer(tokenizer)
    for split, columns in read_splits(source, progress, max_steps).items():
        rows = [row_of(row, f"{split} row {number}") for number, row in enumerate(columns, 1)]
        splits[f"gsm8k_{split}"] = rows, [row.answer for row in rows]
    return _pack(Path(output).absolute(), splits, {}, tokenizer, progress)


def pack_rows(
    rows: Sequence[Row], data_path: str | Path, tokenizer: str | Path, progress: bool = False
) -> PackedSplit:
    """Write the rows of a task for `data_path`:
    {data_path}_packed_{input_ids,labels}_document.{bin,idx} and {data_path}_rows.jsonl, the columns
    of each row, which the labels count. Earlier ones are replaced; errors, and what happens then,
    as `convert_packed`.
    """
    path = Path(data_path).absolute()
    counted = {f"{path.name}_rows.jsonl": "".join(map(_json_line, rows)).encode()}
    splits = {path.name: (rows, list(map(str, range(len(rows)))))}
    [packed] = _pack(path.parent, splits, counted, load_tokenizer(tokenizer), progress)
    return packed


def _pack(
    output: Path,
    splits: Mapping[str, tuple[Sequence[Row], Sequence[str]]],
    others: dict[str, bytes],
    tokenizer: Any,
    progress: bool,
) -> list[PackedSplit]:
    """Write {name: (rows, label of each)} with the files {name: content} of `others`, all of them
    or none.
    """
    packed: list[PackedSplit] = []
    contents: dict[str, bytes] = {}
    for name, (rows, labels) in splits.items():
        check_data_path(output / name)
        fields = _encode(tokenizer, rows, labels, progress)
        files = _contents(name, fields) | others
        _refuse_other_files(output, name, files)
        contents |= files
        prompts_of_split = fields["input_ids"]
        unknown = sum(tokenizer.unk_token_id in prompt for prompt in prompts_of_split)
        lengths = [len(prompt) for prompt in prompts_of_split]
        packed.append(PackedSplit(output / name, list(files), lengths, unknown))
    write_together(output, contents)
    for split in packed:
        count = len(split.prompt_lengths)
        split.files[:] = [described(output / file, count) for file in split.files]
    return packed


def read_packed_rows(data_path: str | Path) -> list[Row] | None:
    """The rows that the labels of `data_path` count; None if its labels are the answers."""
    path = Path(f"{data_path}_rows.jsonl")
    return read_rows(path) if path.exists() else None


def rows_of_labels(labels: Sequence[str], packed: Sequence[Row] | None) -> list[Row]:
    """The row of each decoded label. Without `packed` rows it is what the label says, its answer.

    ConfigError if a label is empty, or counts no row.

    >>> rows_of_labels([" 72"], None)[0].columns
    {'answer': '72'}
    """
    labels = [label.strip() for label in labels]
    if not all(labels):
        raise ConfigError(
            f"label {labels.index('')} of {len(labels)} is empty: pack the data again with "
            "tools/convert_gsm8k.py --format mindspeed, or tools/pack_task.py"
        )
    if packed is None:
        return [Row([], None, "", label, {"answer": label}) for label in labels]
    for label in labels:
        if not (label.isdecimal() and int(label) < len(packed)):
            raise ConfigError(
                f"label {label!r} is not the number of one of the {len(packed):,} packed rows "
                f"({packed[0].where}): the files were not written together. Pack the data again "
                "with tools/pack_task.py"
            )
    return [packed[int(label)] for label in labels]


def _json_line(row: Row) -> str:
    try:
        return json.dumps(row.columns) + "\n"
    except TypeError as error:
        raise ConfigError(
            f"{row.where}: {error}: a packed row holds texts, numbers, lists and dicts"
        ) from None


def indexed_format(rows: list[list[int]]) -> tuple[bytes, bytes]:
    """The content of .bin and .idx (layout above) for `rows` of token ids, each a document of its
    own.
    """
    import numpy as np

    lengths = np.array([len(row) for row in rows], "<i4")
    ends = 4 * np.cumsum(lengths, dtype="<i8")
    tokens = np.array([token for row in rows for token in row], "<i4")
    header = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, INT32, len(rows), len(rows) + 1)
    documents = np.arange(len(rows) + 1, dtype="<i8")
    index = [header, lengths.tobytes(), (ends - 4 * lengths).tobytes(), documents.tobytes()]
    return tokens.tobytes(), b"".join(index)


def read_packed(prefix: str) -> tuple[Any, Any]:
    """(length of each row, all tokens) of an indexed dataset, int32, memory mapped.

    FileNotFoundError; ValueError if the two files are not such a dataset.
    """
    import numpy as np

    index = Path(f"{prefix}.idx").read_bytes()
    rows = int.from_bytes(index[18:26], "little")
    if (
        index[:9] != b"MMIDIDX\0\0"
        or index[17:18] != bytes([INT32])
        or len(index) != 42 + 20 * rows
    ):
        raise ValueError(f"{prefix}.idx is not the index of a dataset of int32 tokens")
    lengths = np.frombuffer(index, "<i4", rows, 34)
    size = Path(f"{prefix}.bin").stat().st_size
    if size != 4 * int(lengths.sum(dtype=np.int64)):
        raise ValueError(
            f"{prefix}.bin has {size:,} bytes, its index {4 * int(lengths.sum(dtype=np.int64)):,}: "
            "a copy that was cut short?"
        )
    return lengths, np.memmap(f"{prefix}.bin", "<i4", "r") if size else np.zeros(0, "<i4")


def load_tokenizer(directory: str | Path):
    """The tokenizer of a model directory; FileNotFoundError if there is no directory, ConfigError
    if it holds none, ValueError if it has no chat template.
    """
    if not Path(directory).is_dir():
        raise FileNotFoundError(
            f"no directory {directory}: --tokenizer is the directory of the Hugging Face model to "
            "be trained"
        )
    tokenizer = prompts.load_tokenizer(directory)
    if not tokenizer.chat_template:
        raise ValueError(
            f"the tokenizer of {directory} has no chat template, so a question cannot become a "
            "prompt: give an instruct or chat model, or add the template that the model was "
            "trained with as chat_template.jinja"
        )
    return tokenizer


def check_data_path(path: Path) -> None:
    """ValueError if MindSpeed-RL, which uses `data_path` in a glob and in a regular expression,
    would not find it.
    """
    special = [character for character in "*?[(){|+^$\\" if character in str(path)]
    if special:
        raise ValueError(
            f"MindSpeed-RL reads the path {path} as a pattern and would not find it, because of "
            f"{' '.join(special)}: choose another output folder"
        )


def _encode(
    tokenizer: Any, rows: Sequence[Row], labels: Sequence[str], progress: bool
) -> dict[str, list[list[int]]]:
    """{field: token ids of each row}. ValueError if those of a label are not decoded to the same
    text.

    Labels are encoded as in mindspeed_rl/datasets/data_handler.py:437 and decoded as in
    models/rule_verifier.py:102.
    """
    from tqdm import tqdm

    fields: dict[str, list[list[int]]] = {"input_ids": [], "labels": []}
    now = datetime.now()  # one date for all rows
    bar = tqdm(rows, desc="tokenising", unit=" rows", disable=not progress)
    for row, label in zip(bar, labels):
        fields["input_ids"].append(prompts.chat_ids(tokenizer, row, now))
        ids = tokenizer.encode(label, add_special_tokens=False)
        decoded = tokenizer.decode(ids, skip_special_tokens=True)
        if decoded != label:
            raise ValueError(
                f"{row.where}: the tokenizer turns the answer {label!r} into {ids} and that back "
                f"into {decoded!r}: the verifier would compare with the wrong number; use the "
                "tokenizer of the model to be trained, unmodified"
            )
        fields["labels"].append(ids)
    prompts.check_vocabulary(tokenizer, rows, fields["input_ids"])
    return fields


def _contents(name: str, fields: dict[str, list[list[int]]]) -> dict[str, bytes]:
    """{file name: content} of a data_path of this name."""
    contents = {}
    for field, rows in fields.items():
        file = f"{name}_packed_{field}_document"
        contents[f"{file}.bin"], contents[f"{file}.idx"] = indexed_format(rows)
    return contents


def _refuse_other_files(output: Path, name: str, files: Mapping[str, bytes]) -> None:
    """MindSpeed-RL reads every field beside ours too, such as the attention_mask of an earlier run
    of its preprocessor; and rows that an earlier packing counted would be taken for the labels'
    own.
    """
    there = [*output.glob(f"{name}_packed_*_document*"), *output.glob(f"{name}_rows.jsonl")]
    for path in sorted(there):
        if path.name not in files:
            raise ValueError(
                f"{path} was not written by this tool, and would be read as a part of the same "
                "data: remove it or choose another output folder"
            )
