import json
import math
import multiprocessing
import os
import shlex
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import numpy
import pytest
import yaml

from mindspeed_qerl.runs import directory, versions
from mindspeed_qerl.runs.description import LABEL_LENGTH, describe_data, label_of
from mindspeed_qerl.runs.directory import RunDirectory
from mindspeed_qerl.runs.versions import git_state

NOON = datetime(2025, 11, 21, 12, 0, 0, tzinfo=UTC)
ROWS = b'{"problem": "1+1"}\n'
# what coreutils' sha256sum prints for it
ROWS_SHA256 = "fba5f57efc9866fdc0512e5316ac225d8f8a33388734369a0918b4ab17a4a6eb"


def create(root, name="run", **changes):
    arguments = {
        "config": {"lr": 2e-4},
        "command": ["train"],
        "seed": 3,
        "data_files": {},
    } | changes
    return RunDirectory.create(root, name, **arguments)


def test_everything_needed_to_repeat_the_run_is_in_it(tmp_path, monkeypatch):
    monkeypatch.setattr(directory, "_now", lambda: NOON)
    data = tmp_path / "train.jsonl"
    data.write_bytes(ROWS)
    config = {
        "lr": 2e-4,
        "aqn": {"sigma_start": 0.05, "targets": ["auto"]},
        "note": "é",
        "resume": None,
    }
    command = ["python", "cli/train_grpo.py", "run.note=two words", "model.path=$HOME/it's"]

    upstream = {"upstream": {"MindSpeed": "0123abc"}}
    run = create(
        tmp_path, config=config, command=command, data_files={"train": data}, versions=upstream
    )

    assert run.path == tmp_path / "run" / "2025-11-21_12-00-00_seed3"
    assert yaml.safe_load(run.config_file.read_text()) == run.config() == config
    assert shlex.split((run.path / "command.txt").read_text()) == command
    assert json.loads((run.path / "data.json").read_text()) == {
        "train": {"path": str(data), "sha256": ROWS_SHA256, "bytes": 19, "rows": 1}
    }
    versions = json.loads((run.path / "versions.json").read_text())
    assert versions["packages"]["numpy"] == numpy.__version__
    assert versions["upstream"] == {"MindSpeed": "0123abc"}
    assert run.status() == {
        "state": "running",
        "step": 0,
        "reason": None,
        "started": "2025-11-21T12:00:00+00:00",
        "ended": None,
        "seed": 3,
        "id": run.id,
    }


def test_a_command_in_the_shell_gets_the_arguments_back(tmp_path):
    command = ["printf", "%s\\n", "a b", "it's", "$HOME", ""]
    run = create(tmp_path, command=command)
    printed = subprocess.run(
        ["sh", str(run.path / "command.txt")], capture_output=True, text=True, check=True
    ).stdout
    assert printed.splitlines() == command[2:]


def test_runs_of_one_second_get_directories_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setattr(directory, "_now", lambda: NOON)
    for label in ("", "aqn=off"):
        names = [create(tmp_path, label=label).path.name for _ in range(3)]
        stem = "_".join(filter(None, ["2025-11-21_12-00-00", label, "seed3"]))
        assert names == [stem + suffix for suffix in ("", "-2", "-3")]


@pytest.mark.parametrize(
    "overrides, label",
    [
        ([], ""),
        (
            [
                "seed=3",
                "megatron_training.seed=3",
                "run.resume=auto",
                "+run.root=/tmp",
                "++run.name=x",
            ],
            "",
        ),
        (["aqn=off", "actor_config.lr=1e-5"], "aqn=off_lr=1e-5"),
        (["aqn.seed=4"], "aqn.seed=4"),
        (["~aqn.targets", "++aqn.exclude=[a,'b c']"], "targets=none_exclude=a-b-c"),
        (["gsm8k.train_file=/data/über/../train.parquet"], "train_file=train.parquet"),
        (["a=../../etc/", "b=$HOME;x"], "a=etc_b=HOME-x"),
        (["key=" + 200 * "x"], "key=" + 76 * "x"),
        ([f"key{i}={i}" for i in range(40)], "_".join(f"key{i}={i}" for i in range(40))[:80]),
    ],
)
def test_labels_are_short_and_fit_a_folders_name(tmp_path, overrides, label):
    assert label_of(overrides) == label and len(label) <= LABEL_LENGTH
    assert create(tmp_path, label=label).path.parent == tmp_path / "run"


def _create_many(barrier, root, who):
    directory._now = lambda: NOON
    directory.own_versions = dict  # the race is about directories
    barrier.wait()
    for k in range(50):
        create(root, config={"who": who, "k": k})


def test_runs_started_at_the_same_time_never_share_a_directory(tmp_path):
    fork = multiprocessing.get_context("fork")
    barrier = fork.Barrier(2)
    children = [
        fork.Process(target=_create_many, args=(barrier, tmp_path, who)) for who in range(2)
    ]
    for child in children:
        child.start()
    for child in children:
        child.join()
    configs = [RunDirectory.open(path).config() for path in (tmp_path / "run").iterdir()]
    assert {(config["who"], config["k"]) for config in configs} == {
        (who, k) for who in range(2) for k in range(50)
    }


