"""The rows of a task: the three forms, what else they carry, and what bad files say."""

import datetime
import json
from decimal import Decimal

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from mindspeed_qerl.common.errors import ConfigError
from mindspeed_qerl.tasks.rows import read_rows

CONVERTED = {
    "messages": [{"role": "user", "content": "3+4? Think."}],
    "question": "3+4?",
    "answer": "7",
    "solution": "#### 7",
}
SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "2+2?"}
ASSISTANT = {"role": "assistant", "content": "#### 4"}


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_parquet(path, rows):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


@pytest.mark.parametrize(
    "write, name, first, second",
    [
        (write_jsonl, "a.jsonl", "a.jsonl:1", "a.jsonl:2"),
        (write_parquet, "a.parquet", "a.parquet: row 1", "a.parquet: row 2"),
    ],
)
def test_a_prompt_is_one_user_turn_and_keeps_its_columns(tmp_path, write, name, first, second):
    columns = [
        {"prompt": "Name a fruit.\n", "answer": "apple", "level": 3},
        {"prompt": "2?", "answer": " ", "level": 4} | {"answer": "x y"},
    ]
    one, two = read_rows(write(tmp_path / name, columns))
    assert one.messages == [{"role": "user", "content": "Name a fruit.\n"}]
    assert (one.prompt, one.question, one.answer, one.columns) == (
        "Name a fruit.\n",
        "Name a fruit.\n",
        "apple",
        columns[0],
    )
    assert (two.answer, one.where, two.where) == (
        "x y",
        f"{tmp_path}/{first}",
        f"{tmp_path}/{second}",
    )


@pytest.mark.parametrize(
    "columns, prompt, question",
    [
        ({"messages": [USER]}, "2+2?", "2+2?"),
        ({"messages": [SYSTEM, USER]}, None, "system: Be brief.\nuser: 2+2?"),
        (
            {"messages": [USER, ASSISTANT, {"role": "user", "content": "Sure?"}]},
            None,
            "user: 2+2?\nassistant: #### 4\nuser: Sure?",
        ),
        ({"messages": [SYSTEM, USER], "prompt": "2+2="}, "2+2=", "2+2="),
        ({"prompt": "2+2=", "messages": None}, "2+2=", "2+2="),  # parquet fills what one row lacks
    ],
)
def test_a_conversation_has_a_plain_form_only_if_it_is_given(tmp_path, columns, prompt, question):
    [row] = read_rows(write_jsonl(tmp_path / "a.jsonl", [columns | {"answer": "4"}]))
    assert (row.prompt, row.question) == (prompt, question)
    assert row.messages == (columns["messages"] or [USER | {"content": "2+2="}])


@pytest.mark.parametrize("write, name", [(write_jsonl, "a.jsonl"), (write_parquet, "a.parquet")])
@pytest.mark.parametrize(
    "columns, messages, answer",
    [
        # verl, examples/data_preprocess/gsm8k.py
        (
            {
                "data_source": "openai/gsm8k",
                "prompt": [USER],
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": "4"},
                "extra_info": {
                    "split": "train",
                    "index": 0,
                    "answer": "#### 4",
                    "question": "2+2?",
                },
            },
            [USER],
            "4",
        ),
        # verl's search-r1
        (
            {"prompt": [USER], "reward_model": {"ground_truth": {"target": ["4", "four"]}}},
            [USER],
            '{"target": ["4", "four"]}',
        ),
        # TRL: examples/scripts/async_grpo.py, grpo_continuous_batching.py, and prompt-completion
        # rows
        ({"prompt": [USER], "solution": "4"}, [USER], "4"),
        ({"prompt": [SYSTEM, USER], "reference_answer": "4"}, [SYSTEM, USER], "4"),
        ({"prompt": [USER], "completion": [ASSISTANT]}, [USER], "#### 4"),
        ({"prompt": "2+2?", "completion": " 4"}, [USER], " 4"),
        ({"prompt": "2+2?", "ground_truth": 4}, [USER], "4"),
        ({"messages": [USER], "solution": 4.0}, [USER], "4"),  # ms-swift
        ({"prompt": "2+2?", "answer": 0.5, "solution": "1/2"}, [USER], "0.5"),
        ({"prompt": "2+2?", "answer": -1e-7}, [USER], "-0.0000001"),
        ({"prompt": "2+2?", "answer": 10**17}, [USER], "1" + 17 * "0"),
        ({"prompt": "2+2?", "answer": None, "solution": 1e20}, [USER], "1" + 20 * "0"),
    ],
)
def test_rows_of_verl_trl_and_swift_are_read_as_they_are(
    tmp_path, write, name, columns, messages, answer
):
    [row] = read_rows(write(tmp_path / name, [columns]))
    assert (row.messages, row.answer, row.columns) == (messages, answer, columns)
    assert row.prompt == ("2+2?" if len(messages) == 1 else None)


def turns(roles):
    return [{"role": role, "content": "4"} for role in roles.split()]


@pytest.mark.parametrize("column", ["messages", "prompt"])
@pytest.mark.parametrize("roles", ["user", "user assistant Human", "user tool", "user ipython"])
def test_a_conversation_may_end_where_the_model_is_to_speak(tmp_path, column, roles):
    row = {column: turns(roles), "answer": "4"}
    assert read_rows(write_jsonl(tmp_path / "a.jsonl", [row]))[0].messages == row[column]


@pytest.mark.parametrize("column", ["messages", "prompt"])
@pytest.mark.parametrize(
    "roles", ["user assistant", "user Model", "user system", "user developer", "critic"]
)
def test_a_conversation_that_ends_with_what_could_hold_the_gold_is_refused(tmp_path, column, roles):
    path = write_jsonl(tmp_path / "a.jsonl", [{column: turns(roles), "answer": "4"}])
    with pytest.raises(ConfigError, match=f"a.jsonl:1: .*turn of the role '{roles.split()[-1]}'"):
        read_rows(path)


