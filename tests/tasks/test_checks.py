"""The planted faults of a task's files: each is found, in words; and rows without a fault pass in silence."""

from dataclasses import replace
from pathlib import Path

import pytest

from mindspeed_qerl.local.tiny_model import build_tokenizer
from mindspeed_qerl.tasks.checks import check_prompts, check_rows
from mindspeed_qerl.tasks.gsm8k.convert import convert
from mindspeed_qerl.tasks.gsm8k.word_problems import make_problems, split_pairs, write_problems
from mindspeed_qerl.tasks.prompts import Prompts
from mindspeed_qerl.tasks.rows import read_rows

REPO = Path(__file__).resolve().parents[2]
GSM8K = REPO.parent / "shared" / "data" / "gsm8k"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    raw, converted = tmp_path_factory.mktemp("raw"), tmp_path_factory.mktemp("converted")
    for name, pairs, count in zip(("train", "test"), split_pairs(0.15, 0), (500, 60)):
        write_problems(raw / f"{name}.jsonl", make_problems(pairs, count, name))
    convert(raw, converted)
    return converted


@pytest.fixture(scope="module")
def rows(folder):
    return [read_rows(folder / f"{name}_chat.parquet") for name in ("train", "test")]


def with_answer(row, answer):
    return replace(row, answer=answer)


def test_rows_without_a_fault_are_silent(rows):
    assert check_rows(*rows, ["gsm8k"]) == ([], [])


def test_the_real_gsm8k_has_no_fault(tmp_path):
    if not GSM8K.is_dir():
        pytest.skip("no ../shared/data/gsm8k beside the repository: the real data are not here")
    convert(GSM8K, tmp_path)
    train, test = (read_rows(tmp_path / f"{name}_chat.parquet") for name in ("train", "test"))
    assert check_rows(train, test, ["gsm8k_strict"]) == ([], [])


def test_test_questions_in_the_training_file_are_refused_unless_allowed(rows):
    train, test = rows
    disguised = [replace(row, question=row.question.upper().replace(" ", "  "), where=f"leak:{i}")
                 for i, row in enumerate(test[10:30])]
    [fault], warnings = check_rows(train + disguised, test, ["gsm8k"])
    assert fault.startswith("20 of 60 test questions are training questions too, the first ") and not warnings
    assert test[10].where in fault and "leak:0" in fault and "set task.allow_overlap=true" in fault
    faults, [warning] = check_rows(train + disguised, test, ["gsm8k"], allow_overlap=True)
    assert not faults and warning.startswith(
        "20 of 60 test questions are training questions too") and "allow_overlap = true" in warning


def test_repeated_rows_are_counted(rows):
    train, test = rows
    faults, [warning] = check_rows(train + train[:20] * 19 + train[20:21], test, ["gsm8k"])
    assert not faults
    assert warning.startswith(
        "881 training rows hold 500 different questions: 1 is there 2 times, 20 are there 20 times, the first ")


def test_swapped_files_are_asked_about(rows):
    train, test = rows
    assert check_rows(test, train, ["gsm8k"]) == (
        [], ["the test file has more rows (500) than the training file (60): are they swapped?"])


def test_gold_answers_that_are_no_integers_are_shown(rows):
    train, test = rows
    points = [with_answer(train[0], "1.234"), with_answer(train[1], "-7.0"), with_answer(train[2], "2/3"), *train[3:]]
    faults, [warning] = check_rows(points, test, ["gsm8k_strict"])
    assert not faults
    assert warning.startswith(
        f"2 of 500 training rows have an answer that is no integer: '1.234' ({train[0].where}), '2/3'")
    words = [with_answer(row, "Paris") for row in test[:5]] + test[5:]
    [fault], warnings = check_rows(train, words, ["gsm8k"])
    assert fault.startswith("5 of 60 test rows have an answer that is no number: 'Paris'") and fault.count(
        "Paris") == 3
    assert "convert the file with tools/convert_gsm8k.py" in fault and not warnings
    assert check_rows(points, words, ["my_module:my_reward"]) == ([], [])  # another reward reads any answer


