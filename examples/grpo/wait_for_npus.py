"""Wait until the Ray at RAY_ADDRESS has its nodes and their NPUs, and say who is missing if they do
not come.

On several nodes also whether they run the same code, answer, reach each other, and have the same
time.

exit status: 0 all there, 1 the time is over or a node is not as this one, 3 Ray ended; with --watch
4, a node has gone, 1 not all were there
"""

import argparse
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
ANSWER = 60  # seconds for a task on each node; it starts a worker there
CLOCK = 5  # seconds that two clocks may differ
SILENT = (
    15  # seconds without an answer after which a node is named; Ray takes up to 65 to give it up
)


class Node(NamedTuple):
    """A node that is in Ray; `port` is its raylet's, `rank` its NODE_RANK, 0 of a node alone."""

    rank: int
    address: str
    npus: int
    port: int

    def __str__(self) -> str:
        return f"{self.address} (NODE_RANK {self.rank})"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--nodes", type=int, required=True, help="nodes that share the NPUs equally"
    )
    parser.add_argument("--npus", type=int, required=True, help="NPUs of all nodes together")
    parser.add_argument("--timeout", type=float, default=60, help="seconds")
    parser.add_argument(
        "--ray-process", type=int, required=True, help="the process of `ray start --block`"
    )
    parser.add_argument(
        "--watch", action="store_true", help="they are there: wait until one has gone"
    )
    args = parser.parse_args()
    address = os.environ["RAY_ADDRESS"]
    if args.watch:
        return watch(address, args.nodes)
    return wait(address, args) or (compare_nodes() if args.nodes > 1 else 0)


