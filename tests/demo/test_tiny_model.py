import json
import random
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from mindspeed_qerl.common.files import sha256
from mindspeed_qerl.demo import tiny_model, word_problems
from mindspeed_qerl.demo.tiny_model import ModelRecipe
from mindspeed_qerl.demo.word_problems import MIXTURE, Problem
from mindspeed_qerl.tasks.gsm8k.verifier import score
from mindspeed_qerl.tasks.rows import read_rows
from tests import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import step_problems

QUICK = ModelRecipe(steps=2, batch_size=4, train_problems=30, test_problems=20)
QUICKSTART = ROOT / "models" / "tiny_qwen3_moe"
WEIGHTS = "69472fa3cda49ab92422aa6d4d3fe5609ca942c9baafdad05f93651e167e4e1a"  # what results are of


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    directory = tmp_path_factory.mktemp("models") / "tiny"
    return directory, tiny_model.make_tiny_model(directory, QUICK)


@pytest.fixture(scope="module")
def saved_tokenizer(made):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(made[0])


@pytest.mark.parametrize("world", [word_problems, step_problems])
def test_tokenizer_gives_every_wording_back(saved_tokenizer, world):
    tokenizer = saved_tokenizer
    if world is step_problems:
        tokenizer = tiny_model.build_tokenizer(world)
    texts = list(word_problems.all_wordings(world.TEMPLATES))
    training_pairs, held_out_pairs = word_problems.split_pairs(0.15, seed=0)
    rng = random.Random(0)
    for _ in range(1000):
        problem = world.random_problem(training_pairs + held_out_pairs, rng)
        answer = world.mixed_answer(problem, set(training_pairs), world.MIXTURE, rng)
        texts.append(f"{problem.question}\n{answer}")
    for text in texts:
        token_ids = tokenizer.encode(text)
        assert tokenizer.decode(token_ids) == text
        assert tokenizer.unk_token_id not in token_ids


@pytest.mark.parametrize(
    "text, tokens",
    [
        ("Tom has 13 apples.\n#### 23", "Tom| has| |1|3| apples|.|\n|####| |2|3"),
        # unknown words, and nothing is lost around them
        ("Natalia sold 48 apples; Tom's", "<unk>|<unk>| |4|8| apples|<unk>| Tom|<unk>|<unk>"),
    ],
)
def test_tokenizer_splits_numbers_into_digits(saved_tokenizer, text, tokens):
    assert saved_tokenizer.tokenize(text) == tokens.split("|")


def test_directory_loads_in_transformers_with_the_trained_weights(made, saved_tokenizer):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    directory, report = made
    config = AutoConfig.from_pretrained(directory)
    assert (config.model_type, config.num_experts, config.num_experts_per_tok, config.head_dim) == (
        "qwen3_moe",
        8,
        2,
        32,
    )
    assert config.vocab_size == len(saved_tokenizer)
    model = AutoModelForCausalLM.from_pretrained(directory)
    assert model.dtype == torch.float32
    assert model.num_parameters() == report["parameters"]
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    generation = GenerationConfig.from_pretrained(directory)
    assert (generation.eos_token_id, generation.pad_token_id) == (
        config.eos_token_id,
        config.pad_token_id,
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as it is made: other threads, other sums
    torch.manual_seed(QUICK.seed)
    tokenizer = tiny_model.build_tokenizer()
    again = tiny_model.build_model(tokenizer, "tiny")
    untrained = again.get_input_embeddings().weight.detach().clone()
    tiny_model.train_supervised(
        again, tokenizer, word_problems.split_pairs(QUICK.held_out, QUICK.seed)[0], QUICK
    )
    torch.set_num_threads(threads)
    assert not torch.equal(untrained, again.get_input_embeddings().weight)
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, again.state_dict()[name]), name


def test_data_are_the_word_problems_of_the_split(made):
    directory, _ = made
    training_pairs, held_out_pairs = (
        set(pairs) for pairs in word_problems.split_pairs(QUICK.held_out, QUICK.seed)
    )
    for name, pairs, count in (("train", training_pairs, 30), ("test", held_out_pairs, 20)):
        raw = [
            json.loads(line)
            for line in (directory / "data" / "raw" / f"{name}.jsonl").read_text().splitlines()
        ]
        converted = [row.columns for row in read_rows(directory / "data" / f"{name}_chat.parquet")]
        assert len(raw) == len(converted) == count
        for row, chat in zip(raw, converted):
            assert chat["question"] == row["question"]
            assert tuple(sorted(map(int, re.findall(r"\d+", row["question"])))) in pairs
            assert score(row["answer"], chat["answer"], method="strict") == 1.0


