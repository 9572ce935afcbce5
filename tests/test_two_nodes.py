"""Two boxes with addresses of their own, joined by a cable, the shipped launcher of two nodes on
both: preflight and Ray are real, the training is played, which asks Ray for its NPUs and has an
actor on each node.
"""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.fake_box import ROOT, Box, left_over, why_not
from tests.fake_box.network import UNREACHABLE, joined, why_no_cable
from tests.fake_box.nodes import CONFIG, Nodes
from tests.fake_box.prepared import prepare

REASON = why_not() or why_no_cable()
pytestmark = [pytest.mark.full, pytest.mark.skipif(bool(REASON), reason=REASON)]
EIGHT = Box(dies=8, network=False)
PYTHON = f"""#!/usr/bin/env bash
[[ "$*" != *preflight.py* || -z ${{NO_PREFLIGHT:-}} ]] || exit 0
[[ "$*" != *train_grpo.py* ]] || exec {sys.executable} "$TRAINING"
exec {sys.executable} "$@"
"""
TRAINING = """
import os
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On

@ray.remote(num_cpus=0, resources={"NPU": 8})
class Worker:
    def where(self):
        return ray.util.get_node_ip_address(), os.environ["HCCL_IF_IP"]

ray.init(address=os.environ["RAY_ADDRESS"], log_to_driver=False, logging_level="ERROR")
print("NPUs", ray.cluster_resources()["NPU"], flush=True)
workers = [Worker.options(scheduling_strategy=On(node["NodeID"], soft=False)).remote() for node in ray.nodes()]
print(sorted(ray.get([worker.where.remote() for worker in workers])), flush=True)
print("it trains", flush=True)
with open(os.environ["GO"]) as go:
    raise SystemExit(int(go.read()))
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return prepare(CONFIG, tmp_path_factory.mktemp("files"), 2)


@pytest.fixture
def nodes(files, tmp_path):
    fakes = tmp_path / "bin"
    fakes.mkdir()
    (fakes / "python").write_text(PYTHON)
    (fakes / "python").chmod(0o755)
    (fakes / "ray").symlink_to(Path(sys.executable).with_name("ray"))
    (tmp_path / "training.py").write_text(TRAINING)
    (tmp_path / "token").write_text("0" * 64)
    os.mkfifo(tmp_path / "go")
    # Ray would start as many workers as the box has CPUs, before anybody asks for one
    variables = {
        **files,
        "PATH": f"{fakes}:/usr/bin:/bin:/usr/sbin:/sbin",
        "PYTHON": str(fakes / "python"),
        "HOME": str(tmp_path),
        "TRAINING": str(tmp_path / "training.py"),
        "GO": str(tmp_path / "go"),
        "RAY_AUTH_TOKEN_PATH": str(tmp_path / "token"),
        "RAY_prestart_worker_first_driver": "0",
    }
    with joined() as cables:
        both = Nodes(tmp_path, cables, variables, EIGHT)
        yield both
        both.kill()


def trained(nodes, status="0"):
    """The statuses of both, of a training that ends with `status`."""
    nodes.until(0, "it trains")
    (nodes.folder / "go").write_text(status)
    return nodes.end(0), nodes.end(1)


# For faults that come after the preflight
NO_PREFLIGHT = {"NO_PREFLIGHT": "1"}


def test_a_healthy_run(nodes):
    """No warnings but the host's; nothing is left, of processes and of files; the second node waits
    for the first one's preflight, and ends with it.
    """
    before = sorted(map(str, Path("/tmp").glob("qerl-ray*")))
    nodes.start(0)
    nodes.start(1)
    assert trained(nodes) == (0, 0), nodes.said(0) + nodes.said(1)
    assert "NPUs 16.0\n[('10.0.0.1', '10.0.0.1'), ('10.0.0.2', '10.0.0.2')]\n" in nodes.said(0)
    for rank in (0, 1):
        assert "HCCL_SOCKET_IFNAME=eth0" in nodes.said(rank)
        assert set(re.findall(r"│   (\S.*?)\s+│ (?:warning|failed)", nodes.said(rank))) == set()
        assert left_over(nodes.box(rank)) == []
        assert nodes.said(rank).splitlines()[-1] == f"left: {' '.join(before) or '/tmp/qerl-ray*'}"
    assert (
        "launch: node 0 has stopped its Ray, and this node is done. How the training went is in "
        "node 0's run directory\n"
    ) in nodes.said(1)


def test_the_second_node_is_missing(nodes):
    nodes.start(0, **NO_PREFLIGHT, NODE_TIMEOUT="8")
    assert nodes.end(0) == 1
    assert (
        "launch: Ray has 8 NPUs at 10.0.0.1; waiting for 16 on 2 nodes, at most 8 s\n"
        in nodes.said(0)
    )
    assert (
        "launch: after 8 s 1 of 2 nodes are there (10.0.0.1): start this script on the other"
        in nodes.said(0)
    )
    assert left_over(nodes.box(0)) == []


def test_the_second_node_is_late(nodes):
    nodes.start(0, **NO_PREFLIGHT)
    nodes.until(0, "Ray has 8 NPUs at 10.0.0.1; waiting")
    nodes.start(1, **NO_PREFLIGHT)
    assert trained(nodes, "7") == (7, 0)


@pytest.mark.parametrize("how", ["killed", "killed in a call", "Ctrl-C", "cable"])
def test_the_second_node_is_lost_in_training(how, nodes):
    """Which ends with it: a second after a Ctrl-C, a quarter of a minute after a kill, a minute
    after a cable. A training that fails by itself first, since it called the node, ends with its
    own status.
    """
    for rank in (0, 1):
        nodes.start(rank, **NO_PREFLIGHT)
    nodes.until(0, "it trains")
    nodes.began = dict.fromkeys(nodes.began, time.monotonic())
    if "killed" in how:
        nodes.process[1].kill()
    elif how == "Ctrl-C":
        os.killpg(nodes.process[1].pid, signal.SIGINT)
    else:
        subprocess.run([*nodes.cables[1], "ip", "link", "set", "eth0", "down"], check=True)
    if how == "killed in a call":
        (nodes.folder / "go").write_text("7")
    nodes.until(
        0, "launch: the node at 10.0.0.2 has left Ray, and the training cannot go on without it"
    )
    first, second = {
        "killed": (1, -signal.SIGKILL),
        "killed in a call": (7, -signal.SIGKILL),
        "Ctrl-C": (1, 130),
        "cable": (1, 1),
    }[how]
    assert nodes.end(0) == first and left_over(nodes.box(0)) == []
    assert nodes.end(1) == second
    if how == "cable":
        assert re.search(
            r"cannot be reached for 60 s: its launcher ends|this node's Ray has ended",
            nodes.said(1),
        )


def test_an_address_where_the_first_node_does_not_reach_the_second(nodes):
    nodes.start(0, **NO_PREFLIGHT)
    nodes.start(1, **NO_PREFLIGHT, NODE_ADDR=UNREACHABLE)
    assert (nodes.end(0), nodes.end(1)) == (1, 1)
    assert (
        "launch: a task on the node at 172.17.0.1 fails: its NODE_ADDR must be an address where"
        in nodes.said(0)
    )
    # a page of Ray's own
    assert "(raylet)" not in nodes.said(0)
    assert "whether it could reach NODE_ADDR=172.17.0.1" in nodes.said(1)


def test_an_address_where_the_second_node_does_not_reach_the_first(nodes):
    nodes.start(0, **NO_PREFLIGHT, NODE_ADDR=UNREACHABLE, NODE_TIMEOUT="8")
    nodes.start(1, **NO_PREFLIGHT, MASTER_ADDR=UNREACHABLE, NODE_TIMEOUT="8")
    assert (nodes.end(0), nodes.end(1)) == (1, 1)
    assert "after 8 s 1 of 2 nodes are there (172.17.0.1)" in nodes.said(0)
    assert (
        "launch: after 8 s nobody answers at 172.17.0.1:6380: look at what node 0's launcher says"
        in nodes.said(1)
    )


def test_another_token(nodes, tmp_path):
    (tmp_path / "other").write_text("1" * 64)
    nodes.start(0, **NO_PREFLIGHT, NODE_TIMEOUT="40")
    nodes.start(1, **NO_PREFLIGHT, RAY_AUTH_TOKEN_PATH=str(tmp_path / "other"))
    nodes.until(
        1,
        "launch: this node's Ray has not joined that of 10.0.0.1:6380 after 20 s, though that "
        "one answers",
    )
    assert nodes.end(0) == 1
    nodes.end(1)


def test_other_code_on_the_second_node(nodes):
    file = ROOT / "mindspeed_qerl" / "common" / "files.py"
    nodes.start(0, **NO_PREFLIGHT)
    nodes.start(
        1,
        Box(dies=8, network=False, files={str(file): file.read_text() + "# an edit\n"}),
        **NO_PREFLIGHT,
    )
    assert (nodes.end(0), nodes.end(1)) == (1, 0)
    assert re.search(
        rf"^launch: the node at 10.0.0.2 has other code in {ROOT}/mindspeed_qerl \(commit \w+, files \w+"
        r"\) than this one \(commit \w+, files \w+\): bring both to the same commit, without edits$",
        nodes.said(0),
        re.MULTILINE,
    )


def test_another_clock_on_the_second_node(nodes, tmp_path):
    """Told, and gone on with."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(
        "import time\ntrue = time.time\ntime.time = lambda: true() + 100\n"
    )
    nodes.start(0, **NO_PREFLIGHT)
    nodes.start(1, **NO_PREFLIGHT, PYTHONPATH=str(tmp_path / "site"))
    assert trained(nodes) == (0, 0)
    assert re.search(
        "launch: warning: the clock of the node at 10.0.0.2 is (9|10)[0-9] s or more from",
        nodes.said(0),
    )
