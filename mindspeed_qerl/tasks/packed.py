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
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from mindspeed_qerl.common.errors import ConfigError

from .gsm8k.convert import read_splits, write_together
from .prompts import Variables, load_tokenizer, token_ids
from .rows import AnyPath, Row, Rows, read_rows, row_of

MAGIC = b"MMIDIDX\0\0"
VARIABLES = "_chat_template_kwargs.json"  # behind a data_path; nothing that upstream looks for
INT32 = 4  # DType.int32, indexed_dataset.py:416


@dataclass(frozen=True)
class PackedSplit:
    """Describes what was written for one `data_path`, which is absolute and goes into
    MindSpeed-RL's config as it is.
    """

    data_path: Path
    prompt_lengths: list[int]  # in tokens

    def report(self, max_prompt_length: int | None) -> str:
        """For the terminal; with the `max_prompt_length` of a config, how many rows it leaves out:
        MindSpeed-RL keeps prompts that are shorter (indexed_dataset.py:545).
        """
        lengths = self.prompt_lengths
        text = f"{len(lengths):,} prompts of {min(lengths)} to {max(lengths)} tokens"
        if max_prompt_length is not None:
            dropped = sum(length >= max_prompt_length for length in lengths)
            text += (
                f"; with max_prompt_length: {max_prompt_length} MindSpeed-RL leaves out {dropped:,}"
            )
        return f'{text}\n  data_path: "{self.data_path}"'


def convert_packed(
    source: AnyPath,
    output: AnyPath,
    tokenizer: AnyPath,
    max_steps: int | None = None,
    template_kwargs: Variables | None = None,
) -> list[PackedSplit]:
    """Write gsm8k_{train,test}_packed_{input_ids,labels}_document.{bin,idx} to the folder `output`;
    earlier ones are replaced.

    `source` and `max_steps` are what `convert.convert` takes, `tokenizer` the directory of a
    Hugging Face model with a chat template, whose variables have the values of `template_kwargs`
    (kept in {name}_chat_template_kwargs.json). Each split is read, checked and tokenised before
    anything of it is written: whatever fails, its files are as they were before.

    FileNotFoundError if a split is missing. ValueError for a bad row, for a tokenizer that cannot
    be read, has no chat template or does not give an answer back, and for an `output` that
    MindSpeed-RL would not read as written.
    """
    packed = []
    for split, columns in read_splits(source, max_steps).items():
        rows = [row_of(row, split) for row in columns]
        data_path = Path(output, f"gsm8k_{split}")
        packed.append(pack_rows(rows, data_path, tokenizer, template_kwargs, counted=False))
    return packed


def pack_rows(
    rows: Rows,
    data_path: AnyPath,
    tokenizer: AnyPath,
    template_kwargs: Variables | None = None,
    counted: bool = True,
) -> PackedSplit:
    """Write the rows of a task for `data_path`, all files or none:
    {data_path}_packed_{input_ids,labels}_document.{bin,idx} and {data_path}_rows.jsonl, the columns
    of each row, which the labels count; unless `counted`, the labels are the answers, and columns
    are not written. Earlier ones are replaced; errors, and what happens then, as `convert_packed`;
    TypeError for a column that JSON cannot hold.
    """
    data_path = Path(data_path).absolute()
    name = data_path.name
    labels = [row.answer for row in rows]
    contents = {}
    if counted:
        labels = list(map(str, range(len(rows))))
        lines = [json.dumps(row.columns) + "\n" for row in rows]
        contents[f"{name}_rows.jsonl"] = "".join(lines).encode()
    check_data_path(data_path)
    loaded = load_tokenizer(tokenizer)
    now = datetime.now()  # one date for all rows
    prompts = token_ids(loaded, rows, "chat", now, template_kwargs)
    for field, ids in (("input_ids", prompts), ("labels", _label_ids(loaded, labels))):
        file = f"{name}_packed_{field}_document"
        contents[f"{file}.bin"], contents[f"{file}.idx"] = indexed_format(ids)
    if template_kwargs:
        contents[f"{name}{VARIABLES}"] = json.dumps(template_kwargs).encode()
    # MindSpeed-RL reads every field that is there, such as the attention_mask of an earlier run of
    # its preprocessor; and rows that an earlier packing counted would be taken for the labels' own
    for ending in ("_packed_*_document*", "_rows.jsonl", VARIABLES):
        for path in data_path.parent.glob(f"{name}{ending}"):
            if path.name not in contents:
                raise ValueError(
                    f"{path} would be read as a part of the same data: remove it or choose another "
                    "output folder"
                )
    write_together(data_path.parent, contents)
    return PackedSplit(data_path, list(map(len, prompts)))


