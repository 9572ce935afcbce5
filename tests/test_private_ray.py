"""A Ray of ours listens where nobody else can reach it."""

import psutil
import pytest
import ray

from mindspeed_qerl import private_ray


@pytest.fixture
def started():
    private_ray.start(num_cpus=1)
    yield
    ray.shutdown()


def test_every_port_is_on_the_loopback_interface(started):
    @ray.remote
    def worker() -> int:
        return psutil.Process().pid

    pids = {ray.get(worker.remote()), *(child.pid for child in psutil.Process().children(recursive=True))}
    sockets = [connection for pid in pids for connection in psutil.Process(pid).net_connections() if connection.status == psutil.CONN_LISTEN]
    assert len(sockets) > 4, "the head, the raylet and the worker listen"
    assert {socket.laddr.ip.removeprefix("::ffff:") for socket in sockets} <= {"127.0.0.1", "::1"}
