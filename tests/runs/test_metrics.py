import json
import math
import os
import subprocess
import sys
import threading

import numpy
import pytest

from mindspeed_qerl.runs.metrics import MetricsWriter, read_columns, read_jsonl


def test_a_killed_run_keeps_every_row_it_logged_also_in_tensorboard(run_killed):
    pytest.importorskip("torch")
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run = run_killed(
        "writer = MetricsWriter(run)\nwriter.log_eval(0, {'accuracy': 0.25})\nfor step in (1, 2, "
        "3):\n    writer.log_rollouts(step, [{'prompt': 'p', 'response': '#### \\u2212 72', "
        "'reward': 1.0}] * 2)\n    writer.log(step, {'reward/mean': 0.1 * step, 'aqn/layers': 5, "
        "'grad_norm': 1e-30})\n"
    )

    rows = read_jsonl(run.metrics_file)
    assert rows == [
        {"step": step, "reward/mean": 0.1 * step, "aqn/layers": 5, "grad_norm": 1e-30}
        for step in (1, 2, 3)
    ]
    assert run.metrics_file.read_bytes().endswith(b"}\n")
    assert read_jsonl(run.eval_file) == [{"step": 0, "accuracy": 0.25}]
    assert [row["response"] for row in read_jsonl(run.rollouts_file)] == ["#### − 72"] * 6
    assert run.status()["step"] == 3

    events = accumulator.EventAccumulator(str(run.tensorboard_dir)).Reload()
    assert set(events.Tags()["scalars"]) == {
        "reward/mean",
        "aqn/layers",
        "grad_norm",
        "eval/accuracy",
    }
    for name in ("reward/mean", "aqn/layers", "grad_norm"):
        written = [(event.step, event.value) for event in events.Scalars(name)]
        assert written == [(row["step"], float(numpy.float32(row[name]))) for row in rows]


def test_a_last_row_cut_off_anywhere_is_dropped(tmp_path):
    file = tmp_path / "metrics.jsonl"
    first, last = b'{"step": 1, "a": 0.5}\n', b'{"step": 2, "b": "\\u00e9}", "c": [1]}\n'
    for end in range(len(last) - 1):
        file.write_bytes(first + last[:end])
        assert read_jsonl(file) == [{"step": 1, "a": 0.5}], end
    for whole in (last[:-1], last):
        file.write_bytes(first + whole)
        assert [row["step"] for row in read_jsonl(file)] == [1, 2]


@pytest.mark.parametrize("damage", [b'{"step": 2, "a"', b"", b"[1]", b"\xff\xfe", b"NaN"])
def test_a_damaged_row_elsewhere_is_named(tmp_path, damage):
    file = tmp_path / "metrics.jsonl"
    for after in (
        b'{"step": 3}\n',
        b"",
    ):  # in the middle, and last but with its newline: no kill does that
        file.write_bytes(b'{"step": 1}\n' + damage + b"\n" + after)
        with pytest.raises(ValueError, match=r"metrics\.jsonl:2: damaged line"):
            read_jsonl(file)


def test_nan_and_infinity_are_visible_valid_json_and_come_back(new_run):
    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    run = new_run()
    with MetricsWriter(run, tensorboard=False) as writer:
        writer.log(
            1, {"loss/total": math.nan, "grad_norm": math.inf, "loss/kl": -math.inf, "lr": 1e-4}
        )
        writer.log_rollouts(1, [{"response": "x", "reward": math.nan}])
    assert json.loads(run.metrics_file.read_text(), parse_constant=refuse) == {
        "step": 1,
        "loss/total": None,
        "grad_norm": None,
        "loss/kl": None,
        "lr": 1e-4,
        "nonfinite": {"loss/total": "nan", "grad_norm": "inf", "loss/kl": "-inf"},
    }
    (row,) = read_jsonl(run.metrics_file)
    assert math.isnan(row["loss/total"])
    assert (row["grad_norm"], row["loss/kl"], row["lr"]) == (math.inf, -math.inf, 1e-4)
    assert math.isnan(read_jsonl(run.rollouts_file)[0]["reward"])


def test_array_scalars_are_numbers_and_other_things_are_not(new_run):
    run = new_run()
    writer = MetricsWriter(run, tensorboard=False)
    writer.log(1, {"a": numpy.float32(0.5), "b": numpy.array(2), "c": 3, "d": numpy.int64(4)})
    assert read_jsonl(run.metrics_file) == [{"step": 1, "a": 0.5, "b": 2.0, "c": 3, "d": 4.0}]
    with pytest.raises(TypeError, match="metric 'bad' must be a number, got"):
        writer.log(2, {"bad": [1, 2]})
    with pytest.raises(ValueError, match="name 'step' is taken"):
        writer.log(3, {"step": 1.0})
    assert len(read_jsonl(run.metrics_file)) == 1


