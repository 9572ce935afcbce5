"""Resuming a run that stopped: same config, same data, nothing lost, nothing counted twice."""

import errno
import hashlib
import json
import os
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from mindspeed_qerl import train
from mindspeed_qerl.common.files import TRACKER, describe_files, whole_checkpoints
from mindspeed_qerl.families.fingerprint import model_files
from mindspeed_qerl.recipe.compose import compose
from mindspeed_qerl.recipe.reader import Found, read
from mindspeed_qerl.runs import directory
from mindspeed_qerl.runs.directory import RunDirectory
from mindspeed_qerl.runs.metrics import MetricsWriter, read_jsonl
from mindspeed_qerl.runs.report import write_report

CONFIG = {"aqn": {"sigma_start": 0.05}, "run": {"resume": None}}


@pytest.fixture
def stopped(new_run):
    """A run that logged five steps and failed; its last checkpoint is of step 3."""
    run = new_run(**CONFIG)
    with MetricsWriter(run, tensorboard=False) as writer:
        writer.log_eval(
            0, {"accuracy": 0.2}, [{"question": "a", "responses": ["1"], "scores": [0.0]}]
        )
        for step in range(1, 6):
            writer.log(step, {"reward/mean": float("nan") if step == 2 else step / 10})
            writer.log_rollouts(step, [{"response": f"{step}"}, {"response": f"{step}, too"}])
        writer.log_eval(5, {"accuracy": 0.5})
    run.fail("out of memory")
    run.lock.close()  # as when its process ends
    return RunDirectory.open(run.path)


def resumed_config(run, **changes):
    return {**CONFIG, "run": {"resume": str(run.path)}, **changes}


def test_later_rows_are_set_aside_and_written_again(stopped):
    before = read_jsonl(stopped.metrics_file)
    run = RunDirectory.take(stopped.path).resume(
        config=resumed_config(stopped), command=["train", "again"], data_files={}
    )
    assert run.status()["state"] == "running" and run.status()["reason"] is None
    assert (run.path / "command.txt").read_text() == "train\ntrain again\n"
    with MetricsWriter(run, tensorboard=False, after=3) as writer:
        assert [row["step"] for row in read_jsonl(run.metrics_file)] == [1, 2, 3]
        writer.log(4, {"reward/mean": 0.45})
    rows = read_jsonl(run.metrics_file)
    assert repr(rows[:3]) == repr(before[:3]) and rows[3] == {"step": 4, "reward/mean": 0.45}
    assert run.status()["step"] == 4
    assert [row["step"] for row in read_jsonl(run.rollouts_file)] == [1, 1, 2, 2, 3, 3]
    assert (
        [row["step"] for row in read_jsonl(run.eval_file)]
        == [0]
        == [row["step"] for row in read_jsonl(run.eval_answers_file)]
    )
    assert read_jsonl(run.path / "discarded" / "metrics.jsonl") == before[3:]
    assert [row["accuracy"] for row in read_jsonl(run.path / "discarded" / "eval.jsonl")] == [0.5]


