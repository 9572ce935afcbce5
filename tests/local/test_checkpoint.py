"""Checkpoints on disk: complete or not there, damage is named, the ones before stay good."""

import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from mindspeed_qerl.common.files import checkpoint_iterations
from mindspeed_qerl.families import NAMED_SHAPES
from mindspeed_qerl.local import checkpoint
from mindspeed_qerl.recipe.types import LoRA

SHAPE = NAMED_SHAPES["qwen3_30b_a3b"]
ADAPTERS = checkpoint.describe(SHAPE, LoRA(32, 64.0, ("linear_qkv", "linear_fc1")))


def write(folder):
    for name in ("one", "two"):
        save_file({f"{name}.lora_A": torch.randn(4, 8)}, folder / f"{name}.safetensors")


def save(checkpoints, *steps, keep=10):
    for step in steps:
        checkpoint.save(checkpoints, step, {"updates": 2 * step, **ADAPTERS}, write, keep)
    return checkpoints


def test_what_was_saved_is_read(tmp_path):
    save(tmp_path / "checkpoints", 5, 10)
    state = checkpoint.read_state(tmp_path / "checkpoints")
    assert (state["iteration"], state["updates"]) == (10, 20) and state["files"].keys() == {
        "one.safetensors",
        "two.safetensors",
    }
    assert checkpoint.read_state(tmp_path / "checkpoints", 5)["updates"] == 10
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {
        "iter_0000005",
        "iter_0000010",
    }


def test_the_last_ones_are_kept(tmp_path):
    save(tmp_path, 1, 2, 3, 20, keep=2)
    assert checkpoint_iterations(tmp_path) == [3, 20]


def truncate(file):
    os.truncate(file, 100)


def flip_a_byte(file):
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize(
    "name, damage, message",
    [
        ("two.safetensors", os.unlink, r"two\.safetensors is missing"),
        ("one.safetensors", truncate, r"one\.safetensors has 100 bytes and had \d+"),
        (
            "two.safetensors",
            flip_a_byte,
            r"the content of two\.safetensors has changed since it was written",
        ),
        ("state.json", truncate, r"its state\.json cannot be read"),
        ("state.json", os.unlink, r"its state\.json cannot be read .*No such file"),
    ],
)
def test_a_damaged_part_is_named_and_the_checkpoint_before_is_good(tmp_path, name, damage, message):
    save(tmp_path, 5, 10)
    damage(tmp_path / "iter_0000010" / name)
    with pytest.raises(
        ValueError, match=message + r".* move iter_0000010 away to resume from the one before"
    ):
        checkpoint.read_state(tmp_path)
    assert checkpoint.read_state(tmp_path, 5)["iteration"] == 5


def test_there_is_no_checkpoint(tmp_path):
    with pytest.raises(
        ValueError,
        match=r"has no checkpoint; one is made .* every megatron_training\.save_interval",
    ):
        checkpoint.read_state(tmp_path)
    save(tmp_path, 5)
    with pytest.raises(ValueError, match=r"no checkpoint of iteration 7: \[5\]"):
        checkpoint.read_state(tmp_path, 7)


def fails(folder):
    write(folder)
    raise OSError(28, "No space left on device")


def test_a_write_that_fails_leaves_the_checkpoints_before(tmp_path):
    save(tmp_path, 5, keep=1)
    with pytest.raises(OSError, match="No space left"):
        checkpoint.save(tmp_path, 10, {"updates": 20, **ADAPTERS}, fails, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["iter_0000005"]
    checkpoint.read_state(tmp_path)


def test_what_a_killed_process_left_is_removed(tmp_path):
    script = (
        f"import sys; sys.path.insert(0, {os.path.dirname(__file__)!r}); import os, signal; from "
        "test_checkpoint import checkpoint, write\nfrom pathlib import Path; "
        f"checkpoint.save(Path({str(tmp_path)!r}), 10, {{}}, lambda folder: (write(folder), "
        "os.kill(os.getpid(), signal.SIGKILL)), 2)"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == -9
    [left] = tmp_path.iterdir()
    assert checkpoint_iterations(tmp_path) == []
    left.rename(
        tmp_path / f".iter_0000010.making-{os.getpid()}"
    )  # in a new container a process has its number again
    (tmp_path / ".iter_0000005.removing").mkdir()
    save(tmp_path, 10)
    assert [path.name for path in tmp_path.iterdir()] == ["iter_0000010"]
