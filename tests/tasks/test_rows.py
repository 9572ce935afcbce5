"""The rows of a task: the three forms, what else they carry, and what bad files say."""

import json

import pyarrow
import pyarrow.parquet
import pytest

from mindspeed_qerl.errors import ConfigError
from mindspeed_qerl.tasks.rows import read_rows

CONVERTED = {"messages": [{"role": "user", "content": "3+4? Think."}], "question": "3+4?", "answer": "7",
             "solution": "#### 7"}
SYSTEM = {"role": "system", "content": "Be brief."}


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_parquet(path, rows):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


@pytest.mark.parametrize("write, name, first, second", [(write_jsonl, "a.jsonl", "a.jsonl:1", "a.jsonl:2"),
                                                        (write_parquet, "a.parquet", "a.parquet: row 1",
                                                         "a.parquet: row 2")])
def test_a_prompt_is_one_user_turn_and_keeps_its_columns(tmp_path, write, name, first, second):
    columns = [{"prompt": "Name a fruit.\n", "answer": "apple", "level": 3},
               {"prompt": "2?", "answer": " ", "level": 4} | {"answer": "x y"}]
    one, two = read_rows(write(tmp_path / name, columns))
    assert one.messages == [{"role": "user", "content": "Name a fruit.\n"}]
    assert (one.prompt, one.question, one.answer, one.columns) == (
        "Name a fruit.\n", "Name a fruit.\n", "apple", columns[0])
    assert (two.answer, one.where, two.where) == ("x y", f"{tmp_path}/{first}", f"{tmp_path}/{second}")


def test_gsm8ks_converted_rows_are_such_rows(tmp_path):
    for path in (write_jsonl(tmp_path / "a.jsonl", [CONVERTED]), write_parquet(tmp_path / "a.parquet", [CONVERTED])):
        [row] = read_rows(path)
        assert row.messages == CONVERTED["messages"] and row.columns == CONVERTED
        assert (row.prompt, row.question, row.answer) == ("3+4?\n", "3+4?", "7")


@pytest.mark.parametrize("columns, prompt, question", [
    ({"messages": [{"role": "user", "content": "2+2?"}]}, "2+2?", "2+2?"),
    ({"messages": [SYSTEM, {"role": "user", "content": "2+2?"}]}, None, "system: Be brief.\nuser: 2+2?"),
    ({"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "5"},
                   {"role": "user", "content": "Sure?"}]},
     None, "user: 2+2?\nassistant: 5\nuser: Sure?"),
    ({"messages": [SYSTEM, {"role": "user", "content": "2+2?"}], "prompt": "2+2="}, "2+2=", "2+2="),
    ({"prompt": "2+2=", "messages": None}, "2+2=", "2+2="),  # parquet fills what one row lacks
])
def test_a_conversation_has_a_plain_form_only_if_it_is_given(tmp_path, columns, prompt, question):
    [row] = read_rows(write_jsonl(tmp_path / "a.jsonl", [columns | {"answer": "4"}]))
    assert (row.prompt, row.question) == (prompt, question)
    assert row.messages == (columns["messages"] or [{"role": "user", "content": "2+2="}])


@pytest.mark.parametrize("change, words", [
    ({"messages": None},
     "neither column 'prompt' nor column 'messages'; the row has messages, question, answer, solution"),
    ({"messages": []}, "column 'messages': expected a list of {role, content}, both of them text, got []"),
    ({"messages": [{"role": "user"}]}, "column 'messages'"),
    ({"messages": [{"content": "3+4?"}]}, "column 'messages'"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "column 'messages'"),
    ({"messages": "3+4?"}, "column 'messages'"),
    ({"messages": [SYSTEM]}, "column 'messages': no turn of the role 'user', so nothing is asked"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "column 'messages': not valid Unicode"),
    ({"answer": True}, "column 'answer': expected a non-empty string, got 'True' (bool)"),
    ({"answer": ""}, "column 'answer'"),
    ({"question": ""}, "column 'question'"),
    ({"prompt": ["3+4?"]}, "column 'prompt': expected a list of {role, content}"),
])
def test_malformed_rows_are_named(tmp_path, change, words):
    path = write_jsonl(tmp_path / "bad.jsonl", [CONVERTED, CONVERTED | change])
    with pytest.raises(ConfigError) as error:
        read_rows(path)
    assert f"{path}:2: {words}" in str(error.value)


def test_missing_columns_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"a.parquet: row 1: column 'answer' is missing; the row has prompt"):
        read_rows(write_parquet(tmp_path / "a.parquet", [{"prompt": "q"}]))
    with pytest.raises(ConfigError, match=r"raw.jsonl:1: neither column 'prompt' nor column 'messages'; the row has "
                                          r"question, answer"):
        read_rows(write_jsonl(tmp_path / "raw.jsonl", [{"question": "3+4?", "answer": "#### 7"}]))  # raw GSM8K


@pytest.mark.parametrize("name, content, words", [
    ("a.jsonl", b"", "no rows"),
    ("a.jsonl", b"\n", "a.jsonl:1: empty line"),
    ("a.jsonl", b'{"prompt": ', "a.jsonl:1: invalid JSON"),
    ("a.jsonl", b"\xff\xfe{}", "a.jsonl:1: invalid JSON"),
    ("a.jsonl", b"[" * 100_000, "a.jsonl:1: invalid JSON"),
    ("a.jsonl", b"[1]\n", "a.jsonl:1: expected a JSON object, got list"),
    ("a.jsonl", b"9" * 10_000, "a.jsonl:1: invalid JSON"),
    ("a.parquet", b"not parquet", "a.parquet: not a readable parquet file"),
    ("a.csv", b"", r"expected a .jsonl or .parquet file"),
])
def test_unreadable_files(tmp_path, name, content, words):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=words):
        read_rows(tmp_path / name)


def test_no_such_file(tmp_path):
    with pytest.raises(FileNotFoundError, match="no data file .*train.jsonl: docs/own_task.md says what it holds"):
        read_rows(tmp_path / "train.jsonl")