def test_a_second_resumption_keeps_what_the_first_set_aside(stopped):
    for after in (4, 2):
        MetricsWriter(stopped, tensorboard=False, after=after)
    rows = read_jsonl(stopped.path / "discarded" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [5, 3, 4]


def test_what_cannot_be_resumed_is_refused(stopped):
    changed = resumed_config(stopped, aqn={"sigma_start": 0.1})
    message = r"another config.*\naqn\.sigma_start was 0\.05 and is 0\.1$"
    run = RunDirectory.take(stopped.path)
    with pytest.raises(ValueError, match=message):
        run.resume(config=changed, command=[], data_files={})
    assert stopped.status()["state"] == "failed"
    with pytest.raises(ValueError, match="is being written by another process"):
        RunDirectory.take(stopped.path)
    stopped.finish()
    with pytest.raises(ValueError, match="is finished after 5 steps: there is nothing to resume"):
        run.resume(config=resumed_config(stopped), command=[], data_files={})


def test_what_may_change_changes(stopped):
    """Accepted checks are of the machine, not of the run, and its config says the latest."""
    changed = resumed_config(stopped, aqn={"sigma_start": 0.1})
    changed["run"]["accepted_checks"] = ["driver"]
    (stopped.checkpoints_dir / "iter_0000003").mkdir(parents=True)
    may_change = ["aqn.sigma_start"]
    newest = RunDirectory.unfinished(stopped.path.parent, config=changed, may_change=may_change)
    assert newest.path == stopped.path
    run = RunDirectory.take(stopped.path)
    run.resume(config=changed, command=[], data_files={}, may_change=may_change)
    assert run.config() == changed
    assert "sigma_start: 0.05" in (run.path / "config.before.yaml").read_text()


def test_the_newest_unfinished_run_of_a_config_is_found(new_run):
    def stopped_with_checkpoint(name="iter_0000003", **config):
        run = new_run(**{**CONFIG, **config})
        (run.checkpoints_dir / name).mkdir(parents=True)
        return run

    def found(*may_change):
        run = RunDirectory.unfinished(parent, config=CONFIG, may_change=may_change)
        return run and run.path

    first = stopped_with_checkpoint()
    parent = first.path.parent
    assert found() == first.path
    newer = stopped_with_checkpoint()
    newer._note(started="2999-01-01T00:00:00+00:00")
    assert found() == newer.path
    newer.finish()
    other = stopped_with_checkpoint(aqn={"sigma_start": 0.1})
    other._note(started="2999-01-01T00:00:00+00:00")
    stopped_with_checkpoint("iter_0000003.making")
    assert found() == first.path
    assert found("aqn.sigma_start") == other.path
    first.finish()
    assert found() is None


@pytest.mark.parametrize(
    "name, content",
    [
        ("status.json", '{"state": "fini'),
        ("status.json", '{"state": "failed", "started": 5}'),
        ("config.yaml", "a: ["),
        ("config.yaml", None),
    ],
)
def test_a_damaged_sibling_is_skipped_and_named_once(new_run, capsys, name, content):
    damaged, whole = new_run(**CONFIG), new_run(**CONFIG)
    (damaged.path / name).unlink()
    if content is not None:
        (damaged.path / name).write_text(content)
    (whole.checkpoints_dir / "iter_0000003").mkdir(parents=True)
    parent = whole.path.parent
    for _ in range(2):
        assert RunDirectory.unfinished(parent, config=CONFIG).path == whole.path
        assert RunDirectory.finished(parent, config=CONFIG, data_files={}) is None
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"warning: {damaged.path} is damaged and is skipped (")


def test_other_data_than_at_the_start_are_refused(tmp_path):
    files = {label: tmp_path / f"{label}.jsonl" for label in ("train", "test")}
    for label, file in files.items():
        file.write_text(json.dumps({"question": label}) + "\n")
    old, new = (
        hashlib.sha256(files[label].read_bytes()).hexdigest() for label in ("train", "test")
    )
    run = RunDirectory.create(
        tmp_path / "runs", "test", config=CONFIG, command=["train"], seed=1, data_files=files
    )
    run.fail("killed")
    run.lock.close()
    status = run.status()
    files["train"].write_bytes(files["test"].read_bytes())
    with pytest.raises(
        ValueError, match=rf"other data.*\ntrain data .*train.jsonl: sha256 was {old} and is {new}$"
    ):
        RunDirectory.take(run.path).resume(config=resumed_config(run), command=[], data_files=files)
    assert run.status() == status
    files["train"].write_text(json.dumps({"question": "train"}) + "\n")
    resumed = RunDirectory.take(run.path).resume(
        config=resumed_config(run), command=[], data_files=files
    )
    assert resumed.status()["state"] == "running"


@pytest.mark.parametrize(
    "file, content, message",
    [
        ("model.safetensors", None, r"model/weights data .*model: sha256 was \w+ and is \w+$"),
        ("tokenizer.json", "{}", r"model/tokenizer.json data .*: sha256 was \w+ and is \w+$"),
        ("chat_template.jinja", "", r"model/chat_template.jinja data .*: was not there$"),
        ("tokenizer.json", "", r"model/tokenizer.json data .*tokenizer.json: is gone$"),
    ],
)
def test_another_model_than_at_the_start_is_refused(tmp_path, file, content, message):
    model = tmp_path / "model"
    model.mkdir()
    (model / "tokenizer.json").write_text('{"version": 1}')
    save_file({"w": torch.zeros(2)}, model / "model.safetensors")
    run = RunDirectory.create(
        tmp_path / "runs",
        "test",
        config=CONFIG,
        command=["train"],
        seed=1,
        data_files=model_files(model),
    )
    run.fail("killed")
    run.lock.close()
    weights = json.loads((run.path / "data.json").read_text())["model/weights"]["sha256"]
    assert run.identity() == {"run": run.id, "base": weights} and len(weights) == 64
    if content is None:
        save_file({"w": torch.ones(2)}, model / file)
    elif message.endswith("gone$"):
        (model / file).unlink()
    else:
        (model / file).write_text(content)
    with pytest.raises(ValueError, match=rf"another model.*\n{message}"):
        RunDirectory.take(run.path).resume(
            config=resumed_config(run), command=[], data_files=model_files(model)
        )


