import math
import os
import subprocess
import sys

import numpy
import pytest

from mindspeed_qerl.runs.directory import RunDirectory
from mindspeed_qerl.runs.metrics import MetricsWriter, read_jsonl


def run_python(code, run, **environment):
    """Python code that has a RunDirectory `run`, in a process of its own; its exit status."""
    prelude = (
        "import os, signal, sys\nfrom mindspeed_qerl.runs.directory import RunDirectory\n"
        "from mindspeed_qerl.runs.metrics import MetricsWriter\n"
        "run = RunDirectory.open(sys.argv[1])\n"
    )
    command = [sys.executable, "-c", prelude + code, str(run.path)]
    return subprocess.run(command, env=os.environ | environment, check=False).returncode


def test_a_killed_run_keeps_every_row_it_logged_also_in_tensorboard(new_run):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run = new_run()
    code = """
writer = MetricsWriter(run)
assert 'torch' not in sys.modules  # which takes seconds before the first row
writer.log_eval(0, {'accuracy': 0.25})
for step in (1, 2, 3):
    writer.log_rollouts(step, [{'response': '\\u2212 72'}] * 2)
    writer.log(step, {'reward/mean': 0.1 * step, 'aqn/layers': 5, 'grad_norm': 1e-30})
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert run_python(code, run) == -9
    rows = read_jsonl(run.metrics_file)
    assert rows == [
        {"step": step, "reward/mean": 0.1 * step, "aqn/layers": 5, "grad_norm": 1e-30}
        for step in (1, 2, 3)
    ]
    assert run.metrics_file.read_bytes().endswith(b"}\n")
    assert read_jsonl(run.eval_file) == [{"step": 0, "accuracy": 0.25}]
    assert [row["response"] for row in read_jsonl(run.rollouts_file)] == ["− 72"] * 6
    assert RunDirectory.open(run.path).status()["step"] == 3

    events = accumulator.EventAccumulator(str(run.path / "tensorboard")).Reload()
    names = {"reward/mean", "aqn/layers", "grad_norm"}
    assert set(events.Tags()["scalars"]) == names | {"eval/accuracy"}
    for name in names:
        written = [(event.step, event.value) for event in events.Scalars(name)]
        assert written == [(row["step"], float(numpy.float32(row[name]))) for row in rows]


def test_a_last_row_cut_off_anywhere_is_dropped(tmp_path):
    file = tmp_path / "metrics.jsonl"
    first, last = b'{"step": 1, "a": 0.5}\n', b'{"step": 2, "b": "\\u00e9}", "c": [1]}\n'
    for end in range(len(last)):
        file.write_bytes(first + last[:end])
        assert read_jsonl(file) == [{"step": 1, "a": 0.5}], end
    file.write_bytes(first + last)
    assert [row["step"] for row in read_jsonl(file)] == [1, 2]


@pytest.mark.parametrize("damage", [b'{"step": 2, "a"', b"", b"\xff\xfe"])
@pytest.mark.parametrize("after", [b'{"step": 3}\n', b""])
def test_a_damaged_row_elsewhere_is_named(tmp_path, damage, after):
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(b'{"step": 1}\n' + damage + b"\n" + after)
    with pytest.raises(ValueError, match=r"metrics\.jsonl:2: damaged line"):
        read_jsonl(file)


def test_numbers_come_back_as_they_were(new_run):
    run = new_run()
    values = {"a": numpy.float32(0.5), "b": numpy.array(2), "c": 3, "d": math.inf, "e": 1e-30}
    with MetricsWriter(run, tensorboard=False) as writer:
        writer.log(1, values | {"f": math.nan})
    (row,) = read_jsonl(run.metrics_file)
    assert math.isnan(row.pop("f")) and row == {"step": 1, **values}
    assert '"c": 3,' in run.metrics_file.read_text()


def test_a_run_is_written_once(new_run):
    run = new_run()
    MetricsWriter(run, tensorboard=False).log(1, {"a": 1.0})
    with pytest.raises(FileExistsError, match=r"metrics\.jsonl exists: .* Start a new run"):
        MetricsWriter(run, tensorboard=False)


@pytest.mark.parametrize(
    "package, arguments", [("wandb", {"tensorboard": False, "wandb": "mine"}), ("tensorboard", {})]
)
def test_a_missing_package_that_was_asked_for_is_an_error_at_the_start(
    new_run, monkeypatch, package, arguments
):
    for name in list(sys.modules):
        if name.startswith((package, "torch.utils.tensorboard")):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=package):
        MetricsWriter(new_run(), **arguments)


def test_wandb_works_offline(new_run):
    pytest.importorskip("wandb")
    run = new_run(lr=1e-4)
    code = """
with MetricsWriter(run, tensorboard=False, wandb='project') as writer:
    writer.log(1, {'reward/mean': 0.5})
    writer.log_eval(1, {'accuracy': 0.25})
"""
    # A process of its own: W&B's service writes its file out when the process that started it ends.
    quiet = {"WANDB_MODE": "offline", "WANDB_ERROR_REPORTING": "false", "WANDB_SILENT": "true"}
    assert run_python(code, run, **quiet) == 0
    (record,) = run.path.glob(f"wandb/offline-run-*/run-{run.id}.wandb")
    stored = record.read_bytes()
    assert b"reward/mean" in stored and b"eval/accuracy" in stored
    # a resumed run is the same one there
    assert run_python(code.replace("project'", "project', after=0"), run, **quiet) == 0
    records = [*run.path.glob("wandb/offline-run-*")]
    assert records and all(each.name.endswith(run.id) for each in records)