def wait(address: str, args: argparse.Namespace) -> int:
    end, told = time.monotonic() + args.timeout, None
    while True:
        nodes = joined(address)
        wanting = missing(nodes, args.nodes, args.npus // args.nodes, address)
        if nodes != told:
            there = ", ".join(f"{node.npus} NPUs at {node.address}" for node in nodes)
            print(
                "launch: Ray has "
                + (there or "not started yet")
                + (
                    f"; waiting for {args.npus} on {args.nodes} nodes, at most {args.timeout:g} s"
                    if nodes and wanting
                    else ""
                ),
                flush=True,
            )
            told = nodes
        if not wanting:
            return 0
        if not alive(args.ray_process):
            print("launch: Ray ended. Its output:", file=sys.stderr)
            return 3
        if time.monotonic() > end:
            print(f"launch: after {args.timeout:g} s {wanting}", file=sys.stderr)
            return 1
        time.sleep(1)


def joined(address: str) -> list[Node]:
    """The nodes that are alive, by rank; none as long as nobody answers at `address`."""
    import ray

    if not ray.is_initialized():
        host, _, port = address.rpartition(":")
        try:
            # ray.init itself would try for half a minute
            socket.create_connection((host, int(port)), timeout=5).close()
            with quiet():
                ray.init(address=address, log_to_driver=False, logging_level="ERROR")
        except OSError:  # ConnectionError is one: on a busy host Ray listens before it answers
            return []
    return sorted(
        Node(
            int(node["Labels"].get("NODE_RANK", 0)),
            node["NodeManagerAddress"],
            int(node["Resources"].get("NPU", 0)),
            node["NodeManagerPort"],
        )
        for node in ray.nodes()
        if node["Alive"]
    )


def watch(address: str, nodes: int) -> int:
    """Ends when a node has left Ray, at once if one is not there; the training, which Ray tells of
    a node that left too, has 10 seconds to end by itself. A node that cannot be reached is named
    long before Ray gives it up.
    """
    there = joined(address)
    if len(there) < nodes:
        print(f"{len(there)} of {nodes} nodes are in Ray", file=sys.stderr)
        return 1
    answered = dict.fromkeys(there, time.monotonic())
    named: set[Node] = set()
    while True:
        time.sleep(2)
        now = joined(address)
        if gone := [node for node in there if node not in now]:
            print(
                f"launch: the node at {', '.join(map(str, gone))} has left Ray, and the training "
                "cannot go on without it: it ends now. Look at what that node's launcher says, "
                "and whether it can be reached",
                flush=True,
            )
            time.sleep(10)
            return 4
        for node in there:
            if reaches(node.address, node.port):
                answered[node] = time.monotonic()
                if node in named:
                    print(f"launch: the node at {node} answers again", flush=True)
                    named.remove(node)
            elif node not in named and time.monotonic() - answered[node] > SILENT:
                print(
                    f"launch: the node at {node} does not answer since {SILENT} s: the training "
                    "ends when Ray gives it up, a minute after its last answer",
                    flush=True,
                )
                named.add(node)


def reaches(address: str, port: int) -> bool:
    """Returns True if a connection is made within two seconds."""
    try:
        socket.create_connection((address, port), timeout=2).close()
    except OSError:
        return False
    return True


def compare_nodes() -> int:
    """Asks each node, by a task on it, what code it has at the path of this checkout, the time, and
    which of the others it reaches.
    """
    answers = ask_nodes()
    commit, code, *_ = look_here(str(ROOT), [])
    wrong = []
    for at, answer in answers.items():
        if isinstance(answer, str):
            wrong.append(
                f"a task on the node at {at} {answer}: its NODE_ADDR must be an address where this "
                "node reaches it, and it this one, with no firewall between them"
            )
            continue
        its_commit, its_code, off, unreached = answer
        unreached = [other for other in unreached if not isinstance(answers[other], str)]
        if off > CLOCK:
            print(
                f"launch: warning: the clock of the node at {at} is {off:.0f} s or more from this "
                "one's, so that their logs do not fit together. Give all the same time server "
                "(chronyc tracking)",
                flush=True,
            )
        if its_code != code:
            wrong.append(
                f"the node at {at} has other code in {ROOT}/mindspeed_qerl ({its_commit}, files "
                f"{its_code}) than this one ({commit}, files {code}): bring all to the same "
                "commit, without edits"
            )
        if unreached:
            wrong.append(
                f"the node at {at} does not reach {', '.join(unreached)}: each NODE_ADDR must be "
                "an address where all nodes reach it, with no firewall between them"
            )
    for each in wrong:
        print(f"launch: {each}", file=sys.stderr)
    return int(bool(wrong))


def ask_nodes() -> dict[str, Any]:
    """Returns by address what `look_here` says on each node, the time as the seconds that it is off
    at least; in words why a node does not answer.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    look = ray.remote(num_cpus=0, max_retries=0)(look_here)
    nodes = [node for node in ray.nodes() if node["Alive"]]
    raylets = [(node["NodeManagerAddress"], node["NodeManagerPort"]) for node in nodes]
    before = time.time()
    asked = {
        node["NodeManagerAddress"]: look.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        ).remote(str(ROOT), raylets)
        for node in nodes
    }
    answers: dict[str, Any] = {}
    with (
        quiet(),
        redirect_stdout(StringIO()),
    ):  # Ray's own words on what fails, a page for a node that is lost
        ray.wait(list(asked.values()), num_returns=len(asked), timeout=ANSWER)
        after = time.time()
        for at, task in asked.items():
            try:
                *found, its_time, unreached = ray.get(task, timeout=0.1)
                answers[at] = (*found, max(before - its_time, its_time - after), unreached)
            except (ray.exceptions.RayError, TimeoutError) as error:
                answers[at] = (
                    f"has no answer after {ANSWER} s"
                    if isinstance(error, TimeoutError)
                    else "fails"
                )
        ray.shutdown()
    return answers


def look_here(root: str, raylets: list[tuple[str, int]]) -> tuple[str, str, float, list[str]]:
    """Commit of a checkout, a hash of the Python files of mindspeed_qerl in it, the time, and the
    addresses of `raylets` that do not answer here. As a task it brings this code along: the node's
    own may be another, or not there.
    """
    import hashlib
    import socket
    import subprocess
    import time
    from pathlib import Path

    now = time.time()
    try:
        git = subprocess.run(
            ["git", "-C", root, "rev-parse", "--short", "HEAD"],
            check=False,
            capture_output=True,
            text=True,
        ).stdout.strip()
    except OSError:  # there is none
        git = ""
    files = sorted(Path(root, "mindspeed_qerl").rglob("*.py"))
    code = hashlib.sha256(
        b"".join(file.name.encode() + file.read_bytes() for file in files)
    ).hexdigest()[:12]
    unreached = []
    for raylet in raylets:
        try:
            socket.create_connection(raylet, timeout=5).close()
        except OSError:
            unreached.append(raylet[0])
    return f"commit {git}" if git else "no commit", code if files else "none", now, unreached


@contextmanager
def quiet() -> Iterator[None]:
    """Nothing to stderr, from C++ neither: as long as a node registers, Ray says each second that
    it retries.
    """
    stderr, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)


def missing(nodes: list[Node], wanted: int, npus: int, address: str) -> str:
    """What is not there of `wanted` nodes with `npus` each, and what to do; "" if nothing."""
    if not nodes:
        return f"nobody answers at {address}"
    wanting = [
        f"the node at {node} has {node.npus} of {npus} NPUs" for node in nodes if node.npus != npus
    ]
    ranks = [node.rank for node in nodes]
    wanting += [
        f"the node at {node} is one too many of {wanted}: each has a NODE_RANK of its own, and "
        "all are started with the same NNODES"
        for place, node in enumerate(nodes)
        if node.rank in ranks[:place] or node.rank >= wanted
    ]
    absent = [str(rank) for rank in range(wanted) if rank not in ranks]
    if absent:
        there = ", ".join(map(str, nodes))
        wanting.append(
            f"{wanted - len(absent)} of {wanted} nodes are there ({there}): start this script on "
            f"the other{'s' * (len(absent) > 1)} with NODE_RANK={' and '.join(absent)} "
            f"MASTER_ADDR={address.rpartition(':')[0]} NODE_ADDR=its own address, or see what it "
            "says there; all need the same token and RAY_PORT"
        )
    return "; ".join(wanting)


def alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