def test_a_checkpoint_of_another_run_is_refused(new_run):
    run, other = new_run(**CONFIG), new_run(**CONFIG)
    assert run.id != other.id and RunDirectory.open(run.path).id == run.id
    run.reached(3)
    run.check_owner(run.checkpoints_dir / "iter_0000003", run.id)
    run.check_owner(run.checkpoints_dir / "iter_0000003", None)
    with pytest.raises(
        ValueError, match=rf"iter_0000003 is of another run \(id {other.id}; .* has {run.id}\)"
    ):
        run.check_owner(run.checkpoints_dir / "iter_0000003", other.id)


@pytest.mark.parametrize(
    "engine, state",
    [
        ("local", '{"iteration": 3, "run": "another", "files": {}}'),
        ("ascend", '{"batches_asked": 3, "run": "another"}'),
    ],
)
def test_each_engine_asks_whose_its_checkpoint_is(new_run, engine, state):
    run = new_run(**CONFIG)
    checkpoint = run.checkpoints_dir / "iter_0000003"
    checkpoint.mkdir(parents=True)
    (checkpoint / {"local": "state.json", "ascend": "data.json"}[engine]).write_text(state)
    (run.checkpoints_dir / TRACKER).write_text("3")
    recipe = SimpleNamespace(run=SimpleNamespace(resume=str(run.path)))
    with pytest.raises(ValueError, match="iter_0000003 is of another run .id another; "):
        import_module(f"mindspeed_qerl.{engine}.engine").last_checkpoint(recipe)


def save(run, step, **position):
    """As the NPU engine leaves it; without a position as upstream does."""
    rank = run.checkpoints_dir / f"iter_{step:07d}" / "mp_rank_00"
    rank.mkdir(parents=True)
    (rank / "model_optim_rng.pt").write_bytes(b"weights")
    if position:
        (rank.parent / "data.json").write_text(json.dumps({**run.identity(), **position}))


def test_the_npu_engine_trusts_no_checkpoint(new_run):
    run, last = new_run(**CONFIG), import_module("mindspeed_qerl.ascend.engine").last_checkpoint
    recipe = SimpleNamespace(run=SimpleNamespace(resume=str(run.path)))
    for step in (5, 10):
        save(run, step, batches_asked=step)
        folder = run.checkpoints_dir / f"iter_{step:07d}"
        files = describe_files(folder, folder.glob("mp_rank_*/*"))
        (folder / "data.json").write_text(
            json.dumps({**run.identity(), "batches_asked": step, "files": files})
        )
    tracker = run.checkpoints_dir / TRACKER
    tracker.write_text("10")
    assert last(recipe) == 10
    (folder / "mp_rank_00" / "model_optim_rng.pt").write_bytes(b"Weights")
    with pytest.raises(
        ValueError,
        match=r"iter_0000010 is damaged: the content of mp_rank_00/model_optim_rng.pt has "
        r"changed .* an earlier one into .*latest_checkpointed_iteration.txt: \[5, 10\]",
    ):
        last(recipe)
    (folder / "data.json").unlink()
    with pytest.raises(
        ValueError,
        match="iter_0000010 is damaged: data.json, which has the position in the data, is",
    ):
        last(recipe)
    tracker.write_text("5")
    assert last(recipe) == 5
    tracker.write_text("")  # Megatron opens it to write
    with pytest.raises(ValueError, match=r"has no checkpoint .* one of these into .*: \[5, 10\]"):
        last(recipe)


def test_what_megatron_had_not_finished_is_no_checkpoint(new_run):
    run = new_run(**CONFIG)
    save(run, 5, batches_asked=5)
    run.fail("killed")
    assert whole_checkpoints(run.checkpoints_dir) == []
    assert RunDirectory.unfinished(run.path.parent, config=CONFIG) is None
    (run.checkpoints_dir / TRACKER).write_text("5")
    save(run, 10, batches_asked=10)
    assert whole_checkpoints(run.checkpoints_dir) == [5]
    assert train.how_to_resume(run).endswith("continues after step 5, the last checkpoint")
    (run.checkpoints_dir / TRACKER).write_text("")
    assert whole_checkpoints(run.checkpoints_dir) == [5, 10]


