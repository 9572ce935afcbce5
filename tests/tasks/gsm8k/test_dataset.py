"""Rows and prompts: what is read, and what bad files say."""

import pytest

from mindspeed_qerl.tasks.gsm8k.convert import converted, gold_answer, load_raw
from tests.tasks.test_rows import write_jsonl, write_parquet

RAW = [
    {"question": "3+4?", "answer": "3+4=7\n#### 7"},
    {"question": "500*2?", "answer": "500*2=1,000\n#### 1,000"},
]


def test_gold_answer_is_behind_the_last_hashes():
    assert gold_answer("2*500 = <<2*500=1000>>1,000\n#### 1,000") == "1000"
    assert gold_answer("#### 1\n#### -2.50\n") == "-2.5"


@pytest.mark.parametrize(
    "write, name",
    [
        (write_jsonl, "train.jsonl"),
        (write_parquet, "train.parquet"),
        (write_parquet, "train-00000-of-00001.parquet"),
        (write_parquet, "main/train-00000-of-00001.parquet"),
    ],
)
def test_raw_rows_from_a_folder(tmp_path, write, name):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    write(tmp_path / name, RAW)
    assert [row for _, row in load_raw(tmp_path, "train")] == RAW
    with pytest.raises(FileNotFoundError, match="no test.jsonl or test.parquet in "):
        list(load_raw(tmp_path, "test"))


def test_raw_rows_from_the_hub(monkeypatch):
    import datasets

    asked = []

    def load_dataset(name, config, split):
        asked.append((name, config, split))
        return datasets.Dataset.from_list(RAW)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert list(load_raw("openai/gsm8k", "test")) == [
        ("openai/gsm8k test: row 1", RAW[0]),
        ("openai/gsm8k test: row 2", RAW[1]),
    ]
    assert asked == [("openai/gsm8k", "main", "test")]

    def offline(name, config, split):
        raise ConnectionError("no network")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(
        FileNotFoundError, match=r"openai/gsm8k is neither .*\(no network\); offline, give a folder"
    ):
        list(load_raw("openai/gsm8k", "test"))


@pytest.mark.parametrize(
    "row, words",
    [
        ({"answer": "#### 1"}, "column 'question' is missing; the row has answer"),
        ({"question": " ", "answer": "#### 1"}, "column 'question': expected a non-empty string"),
        ({"question": "q", "answer": 1}, "column 'answer': expected a non-empty string, got 1 "),
    ],
)
def test_raw_row_errors(row, words):
    with pytest.raises(ValueError, match=words):
        converted(row)
