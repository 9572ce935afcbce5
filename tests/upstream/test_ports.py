"""Upstream's ZMQ server and client as two ranks start them, where a port was taken in between."""

import json

from rehearsal import HERE, emulated, run_python


def test_a_port_that_is_taken(upstream):
    done = run_python([HERE / "ports.py"], emulated(upstream))
    assert done.returncode == 0, done.stderr[-3000:]
    arrived, refused, interfaces = json.loads(done.stdout.split("RESULT ")[1])
    assert arrived == [0, 1, 2, 3, 4]
    assert refused == "Cannot assign requested address (addr='tcp://203.0.113.1:*')"
    assert interfaces == [None, "lo", "eth7"]  # gloo's; what is set stays