LIST = "messages: expected a list of {role, content}, both of them text, got "
TEXT = "expected a non-empty string, got "


@pytest.mark.parametrize(
    "change, words",
    [
        (
            {"messages": None},
            (
                "neither column 'prompt' nor column 'messages'; the row has messages, question, "
                "answer, solution"
            ),
        ),
        ({"messages": []}, LIST + "[]"),
        ({"messages": [{"role": "user"}]}, LIST),
        ({"messages": [{"content": "3+4?"}]}, LIST),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, LIST),
        ({"messages": "3+4?"}, LIST),
        ({"messages": [USER, {"role": "assistant", "content": ""}]}, LIST),
        ({"prompt": ["3+4?"]}, LIST),
        *(
            ({"answer": None, "solution": None, "completion": value}, f"completion: {LIST[10:]}")
            for value in ([], ["4"], [{"role": "a", "text": "4"}], [None], [USER, 4], [["4"]])
        ),
        ({"answer": None, "solution": None, "completion": USER}, f"column 'completion': {TEXT}"),
        ({"answer": True}, f"column 'answer': {TEXT}True (bool)"),
        ({"answer": float("nan")}, f"column 'answer': {TEXT}nan (float)"),
        ({"answer": ["7"]}, f"column 'answer': {TEXT}['7'] (list)"),
        ({"answer": ""}, "column 'answer'"),
        ({"question": ""}, "column 'question'"),
    ],
)
def test_malformed_rows_are_named(tmp_path, change, words):
    path = write_jsonl(tmp_path / "bad.jsonl", [CONVERTED, CONVERTED | change])
    with pytest.raises(ConfigError) as error:
        read_rows(path)
    assert f"{path}:2: {words}" in str(error.value)


P = pyarrow


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(
    "kind, value, written",
    [
        (P.float32(), 33.3, None),
        (P.float16(), np.float16(33.3), None),
        (P.float64(), 33.29999923706055, "33.29999923706055"),
        (P.float64(), -0.0, "0"),
        (P.float64(), float("inf"), None),
        (P.uint64(), 2**64 - 1, str(2**64 - 1)),
        (P.decimal128(38, 2), Decimal("9" * 35 + ".10"), "9" * 35 + ".1"),
        (P.bool_(), True, None),
        (P.date32(), datetime.date(2026, 1, 2), None),
        (P.binary(), b"4", None),
    ],
)
def test_a_number_of_any_type_is_read_as_written_or_refused(tmp_path, kind, value, written, nested):
    path, column = tmp_path / "a.parquet", P.array([value], kind)
    table = {"prompt": ["q"], "answer": column}
    if nested:
        table = {
            "prompt": ["q"],
            "reward_model": P.StructArray.from_arrays([column], ["ground_truth"]),
        }
    P.parquet.write_table(P.table(table), path)
    if written is None:
        with pytest.raises(ConfigError, match="a.parquet.*: column '(answer|reward_model)"):
            read_rows(path)
    else:
        assert read_rows(path)[0].answer == written


@pytest.mark.parametrize(
    "number, written",
    [
        ("33.30", "33.3"),
        ("1e20", "1" + 20 * "0"),
        ("9007199254740993.0", None),
        ("0.1234567890123456789", None),
        ("1e-400", None),
        ("1e400", None),
    ],
)
def test_a_number_of_json_is_read_as_written_or_refused(tmp_path, number, written):
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"prompt": "q", "answer": {number}}}')
    if written is None:
        with pytest.raises(ConfigError, match="a.jsonl:1: column 'answer': "):
            read_rows(path)
    else:
        assert read_rows(path)[0].answer == written


def test_a_text_of_parquet_that_is_no_utf8_is_named(tmp_path):
    texts = P.StringArray.from_buffers(
        1, P.py_buffer(bytes([0] * 4 + [4] + [0] * 3)), P.py_buffer(b"a\xed\xa0\xbd")
    )
    P.parquet.write_table(P.table({"prompt": texts, "answer": ["1"]}), tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match="a.parquet: .*'utf-8' codec"):
        read_rows(tmp_path / "a.parquet")


def test_missing_columns_are_named(tmp_path):
    with pytest.raises(
        ConfigError, match=r"a.parquet: row 1: column 'answer' is missing; the row has prompt"
    ):
        read_rows(write_parquet(tmp_path / "a.parquet", [{"prompt": "q"}]))
    with pytest.raises(
        ConfigError,
        match=r"raw.jsonl:1: neither column 'prompt' nor column 'messages'; the row has "
        r"question, answer. tools/convert_gsm8k.py makes such rows of GSM8K's own",
    ):
        read_rows(
            write_jsonl(tmp_path / "raw.jsonl", [{"question": "3+4?", "answer": "#### 7"}])
        )  # raw GSM8K


@pytest.mark.parametrize(
    "name, content, words",
    [
        ("a.jsonl", b"", "no rows"),
        ("a.jsonl", b"\n", "a.jsonl:1: invalid JSON"),
        ("a.jsonl", b'{"prompt": ', "a.jsonl:1: invalid JSON"),
        ("a.jsonl", b"\xff\xfe{}", "a.jsonl:1: invalid JSON"),
        ("a.jsonl", b"[1]\n", r"a.jsonl:1: expected a JSON object, got \[1\]"),
        ("a.parquet", b"not parquet", "a.parquet: not a readable parquet file"),
        ("a.csv", b"", r"expected a .jsonl or .parquet file"),
    ],
)
def test_unreadable_files(tmp_path, name, content, words):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=words):
        read_rows(tmp_path / name)
