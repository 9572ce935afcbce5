"""Token ids for MindSpeed-RL: read back with megatron-core's reader, which shares no code with our
writer.
"""

import datetime
import json
import random
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pyarrow
import pyarrow.parquet
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from mindspeed_qerl.ascend import limits, observer
from mindspeed_qerl.common.errors import ConfigError
from mindspeed_qerl.demo.word_problems import make_problems, split_pairs, write_problems
from mindspeed_qerl.local.engine import load_data
from mindspeed_qerl.local.evaluate import of_run
from mindspeed_qerl.recipe.compose import compose
from mindspeed_qerl.recipe.reader import read_recipe
from mindspeed_qerl.runs.directory import RunDirectory
from mindspeed_qerl.tasks.gsm8k.convert import convert
from mindspeed_qerl.tasks.packed import (
    convert_packed,
    indexed_format,
    pack_rows,
    read_packed_rows,
    rows_of_labels,
)
from mindspeed_qerl.tasks.prompts import Prompts, load_tokenizer
from mindspeed_qerl.tasks.rows import read_rows
from tests.tasks.gsm8k.test_convert import snapshot
from tests.tasks.gsm8k.tool import run_tool

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# the end of Qwen3's
QWEN3 = TEMPLATE.partition("{% if add_")[0] + (
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}"
    "{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}{%- endif %}"
)


def save_tokenizer(
    directory, model, pre_tokenizer, decoder, template=TEMPLATE, texts=(), **special
):
    """A Hugging Face tokenizer directory."""
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizer, decoder
    if texts:
        reserved = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
        tokenizer.train_from_iterator(
            texts,
            trainers.BpeTrainer(
                vocab_size=400,
                special_tokens=reserved,
                show_progress=False,
                initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            ),
        )
        # As Llama's does, and Qwen's does not: a token in front of every text, which no chat
        # template and no label may get twice.
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
        )
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    wrapped.chat_template = template
    wrapped.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def raw(tmp_path_factory):
    """Word problems in raw GSM8K form, and two rows that are not plain ASCII or a plain number."""
    folder = tmp_path_factory.mktemp("raw")
    train, test = split_pairs(0.1, 0)
    write_problems(folder / "train.jsonl", make_problems(train, 40, "train"))
    write_problems(folder / "test.jsonl", make_problems(test, 15, "test"))
    unusual = [
        {"question": "Wie viele Äpfel kosten 5€?", "answer": "#### 1,234,567"},
        {"question": "A debt of $7?\nIn all.", "answer": "#### -7"},
    ]
    with open(folder / "train.jsonl", "a", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in unusual)
    return folder


@pytest.fixture(scope="module")
def bpe(tmp_path_factory, raw):
    """A byte-level BPE with the special tokens of Qwen's."""
    texts = (raw / "train.jsonl").read_text(encoding="utf-8").splitlines()
    return save_tokenizer(
        tmp_path_factory.mktemp("bpe"),
        models.BPE(),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
        texts=texts,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
    )


def words(directory, decoder, template=TEMPLATE):
    """A tokenizer of ten digits and an unknown token."""
    vocabulary = {token: i for i, token in enumerate(["<unk>", *"0123456789"])}
    return save_tokenizer(
        directory,
        models.WordLevel(vocabulary, unk_token="<unk>"),
        pre_tokenizers.Split("", "isolated"),
        decoder,
        template,
        unk_token="<unk>",
        pad_token="<unk>",
    )


def read(prefix, field):
    return IndexedDataset(f"{prefix}_packed_{field}_document")


def prompts_of(prefix):
    dataset = read(prefix, "input_ids")  # its rows are gone with it
    return [ids.tolist() for ids in dataset]


def test_every_row_reads_back(tmp_path, raw, bpe):
    """Each is the rendered chat and the answer of the same row of the chat file, whose prompts are
    those of an evaluation.
    """
    tokenizer = AutoTokenizer.from_pretrained(bpe)
    convert(raw, tmp_path / "chat")
    for packed in convert_packed(raw, tmp_path / "new" / "out", bpe):
        split = packed.data_path.name.removeprefix("gsm8k_")
        chat_file = tmp_path / "chat" / f"{split}_chat.parquet"
        rows = [row.columns for row in read_rows(chat_file)]
        prompts, labels = (read(packed.data_path, field) for field in ("input_ids", "labels"))
        for row, prompt, label in zip(rows, prompts, labels, strict=True):
            content = row["messages"][0]["content"]
            asked = f"<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n"
            assert tokenizer.decode(prompt) == asked
            assert tokenizer.decode(label) == row["answer"]
            assert not set(label) & set(tokenizer.all_special_ids)
        assert packed.prompt_lengths == prompts.sequence_lengths.tolist()
        assert prompts_of(packed.data_path) == Prompts(chat_file, tokenizer, "chat", 10_000).prompts


