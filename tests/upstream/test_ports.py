"""Upstream's ZMQ server and client as two ranks start them, while another process takes ports as
fast as it can.
"""

import json
import subprocess
import sys

import pytest
from rehearsal import HERE, emulated, run_python

TAKER = """
import collections, socket
held = collections.deque(maxlen=500)
print("taking", flush=True)
while True:
    taken = socket.socket()
    taken.bind(("127.0.0.1", 0))
    held.append(taken)
"""
SENT, STARTS = [0, 1, 2, 3, 4], 150


@pytest.fixture
def taker():
    """A process that binds one port after the other and keeps the last 500."""
    process = subprocess.Popen([sys.executable, "-c", TAKER], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "taking\n"
    yield
    assert process.poll() is None
    process.kill()
    process.wait()


def test_many_starts_beside_a_process_that_takes_ports(upstream, taker):
    """And one whose port was taken: upstream's server goes on without its socket."""
    done = run_python([HERE / "ports.py", STARTS], emulated(upstream))
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.split("RESULT ")[1])
    assert result["arrived"] == [SENT] * STARTS
    assert result["upstream"] == "AttributeError: 'NoneType' object has no attribute 'recv_json'"
    assert result["ours"] == SENT
    assert result["interfaces"] == [None, "lo", "eth7"], "gloo's; what is set stays"
    assert (
        result["elsewhere"]
        == "ZMQError: Cannot assign requested address (addr='tcp://203.0.113.1:*')"
    )
