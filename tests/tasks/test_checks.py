"""The planted faults of a task's files: each is found, in words; and rows without a fault pass in
silence.
"""

import json
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from types import SimpleNamespace

import pytest

from mindspeed_qerl.common.errors import ConfigError
from mindspeed_qerl.demo.tiny_model import build_tokenizer
from mindspeed_qerl.recipe.types import Task
from mindspeed_qerl.tasks import checks
from mindspeed_qerl.tasks.checks import check_task
from mindspeed_qerl.tasks.prompts import Prompts, load_tokenizer
from mindspeed_qerl.tasks.rewards import RewardError
from mindspeed_qerl.tasks.rows import read_rows, row_of
from tests import ROOT
from tests.word_problems import converted


def sentences(check, *arguments):
    """(those of the faults, warnings)"""
    found = check(*arguments)
    assert all(fault.rule == "data" for fault in found.faults)
    return list(map(str, found.faults)), found.warnings


def check_rows(train, test, reward="gsm8k", **settings):
    task = Task(verifier_function=(reward,), **settings)
    return sentences(checks.check_rows, train, test, task)


def check_prompts(*arguments):
    return sentences(checks.check_prompts, *arguments)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return converted(tmp_path_factory.mktemp("data"), 500, 60)


@pytest.fixture(scope="module")
def rows(folder):
    return [read_rows(folder / f"{name}_chat.parquet") for name in ("train", "test")]


def with_answer(row, answer):
    return replace(row, answer=answer)


def test_rows_without_a_fault_are_silent(rows):
    assert check_rows(*rows) == ([], [])


def test_test_questions_in_the_training_file_are_refused_unless_allowed(rows):
    train, test = rows
    disguised = [
        replace(row, question=row.question.upper().replace(" ", "  "), where=f"leak:{i}")
        for i, row in enumerate(test[10:30])
    ]
    [fault], warnings = check_rows(train + disguised, test)
    assert (
        fault.startswith("20 of 60 test questions are training questions too, the first ")
        and not warnings
    )
    assert test[10].where in fault and "leak:0" in fault and "set task.allow_overlap=true" in fault
    faults, [warning] = check_rows(train + disguised, test, allow_overlap=True)
    assert not faults and warning.startswith("20 of 60 test questions are training questions too")


def conversation(*contents):
    roles = ("user", "assistant") if len(contents) % 2 else ("system", "user")
    turns = [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]
    return row_of({"messages": turns, "answer": "4"}, contents[0])


def test_conversations_are_compared_from_their_first_turn_on():
    train = [conversation("2+2?", "5", "Sure?"), conversation("Add.", "2+2?")]
    other = [conversation("3+1?", "4", "Sure?"), conversation("Multiply.", "2+2?")]
    assert check_rows(train * 10, other)[0] == [] == check_rows(train + other, [])[1]
    for row in train:
        again = conversation(*(turn["content"].upper() for turn in row.messages))
        assert check_rows(train, [*other, again])[0][0].startswith(
            "1 of 3 test questions are training"
        )


def test_a_reward_is_tried_on_training_and_on_test_rows(tmp_path, monkeypatch):
    (tmp_path / "by_level.py").write_text("def reward(completions, level):\n    return level\n")
    monkeypatch.syspath_prepend(tmp_path)
    with_level, without = (
        {"prompt": "2+2?", "answer": 4, "level": 1},
        {"prompt": "3+3?", "answer": 6},
    )
    for train, test in ((with_level, without), (without, with_level), (None, with_level)):
        (tmp_path / "test.jsonl").write_text(json.dumps(test) + "\n")
        task = Task(test_file=str(tmp_path / "test.jsonl"), verifier_function=("by_level:reward",))
        with pytest.raises(RewardError, match="missing a required argument: 'level'"):
            check_task(task, train and [row_of(train)])
    [warning] = check_task(task, [row_of(with_level | {"prompt": "q"})]).warnings
    assert warning.startswith("verifier 'by_level:reward' gives the gold answer 1 and an empty ")


def test_repeated_rows_are_counted(rows):
    train, test = rows
    assert check_rows(train + train[:20] * 19, test) == (
        [],
        ["880 training rows hold 500 different questions"],
    )


def test_gold_answers_that_are_no_numbers_are_named(rows):
    train, test = rows
    words = [with_answer(row, "Paris") for row in test[:5]] + test[5:]
    faults, warnings = check_rows(train, words)
    assert len(faults) == 3 and not warnings
    assert faults[0].startswith(f"{test[0].where}: not a number: 'Paris'")
    assert check_rows(train, words, "my_module:my_reward") == ([], [])


@pytest.fixture
def tokenizer():
    tokenizer = build_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}<eos>{{ m.content | trim }}{% endfor %}{% if "
        "add_generation_prompt %}####{% endif %}"
    )
    return tokenizer


@pytest.mark.parametrize("chat", [False, True])
def test_prompts_without_a_fault_are_silent(folder, tokenizer, chat):
    task = Prompts(folder / "train_chat.parquet", tokenizer, "chat" if chat else "plain", 96)
    faults, warnings = check_prompts(task, tokenizer)
    assert (
        not faults and bool(warnings) == chat
    )  # the instruction's words are none of the tiny vocabulary


def test_a_template_that_ignores_the_question_is_refused(folder, tokenizer):
    tokenizer.chat_template = "{% for m in messages %}<eos>Tom has 3 apples.{% endfor %}"
    task = Prompts(folder / "train_chat.parquet", tokenizer, "chat", 96)
    [fault], warnings = check_prompts(task, tokenizer)
    assert (
        "become the same 7 token ids: the tokenizer, or its chat template, loses" in fault
        and not warnings
    )
    assert f"({task.rows[1].where}) and '{task.rows[0].question[:20]}" in fault


