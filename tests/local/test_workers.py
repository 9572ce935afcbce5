"""Results of several processes; who is blamed when one dies while another waits for it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import ray

from mindspeed_qerl.local.processes import Processes, WorkerError


class Named:
    def __init__(self, name):
        self.name, self.log_file = name, Path(f"{name}.log")


@pytest.mark.parametrize("rank_lives, blamed", [(False, "rank 0"), (True, "rollout engine")])
def test_the_dead_is_named_rather_than_the_one_that_waited(monkeypatch, rank_lives, blamed):
    """In a sync the rollout engine's call fails because a rank, whose weights it waits for, is gone."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    processes = Processes([Named("rank 0")], [Named("rollout engine")])
    processes.pids = {"rank 0": os.getpid() if rank_lives else gone.pid, "rollout engine": os.getpid()}

    def fail(reference):
        raise ray.exceptions.RayActorError

    monkeypatch.setattr(ray, "wait", lambda pending, num_returns: (pending[:1], pending[1:]))
    monkeypatch.setattr(ray, "get", fail)
    with pytest.raises(WorkerError, match=rf"^{blamed} \(pid \d+\) died"):
        processes.gather({processes.rollouts[0]: "a call that takes the rank's weights"})


def test_each_result_is_fetched_once_whatever_the_order_they_come_in(monkeypatch):
    processes, fetched = Processes([], []), []
    calls = {Named("rank 0"): "a", Named("rank 1"): "b", Named("rank 2"): "c"}
    monkeypatch.setattr(ray, "wait", lambda pending, num_returns: (pending[-1:], pending[:-1]))
    monkeypatch.setattr(ray, "get", lambda reference: fetched.append(reference) or f"result of {reference}")
    assert processes.gather(calls) == ["result of a", "result of b", "result of c"]
    assert fetched == ["c", "b", "a"]
