"""A Ray of ours listens where nobody else can reach it, and leaves nothing behind."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest
import ray

from mindspeed_qerl.common.errors import EngineError
from mindspeed_qerl.common.files import hold
from mindspeed_qerl.engines import private_ray


@pytest.fixture
def started():
    yield private_ray.start(num_cpus=1)
    private_ray.stop()


def descendants(pid=None):
    return psutil.Process(pid).children(recursive=True)


def run_script(script, **options):
    command = [sys.executable, "-c", script]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=100, check=False, **options
    )


def test_importing_it_changes_nothing_of_ray():
    """A process may join a user's cluster instead."""
    script = """if True:
        from ray._private import node, parameter, ray_constants
        def state():
            return (parameter.RayParams, node.Node.start_api_server,
                    ray_constants.RAY_ENABLE_UV_RUN_RUNTIME_ENV, ray_constants.ENABLE_RAY_CLUSTER)
        before = state()
        from mindspeed_qerl.engines import private_ray
        assert state() == before
    """
    assert run_script(script).returncode == 0


def test_every_port_is_on_the_loopback_interface_and_no_worker_is_started_early(started):
    """`ray.init` would wait for a worker, and for ever when it is killed."""
    others = descendants()
    commands = [" ".join(child.cmdline()[:4]) for child in others]
    # the head, the raylet, its agents
    assert len(commands) > 2
    assert not [words for words in commands if "default_worker" in words or "ray::" in words]

    @ray.remote
    def worker():
        return psutil.Process().pid

    sockets = []
    for pid in {ray.get(worker.remote()), *(child.pid for child in others)}:
        sockets += psutil.Process(pid).net_connections()
    listening = [socket for socket in sockets if socket.status == psutil.CONN_LISTEN]
    # the head, the raylet and the worker listen
    assert len(listening) > 4
    assert {socket.laddr.ip.removeprefix("::ffff:") for socket in listening} <= {"127.0.0.1", "::1"}


@pytest.mark.parametrize(
    "error, words",
    [
        # Ray's for a GCS that is killed while it starts
        (RuntimeError("Failed to start GCS.\n\nLast"), r" Failed to start GCS\. L"),
        (OSError(28, "disk full"), "disk full"),
    ],
)
def test_a_start_that_fails_is_said_in_words(monkeypatch, error, words):
    def fail(**_):
        raise error

    monkeypatch.setattr(ray, "init", fail)
    with pytest.raises(EngineError, match=f"^Ray did not start.*{words}"):
        private_ray.start(num_cpus=1)
    private_ray.stop()


def test_nothing_is_left_in_the_temporary_directory_and_nothing_on_the_screen():
    """In a process of its own: Ray's C++ part writes to stderr when it is first started in one."""
    script = """if True:
        import os
        from mindspeed_qerl.engines import private_ray
        directory = private_ray.start(num_cpus=1)
        print(directory, any(directory.glob("session_*/logs")))
        os.write(2, b"stderr is back")
        private_ray.stop()
    """
    done = run_script(script)
    directory, logs = done.stdout.split()
    assert logs == "True" and not Path(directory).exists()
    assert done.stderr == "stderr is back"


@pytest.fixture
def child():
    """(a process that started a Ray and a worker of it and waits, that Ray's temporary directory,
    where no other test's Ray removes what is left of it, the process's descendants).
    """
    script = """if True:
        import ray
        from mindspeed_qerl.engines import private_ray
        directory = private_ray.start(num_cpus=1)
        ray.get(ray.remote(lambda: 0).remote())
        print(directory, flush=True)
        input()
    """
    with (
        tempfile.TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True) as parent,
        subprocess.Popen(
            [sys.executable, "-c", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "TMPDIR": parent},
        ) as process,
    ):
        directory = Path(process.stdout.readline().strip())
        yield process, directory, descendants(process.pid)
        process.kill()


def test_a_process_that_ends_leaves_nothing(child):
    process, directory, others = child
    process.communicate("\n")
    assert not psutil.wait_procs(others, timeout=60)[1] and not directory.exists()


def test_what_killed_processes_left_is_removed_where_it_is_this_users(monkeypatch, tmp_path):
    for name in ("qerl_ray_left", "qerl_ray_held", "another"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "lock").write_text("theirs")
    another = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: another)
    private_ray.remove_left(tmp_path)
    assert {path.read_text() for path in tmp_path.glob("*/lock")} == {"theirs"}
    # another user's are not even opened
    assert len([*tmp_path.iterdir()]) == 3
    monkeypatch.undo()
    with hold(tmp_path / "qerl_ray_held"):
        private_ray.remove_left(tmp_path)
        assert {path.name for path in tmp_path.iterdir()} == {"qerl_ray_held", "another"}


def test_a_second_interrupt_while_it_stops_leaves_nothing(monkeypatch, capfd):
    directory = private_ray.start(num_cpus=1)
    # nobody else looks into it
    assert directory.stat().st_mode & 0o077 == 0

    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", interrupted)
    with pytest.raises(KeyboardInterrupt):
        private_ray.stop()
    assert directory.exists()
    monkeypatch.undo()
    private_ray.stop()
    assert not directory.exists()
    assert "error" not in capfd.readouterr().err


@pytest.mark.full  # Ray's processes take half a minute to notice
def test_what_a_killed_process_left_goes_with_the_next_start(started, child):
    process, directory, others = child
    private_ray.stop()
    private_ray.start(num_cpus=1)
    # it is in use
    assert directory.exists()
    process.kill()
    assert not psutil.wait_procs(others, timeout=60)[1] and directory.exists()
    private_ray.stop()
    private_ray.start(num_cpus=1)
    assert not directory.exists()
