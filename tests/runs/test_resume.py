"""Resuming a run that stopped: same config, same data, nothing lost, nothing counted twice."""

import json
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

from .conftest import evaluation

CONFIG = {"aqn": {"sigma_start": 0.05}, "run": {"resume": None}}


def resume(run, changes=(), data_files=(), **arguments):
    """Resume `run` as a new process does."""
    run.lock.close()
    config = {**CONFIG, "run": {"resume": str(run.path)}, **dict(changes)}
    return RunDirectory.take(run.path).resume(
        config=config, command=["train", "again"], data_files=dict(data_files), **arguments
    )


@pytest.fixture
def stopped(new_run):
    """A run that logged five steps and failed; its last checkpoint is of step 3."""
    run = new_run(**CONFIG)
    with MetricsWriter(run, tensorboard=False) as writer:
        writer.log_eval(0, evaluation(0.2, 0.1), [{"question": "a", "scores": [0.0]}])
        for step in range(1, 6):
            writer.log(step, {"reward/mean": step / 10})
            writer.log_rollouts(step, [{"response": f"{step}"}, {"response": f"{step}, too"}])
        writer.log_eval(5, evaluation(0.5, 0.1))
    run.fail("out of memory")
    return run


def steps_of(file):
    return [row["step"] for row in read_jsonl(file)]


def test_later_rows_are_set_aside_and_written_again(stopped):
    before = read_jsonl(stopped.metrics_file)
    run = resume(stopped)
    assert run.status()["state"] == "running" and run.status()["reason"] is None
    assert (run.path / "command.txt").read_text() == "train\ntrain again\n"
    with MetricsWriter(run, tensorboard=False, after=3) as writer:
        assert read_jsonl(run.metrics_file) == before[:3]
        writer.log(4, {"reward/mean": 0.45})
    assert read_jsonl(run.metrics_file)[3:] == [{"step": 4, "reward/mean": 0.45}]
    assert run.status()["step"] == 4
    assert steps_of(run.rollouts_file) == [1, 1, 2, 2, 3, 3]
    assert steps_of(run.eval_file) == steps_of(run.eval_answers_file) == [0]
    aside = run.path / "discarded"
    assert read_jsonl(aside / "metrics.jsonl") == before[3:]
    assert read_jsonl(aside / "eval.jsonl") == [{"step": 5, **evaluation(0.5, 0.1)}]
    MetricsWriter(run, tensorboard=False, after=2)  # keeps what was set aside before
    assert steps_of(aside / "metrics.jsonl") == [4, 5, 3, 4]


