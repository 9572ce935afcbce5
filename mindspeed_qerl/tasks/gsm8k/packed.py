r"""Write GSM8K as MindSpeed-RL's trainer reads it: token ids in Megatron's indexed format. Needs numpy and transformers, no torch.

With `data_path: DIR/gsm8k_train` the trainer opens DIR/gsm8k_train_packed_{field}_document.{bin,idx} for every field it finds
(mindspeed_rl/datasets/indexed_dataset.py:23-43 at commit 05a90d7). We write two, a row each for every problem, in the order of the
source:

    input_ids   the prompt: the chat template applied to `prompts.chat_messages`, with the header of the assistant's turn
    labels      the canonical gold answer, "72", without special tokens; the reward process decodes it and verifies against it

.bin is the tokens of all rows as int32, one after the other. .idx is, little-endian (indexed_dataset.py:749-812):

    offset     type          content
    0          9 bytes       MMIDIDX, two zeros
    9          uint64        version: 1
    17         uint8         type of the tokens: 4 = int32
    18         uint64        n, the number of rows
    26         uint64        n + 1
    34         int32[n]      length of each row in tokens
    34 + 4n    int64[n]      where each row begins in .bin, in bytes
    34 + 12n   int64[n+1]    where each document begins, and the end: 0, 1, ..., n, since a document is a row
"""

import struct
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mindspeed_qerl.tasks.gsm8k.convert import WrittenFile, describe, output_folder, read_splits, write_together

INT32 = 4  # DType.int32, indexed_dataset.py:416


@dataclass(frozen=True)
class PackedSplit:
    """What `convert_packed` wrote for one split. `data_path` is absolute and goes into MindSpeed-RL's config as it is."""

    data_path: Path
    files: list[WrittenFile]
    prompt_lengths: list[int]  # in tokens
    prompts_with_unknown: int  # prompts that hold the tokenizer's unknown token: the model cannot read a part of them

    def dropped(self, max_prompt_length: int) -> int:
        """How many rows MindSpeed-RL leaves out: it keeps prompts shorter than `max_prompt_length` (indexed_dataset.py:545)."""
        return sum(length >= max_prompt_length for length in self.prompt_lengths)


def convert_packed(source: str | Path, output: str | Path, tokenizer: str | Path, progress: bool = False) -> list[PackedSplit]:
    """Write gsm8k_{train,test}_packed_{input_ids,labels}_document.{bin,idx} to the folder `output`; earlier ones are replaced.

    `source` is what `convert.convert` takes, `tokenizer` the directory of a Hugging Face model with a chat template. Everything is
    read, checked and tokenised before anything is written: whatever fails, `output` is as it was before. No row is left out.

    FileNotFoundError if the tokenizer or a split is missing. ValueError for a bad row, for a tokenizer without a chat template or
    one that does not give an answer back, and for an `output` that MindSpeed-RL would not read as written.
    """
    output = output_folder(output).absolute()
    check_data_path(output)
    tokenizer = load_tokenizer(tokenizer)
    encoded = {split: _encode_split(tokenizer, split, rows, progress) for split, rows in read_splits(source, progress).items()}
    contents = {split: _contents(split, fields) for split, fields in encoded.items()}
    _refuse_other_fields(output, contents)
    write_together(output, {name: partial(Path.write_bytes, data=data) for files in contents.values() for name, data in files.items()})
    return [
        PackedSplit(
            data_path=output / f"gsm8k_{split}",
            files=[describe(output / name, len(fields["labels"])) for name in contents[split]],
            prompt_lengths=list(map(len, fields["input_ids"])),
            prompts_with_unknown=sum(tokenizer.unk_token_id in prompt for prompt in fields["input_ids"]),
        )
        for split, fields in encoded.items()
    ]


def indexed_format(rows: list[list[int]]) -> tuple[bytes, bytes]:
    """The content of .bin and .idx (layout above) for `rows` of token ids, each a document of its own."""
    import numpy as np

    lengths = np.array([len(row) for row in rows], "<i4")
    ends = 4 * np.cumsum(lengths, dtype="<i8")
    tokens = np.array([token for row in rows for token in row], "<i4")
    header = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, INT32, len(rows), len(rows) + 1)
    documents = np.arange(len(rows) + 1, dtype="<i8")
    return tokens.tobytes(), header + lengths.tobytes() + (ends - 4 * lengths).tobytes() + documents.tobytes()


def count_documents(index: str | Path) -> int:
    """How many rows the .idx file of an indexed dataset describes."""
    with open(index, "rb") as file:
        return struct.unpack("<9sQBQQ", file.read(struct.calcsize("<9sQBQQ")))[3]