def test_bytes_are_those_of_megatrons_writer(tmp_path):
    import torch

    rng = random.Random(0)
    for lengths in ([1], [3, 1, 7], [rng.randrange(1, 50) for _ in range(200)]):
        rows = [[rng.randrange(2**31) for _ in range(length)] for length in lengths]
        builder = IndexedDatasetBuilder(str(tmp_path / "x.bin"))
        for row in rows:
            builder.add_item(torch.tensor(row))
            builder.end_document()
        builder.finalize(str(tmp_path / "x.idx"))
        assert indexed_format(rows) == (
            (tmp_path / "x.bin").read_bytes(),
            (tmp_path / "x.idx").read_bytes(),
        )


def test_the_report_counts_prompts_that_are_not_shorter(tmp_path, raw, bpe):
    _, test = convert_packed(raw, tmp_path, bpe)
    longest = max(test.prompt_lengths)
    count = test.prompt_lengths.count(longest)
    for limit, dropped in ((longest + 1, 0), (1, 15), (longest, count)):
        assert f"MindSpeed-RL leaves out {dropped}\n" in test.report(limit)


OFF = {"enable_thinking": False}


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory, bpe):
    """A model's folder with Qwen3's template, but for tools."""
    tokenizer = AutoTokenizer.from_pretrained(bpe)
    tokenizer.chat_template = QWEN3
    folder = tmp_path_factory.mktemp("qwen3")
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def asked(tmp_path, raw, qwen3):
    """A recipe, and the last words of the prompts that it asks with everywhere."""
    convert(raw, tmp_path)
    files = [f"task.{name}_file={tmp_path}/{name}_chat.parquet" for name in ("train", "test")]

    def ask(*overrides):
        model = f"megatron_training.tokenizer_name_or_path={qwen3}"
        config = compose("grpo_tiny_moe_cpu", [*files, "task.prompt=chat", model, *overrides])
        recipe = read_recipe(config)
        of = recipe.task.chat_template_kwargs
        run = RunDirectory.create(
            tmp_path, "run", config=config, command=[], seed=1, data_files={"test": files[1][15:]}
        )
        data = load_data(recipe, run, SimpleNamespace(message=print))
        [packed, _] = convert_packed(raw, tmp_path / "out", qwen3, None, of)
        own = pack_rows(read_rows(recipe.task.train_file), tmp_path / "out" / "own", qwen3, of)
        job = of_run(str(run.path), step=0, model=str(qwen3))
        variables = {"template_kwargs": job.chat_template_kwargs}
        evaluated = Prompts(job.data, data.tokenizer, job.prompt, 500, **variables)
        prompts = [*data.train.prompts, *data.test.prompts, *evaluated.prompts]
        prompts += prompts_of(packed.data_path) + prompts_of(own.data_path)
        ends = {data.tokenizer.decode(ids).rpartition("<|im_start|>")[2] for ids in prompts}
        return recipe, ends

    return ask


def test_thinking_is_switched_off_wherever_the_model_is_asked(asked):
    off = "task.chat_template_kwargs.enable_thinking=false"
    recipe, ends = asked(off)
    assert recipe.task.chat_template_kwargs == OFF
    assert ends == {"assistant\n<think>\n\n</think>\n\n"}


@pytest.mark.parametrize("overrides", [[], ["task.chat_template_kwargs.enable_thinking=true"]])
def test_thinking_is_as_the_template_has_it_otherwise(asked, overrides):
    assert asked(*overrides)[1] == {"assistant\n"}


def test_the_npu_engines_training_and_evaluation_ask_alike(tmp_path, monkeypatch, raw, qwen3):
    convert(raw, tmp_path)
    monkeypatch.setattr(observer.RunObserver, "__init__", lambda *_, **__: None)
    monkeypatch.setattr(observer, "end_tokens", lambda *_: set())
    packed = tmp_path / "out" / "gsm8k_train"
    run = SimpleNamespace(started=datetime.datetime(2026, 1, 1), keep=lambda **_: None)

    def recipe(variables):
        model = [
            f"task.test_file={tmp_path}/test_chat.parquet",
            f"megatron_training.data_path={packed}",
        ]
        read = read_recipe(compose("grpo_tiny_moe_cpu", model))
        task = replace(read.task, prompt="chat", chat_template_kwargs=variables)
        sampling = replace(read.sampling, max_prompt_length=500)
        model = replace(read.model, path=str(qwen3))
        return replace(read, task=task, sampling=sampling, model=model)

    convert_packed(raw, packed.parent, qwen3, None, OFF)
    watch = observer.TokenObserver(recipe(OFF), run, None, None)
    assert watch.problems.prompts == prompts_of(packed.with_name("gsm8k_test"))
    assert not list(limits._missing_rows(recipe(OFF)))
    for variables in (None, {"enable_thinking": True}):
        [fault] = limits._missing_rows(recipe(variables))
        assert fault.key == "task.chat_template_kwargs"
        assert f"{packed} was packed with {OFF}. Pack it again with --chat-" in str(fault)
    with pytest.raises(ValueError, match="gsm8k_train_chat_template_kwargs.json would be read as"):
        convert_packed(raw, packed.parent, qwen3)


