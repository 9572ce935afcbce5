"""Conversion: what is written, and that nothing is written when something is wrong."""

import json
from pathlib import Path

import pytest

from mindspeed_qerl.tasks.gsm8k.convert import (
    INSTRUCTION,
    convert,
    converted,
    gold_answer,
    load_raw,
    read_splits,
)
from mindspeed_qerl.tasks.rows import read_rows
from tests import GSM8K, needs_gsm8k
from tests.tasks.gsm8k.tool import run_tool
from tests.tasks.test_rows import write_jsonl, write_parquet

NAMES = ["test_chat.parquet", "train_chat.parquet"]
ROW = {"question": "Wie viele Äpfel sind 3+4?", "answer": "3+4=7\n#### 7"}


def write_raw(folder, train=(ROW,), test=(ROW,)):
    folder.mkdir(exist_ok=True)
    for split, rows in (("train", train), ("test", test)):
        lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
        (folder / f"{split}.jsonl").write_text(
            "".join(line + "\n" for line in lines), encoding="utf-8"
        )
    return folder


def snapshot(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_files_and_counts(tmp_path):
    big = {"question": "500*2?", "answer": "500*2=1,000\n#### 1,000"}
    written = convert(write_raw(tmp_path / "raw", train=[ROW, big]), tmp_path / "new" / "out")
    out = tmp_path / "new" / "out"
    assert sorted(path.name for path in out.iterdir()) == NAMES
    assert written == {"train": 2, "test": 1}
    assert [row.columns for row in read_rows(out / "train_chat.parquet")] == [
        {
            "messages": [{"role": "user", "content": f"{ROW['question']} {INSTRUCTION}"}],
            "question": ROW["question"],
            "answer": "7",
            "solution": ROW["answer"],
        },
        converted(big),
    ]
    assert converted(big)["answer"] == "1000"


def test_same_input_same_bytes(tmp_path):
    raw = write_raw(tmp_path / "raw")
    convert(raw, tmp_path / "a")
    convert(raw, tmp_path / "b")
    convert(raw, tmp_path / "b")  # again, over the first
    assert snapshot(tmp_path / "a") == snapshot(tmp_path / "b")


@pytest.mark.parametrize(
    "bad, words",
    [
        ({"question": "q"}, "column 'answer' is missing"),
        ({"question": "q", "answer": "no hashes"}, "not a number: 'no hashes'"),
        ('{"question": ', "invalid JSON"),
    ],
)
def test_bad_row_names_its_line_and_changes_nothing(tmp_path, bad, words):
    raw = write_raw(tmp_path / "raw", test=[ROW, bad, ROW])
    with pytest.raises(ValueError) as error:
        convert(raw, tmp_path / "out")
    assert f"{raw / 'test.jsonl'}:2: {words}" in str(error.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("failure", [OSError("disk full"), KeyboardInterrupt()])
def test_failure_while_writing_changes_nothing(tmp_path, monkeypatch, failure):
    out = tmp_path / "deep" / "out"
    convert(write_raw(tmp_path / "raw"), out)
    before = snapshot(out)

    def fails_half_way(path, content):
        path.write_text("half a li")
        raise failure

    monkeypatch.setattr(Path, "write_bytes", fails_half_way)
    with pytest.raises(type(failure)):
        convert(write_raw(tmp_path / "raw", train=[ROW, ROW]), out)
    assert snapshot(out) == before


def test_an_empty_split(tmp_path):
    raw = write_raw(tmp_path / "raw", test=[])
    with pytest.raises(ValueError, match="no test rows"):
        convert(raw, tmp_path / "out")


def test_tool(tmp_path):
    raw = write_raw(tmp_path / "raw")
    arguments = ["--input", raw, "--output", tmp_path / "out"]
    done = run_tool("convert_gsm8k", *arguments, "--max-steps", 1)
    assert done.returncode == 0, done.stderr
    assert f"{tmp_path / 'out'}: 1 rows of train\n" in done.stdout
    done = run_tool("convert_gsm8k", *arguments, "--max-steps", 0)
    assert done.returncode == 1 and "no train rows, or none of so few steps" in done.stderr
    write_raw(raw, train=[ROW, {"question": "q", "answer": "none"}])
    done = run_tool("convert_gsm8k", *arguments)
    assert done.returncode == 1 and done.stdout == ""
    assert f"convert_gsm8k: {raw / 'train.jsonl'}:2: not a number: 'none'" in done.stderr
    assert run_tool("convert_gsm8k", "--input", raw).returncode == 2


@pytest.mark.parametrize(
    "most, kept", [(1, ["one"]), (2, ["one", "two"]), (None, ["one", "two", "three"])]
)
def test_problems_of_few_steps(tmp_path, most, kept):
    rows = [
        {"question": "one", "answer": "3+4=7\n\n#### 7"},  # an empty line is no step
        {"question": "two", "answer": "3+4=7\n7+1=8\n#### 8"},
        {"question": "three", "answer": "3+4=7\n7+1=8\n#### no\n#### 8"},
    ]  # the last #### counts
    raw = write_raw(tmp_path / "raw", train=rows)
    convert(raw, tmp_path / "out", max_steps=most)
    written = read_rows(tmp_path / "out" / "train_chat.parquet")
    assert [row.columns["question"] for row in written] == kept
    splits = read_splits(raw, max_steps=most)
    assert [row["question"] for row in splits["train"]] == kept and len(splits["test"]) == 1


@needs_gsm8k
def test_gsm8k_itself(tmp_path):
    easy = read_splits(GSM8K, max_steps=2)
    assert (len(easy["train"]), len(easy["test"])) == (1961, 326)
    convert(GSM8K, tmp_path)
    train, test = (
        [row.columns for row in read_rows(tmp_path / f"{split}_chat.parquet")]
        for split in ("train", "test")
    )
    assert (len(train), len(test)) == (7473, 1319)
    raw = [json.loads(line) for line in (GSM8K / "train.jsonl").read_bytes().splitlines()]
    assert [(row["question"], row["solution"]) for row in train] == [
        (row["question"], row["answer"]) for row in raw
    ]
    assert train[0]["answer"] == "72" and {row["answer"] for row in train + test} >= {
        "109200000",
        "-7",
    }


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
