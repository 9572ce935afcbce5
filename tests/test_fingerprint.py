"""Which changes of a model's folder are seen."""

import os

import pytest
import torch
from safetensors.torch import load_file, save_file

from mindspeed_qerl.families.fingerprint import SAMPLE, model_files, weights_digest

TENSORS = {"a": torch.arange(12.0).view(3, 4), "b": torch.arange(5000.0), "c": torch.zeros(0)}


def written(folder, *files):
    folder.mkdir()
    for number, tensors in enumerate(files):
        save_file(tensors, folder / f"model-{number}.safetensors", metadata={"number": str(number)})
    return weights_digest(folder)


def test_the_same_weights_in_other_files_are_the_same(tmp_path):
    a, b, c = ({name: tensor} for name, tensor in TENSORS.items())
    whole = written(tmp_path / "one", TENSORS)
    assert written(tmp_path / "three", c, b, a) == written(tmp_path / "two", a | c, b) == whole


@pytest.mark.parametrize(
    "change",
    [
        {"a": TENSORS["a"] + 1e-6},
        {"a": TENSORS["a"].view(4, 3)},
        {"a": TENSORS["a"].to(torch.float16)},
        {"d": torch.zeros(1)},
        {"b": TENSORS["b"][:-1]},
        {"c": torch.zeros(0, 2)},
    ],
)
def test_other_weights_are_others(tmp_path, change):
    assert written(tmp_path / "before", TENSORS) != written(tmp_path / "after", TENSORS | change)
    assert written(tmp_path / "fewer", {"a": TENSORS["a"]}) != written(
        tmp_path / "renamed", {"A": TENSORS["a"]}
    )


def test_what_is_not_looked_at(tmp_path):
    """As the docstring says, so that nobody trusts it with more."""
    b = TENSORS["b"].clone()
    b[SAMPLE // 4] = 0
    assert written(tmp_path / "before", TENSORS) == written(tmp_path / "after", TENSORS | {"b": b})
    b[SAMPLE // 4 - 1] = 0
    assert weights_digest(tmp_path / "before") != written(tmp_path / "seen", TENSORS | {"b": b})


def test_weights_that_are_no_safetensors(tmp_path):
    """Megatron's: a folder for each rank."""
    for rank in ("mp_rank_00", "mp_rank_01"):
        (tmp_path / rank).mkdir()
        (tmp_path / rank / "model_optim_rng.pt").write_bytes(os.urandom(10**6))
    before = weights_digest(tmp_path)
    assert weights_digest(tmp_path) == before
    file = tmp_path / "mp_rank_01" / "model_optim_rng.pt"
    file.write_bytes(os.urandom(10**6))
    other = weights_digest(tmp_path)
    file.rename(tmp_path / "mp_rank_01" / "other.pt")
    assert len({before, other, weights_digest(tmp_path)}) == 3


def test_the_files_of_a_model(tmp_path):
    written(tmp_path / "model", TENSORS)
    for name in ("config.json", "tokenizer.json", "README.md"):
        (tmp_path / "model" / name).write_text(name)
    assert {label: path.name for label, path in model_files(tmp_path / "model").items()} == {
        "model/config.json": "config.json",
        "model/tokenizer.json": "tokenizer.json",
        "model/weights": "model",
    }
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer.json").write_text("{}")
    assert model_files(tmp_path / "tokenizer").keys() == {
        "model/tokenizer.json"
    }  # the weights are elsewhere
    assert load_file(tmp_path / "model" / "model-0.safetensors").keys() == TENSORS.keys()
