"""A Ray of ours listens where nobody else can reach it, and leaves nothing behind."""

import signal
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


@pytest.mark.full  # Ray's processes take half a minute to notice
def test_what_a_killed_process_left_goes_with_the_next_start(started):
    script = "from mindspeed_qerl import private_ray; print(private_ray.start(num_cpus=1), flush=True); input()"
    child = subprocess.Popen([sys.executable, "-c", script],
                             stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    left = started.parent / child.stdout.readline().strip().rpartition("/")[2]
    processes = psutil.Process(child.pid).children(recursive=True)
    private_ray.stop()
    private_ray.start(num_cpus=1)
    assert left.exists(), "it is in use"
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert not psutil.wait_procs(processes, timeout=60)[1]
    private_ray.stop()
    private_ray.start(num_cpus=1)
    assert not left.exists()
