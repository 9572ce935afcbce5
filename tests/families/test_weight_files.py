"""The files of a model's weights: read as transformers reads them, the same file if a tensor is in
several, and nothing that lies beside them; or refused with the file's name.
"""

import json
import os

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from mindspeed_qerl.common.errors import ConfigError
from mindspeed_qerl.families.checkpoint import Checkpoint, refuse_beside_single
from mindspeed_qerl.families.fingerprint import INDEX, SINGLE, weights_digest

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 4096\n"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    folder = tmp_path_factory.mktemp("saved")
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def shards(folder, **more):
    """The single file divided in two, with an index; more: what the second file has besides."""
    tensors = load_file(folder / SINGLE)
    names = sorted(tensors)
    parts = (
        {name: tensors[name] for name in names[::2]},
        {name: tensors[name] for name in names[1::2]} | more,
    )
    for file, part in zip(SHARDS, parts):
        save_file(part, folder / file, metadata={"format": "pt"})
    weight_map = {name: file for file, part in zip(SHARDS, parts) for name in part}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / SINGLE).unlink()
    return weight_map


def dtypes(folder):
    tensors = load_file(folder / SINGLE)
    save_file(
        {name: tensor if "norm" in name else tensor.bfloat16() for name, tensor in tensors.items()},
        folder / SINGLE,
        metadata={"format": "pt"},
    )


def twice(folder):
    shards(folder, **{"lm_head.weight": torch.full((16, 8), 7.0)})


def stale_names(folder):
    """An index with a tensor that no file has, and without one that a file has."""
    weight_map = shards(folder)
    weight_map |= {"model.layers.1.mlp.up_proj.weight": SHARDS[0]}
    del weight_map["model.norm.weight"]
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def with_adapter(folder):
    shards(folder)
    for name in ("adapter_model.safetensors", "consolidated.safetensors"):
        save_file({"x": torch.zeros(1)}, folder / name)


READ = {
    "one file": lambda folder: None,
    "two files": shards,
    "norms in float32": dtypes,
    "a tensor twice": twice,
    "an index that is not quite its files'": stale_names,
    "an adapter beside two files": with_adapter,
    "an index of one file": lambda folder: (folder / INDEX).write_text(
        json.dumps({"weight_map": dict.fromkeys(load_file(folder / SINGLE), SINGLE)})
    ),
}


def copied(saved, folder):
    for file in saved.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


@pytest.mark.parametrize("case", READ)
def test_it_is_read_as_transformers_reads_it(saved, tmp_path, case):
    READ[case](copied(saved, tmp_path))
    theirs = transformers.LlamaForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32
    ).state_dict()
    ours = Checkpoint(tmp_path)
    assert ours.files.keys() == theirs.keys()
    assert all(torch.equal(ours.read(name).float(), tensor) for name, tensor in theirs.items())
    refuse_beside_single(tmp_path)


def both(folder):
    whole = (folder / SINGLE).read_bytes()
    shards(folder)
    (folder / SINGLE).write_bytes(whole)


def without_shard(folder):
    shards(folder)
    (folder / SHARDS[1]).unlink()


def only_pickled(folder):
    torch.save(load_file(folder / SINGLE), folder / "pytorch_model.bin")
    (folder / SINGLE).unlink()


def content(file, data):
    return lambda folder: (folder / file).write_bytes(data)


def cut(folder):
    (folder / SINGLE).write_bytes((folder / SINGLE).read_bytes()[:-8])


REFUSED = {
    "a shard is missing": (
        without_shard,
        f"lacks 1 of 2 files that {INDEX} names, such as {SHARDS[1]}. Fetch",
    ),
    "a stale index": (
        content(INDEX, json.dumps({"weight_map": {"x": "gone.safetensors"}}).encode()),
        f"gone.safetensors. If {SINGLE} is the whole model, move {INDEX} away",
    ),
    "two sets": (both, f"has {SINGLE} beside the files of {INDEX}. If"),
    "pytorch_model.bin alone": (only_pickled, r"neither .* in safetensors .save_pretrained"),
    "no weights": (lambda folder: (folder / SINGLE).unlink(), f"neither {INDEX} nor {SINGLE}"),
    "an empty file": (content(SINGLE, b""), f"{SINGLE} cannot be read; it may be cut short"),
    "a header that was cut": (
        lambda folder: os.truncate(folder / SINGLE, 20),
        f"{SINGLE} cannot be read; it may be cut short",
    ),
    "a file that was cut": (cut, f"{SINGLE} cannot be read; it may be cut short"),
    "a pointer": (
        content(SINGLE, POINTER.encode()),
        f"{SINGLE} is a pointer of git-lfs.* git lfs pull",
    ),
    "an index that is a pointer": (
        content(INDEX, POINTER.encode()),
        f"{INDEX} is a pointer of git-lfs.*git lfs pull",
    ),
    "an index that is cut": (content(INDEX, b'{"weight_map": {'), f"{INDEX} cannot be read"),
    "an index of another kind": (
        content(INDEX, b'{"weights": []}'),
        f"{INDEX} cannot be read.*'weight_map'",
    ),
}


@pytest.mark.parametrize("framework", ["pt", "np"])
@pytest.mark.parametrize("case", REFUSED)
def test_the_file_is_named(saved, tmp_path, case, framework):
    breaking, words = REFUSED[case]
    breaking(copied(saved, tmp_path))
    with pytest.raises(ConfigError, match=words):
        Checkpoint(tmp_path, framework)
    if breaking is not cut and ("cannot be read" in words or "pointer" in words):
        with pytest.raises(ValueError, match=words):
            weights_digest(tmp_path)


@pytest.mark.parametrize(
    "name", ["adapter_model.safetensors", "consolidated.safetensors", "model-old.safetensors"]
)
def test_what_vllm_would_read_besides_is_named(saved, tmp_path, name):
    digest = weights_digest(copied(saved, tmp_path))
    save_file({"x": torch.zeros(1)}, tmp_path / name)
    with pytest.raises(ConfigError, match=f"{name} beside {SINGLE}, .*: move it"):
        refuse_beside_single(tmp_path)
    assert weights_digest(tmp_path) == digest
    assert "x" not in Checkpoint(tmp_path).files