def test_a_run_that_is_resumed_with_other_versions_says_so(stopped, capsys, monkeypatch):
    before = json.loads((stopped.path / "versions.json").read_text())
    other = {**before, "packages": {**before["packages"], "torch": "9"}}
    monkeypatch.setattr(directory, "own_versions", lambda: other)
    monkeypatch.setattr(train, "trainer_of", lambda _: SimpleNamespace(train=lambda *_: None))
    run = RunDirectory.take(stopped.path).resume(
        config=resumed_config(stopped),
        command=[],
        data_files={},
        versions={"upstream": {"MindSpeed": "abc"}},
    )
    torch_was = before["packages"]["torch"]
    assert run.other_versions == [
        f"packages.torch was '{torch_was}' and is '9'",
        "upstream.MindSpeed was not there and is 'abc'",
    ]
    assert json.loads((run.path / "versions.before.json").read_text()) == before
    assert json.loads((run.path / "versions.json").read_text())["packages"]["torch"] == "9"
    recipe = read(compose("grpo_tiny_moe_cpu", ["run.tensorboard=false"]))[0]
    train._train(recipe, Found(), "tiny", run, 3, None)
    said = " ".join(capsys.readouterr().out.split())
    assert (
        f"the run was started with other versions: packages.torch was '{torch_was}' and is '9'; "
        "upstream" in said
    )


def test_a_damaged_row_is_named_and_no_traceback(stopped, capsys):
    whole = stopped.metrics_file.read_text()
    stopped.metrics_file.write_text(whole.replace('{"step": 2', "step 2", 1))
    assert train._stop(stopped, "for a reason") == 1
    said = capsys.readouterr().err
    assert (
        "warning: the report cannot be written" in said and "metrics.jsonl:2: damaged line" in said
    )
    assert "error: for a reason" in said


def test_rows_that_a_cut_lost_are_named(stopped):
    whole = stopped.metrics_file.read_bytes()
    stopped.metrics_file.write_bytes(whole[: whole.index(b'"step": 3') + 5])
    with MetricsWriter(stopped, tensorboard=False, after=4) as writer:
        assert writer.missing_steps == [3, 4]
        writer.log(5, {"reward/mean": 0.5})
    assert [row["step"] for row in read_jsonl(stopped.metrics_file)] == [1, 2, 5]
    write_report(stopped)
    assert "metrics.jsonl has no row for 2 of 5 steps: 3, 4" in stopped.summary_file.read_text()


def test_an_interrupted_run_says_how_to_resume_and_from_where(stopped):
    assert "before the first checkpoint" in train.how_to_resume(stopped)
    for name in ("iter_0000002", "iter_0000003", "iter_0000004.making"):
        (stopped.checkpoints_dir / name).mkdir(parents=True)
    assert train.how_to_resume(stopped) == (
        "interrupted after step 5. The same command with run.resume=auto continues after step 3, "
        "the last checkpoint"
    )


def test_a_full_disk_ends_a_run_with_a_reason_and_loses_nothing(new_run, monkeypatch, capsys):
    def train_two_steps(recipe, directory, metrics, progress):
        metrics.log(1, {"reward/mean": 0.5})
        kept = directory.metrics_file.rename(directory.path / "kept")
        for name in ("metrics.jsonl", "status.json.tmp", "summary.md"):
            (directory.path / name).symlink_to("/dev/full")  # full(4): no write has room
        try:
            metrics.log(2, {"reward/mean": 0.5})
        finally:
            kept.rename(directory.metrics_file)  # and reading it would never end

    run, recipe = (
        new_run(**CONFIG),
        read(compose("grpo_tiny_moe_cpu", ["run.tensorboard=false"]))[0],
    )
    monkeypatch.setattr(train, "trainer_of", lambda _: SimpleNamespace(train=train_two_steps))
    assert train._train(recipe, Found(), "tiny", run, None, None) == 1
    said = capsys.readouterr().err
    assert "error: [Errno 28] No space left on device" in said
    assert (
        "warning: status.json cannot be written" in said
        and "warning: the report cannot be written" in said
    )
    assert (
        read_jsonl(run.metrics_file) == [{"step": 1, "reward/mean": 0.5}]
        and run.status()["step"] == 1
    )


def test_a_full_disk_hides_no_other_error(new_run, monkeypatch, capsys):
    def fail(recipe, directory, metrics, progress):
        (directory.path / "status.json.tmp").symlink_to("/dev/full")
        raise ZeroDivisionError("a bug")

    recipe = read(compose("grpo_tiny_moe_cpu", ["run.tensorboard=false"]))[0]
    monkeypatch.setattr(train, "trainer_of", lambda _: SimpleNamespace(train=fail))
    with pytest.raises(ZeroDivisionError, match="a bug"):
        train._train(recipe, Found(), "tiny", new_run(**CONFIG), None, None)
    assert "warning: status.json cannot be written" in capsys.readouterr().err


def test_a_disk_that_is_full_before_the_first_step_is_said(new_run, monkeypatch, capsys):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    recipe = read(compose("grpo_tiny_moe_cpu", []))[0]
    monkeypatch.setattr(train, "MetricsWriter", full)
    assert train._train(recipe, Found(), "tiny", run := new_run(**CONFIG), None, None) == 1
    assert "No space left" in capsys.readouterr().err and "No space left" in run.status()["reason"]