@pytest.mark.parametrize("name, mine", [("notes.txt", "mine"), ("recipe.json", "{}"), ("file", "")])
def test_what_is_in_the_way_is_refused_and_kept(tmp_path, made, name, mine):
    (tmp_path / name).write_text(mine)
    for way in (tmp_path / name if name == "file" else tmp_path, made[0]):
        with pytest.raises(FileExistsError, match="exists already"):
            tiny_model.make_tiny_model(way, replace(QUICK, seed=1))
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [(name, mine)]


def test_a_making_that_fails_leaves_nothing(tmp_path, monkeypatch):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(tiny_model, "train_supervised", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tiny_model.make_tiny_model(tmp_path / "model", QUICK)
    assert list(tmp_path.iterdir()) == []


def test_loss_is_on_the_completion_only(monkeypatch):
    tokenizer = tiny_model.build_tokenizer()
    question = "Tom has 3 apples and Ben has 4. How many apples do they have together?"
    problem = Problem(question, 3, (("+", 4),))
    answers = ["3+4=7\n#### 7", "The answer is 7"]
    monkeypatch.setattr(word_problems, "random_problem", lambda *_: problem)
    monkeypatch.setattr(word_problems, "mixed_answer", lambda *_: next(given))
    fit = "mindspeed_qerl.demo.supervised.fit"
    monkeypatch.setattr(fit, lambda model, batches, *_: next(batches))
    given = iter(answers)
    recipe = replace(QUICK, batch_size=2)
    input_ids, labels = tiny_model.train_supervised(None, tokenizer, [], recipe)
    for ids, label, answer in zip(input_ids, labels, answers):
        assert tokenizer.decode(label[label != -100]) == answer + "<eos>"
        assert tokenizer.decode(ids, skip_special_tokens=True) == problem.question + "\n" + answer
        assert (label == ids)[label != -100].all()


def test_large_variant_has_about_ten_million_parameters():
    tokenizer = tiny_model.build_tokenizer()
    assert 9e6 < tiny_model.build_model(tokenizer, "large").num_parameters() < 11e6


def shares(directory: Path) -> tuple[float, float]:
    """Of transformers' answers to 400 held-out problems at temperature 1: right and in the right
    form; in the right form.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    rows = read_rows(directory / "data" / "test_chat.parquet")[:400]
    prompts = tokenizer([row.prompt for row in rows], padding=True, return_tensors="pt")
    torch.manual_seed(0)
    ids = model.generate(**prompts, do_sample=True, top_k=0, max_new_tokens=24)
    answers = tokenizer.batch_decode(
        ids[:, prompts["input_ids"].shape[1] :], skip_special_tokens=True
    )
    right = [
        score(answer, row.columns["answer"], method="strict") for answer, row in zip(answers, rows)
    ]
    return sum(right) / len(right), sum("####" in answer for answer in answers) / len(answers)


def compare_with_the_quickstarts(directory: Path) -> None:
    """Everything but the weights is the same in `directory`; file for file, apart from how parquet
    was written.
    """
    names = {file.relative_to(QUICKSTART) for file in QUICKSTART.rglob("*") if file.is_file()}
    assert names == {file.relative_to(directory) for file in directory.rglob("*") if file.is_file()}
    for name in names:
        if name.suffix == ".parquet":
            theirs, ours = read_rows(QUICKSTART / name), read_rows(directory / name)
            assert [row.columns for row in theirs] == [row.columns for row in ours]
        elif name.suffix != ".safetensors":
            assert (QUICKSTART / name).read_bytes() == (directory / name).read_bytes(), name


def test_the_quickstarts_model_is_of_todays_recipe(tmp_path, monkeypatch):
    """Words, tokenizer, shape and problems as the code makes them; the weights everybody starts
    from, half way to knowing how to answer.
    """
    monkeypatch.setattr(tiny_model, "train_supervised", lambda *_: None)
    tiny_model.make_tiny_model(tmp_path / "model", ModelRecipe())
    compare_with_the_quickstarts(tmp_path / "model")
    assert sha256(QUICKSTART / "model.safetensors") == WEIGHTS
    right, form = shares(QUICKSTART)
    assert right == pytest.approx(0.24, abs=0.05)
    assert form == pytest.approx(1 - MIXTURE["bare"], abs=0.08)


@pytest.mark.full  # two minutes: all 700 steps
def test_made_anew_it_is_the_quickstarts_but_for_rounding(tmp_path):
    tiny_model.make_tiny_model(tmp_path / "model", ModelRecipe())
    compare_with_the_quickstarts(tmp_path / "model")
    if sha256(tmp_path / "model" / "model.safetensors") != WEIGHTS:  # another kind of processor
        assert shares(tmp_path / "model") == pytest.approx(shares(QUICKSTART), abs=0.08)
