"""The processes of a run, when starting them fails: nothing is left behind."""

import signal

import psutil
import pytest

from mindspeed_qerl import private_ray
from mindspeed_qerl.local import launch
from mindspeed_qerl.local.settings import check
from mindspeed_qerl.local.workers import Team, WorkerError
from mindspeed_qerl.runs.directory import RunDirectory

from .conftest import raw_config


def no_port():
    raise OSError("no port is free")


def start_another_class(start):
    """Workers of a class that is not there: they raise where they are built."""
    return lambda team, name, module, cls, log, environment, **arguments: start(team, name, "json", "NoSuchClass", log, environment)


@pytest.mark.parametrize("place, name, broken, error, message", [
    (Team, "start", start_another_class(Team.start), WorkerError, "rank 0 failed: .*NoSuchClass|rollout engine failed: .*NoSuchClass"),
    (launch, "free_port", no_port, OSError, "no port is free"),
])
def test_a_failure_anywhere_leaves_nothing_behind(monkeypatch, moe_dir, data_dir, tmp_path, place, name, broken, error, message):
    raw = raw_config(moe_dir, data_dir)
    run = RunDirectory.create(tmp_path, "run", config=raw, command=["test"], seed=1, data_files={})
    directories, start = [], private_ray.start
    monkeypatch.setattr(private_ray, "start", lambda **options: directories.append(start(**options)) or directories[0])
    monkeypatch.setattr(place, name, broken)
    children, handler = set(psutil.Process().children(recursive=True)), signal.getsignal(signal.SIGTERM)
    with pytest.raises(error, match=message), launch.launch(check(raw), run) as processes:
        assert signal.getsignal(signal.SIGTERM) is signal.default_int_handler
        processes.team.wait_until_ready()
    assert len(directories) == 1 and not directories[0].exists()
    assert set(psutil.Process().children(recursive=True)) <= children
    assert signal.getsignal(signal.SIGTERM) is handler
    assert [path.name for path in (run.path / "logs").iterdir() if not path.name.endswith(".log")] == []
