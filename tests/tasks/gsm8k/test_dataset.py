"""Rows and prompts: what is read, and what bad files say."""

import json

import pyarrow
import pyarrow.parquet
import pytest

from mindspeed_qerl.tasks.gsm8k.dataset import (
    check_raw,
    gold_answer,
    load_raw,
    read_converted,
)
from mindspeed_qerl.tasks.gsm8k.prompts import chat_messages, plain_prompt

RAW = [{"question": "3+4?", "answer": "3+4=7\n#### 7"}, {"question": "500*2?", "answer": "500*2=1,000\n#### 1,000"}]
CONVERTED = {"messages": [{"role": "user", "content": "3+4?"}], "question": "3+4?", "answer": "7", "solution": "#### 7"}


def write_jsonl(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_parquet(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def test_prompts():
    assert plain_prompt("What is 3+4?") == "What is 3+4?\n"
    assert chat_messages("What is 3+4?") == [
        {"role": "user", "content": 'What is 3+4? Let\'s think step by step and output the final answer after "####".'}
    ]


def test_gold_answer_is_behind_the_last_hashes():
    assert gold_answer("2*500 = <<2*500=1000>>1,000\n#### 1,000") == "1000"
    assert gold_answer("#### 1\n#### -2.50\n") == "-2.5"


@pytest.mark.parametrize("solution, words", [
    ("seven", "no '#### n'"), ("#### ", "not a number: ' '"), ("#### 7 or 8", "not a number: ' 7 or 8'"), ("#### 1e9", "1e9"),
])
def test_gold_answer_errors(solution, words):
    with pytest.raises(ValueError, match=words):
        gold_answer(solution)


@pytest.mark.parametrize("write, name", [
    (write_jsonl, "train.jsonl"), (write_parquet, "train.parquet"), (write_parquet, "train-00000-of-00001.parquet"),
    (write_parquet, "main/train-00000-of-00001.parquet"),
])
def test_raw_rows_from_a_folder_or_a_file(tmp_path, write, name):
    path = write(tmp_path / name, RAW)
    assert [row for _, row in load_raw(tmp_path, "train")] == RAW
    assert [row for _, row in load_raw(path, "train")] == RAW
    with pytest.raises(FileNotFoundError, match="no test rows in .*expected test.jsonl"):
        list(load_raw(tmp_path, "test"))


def test_raw_rows_from_the_hub(monkeypatch):
    import datasets

    asked = []

    def load_dataset(name, config, split):
        asked.append((name, config, split))
        return datasets.Dataset.from_list(RAW)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert list(load_raw("openai/gsm8k", "test")) == [
        ("openai/gsm8k test: row 1", RAW[0]), ("openai/gsm8k test: row 2", RAW[1])
    ]
    assert asked == [("openai/gsm8k", "main", "test")]

    def offline(name, config, split):
        raise ConnectionError("no network")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(FileNotFoundError, match=r"openai/gsm8k is neither .*\(no network\); offline, give a folder"):
        list(load_raw("openai/gsm8k", "test"))
    with pytest.raises(FileNotFoundError, match="not a Hub name"):
        list(load_raw("/nowhere/gsm8k", "test"))


@pytest.mark.parametrize("row, words", [
    ({"answer": "#### 1"}, "column 'question' is missing; the row has answer"),
    ({"question": "q"}, "column 'answer' is missing"),
    ({"question": " ", "answer": "#### 1"}, "column 'question': expected a non-empty string"),
    ({"question": "q", "answer": 1}, "column 'answer': expected a non-empty string, got '1'"),
    ({"question": "q\ud800", "answer": "#### 1"}, "column 'question': not valid Unicode"),
    ({"question": "q", "answer": "one"}, "column 'answer': no '#### n'"),
])
def test_raw_row_errors(row, words):
    with pytest.raises(ValueError, match=words):
        check_raw(row)


def test_converted_rows_from_parquet_and_jsonl(tmp_path):
    rows = [CONVERTED, CONVERTED | {"question": "other"}]
    assert read_converted(write_parquet(tmp_path / "a.parquet", rows)) == rows
    assert read_converted(write_jsonl(tmp_path / "a.jsonl", rows)) == rows


@pytest.mark.parametrize("change, words", [
    ({"messages": None}, "column 'messages': expected a list of {role, content}, got None"),
    ({"messages": []}, "column 'messages'"),
    ({"messages": [{"role": "user"}]}, "column 'messages'"),
    ({"messages": [{"content": "3+4?"}]}, "column 'messages'"),
    ({"messages": "3+4?"}, "column 'messages'"),
    ({"answer": "seven"}, "column 'answer': not a number: 'seven'"),
    ({"answer": 7}, "column 'answer': expected a non-empty string"),
    ({"question": ""}, "column 'question'"),
    ({"solution": None}, "column 'solution'"),
])
def test_malformed_converted_rows_are_named(tmp_path, change, words):
    path = write_jsonl(tmp_path / "bad.jsonl", [CONVERTED, CONVERTED | change])
    with pytest.raises(ValueError) as error:
        read_converted(path)
    assert f"{path}:2: {words}" in str(error.value) and "tools/convert_gsm8k.py" in str(error.value)


@pytest.mark.parametrize("column", ["messages", "question", "answer", "solution"])
def test_missing_column_is_named(tmp_path, column):
    row = {key: value for key, value in CONVERTED.items() if key != column}
    path = write_parquet(tmp_path / "bad.parquet", [row])
    with pytest.raises(ValueError, match=f"bad.parquet: row 1: column '{column}'"):
        read_converted(path)


@pytest.mark.parametrize("name, content, words", [
    ("a.jsonl", b"", "no rows"),
    ("a.jsonl", b"\n", "a.jsonl:1: empty line"),
    ("a.jsonl", b'{"question": ', "a.jsonl:1: invalid JSON"),
    ("a.jsonl", b"\xff\xfe{}", "a.jsonl:1: invalid JSON"),
    ("a.jsonl", b"[" * 100_000, "a.jsonl:1: invalid JSON"),
    ("a.jsonl", b"[1]\n", "a.jsonl:1: expected a JSON object, got list"),
    ("a.jsonl", b"9" * 10_000, "a.jsonl:1: invalid JSON"),
    ("a.parquet", b"not parquet", "a.parquet: not a readable parquet file"),
    ("a.csv", b"", r"expected a .jsonl or .parquet file"),
])
def test_unreadable_files(tmp_path, name, content, words):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=words):
        read_converted(tmp_path / name)


def test_no_such_file(tmp_path):
    with pytest.raises(FileNotFoundError, match="no data file .*make it with tools/convert_gsm8k.py"):
        read_converted(tmp_path / "train_chat.parquet")
