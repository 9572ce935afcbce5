"""A sweep: the real command line and Hydra, with runs that take no time; and one that is killed
(test-full runs the real thing).
"""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from tests import ROOT

STUB = """
import sys, time
from pathlib import Path
sys.path.insert(0, {root!r})
from mindspeed_qerl import train
from mindspeed_qerl.local import limits
from mindspeed_qerl.runs.directory import RunDirectory
from mindspeed_qerl.runs.metrics import MetricsWriter

data = {{"train": {folder!r} + "/rows"}}
limits.data_files = lambda recipe: data

def run(raw, name, overrides=()):
    seed, root = raw["megatron_training"]["seed"], Path(raw["run"]["root"])
    stopped = RunDirectory.unfinished(root / name, config=raw)
    made = RunDirectory.take(stopped.path).resume(
        config=raw, command=sys.argv, data_files=data) if stopped else RunDirectory.create(
        root, name, config=raw, command=sys.argv, seed=seed, data_files=data)
    (made.checkpoints_dir / "iter_0000001").mkdir(parents=True, exist_ok=True)
    with open({folder!r} + "/calls", "a") as calls:
        print(seed, raw["aqn"]["enabled"], "again" if stopped else "new", raw["run"]["resume"], file=calls)
    if Path({folder!r}, f"fails{{seed}}").exists():
        made.fail("no reason")
        return 1
    while Path({folder!r}, f"hangs{{seed}}").exists():
        time.sleep(0.05)
    if not stopped:
        with MetricsWriter(made, tensorboard=False) as writer:
            writer.log_eval(3, {{"accuracy": 0.5 + seed / 10}})
    made.finish()
    return 0

train.run = run
sys.argv[0] = __file__
# runpy would change argv
exec(compile(Path({cli!r}).read_text(), {cli!r}, "exec"), {{"__name__": "__main__", "__file__": {cli!r}}})
"""


@pytest.fixture
def sweep(tmp_path):
    """A function that starts a sweep over two settings of AQN and two seeds; its runs take as long
    as a file called hangs<seed> is there.
    """
    (tmp_path / "rows").write_text("first")
    stub = tmp_path / "stub.py"
    stub.write_text(
        STUB.format(root=str(ROOT), folder=str(tmp_path), cli=str(ROOT / "cli/train_grpo.py"))
    )
    command = [
        sys.executable,
        stub,
        "--multirun",
        "--config-name",
        "grpo_tiny_moe_cpu",
        "aqn=off,qerl",
        f"run.root={tmp_path}/runs",
    ]
    return lambda *more, seeds="1,2": subprocess.Popen(
        [*command, f"seed={seeds}", *more],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "COLUMNS": "200"},
    )


def calls(folder):
    return (folder / "calls").read_text().splitlines()


def states(folder):
    return [
        json.loads(file.read_text())["state"]
        for file in sorted((folder / "runs/grpo_tiny_moe_cpu").glob("*/status.json"))
    ]


def wait_for(condition):
    while not condition():
        time.sleep(0.05)


def test_every_combination_is_run_once_and_not_again(sweep, tmp_path):
    process = sweep()
    out, error = process.communicate()
    assert process.returncode == 0, error
    assert calls(tmp_path) == [
        "1 False new auto",
        "2 False new auto",
        "1 True new auto",
        "2 True new auto",
    ]
    again = sweep()
    out, _ = again.communicate()
    assert (
        again.returncode == 0
        and out.count("finished before, in") == 2 * 4  # at its turn, and in the end
        and len(calls(tmp_path)) == 4
    )
    (tmp_path / "rows").write_text("others")  # another experiment
    sweep(seeds="1").communicate()
    assert len(calls(tmp_path)) == 6
    sweep("actor_config.lr=1e-5", seeds="1").communicate()  # and another
    assert len(calls(tmp_path)) == 8 and states(tmp_path) == ["finished"] * 8


def test_a_failed_run_is_reported_and_not_in_the_way(sweep, tmp_path):
    (tmp_path / "fails1").touch()
    process = sweep()
    out, error = process.communicate()
    assert process.returncode == 1 and "2 of 4 runs failed" in error
    assert sorted(states(tmp_path)) == ["failed", "failed", "finished", "finished"]
    assert out.count(": failed") == 2
    (tmp_path / "fails1").unlink()
    fixed = sweep()
    fixed.communicate()
    assert fixed.returncode == 0 and calls(tmp_path)[4:] == [
        "1 False again auto",
        "1 True again auto",
    ]
    assert states(tmp_path) == ["finished"] * 4


def test_a_sweep_that_is_killed_takes_its_run_along_and_goes_on(sweep, tmp_path):
    (tmp_path / "hangs2").touch()
    process = sweep()
    wait_for(lambda: (tmp_path / "calls").exists() and len(calls(tmp_path)) == 2)
    process.kill()
    # ends only when nobody holds the pipes any more, the run's process included
    process.communicate()
    assert sorted(states(tmp_path)) == ["finished", "running"]
    (tmp_path / "hangs2").unlink()
    again = sweep()
    again.communicate()
    assert again.returncode == 0
    assert calls(tmp_path)[2:] == ["2 False again auto", "1 True new auto", "2 True new auto"]
    assert states(tmp_path) == ["finished"] * 4


def test_an_interrupted_sweep_stops_whole(sweep, tmp_path):
    (tmp_path / "hangs1").touch()
    process = sweep()
    wait_for(lambda: (tmp_path / "calls").exists())
    for child in subprocess.run(
        ["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=True
    ).stdout.split():
        os.kill(int(child), signal.SIGINT)  # a terminal sends it to both
    process.send_signal(signal.SIGINT)
    _, error = process.communicate()
    assert process.returncode == 130 and "the same command resumes the sweep" in error
    assert len(calls(tmp_path)) == 1


def test_rehearsals_are_no_sweep(sweep, tmp_path):
    process = sweep("++rehearsal.enabled=true")
    _, error = process.communicate()
    assert process.returncode != 0 and "Traceback" not in error
    assert "rehearse one config at a time, without --multirun" in error
    assert not (tmp_path / "calls").exists()