def read_packed(prefix: str) -> tuple[Any, Any]:
    """(length of each row, all tokens) of an indexed dataset, int32, memory mapped.

    FileNotFoundError; ValueError if the two files are not such a dataset.
    """
    import numpy as np

    index = Path(f"{prefix}.idx").read_bytes()
    rows = int.from_bytes(index[18:26], "little")
    if index[:9] != b"MMIDIDX\0\0" or index[17:18] != bytes([INT32]) or len(index) != 42 + 20 * rows:
        raise ValueError(f"{prefix}.idx is not the index of a dataset of int32 tokens")
    lengths = np.frombuffer(index, "<i4", rows, 34)
    size = Path(f"{prefix}.bin").stat().st_size
    if size != 4 * int(lengths.sum(dtype=np.int64)):
        raise ValueError(f"{prefix}.bin has {size:,} bytes, its index {4 * int(lengths.sum(dtype=np.int64)):,}: a copy that was cut short?")
    return lengths, np.memmap(f"{prefix}.bin", "<i4", "r") if size else np.zeros(0, "<i4")


def load_tokenizer(directory: str | Path):
    """The tokenizer of a model directory; FileNotFoundError if there is none, ValueError if it has no chat template."""
    from transformers import AutoTokenizer

    if not Path(directory).is_dir():
        raise FileNotFoundError(f"no directory {directory}: --tokenizer is the directory of the Hugging Face model to be trained")
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory)
    except (OSError, ValueError) as error:
        raise FileNotFoundError(f"{directory} has no tokenizer that transformers can read: {error}") from error
    if not tokenizer.chat_template:
        raise ValueError(f"the tokenizer of {directory} has no chat template, so a question cannot become a prompt: give an instruct "
                         "or chat model, or add the template that the model was trained with as chat_template.jinja")
    return tokenizer


def encode_prompt(tokenizer, messages: list[dict[str, str]]) -> list[int]:
    """Token ids of the chat template applied to `messages`, up to where the model's answer begins."""
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


def encode_answer(tokenizer, answer: str) -> list[int]:
    """Token ids of a gold answer. ValueError if they are not decoded to the same text.

    Encoded as in mindspeed_rl/datasets/data_handler.py:437 and decoded as in models/rule_verifier.py:102.
    """
    ids = tokenizer.encode(answer, add_special_tokens=False)
    decoded = tokenizer.decode(ids, skip_special_tokens=True)
    if decoded != answer:
        raise ValueError(f"the tokenizer turns the answer {answer!r} into {ids} and that back into {decoded!r}: the verifier would "
                         "compare with the wrong number; use the tokenizer of the model to be trained, unmodified")
    return ids


def check_data_path(folder: Path) -> None:
    """ValueError if MindSpeed-RL, which uses `data_path` in a glob and in a regular expression, would not find files in `folder`."""
    special = [character for character in "*?[(){|+^$\\" if character in str(folder)]
    if special:
        raise ValueError(f"MindSpeed-RL reads the path {folder} as a pattern and would not find it, because of {' '.join(special)}: "
                         "choose another output folder")


def _encode_split(tokenizer, split: str, rows: list[dict], progress: bool) -> dict[str, list[list[int]]]:
    """{field: token ids of each row}."""
    from jinja2 import TemplateError
    from tqdm import tqdm

    fields = {"input_ids": [], "labels": []}
    for number, row in enumerate(tqdm(rows, desc=f"tokenising {split}", unit=" rows", disable=not progress), 1):
        try:
            fields["input_ids"].append(encode_prompt(tokenizer, row["messages"]))
            fields["labels"].append(encode_answer(tokenizer, row["answer"]))
        except (TemplateError, ValueError) as error:
            raise ValueError(f"{split} row {number}: {error}") from error
    return fields


def _contents(split: str, fields: dict[str, list[list[int]]]) -> dict[str, bytes]:
    """{file name: content} of a split."""
    contents = {}
    for field, rows in fields.items():
        name = f"gsm8k_{split}_packed_{field}_document"
        contents[f"{name}.bin"], contents[f"{name}.idx"] = indexed_format(rows)
    return contents


def _refuse_other_fields(output: Path, contents: dict[str, dict[str, bytes]]) -> None:
    """MindSpeed-RL reads every field beside ours too, such as the attention_mask of an earlier run of its preprocessor."""
    for split, files in contents.items():
        for path in sorted(output.glob(f"gsm8k_{split}_packed_*_document*")):
            if path.name not in files:
                raise ValueError(f"{path} was not written by this tool, and MindSpeed-RL would read it as a part of the same data: "
                                 "remove it or choose another output folder")