def _label_ids(tokenizer: Any, labels: Sequence[str]) -> list[list[int]]:
    """Token ids of each label, encoded as in mindspeed_rl/datasets/data_handler.py:437; ValueError
    if they are not decoded, as in models/rule_verifier.py:102, to the same text.
    """
    encoded = []
    for label in labels:
        ids = tokenizer.encode(label, add_special_tokens=False)
        decoded = tokenizer.decode(ids, skip_special_tokens=True)
        if decoded != label:
            raise ValueError(
                f"the tokenizer turns the label {label!r} into {ids} and that back into "
                f"{decoded!r}: the verifier would compare with something else; use the tokenizer "
                "of the model to be trained, unmodified"
            )
        encoded.append(ids)
    return encoded


def packed_template_kwargs(data_path: AnyPath) -> Variables:
    """The variables of the chat template that `data_path` was packed with."""
    path = Path(f"{data_path}{VARIABLES}")
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def read_packed_rows(data_path: AnyPath) -> list[Row] | None:
    """The rows that the labels of `data_path` count; None if its labels are the answers."""
    path = Path(f"{data_path}_rows.jsonl")
    return read_rows(path) if path.exists() else None


def rows_of_labels(labels: Sequence[str], packed: Rows | None) -> list[Row]:
    """The row of each decoded label. Without `packed` rows it is what the label says, its answer.

    ConfigError if a label is empty, or counts no row.

    >>> rows_of_labels([" 72"], None)[0].columns
    {'answer': '72'}
    """
    rows = []
    for label in map(str.strip, labels):
        if label and packed is None:
            rows.append(Row([], None, "", label, {"answer": label}))
        elif packed and label.isdecimal() and int(label) < len(packed):
            rows.append(packed[int(label)])
        else:
            raise ConfigError(
                f"label {label!r} is neither an answer nor the number of a packed row: pack the "
                "data again with tools/convert_gsm8k.py --format mindspeed, or tools/pack_task.py"
            )
    return rows


def indexed_format(rows: list[list[int]]) -> tuple[bytes, bytes]:
    """The content of .bin and .idx (layout above) for `rows` of token ids, each a document of its
    own.
    """
    lengths = np.array([len(row) for row in rows], "<i4")
    ends = 4 * np.cumsum(lengths, dtype="<i8")
    tokens = np.concatenate(rows).astype("<i4")
    header = struct.pack("<9sQBQQ", MAGIC, 1, INT32, len(rows), len(rows) + 1)
    documents = np.arange(len(rows) + 1, dtype="<i8")
    index = [header, lengths.tobytes(), (ends - 4 * lengths).tobytes(), documents.tobytes()]
    return tokens.tobytes(), b"".join(index)


def read_packed(prefix: str) -> tuple[Any, Any]:
    """(length of each row, all tokens) of an indexed dataset, int32.

    FileNotFoundError; ValueError if the two files are not such a dataset.
    """
    index = Path(f"{prefix}.idx").read_bytes()
    rows = int.from_bytes(index[18:26], "little")
    if index[:9] != MAGIC or len(index) != 42 + 20 * rows:
        raise ValueError(f"{prefix}.idx is not the index of a packed dataset")
    lengths = np.frombuffer(index, "<i4", rows, 34)
    tokens = np.fromfile(f"{prefix}.bin", "<i4")
    if len(tokens) != lengths.sum(dtype=np.int64):
        raise ValueError(f"{prefix}.bin has {len(tokens):,} tokens, its index {lengths.sum():,}")
    return lengths, tokens


def check_data_path(path: Path) -> None:
    """ValueError if MindSpeed-RL, which uses `data_path` in a glob and in a regular expression,
    would not find it.
    """
    special = set("*?[(){|+^$\\") & set(str(path))
    if special:
        raise ValueError(
            f"MindSpeed-RL reads the path {path} as a pattern and would not find it, because of "
            f"{' '.join(special)}: choose another output folder"
        )