def test_steps_increase(new_run):
    writer = MetricsWriter(new_run(), tensorboard=False)
    writer.log(1, {"a": 1.0})
    with pytest.raises(ValueError, match="step 1 came after those of step 1"):
        writer.log(1, {"a": 1.0})


def test_a_run_is_written_once(new_run):
    run = new_run()
    MetricsWriter(run, tensorboard=False).log(1, {"a": 1.0})
    with pytest.raises(FileExistsError, match=r"metrics\.jsonl exists: .* Start a new run"):
        MetricsWriter(run, tensorboard=False)
    assert len(read_jsonl(run.metrics_file)) == 1


def test_columns_have_one_value_per_step(new_run):
    run = new_run()
    with MetricsWriter(run, tensorboard=False) as writer:
        for step in (1, 2, 3):
            writer.log(step, {"a": 10 * step} | ({"time/sync": 0.5} if step == 2 else {}))
    columns = read_columns(run.metrics_file)
    assert columns["step"] == [1, 2, 3]
    assert columns["a"] == [10, 20, 30]
    assert [math.isnan(seconds) for seconds in columns["time/sync"]] == [True, False, True]
    assert read_columns(run.path / "absent.jsonl") == {"step": []}


def test_a_full_disk_under_tensorboard_is_raised(new_run, monkeypatch):
    record_writer = pytest.importorskip("tensorboard.summary.writer.record_writer")

    def write(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(threading, "excepthook", lambda _: None)  # of its writing thread
    monkeypatch.setattr(record_writer.RecordWriter, "write", write)
    with pytest.raises(OSError, match="No space left"):
        MetricsWriter(new_run()).log(1, {"a": 1.0})


@pytest.mark.parametrize(
    ("asked", "module"), [({"wandb": "project"}, "wandb"), ({"tensorboard": True}, "tensorboard")]
)
def test_a_missing_package_that_was_asked_for_is_an_error_at_the_start(
    new_run, monkeypatch, asked, module
):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match="pip install"):
        MetricsWriter(new_run(), **{"tensorboard": False} | asked)


@pytest.mark.parametrize("error", ["CommError", "UsageError", "AuthenticationError"])
def test_wandb_that_does_not_answer_is_asked_shortly_and_said_in_words(new_run, monkeypatch, error):
    wandb = pytest.importorskip("wandb")
    asked = {}

    def init(**arguments):
        asked.update(arguments)
        raise getattr(wandb.errors, error)("no such host.\nConsider increasing the init_timeout")

    monkeypatch.setattr(wandb, "init", init)
    monkeypatch.delenv("WANDB_INIT_TIMEOUT", raising=False)
    with pytest.raises(
        OSError, match=r"project 'mine': no such host. With WANDB_MODE=offline .*wandb_project=null"
    ):
        MetricsWriter(new_run(), tensorboard=False, wandb="mine")
    assert asked["settings"].init_timeout == 15
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "60")
    with pytest.raises(OSError, match="no such host"):
        MetricsWriter(new_run(), tensorboard=False, wandb="mine")
    assert asked["settings"].init_timeout == 60


def test_wandb_works_offline(new_run):
    pytest.importorskip("wandb")
    run = new_run(lr=1e-4)
    code = (
        "import sys\nfrom mindspeed_qerl.runs.directory import RunDirectory\nfrom "
        "mindspeed_qerl.runs.metrics import MetricsWriter\nwith "
        "MetricsWriter(RunDirectory.open(sys.argv[1]), tensorboard=False, wandb='project') as "
        "writer:\n    writer.log(1, {'reward/mean': 0.5})\n    writer.log_eval(1, {'accuracy': "
        "0.25})\n"
    )
    # A process of its own: W&B's service writes its file out when the process that started it ends.
    quiet = {"WANDB_MODE": "offline", "WANDB_ERROR_REPORTING": "false", "WANDB_SILENT": "true"}
    subprocess.run([sys.executable, "-c", code, str(run.path)], env=os.environ | quiet, check=True)
    (record,) = run.path.glob("wandb/offline-run-*/run-*.wandb")
    stored = record.read_bytes()
    assert b"reward/mean" in stored
    assert b"eval/accuracy" in stored
