"""A Ray of ours listens where nobody else can reach it, and leaves nothing behind."""

import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import ray

from mindspeed_qerl import private_ray


@pytest.fixture
def started():
    yield private_ray.start(num_cpus=1)
    private_ray.stop()


def test_every_port_is_on_the_loopback_interface(started):
    @ray.remote
    def worker() -> int:
        return psutil.Process().pid

    pids = {ray.get(worker.remote()), *(child.pid for child in psutil.Process().children(recursive=True))}
    connections = [connection for pid in pids for connection in psutil.Process(pid).net_connections()]
    sockets = [connection for connection in connections if connection.status == psutil.CONN_LISTEN]
    assert len(sockets) > 4, "the head, the raylet and the worker listen"
    assert {socket.laddr.ip.removeprefix("::ffff:") for socket in sockets} <= {"127.0.0.1", "::1"}


def test_nothing_is_left_in_the_temporary_directory_and_nothing_on_the_screen():
    """In a process of its own: Ray's C++ part writes to stderr when it is first started in one."""
    script = """if True:
        import os
        from mindspeed_qerl import private_ray
        directory = private_ray.start(num_cpus=1)
        print(directory, any(directory.glob("session_*/logs")))
        os.write(2, b"stderr is back")
        private_ray.stop()
    """
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    directory, logs = done.stdout.split()
    assert logs == "True" and not Path(directory).exists()
    assert done.stderr == "stderr is back"


@pytest.fixture
def child():
    """(a process that started a Ray and waits, that Ray's temporary directory, the process's descendants)."""
    script = "from mindspeed_qerl import private_ray; print(private_ray.start(num_cpus=1), flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                          text=True) as process:
        directory = Path(process.stdout.readline().strip())
        yield process, directory, psutil.Process(process.pid).children(recursive=True)
        process.kill()


def guard_of(directory: Path, processes: list[psutil.Process]) -> psutil.Process:
    [guard] = (process for process in processes if process.cmdline()[-2:] == [str(private_ray.GUARD), str(directory)])
    return guard


def test_a_killed_process_leaves_nothing(child):
    process, directory, others = child
    guard = guard_of(directory, others)
    assert any(directory.glob("session_*/logs"))
    process.kill()
    assert not psutil.wait_procs([guard], timeout=100)[1]
    assert not directory.exists()
    assert not psutil.wait_procs(others, timeout=1)[1], "the guard is the last one"


def test_a_process_that_ends_takes_its_guard_along(child):
    process, directory, others = child
    process.communicate("\n")
    assert not psutil.wait_procs(others, timeout=60)[1] and not directory.exists()


@pytest.mark.full  # Ray's processes take half a minute to notice
def test_what_was_left_because_the_guard_was_killed_goes_with_the_next_start(started, child):
    process, directory, others = child
    guard_of(directory, others).kill()
    private_ray.stop()
    private_ray.start(num_cpus=1)
    assert directory.exists(), "it is in use"
    process.kill()
    assert not psutil.wait_procs(others, timeout=60)[1] and directory.exists()
    private_ray.stop()
    private_ray.start(num_cpus=1)
    assert not directory.exists()
