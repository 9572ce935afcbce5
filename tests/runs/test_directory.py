import json
import math
import multiprocessing
import os
import shlex
import subprocess
from datetime import datetime
from pathlib import Path

import numpy
import pytest

from mindspeed_qerl.common.errors import ConfigError
from mindspeed_qerl.runs import directory
from mindspeed_qerl.runs.description import code_digest, git_state, label_of, own_versions
from mindspeed_qerl.runs.directory import RunDirectory

NOON = "2025-11-21T12:00:00+00:00"
ROWS = b'{"problem": "1+1"}\n'
# what coreutils' sha256sum prints for it
ROWS_SHA256 = "fba5f57efc9866fdc0512e5316ac225d8f8a33388734369a0918b4ab17a4a6eb"


def create(root, name="run", **changes):
    arguments = dict(config={"lr": 2e-4}, command=["train"], seed=3, data_files={}) | changes
    return RunDirectory.create(root, name, **arguments)


def test_everything_needed_to_repeat_the_run_is_in_it(tmp_path, monkeypatch):
    monkeypatch.setattr(directory, "_now", lambda: NOON)
    data = tmp_path / "train.jsonl"
    data.write_bytes(ROWS)
    config = {"lr": 2e-4, "aqn": {"targets": ["auto"]}, "note": "é", "resume": None}
    command = ["printf", "%s\\n", "a b", "it's", "$HOME", ""]
    upstream = {"upstream": {"MindSpeed": "0123abc"}}
    run = create(
        tmp_path, config=config, command=command, data_files={"train": data}, versions=upstream
    )
    assert run.path == tmp_path / "run" / "2025-11-21_12-00-00_seed3"
    assert run.config() == config
    file = run.path / "command.txt"
    assert shlex.split(file.read_text()) == command
    printed = subprocess.run(["sh", str(file)], capture_output=True, text=True, check=True).stdout
    assert printed.splitlines() == command[2:]
    described = json.loads((run.path / "data.json").read_text())
    assert described == {"train": {"path": str(data), "sha256": ROWS_SHA256}}
    versions = json.loads((run.path / "versions.json").read_text())
    assert versions["packages"]["numpy"] == numpy.__version__
    assert versions["upstream"] == {"MindSpeed": "0123abc"}
    assert run.status() == {
        "state": "running",
        "step": 0,
        "reason": None,
        "started": "2025-11-21T12:00:00+00:00",
        "ended": None,
        "seconds": 0.0,
        "seed": 3,
        "id": run.id,
    }
    assert run.started == datetime(2025, 11, 21, 12)


@pytest.mark.parametrize(
    "overrides, label",
    [
        ([], ""),
        (["seed=3", "megatron_training.seed=3", "run.resume=auto", "+run.root=/tmp"], ""),
        (["aqn=off", "actor_config.lr=1e-5"], "aqn=off_lr=1e-5"),
        (["~aqn.targets", "++aqn.exclude=[a,'b c']"], "targets=_exclude=a-b-c"),
        (["gsm8k.train_file=/data/über/../train.parquet"], "train_file=train.parquet"),
        (["a=../../etc/", "b=$HOME;x"], "a=etc_b=-HOME-x"),
        (["key=" + 200 * "x"], "key=" + 76 * "x"),
    ],
)
def test_labels_are_short_and_runs_of_one_second_have_directories_of_their_own(
    tmp_path, monkeypatch, overrides, label
):
    monkeypatch.setattr(directory, "_now", lambda: NOON)
    assert label_of(overrides) == label
    names = [create(tmp_path, label=label).path.name for _ in range(3)]
    stem = "_".join(filter(None, ["2025-11-21_12-00-00", label, "seed3"]))
    assert names == [stem + suffix for suffix in ("", "-2", "-3")]


def _create_many(barrier, root, who):
    directory._now = lambda: NOON
    directory.own_versions = dict  # the race is about directories
    barrier.wait()
    for number in range(50):
        create(root, config={"who": who, "number": number})