@pytest.fixture
def tokenizer():
    tokenizer = build_tokenizer()
    tokenizer.chat_template = ("{% for m in messages %}<eos>{{ m.content | trim }}{% endfor %}{% if "
                               "add_generation_prompt %}####{% endif %}")
    return tokenizer


@pytest.mark.parametrize("chat", [False, True])
def test_prompts_without_a_fault_are_silent(folder, tokenizer, chat):
    task = Prompts(folder / "train_chat.parquet", tokenizer, "chat" if chat else "plain", 96)
    faults, warnings = check_prompts(task, tokenizer, chat)
    assert not faults and bool(warnings) == chat  # the instruction's words are none of the tiny vocabulary


def test_a_template_that_ignores_the_question_is_refused(folder, tokenizer):
    tokenizer.chat_template = "{% for m in messages %}<eos>Tom has 3 apples.{% endfor %}"
    task = Prompts(folder / "train_chat.parquet", tokenizer, "chat", 96)
    [fault], warnings = check_prompts(task, tokenizer, True)
    assert "become the same 7 token ids: the chat template loses the question" in fault and not warnings
    assert f"({task.rows[1].where}) and '{task.rows[0].question[:20]}" in fault


def test_a_template_that_cuts_the_question_is_refused(folder, tokenizer):
    tokenizer.chat_template = "{% for m in messages %}<eos>{{ m.content[7:] }}{% endfor %}"
    task = Prompts(folder / "train_chat.parquet", tokenizer, "chat", 96)
    [fault], _ = check_prompts(task, tokenizer, True)
    assert fault.startswith(f"{task.rows[0].where}: the chat template loses the question. Asked is ")
    assert repr(tokenizer.decode(task.prompts[0]))[:60] in fault


def test_a_tokenizer_that_does_not_know_the_words_is_a_warning(tmp_path, tokenizer):
    """Names that it lacks make two questions one: no fault of a template."""
    (tmp_path / "a.jsonl").write_text("".join(f'{{"prompt": "{name} has 3 apples.", "answer": "3"}}\n'
                                              for name in ("Tom", "Zoe", "Ida")))
    task = Prompts(tmp_path / "a.jsonl", tokenizer, "plain", 96)
    assert task.prompts[1] == task.prompts[2]
    assert check_prompts(task, tokenizer, False) == (
        [], ["2 of 3 prompts hold words that the tokenizer does not know: is it the right one?"])


def test_a_tokenizer_may_change_the_case(tmp_path):
    from tokenizers import normalizers

    tokenizer = build_tokenizer()
    # what it gives back is another text
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace("apples", "books")
    (tmp_path / "a.jsonl").write_text('{"prompt": "Tom has 3 apples.", "answer": "3"}\n')
    task = Prompts(tmp_path / "a.jsonl", tokenizer, "plain", 96)
    assert "books" in tokenizer.decode(task.prompts[0]) and check_prompts(task, tokenizer, False) == ([], [])


def test_too_long_prompts_are_counted_of_all(folder, tokenizer):
    lengths = sorted(map(len, Prompts(folder / "test_chat.parquet", tokenizer, "plain", 96).prompts))
    task = Prompts(folder / "test_chat.parquet", tokenizer, "plain", lengths[9])
    left = sum(length > lengths[9] for length in lengths)
    assert task.left_out(
        "evaluation") == f"{left} of 60 evaluation prompts are longer than {lengths[9]} tokens and are left out"
    assert Prompts(folder / "test_chat.parquet", tokenizer, "plain", 96).left_out("evaluation") == ""


def test_a_conversation_needs_a_chat_template(tmp_path, tokenizer):
    turns = ('[{"role": "user", "content": "Tom"}, {"role": "assistant", "content": "Tom"}, {"role": "user", '
             '"content": "Tom"}]')
    (tmp_path / "a.jsonl").write_text(f'{{"messages": {turns}, "answer": "3"}}\n')
    with pytest.raises(ValueError, match=r"a.jsonl:1: its messages are a conversation, which has no plain form"):
        Prompts(tmp_path / "a.jsonl", tokenizer, "plain", 96)
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ValueError,
                       match=r"a.jsonl:1: the tokenizer's chat template refuses its messages: roles must alternate"):
        Prompts(tmp_path / "a.jsonl", tokenizer, "chat", 96)
