"""Results of several processes; who is blamed when one dies while another waits for it."""

import os
import pickle
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import psutil
import pytest
import ray

from mindspeed_qerl.engines import private_ray
from mindspeed_qerl.local.processes import Processes, Worker, WorkerError, _errors_in_log


class Named:
    def __init__(self, name):
        self.name, self.log_file = name, Path(f"{name}.log")


# Ray 2.53
NODE_DIED = """The actor died unexpectedly before finishing this task.
The actor died because its node has died. Node Id: 153c309eef47de66697f
\tthe actor's node was terminated unexpectedly: health check failed"""


@pytest.mark.parametrize(
    "rank_lives, said, blamed",
    [
        (False, "", "rank 0 died"),
        (True, "", "rollout engine died"),
        (False, NODE_DIED, "one of Ray's own processes"),  # it takes the rank along
        (True, None, "one of Ray's own processes"),  # a raylet that died a moment ago
    ],
)
def test_the_dead_is_named_rather_than_the_one_that_waited(monkeypatch, rank_lives, said, blamed):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    processes = Processes([Named("rank 0")], Named("rollout engine"))
    rank = os.getpid() if rank_lives else gone.pid
    processes.pids = {"rank 0": rank, "rollout engine": os.getpid()}

    def fail(reference):
        raise ray.exceptions.RayActorError(error_msg=said) if said is not None else OSError("pipe")

    monkeypatch.setattr(ray, "wait", lambda pending, **_: (pending[:1], pending[1:]))
    monkeypatch.setattr(ray, "get", fail)
    with pytest.raises(WorkerError, match=f"^{blamed}"):
        processes.gather({processes.rollout: "a call that takes the rank's weights"})


def test_each_result_is_fetched_once_whatever_the_order_they_come_in(monkeypatch):
    processes, fetched = Processes([], None), []
    calls = {Named("rank 0"): "a", Named("rank 1"): "b", Named("rank 2"): "c"}
    monkeypatch.setattr(ray, "wait", lambda pending, **_: (pending[-1:], pending[:-1]))
    monkeypatch.setattr(
        ray, "get", lambda reference: fetched.append(reference) or f"result of {reference}"
    )
    assert processes.gather(calls) == ["result of a", "result of b", "result of c"]
    assert fetched == ["c", "b", "a"]


def test_a_dead_process_of_ray_is_not_taken_for_a_rank(tmp_path):
    """Its workers go with it, and none of them is at fault. What Ray has not started is not waited
    for: it says that its node died after a minute, or not at all.
    """
    private_ray.start(num_cpus=1)
    try:
        worker = Worker("rank 0", "threading:Event", tmp_path / "0.log", {})
        processes = Processes([], worker)
        processes.wait_until_ready()  # it has the processor
        [raylet] = (child for child in psutil.Process().children() if child.name() == "raylet")
        raylet.kill()
        with pytest.raises(WorkerError, match="^one of Ray's own processes"):
            processes.on_rollout(threading.Event.wait)
        second = Worker("rank 1", "collections:Counter", tmp_path / "1.log", {})
        with pytest.raises(WorkerError, match="^one of Ray's own processes") as caught:
            Processes([], second).wait_until_ready()
        assert isinstance(caught.value.__cause__, BrokenPipeError)
    finally:
        private_ray.stop()


@pytest.fixture(scope="module")
def box():
    """A Ray for the tests that kill its workers and not its own processes."""
    yield private_ray.start(num_cpus=5)
    private_ray.stop()


def counters(folder, *names):
    return [Worker(name, "collections:Counter", folder / f"{name}.log", {}) for name in names]


class Unpicklable(ValueError):
    def __reduce__(self):
        raise TypeError("no pickle")


def validation_error():
    from pydantic import TypeAdapter

    TypeAdapter(int).validate_python("many")


def unpicklable():
    raise Unpicklable("a lock")


def local_class():
    class Local(Exception):
        pass

    raise Local("made in a function")


@pytest.mark.parametrize(
    "fail, said",
    [
        (validation_error, "ValidationError: 1 validation error for int"),
        (unpicklable, "Unpicklable: a lock"),
        (local_class, "Local: made in a function"),
    ],
)
def test_of_any_error_the_words_travel(fail, said, capsys):
    """vLLM's of a length that it refuses is pydantic's, which no pickle holds."""
    with pytest.raises(RuntimeError) as travels, _errors_in_log():
        fail()
    again = pickle.loads(pickle.dumps(travels.value))
    assert type(again) is RuntimeError and str(again).startswith(said)
    assert travels.value.__suppress_context__ and "Traceback" in capsys.readouterr().err


def test_what_fails_is_named_with_its_type_and_where_it_came_from_is_in_its_log(box, tmp_path):
    rank, rollout = counters(tmp_path, "rank 0", "rollout engine")
    processes = Processes([rank], rollout)
    processes.wait_until_ready()
    with pytest.raises(WorkerError, match=r"^rank 0 failed: KeyError: .*\nIts log: .*rank 0\.log"):
        processes.on_ranks(Counter.popitem)
    logs = [worker.log_file.read_text() for worker in (rank, rollout)]
    assert ["Traceback" in log for log in logs] == [True, False]
    with pytest.raises(WorkerError, match="^rollout engine failed: TypeError: "):
        processes.on_rollout(Counter.update, 5)
    psutil.Process(processes.pids["rank 0"]).kill()
    with pytest.raises(WorkerError, match="^rank 0 died"):
        processes.on_ranks(Counter.total)
