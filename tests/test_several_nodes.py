"""Boxes with addresses of their own, joined by cables, a shipped launcher on each: preflight and Ray
are real, the training is played, which asks Ray for its NPUs and has an actor on each node.
"""

import os
import re
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.fake_box import ROOT, Box, left_over, why_not
from tests.fake_box.network import ADDRESSES, UNREACHABLE, joined, why_no_cable
from tests.fake_box.nodes import PAIR, TWO_NODES, Nodes, environment
from tests.fake_box.prepared import prepare

REASON = why_not() or why_no_cable()
pytestmark = [pytest.mark.full, pytest.mark.skipif(bool(REASON), reason=REASON)]
TRAINING = """
import os
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On

ray.init(address=os.environ["RAY_ADDRESS"], log_to_driver=False, logging_level="ERROR")

@ray.remote(num_cpus=0, resources={"NPU": int(os.environ["WIDTH"])})
class Worker:
    def where(self):
        return ray.util.get_node_ip_address(), os.environ["HCCL_IF_IP"]

print("NPUs", ray.cluster_resources()["NPU"], flush=True)
workers = [Worker.options(scheduling_strategy=On(node["NodeID"], soft=False)).remote() for node in ray.nodes()]
print(sorted(ray.get([worker.where.remote() for worker in workers])), flush=True)
print("it trains", flush=True)
with open(os.environ["GO"]) as go:
    raise SystemExit(int(go.read()))
"""
# nodes -> NPUs of each, the config, and how all are launched: by the launcher of two nodes, by
# NNODES, and as the config says, whose nodes have 16
LAUNCHES = {
    2: (8, PAIR, TWO_NODES),
    3: (4, "grpo_qwen3_30b_a3b_gsm8k_12npu", ["grpo_trainer.sh", "grpo_qwen3_30b_a3b_gsm8k_12npu"]),
    4: (
        16,
        "grpo_qwen3_30b_a3b_gsm8k_16npu",
        [
            "grpo_trainer.sh",
            "grpo_qwen3_30b_a3b_gsm8k_16npu",
            "rl_config.actor_resource.num_npus=64",
        ],
    ),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A function that writes what a config reads, once."""
    return cache(lambda config: prepare(config, tmp_path_factory.mktemp("files")))


@pytest.fixture
def nodes(request, files, tmp_path):
    """As many as the parameter says."""
    width, config, command = LAUNCHES[request.param]
    (tmp_path / "training.py").write_text(TRAINING)
    os.mkfifo(tmp_path / "go")
    variables = {
        **environment(tmp_path, f'exec {sys.executable} "$TRAINING"'),
        **files(config),
        "TRAINING": str(tmp_path / "training.py"),
        "WIDTH": str(width),
        "GO": str(tmp_path / "go"),
    }
    if request.param == 3:
        variables["NNODES"] = "3"
    with joined(request.param) as cables:
        all_nodes = Nodes(tmp_path, cables, variables, Box(dies=width, network=False), command)
        yield all_nodes
        all_nodes.kill()


def trained(nodes, status="0"):
    """The statuses of all, of a training that ends with `status`."""
    nodes.until(0, "it trains")
    (nodes.folder / "go").write_text(status)
    return [nodes.end(rank) for rank in nodes.ranks]


def start_all(nodes, **variables):
    for rank in nodes.ranks:
        nodes.start(rank, **NO_PREFLIGHT, **variables)


def everyone(test):
    return pytest.mark.parametrize("nodes", LAUNCHES, indirect=True)(test)


# For faults that come after the preflight
NO_PREFLIGHT = {"NO_PREFLIGHT": "1"}


@everyone
def test_a_healthy_run(nodes):
    """No warnings but the host's; nothing is left, of processes and of files; nodes wait for the
    first one's preflight, it waits for the last one, and all end with it.
    """
    before = sorted(map(str, Path("/tmp").glob("qerl-ray*")))
    width = nodes.default.dies
    *others, last = nodes.ranks
    for rank in others:
        nodes.start(rank)
    nodes.until(0, f"NPUs at {ADDRESSES[last - 1]}; waiting")
    nodes.start(last)
    assert trained(nodes) == [0 for _ in nodes.ranks], [nodes.said(rank) for rank in nodes.ranks]
    there = [(address, address) for address in ADDRESSES[: len(nodes.ranks)]]
    assert f"NPUs {width * len(there)}.0\n{there}\n" in nodes.said(0)
    for rank in nodes.ranks:
        assert "HCCL_SOCKET_IFNAME=eth0" in nodes.said(rank)
        assert not re.findall(r"│   (\S.*?)\s+│ (?:warning|failed)", nodes.said(rank))
        assert left_over(nodes.box(rank)) == []
        assert nodes.said(rank).splitlines()[-1] == f"left: {' '.join(before) or '/tmp/qerl-ray*'}"
        if rank:
            assert "launch: node 0's Ray at 10.0.0.1 has gone, and this node is" in nodes.said(rank)


@pytest.mark.parametrize(
    "nodes, away, words",
    [
        (2, [1], "1 of 2 nodes are there (10.0.0.1 (NODE_RANK 0)): start this script on the other"),
        (3, [1], "NODE_RANK 2)): start this script on the other with NODE_RANK=1 MASTER_ADDR=10"),
        (4, [1, 2], "2 of 4 nodes are there (10.0.0.1 (NODE_RANK 0), 10.0.0.4 (NODE_RANK 3)): "),
    ],
    indirect=["nodes"],
)
def test_nodes_are_missing(nodes, away, words):
    for rank in nodes.ranks:
        if rank not in away:
            nodes.start(rank, **NO_PREFLIGHT, NODE_TIMEOUT="30")
    assert nodes.end(0) == 1
    assert f"; waiting for {nodes.default.dies * len(nodes.ranks)} on" in nodes.said(0)
    assert "launch: after 30 s " in nodes.said(0) and words in nodes.said(0)
    assert left_over(nodes.box(0)) == []


WAYS = ("killed", "killed in a call", "Ctrl-C", "cable")


@pytest.mark.parametrize(
    "nodes, lost, how",
    [(count, 1, how) for count in (2, 3) for how in WAYS]
    + [(4, 1, how) for how in WAYS[1::2]]
    + [(4, 3, how) for how in WAYS[::2] + WAYS[3:]]
    + [(count, 0, how) for count in (2, 4) for how in ("killed", "cable")],
    indirect=["nodes"],
)
def test_a_node_is_lost_in_training(nodes, lost, how):
    """Which ends with it: a second after a Ctrl-C, a quarter of a minute after a kill, a minute
    after a cable, which is told much earlier. A training that fails by itself first, since it
    called the node, ends with its own status. All others name the first node.
    """
    start_all(nodes)
    nodes.until(0, "it trains")
    nodes.lose(lost, how)
    if how == "killed in a call":
        (nodes.folder / "go").write_text("7")
    others = set(nodes.ranks) - {0, lost}
    cut = "launch: node 0 at 10.0.0.1 cannot be reached since"
    if lost == 0:
        words = cut if how == "cable" else "launch: node 0's Ray at 10.0.0.1 has gone"
        for rank in others:
            nodes.until(rank, words)
    else:
        name = f"launch: the node at {ADDRESSES[lost]} (NODE_RANK {lost})"
        if how == "cable":
            nodes.until(0, f"{name} does not answer since 15 s: the training ends")
        nodes.until(0, f"{name} has left Ray, and the training cannot go on without it")
        assert nodes.end(0) == (7 if "call" in how else 1) and left_over(nodes.box(0)) == []
        assert nodes.end(lost) == {"Ctrl-C": 130, "cable": 1}.get(how, -signal.SIGKILL)
        assert how != "cable" or cut in nodes.said(lost)
    for rank in others:
        assert nodes.end(rank) == int(lost == 0 and how == "cable")
        assert left_over(nodes.box(rank)) == []


@everyone
def test_an_address_where_the_others_do_not_reach_the_first_node(nodes):
    nodes.start(0, **NO_PREFLIGHT, NODE_ADDR=UNREACHABLE, NODE_TIMEOUT="20")
    for rank in nodes.ranks[1:]:
        nodes.start(rank, **NO_PREFLIGHT, MASTER_ADDR=UNREACHABLE, NODE_TIMEOUT="20")
    assert [nodes.end(rank) for rank in nodes.ranks] == [1 for _ in nodes.ranks]
    assert f"after 20 s 1 of {len(nodes.ranks)} nodes are there (172.17.0.1 (" in nodes.said(0)
    for rank in nodes.ranks[1:]:
        assert "launch: after 20 s nobody answers at 172.17.0.1:6380: look at what node 0" in (
            nodes.said(rank)
        )


@everyone
def test_another_token(nodes, tmp_path):
    (tmp_path / "other").write_text("1" * 64)
    *others, last = nodes.ranks
    for rank in others:
        nodes.start(rank, **NO_PREFLIGHT, NODE_TIMEOUT="60")
    nodes.start(last, **NO_PREFLIGHT, RAY_AUTH_TOKEN_PATH=str(tmp_path / "other"))
    nodes.until(
        last,
        "launch: this node's Ray has not joined that of 10.0.0.1:6380 after 20 s, though that "
        "one answers",
    )
    assert nodes.end(0) == 1
    nodes.end(last)


def spoil(nodes, rank, fault):
    """The box and the variables of a node with a fault, and what is said of it."""
    at = f"the node at {ADDRESSES[rank]}"
    if fault == "code":
        file = ROOT / "mindspeed_qerl" / "common" / "files.py"
        edited = {str(file): file.read_text() + "# an edit\n"}
        box = Box(dies=nodes.default.dies, network=False, files=edited)
        code = r"\(commit \w+, files \w+\)"
        ends = f"than this one {code}: bring all to the same commit, without edits$"
        return box, {}, f"^launch: {at} has other code in {ROOT}/mindspeed_qerl {code} {ends}"
    if fault == "clock":
        site = nodes.folder / "site"
        site.mkdir()
        late = "import time\ntrue = time.time\ntime.time = lambda: true() + 100\n"
        (site / "sitecustomize.py").write_text(late)
        words = f"^launch: warning: the clock of {at} is (9|10)[0-9] s or more from"
        return None, {"PYTHONPATH": str(site)}, words
    if fault == "address":
        words = "^launch: a task on the node at 172.17.0.1 fails: its NODE_ADDR must be an address"
        return None, {"NODE_ADDR": UNREACHABLE}, words
    other = ADDRESSES[rank - 1]
    subprocess.run([*nodes.cables[rank], *f"ip route add blackhole {other}".split()], check=True)
    return None, {}, f"^launch: {at} does not reach {other}: each NODE_ADDR must be"


@pytest.mark.parametrize(
    "nodes, faults",
    [
        (2, {1: "code"}),
        (2, {1: "clock"}),
        (2, {1: "address"}),
        (3, {1: "code", 2: "clock"}),
        (3, {1: "address"}),
        (4, {1: "code", 2: "clock", 3: "route"}),
        (4, {2: "address"}),
    ],
    indirect=["nodes"],
    ids=str,
)
def test_nodes_that_are_not_as_the_first_are_all_named(nodes, faults):
    """Before the training, but for a clock, which is told and gone on with."""
    nodes.start(0, **NO_PREFLIGHT)
    said = []
    for rank in nodes.ranks[1:]:
        box, variables = None, {}
        if rank in faults:
            box, variables, words = spoil(nodes, rank, faults[rank])
            said.append(words)
        nodes.start(rank, box, **NO_PREFLIGHT, **variables)
    if set(faults.values()) == {"clock"}:
        assert trained(nodes) == [0 for _ in nodes.ranks]
    assert nodes.end(0) == int(set(faults.values()) != {"clock"})
    for words in said:
        assert re.search(words, nodes.said(0), re.MULTILINE), nodes.said(0)
    assert "(raylet)" not in nodes.said(0)  # a page of Ray's own
    for rank in nodes.ranks[1:]:
        assert nodes.end(rank) == int(faults.get(rank) == "address")
        if faults.get(rank) == "address":
            assert "whether it could reach NODE_ADDR=172.17.0.1" in nodes.said(rank)