def test_seconds_add_up_and_the_summary_of_a_failure_goes(new_run, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(directory, "time", SimpleNamespace(monotonic=lambda: now[0]))
    run = new_run(**CONFIG)
    now[0] += 30
    run.reached(1)
    now[0] += 5  # lost with a killed process
    run.summary_file.write_text("failed: out of memory")
    run = resume(run)
    now[0] += 12
    assert not run.summary_file.exists()
    run.finish()
    assert run.status()["seconds"] == 42
    write_report(run)
    assert "| seconds in all | 42 |" in run.summary_file.read_text()


def test_what_cannot_be_resumed_is_refused(stopped):
    with pytest.raises(ValueError, match="is being written by another process"):
        RunDirectory.take(stopped.path)
    message = r"another config.*\naqn\.sigma_start was 0\.05 and is 0\.1$"
    with pytest.raises(ValueError, match=message):
        resume(stopped, {"aqn": {"sigma_start": 0.1}})
    assert stopped.status()["state"] == "failed"
    stopped.finish()
    with pytest.raises(ValueError, match="is finished after 5 steps: there is nothing to resume"):
        resume(stopped)


def test_what_may_change_changes(stopped):
    """Accepted checks are of the machine, not of the run, and its config says the latest."""
    changes = {"aqn": {"sigma_start": 0.1}, "run": {"accepted_checks": ["driver"]}}
    may_change = ["aqn.sigma_start"]
    (stopped.checkpoints_dir / "iter_0000003").mkdir(parents=True)
    parent, config = stopped.path.parent, {**CONFIG, **changes}
    newest = RunDirectory.unfinished(parent, config=config, may_change=may_change)
    assert newest.path == stopped.path
    assert resume(stopped, changes, may_change=may_change).config() == config


def test_the_newest_unfinished_run_of_a_config_is_chosen(new_run):
    def stopped_with_checkpoint(name="iter_0000003", **config):
        run = new_run(**{**CONFIG, **config})
        (run.checkpoints_dir / name).mkdir(parents=True)
        return run

    def newest(*may_change):
        run = RunDirectory.unfinished(first.path.parent, config=CONFIG, may_change=may_change)
        return run and run.path

    first, second = stopped_with_checkpoint(), stopped_with_checkpoint()
    assert newest() == second.path
    second.finish()
    other = stopped_with_checkpoint(aqn={"sigma_start": 0.1})
    stopped_with_checkpoint("iter_0000003.making")
    assert newest() == first.path
    assert newest("aqn.sigma_start") == other.path
    first.finish()
    assert newest() is None


@pytest.mark.parametrize("file", ["status.json", "config.yaml"])
def test_a_damaged_sibling_is_named_and_not_in_the_way(new_run, capsys, file):
    whole, damaged = new_run(**CONFIG), new_run(**CONFIG)
    whole.finish()
    (damaged.path / file).write_text('{"state": "fini')
    parent = whole.path.parent
    done = RunDirectory.finished(parent, config=CONFIG, data_files={})
    assert done is not None and done.path == whole.path
    assert f"warning: {damaged.path} is skipped: " in capsys.readouterr().err


@pytest.mark.parametrize(
    "file, change, message",
    [
        ("train.jsonl", lambda file: file.write_text("2"), r"train\.sha256 was '6b86.* is 'd473"),
        (
            "model/model.safetensors",
            lambda file: save_file({"w": torch.ones(2)}, file),
            r"model/weights\.sha256 was '\w+' and is '\w+'$",
        ),
        (
            "model/tokenizer.json",
            lambda file: file.write_text("{}"),
            r"model/tokenizer\.json\.sha256 was '\w+' and is '\w+'$",
        ),
        (
            "model/chat_template.jinja",
            lambda file: file.write_text(""),
            r"model/chat_template\.jinja\.sha256 was None and is '\w+'$",
        ),
        (
            "model/tokenizer.json",
            lambda file: file.unlink(),
            r"model/tokenizer\.json\.sha256 was '\w+' and is None$",
        ),
    ],
)
def test_other_data_or_another_model_than_at_the_start_is_refused(tmp_path, file, change, message):
    model, train_file = tmp_path / "model", tmp_path / "train.jsonl"
    model.mkdir()
    (model / "tokenizer.json").write_text('{"version": 1}')
    save_file({"w": torch.zeros(2)}, model / "model.safetensors")
    train_file.write_text("1")
    data_files = {"train": train_file, **model_files(model)}
    run = RunDirectory.create(
        tmp_path / "runs", "test", config=CONFIG, command=[], seed=1, data_files=data_files
    )
    weights = json.loads((run.path / "data.json").read_text())["model/weights"]["sha256"]
    assert run.identity() == {"run": run.id, "base": weights} and len(weights) == 64
    assert run.other_data({"train": train_file}) == []  # the model may be another one
    resume(run, data_files=data_files).fail("killed")
    status = run.status()
    change(tmp_path / file)
    data_files = {"train": train_file, **model_files(model)}
    with pytest.raises(ValueError, match=rf"another model.*\n{message}"):
        resume(run, data_files=data_files)
    assert run.status() == status


def last_checkpoint(engine, run):
    recipe = SimpleNamespace(run=SimpleNamespace(resume=str(run.path)))
    return import_module(f"mindspeed_qerl.{engine}.engine").last_checkpoint(recipe)


@pytest.mark.parametrize(
    "engine, file, state",
    [
        ("local", "state.json", {"iteration": 3, "run": "another", "files": {}}),
        ("ascend", "data.json", {"batches_asked": 3, "run": "another"}),
    ],
)
def test_each_engine_asks_whose_its_checkpoint_is(new_run, engine, file, state):
    run = new_run(**CONFIG)
    checkpoint = run.checkpoints_dir / "iter_0000003"
    checkpoint.mkdir(parents=True)
    (checkpoint / file).write_text(json.dumps(state))
    (run.checkpoints_dir / TRACKER).write_text("3")
    with pytest.raises(ValueError, match="iter_0000003 is of another run .id another; "):
        last_checkpoint(engine, run)
    for owner in (run.id, None):
        run.check_owner(checkpoint, owner)


def save(run, step):
    """A checkpoint as the NPU engine leaves it."""
    folder = run.checkpoints_dir / f"iter_{step:07d}"
    (folder / "mp_rank_00").mkdir(parents=True)
    (folder / "mp_rank_00" / "model_optim_rng.pt").write_bytes(b"weights")
    files = describe_files(folder, folder.glob("mp_rank_*/*"))
    position = {**run.identity(), "batches_asked": step, "files": files}
    (folder / "data.json").write_text(json.dumps(position))
    return folder


def test_the_npu_engine_trusts_no_checkpoint(new_run):
    run = new_run(**CONFIG)
    save(run, 5)
    folder = save(run, 10)
    tracker = run.checkpoints_dir / TRACKER

    def refusal():
        with pytest.raises(ValueError) as error:
            last_checkpoint("ascend", run)
        return str(error.value)

    tracker.write_text("10")
    assert last_checkpoint("ascend", run) == 10
    (folder / "mp_rank_00" / "model_optim_rng.pt").write_bytes(b"Weights")
    message = refusal()
    assert "iter_0000010 is damaged: the content of mp_rank_00/model_optim_rng.pt has" in message
    assert "[5, 10]" in message
    (folder / "data.json").unlink()
    assert "iter_0000010 is damaged: data.json, which has the position in the" in refusal()
    tracker.write_text("5")
    assert last_checkpoint("ascend", run) == 5
    tracker.write_text("")  # Megatron opens it to write
    message = refusal()
    assert "has no checkpoint" in message and "[5, 10]" in message


def test_what_megatron_had_not_finished_is_no_checkpoint(new_run):
    run = new_run(**CONFIG)
    save(run, 5)
    run.fail("killed")
    assert whole_checkpoints(run.checkpoints_dir) == []
    assert RunDirectory.unfinished(run.path.parent, config=CONFIG) is None
    (run.checkpoints_dir / TRACKER).write_text("5")
    save(run, 10)
    assert whole_checkpoints(run.checkpoints_dir) == [5]
    assert train.how_to_resume(run).endswith("continues after step 5, the last checkpoint")
    (run.checkpoints_dir / TRACKER).write_text("")
    assert whole_checkpoints(run.checkpoints_dir) == [5, 10]


@pytest.fixture
def train_in(monkeypatch):
    """A function that calls train.py with an engine whose `train` is given; its exit status."""
    recipe = read(compose("grpo_tiny_moe_cpu", ["run.tensorboard=false"]))[0]

    def call(run, engine_train, after=None):
        monkeypatch.setattr(train, "trainer_of", lambda _: SimpleNamespace(train=engine_train))
        return train._train(recipe, Found(), "tiny", run, after, None)

    return call


def test_a_run_that_is_resumed_with_other_versions_says_so(stopped, train_in, capsys, monkeypatch):
    before = json.loads((stopped.path / "versions.json").read_text())
    other = {**before, "packages": {**before["packages"], "torch": "9"}}
    monkeypatch.setattr(directory, "own_versions", lambda: other)
    run = resume(stopped, versions={"upstream": {"MindSpeed": "abc"}})
    torch_was = before["packages"]["torch"]
    assert run.other_versions == [
        f"packages.torch was '{torch_was}' and is '9'",
        "upstream.MindSpeed was None and is 'abc'",
    ]
    assert json.loads((run.path / "versions.before.json").read_text()) == before
    assert json.loads((run.path / "versions.json").read_text())["packages"]["torch"] == "9"
    train_in(run, lambda *_: None, after=3)
    lines = " ".join(capsys.readouterr().out.split())
    assert f"started with other versions: packages.torch was '{torch_was}' and is '9'; up" in lines


def test_a_damaged_row_is_named_and_no_traceback(stopped, capsys):
    whole = stopped.metrics_file.read_text()
    stopped.metrics_file.write_text(whole.replace('{"step": 2', "step 2", 1))
    assert train._stop(stopped, "for a reason") == 1
    errors = capsys.readouterr().err
    assert "warning: the report cannot be written" in errors
    assert "metrics.jsonl:2: damaged line" in errors and "error: for a reason" in errors


def test_an_interrupted_run_says_how_to_resume_and_from_where(stopped):
    assert "before the first checkpoint" in train.how_to_resume(stopped)
    for name in ("iter_0000002", "iter_0000003", "iter_0000004.making"):
        (stopped.checkpoints_dir / name).mkdir(parents=True)
    assert train.how_to_resume(stopped) == (
        "interrupted after step 5. The same command with run.resume=auto continues after step 3, "
        "the last checkpoint"
    )


def test_a_full_disk_ends_a_run_with_a_reason_and_loses_nothing(new_run, train_in, capsys):
    def train_two_steps(recipe, run, metrics, progress):
        metrics.log(1, {"reward/mean": 0.5})
        kept = run.metrics_file.rename(run.path / "kept")
        for name in ("metrics.jsonl", "status.json.tmp", "summary.md"):
            (run.path / name).symlink_to("/dev/full")  # full(4): no write has room
        try:
            metrics.log(2, {"reward/mean": 0.5})
        finally:
            kept.rename(run.metrics_file)  # and reading it would never end

    run = new_run(**CONFIG)
    assert train_in(run, train_two_steps) == 1
    errors = capsys.readouterr().err
    for words in (
        "error: [Errno 28] No space left on device",
        "warning: status.json cannot be written",
        "warning: the report cannot be written",
    ):
        assert words in errors
    assert read_jsonl(run.metrics_file) == [{"step": 1, "reward/mean": 0.5}]
    assert run.status()["step"] == 1


def test_a_full_disk_hides_no_other_error(new_run, train_in, capsys):
    def fail(recipe, run, metrics, progress):
        (run.path / "status.json.tmp").symlink_to("/dev/full")
        raise ZeroDivisionError("a bug")

    with pytest.raises(ZeroDivisionError, match="a bug"):
        train_in(new_run(**CONFIG), fail)
    assert "warning: status.json cannot be written" in capsys.readouterr().err
