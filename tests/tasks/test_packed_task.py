"""An own task packed for MindSpeed-RL: read back with megatron-core's reader; a label finds its
whole row.
"""

import datetime
import json

import pyarrow
import pyarrow.parquet
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset
from transformers import AutoTokenizer

from mindspeed_qerl.common.errors import ConfigError
from mindspeed_qerl.demo.tiny_model import build_tokenizer
from mindspeed_qerl.tasks.packed import convert_packed, pack_rows, read_packed_rows, rows_of_labels
from mindspeed_qerl.tasks.rows import read_rows
from tests.tasks.gsm8k.tool import run_tool

COLUMNS = [
    {"prompt": f"Tom has {i} apples.", "answer": answer, "tags": ["fruit", i], "note": None}
    for i, answer in enumerate(["Ä cafe\u0301\n", " 7 ", "x" * 3000, *map(str, range(9))])
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    tokenizer = build_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}<eos>{{ m.content }}{% endfor %}{% if add_generation_prompt "
        "%}####{% endif %}"
    )
    tokenizer.save_pretrained(folder := tmp_path_factory.mktemp("tokenizer"))
    return folder


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in COLUMNS))
    return path


def test_labels_find_their_rows_exactly(tmp_path, file, tokenizer):
    packed = pack_rows(read_rows(file), tmp_path / "out" / "mine", tokenizer)
    assert packed.data_path == tmp_path / "out" / "mine"
    decode = AutoTokenizer.from_pretrained(tokenizer).decode
    prompts, labels = (
        IndexedDataset(f"{packed.data_path}_packed_{field}_document")
        for field in ("input_ids", "labels")
    )
    assert [decode(ids) for ids in prompts] == [f"<eos>{row['prompt']}####" for row in COLUMNS]
    rows = rows_of_labels(
        [f" {decode(ids)} " for ids in labels], read_packed_rows(packed.data_path)
    )
    assert [row.columns for row in rows] == COLUMNS
    # no answer goes through the tokenizer
    assert [row.answer for row in rows] == [row["answer"] for row in COLUMNS]
    assert packed.prompt_lengths == list(map(len, prompts))


def test_without_packed_rows_a_label_is_the_answer(tmp_path):
    assert read_packed_rows(tmp_path / "gsm8k_train") is None
    [row] = rows_of_labels(["72 "], None)
    assert (row.answer, row.columns) == ("72", {"answer": "72"})


@pytest.mark.parametrize("label", ["12", "-1", "Paris", "1.0", "²", " "])
def test_a_label_that_counts_no_row_is_refused(file, label):
    with pytest.raises(ConfigError, match="neither an answer nor the number of a packed row"):
        rows_of_labels(["0", label], read_rows(file))


def test_an_empty_label_is_refused():
    with pytest.raises(ConfigError, match="label '' is neither an answer nor"):
        rows_of_labels(["7", " "], None)


def test_gsm8k_is_not_packed_beside_rows_of_another_packing(tmp_path, file, tokenizer):
    """Its labels, which are answers, would be taken for the numbers of those rows."""
    pack_rows(read_rows(file), tmp_path / "out" / "gsm8k_train", tokenizer)
    for split in ("train", "test"):
        file = tmp_path / f"{split}.jsonl"
        file.write_text('{"question": "Tom has 3 apples.", "answer": "#### 3"}\n')
    with pytest.raises(ValueError, match=r"gsm8k_train_rows.jsonl would be read as a part"):
        convert_packed(tmp_path, tmp_path / "out", tokenizer)


def test_columns_that_json_cannot_hold_are_refused_and_nothing_is_written(tmp_path, tokenizer):
    table = pyarrow.Table.from_pylist(
        [{"prompt": "Tom", "answer": "3", "day": datetime.date(2026, 1, 2)}]
    )
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    with pytest.raises(TypeError, match="Object of type date is not JSON serializable"):
        pack_rows(read_rows(tmp_path / "rows.parquet"), tmp_path / "out" / "mine", tokenizer)
    assert not (tmp_path / "out").exists()


def test_tool(tmp_path, file, tokenizer):
    target = ["--tokenizer", tokenizer, "--data-path", tmp_path / "out" / "mine"]
    done = run_tool("pack_task", "--rows", file, *target, "--max-prompt-length", "9")
    assert done.returncode == 0, done.stderr
    assert f'  data_path: "{tmp_path}/out/mine"\n' in done.stdout
    assert done.stdout.startswith("12 prompts of ") and "leaves out " in done.stdout
    done = run_tool("pack_task", "--rows", tmp_path / "none.jsonl", *target)
    assert done.returncode == 1 and done.stderr.startswith("pack_task: ")
    assert "No such file" in done.stderr and "Traceback" not in done.stderr
