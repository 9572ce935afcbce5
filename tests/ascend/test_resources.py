"""Too few NPUs or CPUs are an error in seconds with the counts, where upstream would wait for ever."""

import re
import signal
import subprocess
import sys
from contextlib import nullcontext
from functools import cache
from types import SimpleNamespace

import pytest
import ray

from mindspeed_qerl.ascend import cluster as of_ray
from mindspeed_qerl.ascend import ray_session
from mindspeed_qerl.ascend.cluster import check_resources
from mindspeed_qerl.common.errors import EngineError
from mindspeed_qerl.recipe.compose import compose
from mindspeed_qerl.recipe.reader import read_recipe


@pytest.fixture(scope="module")
def cluster():
    """A real Ray of 12 NPUs and 128 CPUs."""
    ray.init(
        address="local",
        num_cpus=128,
        resources={"NPU": 12},
        include_dashboard=False,
        logging_level="ERROR",
    )
    yield
    ray.shutdown()


@cache
def asked(npus, cpus_per_npu):
    return read_recipe(
        compose(
            "grpo_qwen3_30b_a3b_gsm8k_16npu",
            [
                f"rl_config.actor_resource.num_npus={npus}",
                f"rl_config.num_cpus_for_placement_group={cpus_per_npu}",
            ],
        )
    )


@pytest.mark.parametrize(
    "npus, cpus_per_npu, fault",
    [
        (16, 4, "16 NPUs are needed, Ray has 12. .*ASCEND_RT_VISIBLE_DEVICES names fewer"),
        # 12 x 10 are taken by upstream's bundles, and its transfer dock waits for 10 more
        (12, 10, "132 CPUs are needed, Ray has 128. .*num_cpus_for_placement_group"),
    ],
)
def test_a_ray_that_is_too_small(npus, cpus_per_npu, fault, cluster):
    with pytest.raises(EngineError, match=fault):
        check_resources(asked(npus, cpus_per_npu), patience=0)
    check_resources(asked(12, 9), patience=0)


OTHER = """
import os, sys
import ray
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")

@ray.remote(resources={"NPU": 8})
class Training:
    def ready(self): return True

held = Training.remote()
ray.get(held.ready.remote())
print("holds", flush=True)
sys.stdin.read()
"""


def test_npus_that_another_job_holds(cluster, tmp_path):
    """The count is right, and upstream would wait for ever; when the job has ended its NPUs are
    taken.
    """
    (tmp_path / "other_training.py").write_text(OTHER)
    with subprocess.Popen(
        [sys.executable, tmp_path / "other_training.py", ray.get_runtime_context().gcs_address],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout.readline() == "holds\n"
        with pytest.raises(
            EngineError,
            match=rf"12 NPUs are needed, Ray has 12. 4 are free, the others are held by process "
            rf"{other.pid} on .* \({re.escape(sys.executable)}",
        ):
            check_resources(asked(12, 4), patience=0)
        other.stdin.close()
    check_resources(asked(12, 4))


@pytest.mark.parametrize(
    "dies, cpus, fault",
    [
        (8, (100, 100), None),
        (4, (100, 100), None),
        (16, (100, 100), "this node shows 16 dies to CANN.* the nodes have 8, 8"),
        (12, (100, 100), "this node shows 12 dies to CANN.* the nodes have 8, 8"),
        # eight ranks of 4 on each, a reward process, and the transfer dock's 10 on one of them; the
        # nodes together have the 76 that are counted for one machine
        (8, (43, 33), None),
        (8, (32, 44), None),
        (
            8,
            (42, 42),
            "the nodes have 42, 42 CPUs free; their ranks reserve 32, 32, .*larger --num-cpus",
        ),
        (
            8,
            (76, 31),
            "the nodes have 76, 31 CPUs free; .* the transfer dock 10 on one .*larger --num-cpus",
        ),
    ],
)
def test_two_nodes_that_upstreams_groups_fit_into_and_others(dies, cpus, fault, monkeypatch):
    """launcher.py:64-104: as many NPUs on one node as the driver's node shows."""
    sums = {"NPU": 16.0, "CPU": float(sum(cpus))}
    nodes = dict(resources=sums, available=sums, nodes=2, jobs=[], npus=[8, 8], cpus=list(cpus))
    monkeypatch.setattr(of_ray, "look", lambda: nodes)
    acl = SimpleNamespace(rt=SimpleNamespace(get_device_count=lambda: (dies, 0)))
    monkeypatch.setitem(sys.modules, "acl", acl)
    with pytest.raises(EngineError, match=fault) if fault else nullcontext():
        check_resources(asked(16, 4), patience=0)


def test_the_first_ranks_are_on_the_drivers_node(monkeypatch):
    """Wherever Ray puts upstream's groups: their order is that of the ranks."""
    tables = {
        "a": {0: "third", 1: "third"},
        "b": {0: "driver's", 1: "driver's"},
        "c": {0: "second", 1: "second"},
    }
    labels = {"third": {"NODE_RANK": "10"}, "second": {"NODE_RANK": "9"}, "driver's": {}}
    nodes = [{"NodeID": node, "Labels": each} for node, each in labels.items()]
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    monkeypatch.setattr(
        ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "driver's")
    )
    monkeypatch.setattr(
        ray.util, "placement_group_table", lambda group: {"bundles_to_node_id": tables[group]}
    )
    assert ray_session.in_order_of_nodes(["a", "b", "c"]) == ["b", "c", "a"]


@pytest.mark.parametrize("fails", ["Ray does not start", "the run is interrupted", ""])
def test_sigterm_and_ray_are_left_as_they_were(fails, monkeypatch, tmp_path):
    """Ray's own start replaces the handler, whether it succeeds or not."""
    ended, before = [], signal.getsignal(signal.SIGTERM)
    node = SimpleNamespace(get_logs_dir_path=lambda: str(tmp_path / "session"))
    (tmp_path / "session").mkdir()
    (tmp_path / "session" / "worker-1.err").write_text("an error")

    def start(recipe, environment):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if fails == "Ray does not start":
            raise EngineError(fails)

    monkeypatch.setattr(ray_session, "start_ray", start)
    monkeypatch.setattr(ray_session.private_ray, "stop", lambda: ended.append(True))
    monkeypatch.setattr(ray._private.worker.global_worker, "node", node, raising=False)
    expected = pytest.raises(EngineError, match=fails) if fails else nullcontext()
    with expected, ray_session.ray_session(None, {}, tmp_path):
        assert signal.getsignal(signal.SIGTERM) is signal.default_int_handler
        if fails:
            raise EngineError(fails)
    assert ended == [True] and signal.getsignal(signal.SIGTERM) is before
    assert (tmp_path / "worker-1.err").exists() == (fails != "Ray does not start")