def test_a_tokenizer_that_does_not_know_the_words_is_a_warning(tmp_path, tokenizer):
    """Names that it lacks make two questions one: no fault of a template."""
    (tmp_path / "a.jsonl").write_text(
        "".join(
            f'{{"prompt": "{name} has 3 apples.", "answer": "3"}}\n'
            for name in ("Tom", "Zoe", "Ida")
        )
    )
    task = Prompts(tmp_path / "a.jsonl", tokenizer, "plain", 96)
    assert task.prompts[1] == task.prompts[2]
    assert check_prompts(task, tokenizer) == (
        [],
        ["2 of 3 prompts hold words that the tokenizer does not know: is it the right one?"],
    )


def test_too_long_prompts_are_counted_of_all(folder, tokenizer):
    lengths = sorted(
        map(len, Prompts(folder / "test_chat.parquet", tokenizer, "plain", 96).prompts)
    )
    task = Prompts(folder / "test_chat.parquet", tokenizer, "plain", lengths[9])
    left = sum(length > lengths[9] for length in lengths)
    assert (
        task.left_out("evaluation")
        == f"{left} of 60 evaluation prompts are longer than {lengths[9]} tokens and are left out"
    )


def test_a_conversation_needs_a_chat_template(tmp_path, tokenizer):
    turns = (
        '[{"role": "user", "content": "Tom"}, {"role": "assistant", "content": "Tom"}, {"role": '
        '"user", "content": "Tom"}]'
    )
    (tmp_path / "a.jsonl").write_text(f'{{"messages": {turns}, "answer": "3"}}\n')
    with pytest.raises(
        ValueError, match=r"a.jsonl:1: its messages are a conversation, which has no plain form"
    ):
        Prompts(tmp_path / "a.jsonl", tokenizer, "plain", 96)


@pytest.mark.parametrize("form", ["chat", "plain"])
def test_half_a_character_is_named_with_its_row(tmp_path, tokenizer, form):
    """Of a text that was cut within an emoji: no tokenizer reads it."""
    (tmp_path / "a.jsonl").write_text('{"prompt": "Tom \\ud83d", "answer": "3"}\n')
    with pytest.raises(ConfigError, match=r"a.jsonl:1: the (tokenizer|chat template) "):
        Prompts(tmp_path / "a.jsonl", tokenizer, form, 96)


@pytest.fixture
def tom(tmp_path):
    """A file of one row."""
    file = tmp_path / "a.jsonl"
    file.write_text('{"prompt": "Tom", "answer": "3"}\n')
    return file


@pytest.mark.parametrize(
    "template, words",
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ 1 / 0 }}", "ZeroDivisionError: division by zero"),
        ("{% for m in messages %}", "Unexpected end of template"),
        (7, "TypeError"),
        (None, "chat_template is not set"),
        ({"tool_use": "a", "rag": "b"}, "no default"),
    ],
)
def test_any_error_of_a_template_is_the_templates(tom, tokenizer, template, words):
    tokenizer.chat_template = template
    with pytest.raises(ConfigError) as error:
        Prompts(tom, tokenizer, "chat", 96)
    assert str(error.value).startswith(f"{tom}:1: the chat template of ")
    assert words in str(error.value)


def test_a_model_without_its_tokenizers_files_is_named(tmp_path, tom):
    config = (ROOT / "models" / "tiny_qwen3_moe" / "config.json").read_text()
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(ConfigError, match=f":1: no token .*tokenizer.json in {tmp_path}"):
        Prompts(tom, load_tokenizer(tmp_path), "plain", 96)


@pytest.mark.parametrize("name", ["nowhere", "Qwen/Qwen3-0.6B", "a.jsonl"])
def test_a_folder_that_is_not_there_asks_no_hub(tmp_path, monkeypatch, tom, name):
    def connect(*_):
        raise AssertionError("a hub is asked")

    monkeypatch.setattr("socket.socket.connect", connect)
    monkeypatch.setattr("socket.getaddrinfo", connect)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=f"^{name}: no such folder, and so no tokenizer"):
        load_tokenizer(name)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="empty has no tokenizer that"):
        load_tokenizer("empty")


def test_a_templates_date_is_the_one_it_is_told(tom, tokenizer):
    """Against transformers' own answer, on a day when the clock says so."""
    tokenizer.chat_template = (
        "{% if strftime_now is defined %}{{ strftime_now('%d') }} {{ strftime_now('%H') }}"
        "{% endif %} {{ messages[0].content }}"
    )
    started = datetime(2026, 7, 26, 23, 59)
    then = Prompts(tom, tokenizer, "chat", 96, at=started)
    assert tokenizer.decode(then.prompts[0]).split()[-1] == "Tom" and tokenizer.decode(
        then.prompts[0]
    ).replace(" ", "").startswith("2623")
    with freeze(started):
        assert then.digest() == Prompts(tom, tokenizer, "chat", 96).digest()
    later = Prompts(tom, tokenizer, "chat", 96, at=datetime(2026, 7, 27, 23, 59))
    assert later.digest() != then.digest()


@contextmanager
def freeze(now):
    """transformers' clock."""
    from transformers.utils import chat_template_utils

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chat_template_utils, "datetime", SimpleNamespace(now=lambda: now))
        chat_template_utils._compile_jinja_template.cache_clear()
        yield
    chat_template_utils._compile_jinja_template.cache_clear()