def test_state_follows_the_run(tmp_path):
    run, other = create(tmp_path), create(tmp_path)
    run.reached(7)
    status = run.status()
    assert (status["state"], status["step"], status["ended"]) == ("running", 7, None)
    run.fail("a rank was killed")
    other.finish()
    expected = (run, "failed", 7, "a rank was killed"), (other, "finished", 0, None)
    for ended, state, step, reason in expected:
        status = ended.status()
        assert (status["state"], status["step"], status["reason"]) == (state, step, reason)
        times = [datetime.fromisoformat(status[name]) for name in ("started", "ended")]
        assert times == sorted(times)


def test_facts_add_up(tmp_path):
    run = create(tmp_path)
    assert run.facts() == {}
    run.record(engine_start_seconds=12.5)
    run.record(lora={"linear_qkv": 8}, engine_start_seconds=13.5)
    assert RunDirectory.open(run.path).facts() == {
        "engine_start_seconds": 13.5,
        "lora": {"linear_qkv": 8},
    }


def strict(text: str):
    """`text` as JSON, which knows no NaN."""
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_what_is_no_number_is_null_in_json(tmp_path):
    run = create(tmp_path)
    run.record(
        a=math.nan,
        b=[math.inf, 1.5, {"c": -math.inf}],
        d=numpy.float64("nan"),
        e=numpy.float32(0.5),
        f="NaN",
    )
    assert (
        strict(run.facts_file.read_text())
        == {"a": None, "b": [None, 1.5, {"c": None}], "d": None, "e": 0.5, "f": "NaN"}
        == run.facts()
    )


def test_what_a_package_brings_along_is_no_package_of_its_own(tmp_path, monkeypatch):
    """Ray puts folders within its own on sys.path: whether it was imported before is no difference
    between runs.
    """
    for folder in ("lib/site-packages", "lib/site-packages/raylike/thirdparty", "checkout"):
        name = folder.rpartition("/")[2].replace("-", "")
        (tmp_path / folder / f"{name}-1.dist-info").mkdir(parents=True)
        (tmp_path / folder / f"{name}-1.dist-info" / "METADATA").write_text(
            f"Name: {name}\nVersion: 1\n"
        )
        monkeypatch.syspath_prepend(tmp_path / folder)
    found = versions._installed.__wrapped__()
    assert found["sitepackages"] == found["checkout"] == "1" and "thirdparty" not in found
    assert found["numpy"] == numpy.__version__


def test_a_crash_while_the_status_is_written_leaves_the_old_one(tmp_path, monkeypatch):
    run = create(tmp_path)
    run.reached(1)

    def crash(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", crash)
    with pytest.raises(KeyboardInterrupt):
        run.reached(2)
    assert run.status()["step"] == 1


def test_rows_of_parquet_and_jsonl_are_counted(tmp_path):
    pandas = pytest.importorskip("pandas")
    pandas.DataFrame({"answer": ["1", "2", "3"]}).to_parquet(tmp_path / "a.parquet")
    (tmp_path / "b.jsonl").write_text('{"a": 1}\n{"a": 2}')
    (tmp_path / "c.txt").write_text("x\n")
    described = describe_data({name: tmp_path / name for name in ("a.parquet", "b.jsonl", "c.txt")})
    assert [file["rows"] for file in described.values()] == [3, 2, None]


def test_the_commit_and_unsaved_changes_are_seen(tmp_path):
    def git(*arguments):
        command = ["git", "-c", "user.name=n", "-c", "user.email=e", "-C", str(tmp_path)]
        done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    git("init")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "a.py").write_text("1")
    assert git_state(tmp_path) == {"commit": None, "dirty": False}
    git("add", ".")
    git("commit", "-m", "x")
    assert git_state(tmp_path) == {"commit": git("rev-parse", "HEAD"), "dirty": False}
    (tmp_path / "notes.txt").write_text("not tracked")
    assert git_state(tmp_path)["dirty"] is False
    (tmp_path / "package" / "a.py").write_text("2")
    assert git_state(tmp_path)["dirty"] is True
    assert (
        git_state(tmp_path / "package") is None
    )  # like site-packages below somebody else's checkout


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"name": "a/b"}, ValueError, "a/b"),
        ({"name": ".."}, ValueError, "letters, digits"),
        ({"data_files": {"train": Path("no/such.parquet")}}, FileNotFoundError, "no/such.parquet"),
    ],
)
def test_bad_input_is_refused_before_anything_is_made(tmp_path, changes, error, says):
    with pytest.raises(error, match=says):
        create(tmp_path / "root", **changes)
    assert not (tmp_path / "root").exists()


def test_a_root_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        NotADirectoryError, match=r"cannot make the run directory .*file/run: .*Choose a folder"
    ):
        create(tmp_path / "file")


def test_a_folder_that_is_no_run_is_not_opened(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"is not a run directory: it has no status\.json"):
        RunDirectory.open(tmp_path)