def test_runs_started_at_the_same_time_never_share_a_directory(tmp_path):
    fork = multiprocessing.get_context("fork")
    barrier = fork.Barrier(2)
    children = []
    for who in range(2):
        children.append(fork.Process(target=_create_many, args=(barrier, tmp_path, who)))
        children[-1].start()
    for child in children:
        child.join()
    configs = [RunDirectory.open(path).config() for path in (tmp_path / "run").iterdir()]
    made = {(config["who"], config["number"]) for config in configs}
    assert len(made) == len(configs) == 100


def test_state_follows_the_run_and_a_crash_while_it_is_written_leaves_the_old_one(
    tmp_path, monkeypatch
):
    run = create(tmp_path)
    run.reached(7)
    status = run.status()
    assert (status["state"], status["step"], status["ended"]) == ("running", 7, None)
    run.fail("a rank was killed")
    status = run.status()
    assert (status["state"], status["step"]) == ("failed", 7)
    assert status["reason"] == "a rank was killed"
    assert datetime.fromisoformat(status["started"]) <= datetime.fromisoformat(status["ended"])

    def crash(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", crash)
    with pytest.raises(KeyboardInterrupt):
        run.finish()
    assert run.status() == status


def test_facts_add_up_and_what_is_no_number_is_null_in_them(tmp_path):
    run = create(tmp_path)
    assert run.facts() == {}
    run.record(a=12.5, b={"c": [1.5, -math.inf]})
    run.record(a=numpy.float64("nan"), d=numpy.float32(0.5), e="NaN")
    facts = {"a": None, "b": {"c": [1.5, None]}, "d": 0.5, "e": "NaN"}
    assert RunDirectory.open(run.path).facts() == facts
    text = run.facts_file.read_text()
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_the_commit_and_unsaved_changes_are_seen(tmp_path):
    def git(*arguments):
        command = ["git", "-c", "user.name=n", "-c", "user.email=e", "-C", str(tmp_path)]
        done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    git("init")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "a.py").write_text("1")
    git("add", ".")
    git("commit", "-m", "x")
    (tmp_path / "notes.txt").write_text("not tracked")
    assert git_state(tmp_path) == {"commit": git("rev-parse", "HEAD"), "dirty": False}
    (tmp_path / "package" / "a.py").write_text("2")
    assert git_state(tmp_path)["dirty"] is True
    # like site-packages below somebody else's checkout
    assert git_state(tmp_path / "package") is None


@pytest.mark.parametrize(
    "file, trains",
    [
        ("a.py", True),
        ("aqn/b.py", True),
        ("recipe/keys.yaml", True),
        ("aqn/new.py", True),
        ("compare/c.py", False),
        ("runs/plots.yaml", False),
        ("page.md", False),
    ],
)
def test_the_digest_of_the_code_is_that_of_what_trains(tmp_path, file, trains):
    for name in ("a.py", "aqn/b.py", "compare/c.py", "recipe/keys.yaml", "runs/plots.yaml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("1")
    before = code_digest(tmp_path)
    assert len(before) == 64 == len(own_versions()["code"])
    (tmp_path / file).write_text("2")
    assert (code_digest(tmp_path) != before) == trains


@pytest.mark.parametrize(
    "changes, error, message",
    [
        ({"name": "a/b"}, ValueError, "run.name = 'a/b': it becomes a folder: .*letters, digits"),
        ({"name": ".."}, ValueError, "letters, digits"),
        ({"data_files": {"train": Path("no/such.parquet")}}, FileNotFoundError, "no/such.parquet"),
    ],
)
def test_bad_input_is_refused_before_anything_is_made(tmp_path, changes, error, message):
    with pytest.raises(error, match=message):
        create(tmp_path / "root", **changes)
    assert not (tmp_path / "root").exists()


def test_folders_that_cannot_be_used_are_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        ConfigError, match="run.root = '.*/file': no folder can be made: .*file/run"
    ):
        create(tmp_path / "file")
    with pytest.raises(FileNotFoundError, match=r"is not a run directory: it has no status\.json"):
        RunDirectory.open(tmp_path)