@pytest.mark.parametrize(
    "template, variables, words",
    [
        (QWEN3, {"enable_thinkin": 0}, "'enable_thinkin', did you mean 'enable_thinking'?"),
        (QWEN3, {**OFF, "thinking": False}, "'thinking'"),
        (QWEN3, {"tokenize": False}, "'tokenize'"),
        (QWEN3, {"messages": []}, "'messages'"),
        (QWEN3, {"add_generation_prompt": False}, "'add_generation_prompt'"),
        ("{# enable_thinking #}{% set enable_thinking = 1 %}" + TEMPLATE, OFF, "'enable_thinking'"),
        (TEMPLATE + "{{ strftime_now('%d') }}", {"strftime_now": "x"}, "'strftime_now'"),
        (None, OFF, "has no chat template that can be read"),
    ],
)
def test_a_variable_that_the_template_does_not_read_is_refused(
    tmp_path, raw, qwen3, template, variables, words
):
    tokenizer = AutoTokenizer.from_pretrained(qwen3)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(tmp_path / "model")
    with pytest.raises(ConfigError, match=re.escape(words)):
        convert_packed(raw, tmp_path / "out", tmp_path / "model", None, variables)
    assert not (tmp_path / "out").exists()
    convert(raw, tmp_path)
    tokenizer = load_tokenizer(tmp_path / "model")
    with pytest.raises(ConfigError, match="task.chat_template_kwargs: "):
        Prompts(tmp_path / "test_chat.parquet", tokenizer, "chat", 500, None, None, variables)


def half_written(path, data):
    with open(path, "wb") as file:
        file.write(data[: len(data) // 2])
    if "labels" in path.name:
        raise OSError("disk full")


@pytest.mark.parametrize(
    "fault, message",
    [
        ("bad row", "test.jsonl:16: not a number: 'none'"),
        (
            "no chat template",
            "train: the chat template of .* makes no prompt of it: .*chat_template is not set",
        ),
        ("template fails", "train: the chat template of .*: no templates here"),
        (
            "answers change",
            r"the tokenizer turns the label '\d\d' into .* and that back into '\d \d'",
        ),
        ("no directory", "nowhere: no such folder, and so no tokenizer"),
        ("no tokenizer", "has no tokenizer that transformers can read"),
        ("disk full", "disk full"),
        ("foreign field", "gsm8k_test_packed_attention_mask_document.idx would be read as a part"),
    ],
)
def test_a_fault_changes_nothing(tmp_path, monkeypatch, raw, bpe, fault, message):
    source, output, tokenizer = tmp_path / "raw", tmp_path / "out", bpe
    source.mkdir()
    for split in ("train", "test"):
        (source / f"{split}.jsonl").write_bytes((raw / f"{split}.jsonl").read_bytes())
    convert_packed(raw, output, bpe)
    if fault == "bad row":
        with open(source / "test.jsonl", "a") as file:
            file.write('{"question": "q", "answer": "none"}\n')
    elif fault == "no chat template":
        tokenizer = words(tmp_path / "words", decoders.Fuse(), template=None)
    elif fault == "template fails":
        tokenizer = words(
            tmp_path / "words",
            decoders.Fuse(),
            template="{{ raise_exception('no templates here') }}",
        )
    elif fault == "answers change":
        tokenizer = words(tmp_path / "words", None)  # transformers then joins tokens with spaces
    elif fault == "foreign field":
        (output / "gsm8k_test_packed_attention_mask_document.idx").write_text(
            "from an earlier run of upstream's preprocessor"
        )
    elif fault == "disk full":
        monkeypatch.setattr(Path, "write_bytes", half_written)
    else:
        tokenizer = tmp_path / {"no directory": "nowhere", "no tokenizer": "raw"}[fault]
    before = snapshot(output)
    with pytest.raises(OSError if fault == "disk full" else ValueError, match=message):
        convert_packed(source, output, tokenizer)
    assert snapshot(output) == before


@pytest.mark.parametrize("name", ["a+b", "[a]", "a{2}"])
def test_folders_that_upstream_cannot_find(tmp_path, raw, bpe, name):
    with pytest.raises(
        ValueError,
        match="MindSpeed-RL reads the path .* as a pattern and would not find it, because of",
    ):
        convert_packed(raw, tmp_path / name, bpe)
    assert not (tmp_path / name).exists()


def test_tool(tmp_path, raw, bpe):
    arguments = ["--input", raw, "--format", "mindspeed", "--output", tmp_path / "out"]
    done = run_tool("convert_gsm8k", *arguments, "--tokenizer", bpe, "--max-prompt-length", "1")
    assert done.returncode == 0, done.stderr
    assert f'  data_path: "{tmp_path / "out" / "gsm8k_test"}"\n' in done.stdout
    assert "; with max_prompt_length: 1 MindSpeed-RL leaves out 15\n" in done.stdout
    done = run_tool("convert_gsm8k", *arguments, "--tokenizer", raw)
    assert done.returncode == 1 and done.stderr.startswith("convert_gsm8k: ") and not done.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ["--format", "mindspeed"],
        ["--tokenizer", "x"],
        ["--max-prompt-length", "9"],
        ["--format", "mindspeed", "--tokenizer", "x", "--max-prompt-length", "0"],
    ],
)
def test_arguments_that_do_not_go_together(tmp_path, arguments):
    done = run_tool("convert_gsm8k", "--input", tmp_path, "--output", tmp_path / "out", *arguments)
    assert done.returncode == 2 and "error: --" in done.stderr and not (tmp_path / "out").exists()


# ---- a task of one's own ----

COLUMNS = [
    {"prompt": f"Tom has {i} apples.", "answer": answer, "tags": ["fruit", i], "note": None}
    for i, answer in enumerate(["Ä cafe\u0301\n", " 7 ", "x" * 3000, *map(str, range(9))])
]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in COLUMNS))
    return path


def test_labels_find_their_rows_exactly(tmp_path, file, bpe):
    packed = pack_rows(read_rows(file), tmp_path / "out" / "mine", bpe)
    assert packed.data_path == tmp_path / "out" / "mine"
    decode = AutoTokenizer.from_pretrained(bpe).decode
    prompts, labels = (
        IndexedDataset(f"{packed.data_path}_packed_{field}_document")
        for field in ("input_ids", "labels")
    )
    assert [decode(ids) for ids in prompts] == [
        f"<|im_start|>user\n{row['prompt']}<|im_end|>\n<|im_start|>assistant\n" for row in COLUMNS
    ]
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
    with pytest.raises(ConfigError, match="label '' is neither an answer nor"):
        rows_of_labels(["7", " "], None)


@pytest.mark.parametrize("label", ["12", "-1", "Paris", "1.0", "²", " "])
def test_a_label_that_counts_no_row_is_refused(file, label):
    with pytest.raises(ConfigError, match="neither an answer nor the number of a packed row"):
        rows_of_labels(["0", label], read_rows(file))


def test_gsm8k_is_not_packed_beside_rows_of_another_packing(tmp_path, file, bpe):
    """Its labels, which are answers, would be taken for the numbers of those rows."""
    pack_rows(read_rows(file), tmp_path / "out" / "gsm8k_train", bpe)
    for split in ("train", "test"):
        file = tmp_path / f"{split}.jsonl"
        file.write_text('{"question": "Tom has 3 apples.", "answer": "#### 3"}\n')
    with pytest.raises(ValueError, match=r"gsm8k_train_rows.jsonl would be read as a part"):
        convert_packed(tmp_path, tmp_path / "out", bpe)


def test_columns_that_json_cannot_hold_are_refused_and_nothing_is_written(tmp_path, bpe):
    table = pyarrow.Table.from_pylist(
        [{"prompt": "Tom", "answer": "3", "day": datetime.date(2026, 1, 2)}]
    )
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    with pytest.raises(TypeError, match="Object of type date is not JSON serializable"):
        pack_rows(read_rows(tmp_path / "rows.parquet"), tmp_path / "out" / "mine", bpe)
    assert not (tmp_path / "out").exists()


def test_the_tool_for_own_tasks(tmp_path, file, bpe):
    target = ["--tokenizer", bpe, "--data-path", tmp_path / "out" / "mine"]
    done = run_tool("pack_task", "--rows", file, *target, "--max-prompt-length", "9")
    assert done.returncode == 0, done.stderr
    assert f'  data_path: "{tmp_path}/out/mine"\n' in done.stdout
    assert done.stdout.startswith("12 prompts of ") and "leaves out " in done.stdout
    done = run_tool("pack_task", "--rows", tmp_path / "none.jsonl", *target)
    assert done.returncode == 1 and done.stderr.startswith("pack_task: ")
    assert "no such file" in done.stderr and "Traceback" not in done.stderr
