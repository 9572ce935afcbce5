"""Wait until the Ray at RAY_ADDRESS has its nodes and their NPUs, and say who is missing if they do
not come.

On several nodes also whether they run the same code, answer, and have the same time.

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
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
ANSWER = 60  # seconds for a task on each node; it starts a worker there
CLOCK = 5  # seconds that two clocks may differ


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
            print(
                "launch: Ray has "
                + (", ".join(f"{npus} NPUs at {node}" for node, npus in nodes) or "not started yet")
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


def joined(address: str) -> list[tuple[str, int]]:
    """(address, NPUs) of each node that is alive; none as long as nobody answers at `address`."""
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
        (node["NodeManagerAddress"], int(node["Resources"].get("NPU", 0)))
        for node in ray.nodes()
        if node["Alive"]
    )


def watch(address: str, nodes: int) -> int:
    """Ends when a node has left Ray, at once if one is not there; the training, which Ray tells of
    a node that left too, has 10 seconds to end by itself.
    """
    there = {node for node, _ in joined(address)}
    if len(there) < nodes:
        print(f"{len(there)} of {nodes} nodes are in Ray", file=sys.stderr)
        return 1
    while True:
        time.sleep(2)
        now = {node for node, _ in joined(address)}
        if gone := there - now:
            print(
                f"launch: the node at {', '.join(sorted(gone))} has left Ray, and the training "
                "cannot go on without it: it ends now. Look at what that node's launcher says, "
                "and whether it can be reached",
                flush=True,
            )
            time.sleep(10)
            return 4


def compare_nodes() -> int:
    """Ask each node, by a task on it, what code it has at the path of this checkout, and the time."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    look = ray.remote(num_cpus=0, max_retries=0)(look_here)
    nodes = {node["NodeManagerAddress"]: node["NodeID"] for node in ray.nodes() if node["Alive"]}
    before = time.time()
    asked = {
        at: look.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)
        ).remote(str(ROOT))
        for at, node in nodes.items()
    }
    answers: dict[str, Any] = {}
    with (
        quiet(),
        redirect_stdout(StringIO()),
    ):  # Ray's own words on what fails, a page for a node that is lost
        ray.wait(list(asked.values()), num_returns=len(asked), timeout=ANSWER)
        for at, task in asked.items():
            try:
                answers[at] = ray.get(task, timeout=0.1)
            except (ray.exceptions.RayError, TimeoutError) as error:
                answers[at] = (
                    f"has no answer after {ANSWER} s"
                    if isinstance(error, TimeoutError)
                    else "fails"
                )
        ray.shutdown()
    commit, code, now = look_here(str(ROOT))
    wrong = []
    for at, answer in answers.items():
        if isinstance(answer, str):
            wrong.append(
                f"a task on the node at {at} {answer}: its NODE_ADDR must be an address where this "
                "node reaches it, and it this one, with no firewall between them"
            )
            continue
        its_commit, its_code, its_time = answer
        if (off := max(before - its_time, its_time - now)) > CLOCK:
            print(
                f"launch: warning: the clock of the node at {at} is {off:.0f} s or more from this "
                "one's, so that their logs do not fit together. Give both the same time server "
                "(chronyc tracking)",
                flush=True,
            )
        if its_code != code:
            wrong.append(
                f"the node at {at} has other code in {ROOT}/mindspeed_qerl ({its_commit}, files "
                f"{its_code}) than this one ({commit}, files {code}): bring both to the same "
                "commit, without edits"
            )
    for each in wrong:
        print(f"launch: {each}", file=sys.stderr)
    return int(bool(wrong))


def look_here(root: str) -> tuple[str, str, float]:
    """Commit of a checkout, a hash of the Python files of mindspeed_qerl in it, and the time. As a
    task it brings this code along: the node's own may be another, or not there.
    """
    import hashlib
    import subprocess
    import time
    from pathlib import Path

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
    return f"commit {git}" if git else "no commit", code if files else "none", time.time()


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


def missing(nodes: list[tuple[str, int]], wanted: int, npus: int, address: str) -> str:
    """What is not there of `wanted` nodes with `npus` each, and what to do; "" if nothing."""
    wanting = [
        f"the node at {node} has {have} of {npus} NPUs" for node, have in nodes if have < npus
    ]
    if not nodes:
        wanting.append(f"nobody answers at {address}")
    elif len(nodes) < wanted:
        wanting.append(
            f"{len(nodes)} of {wanted} nodes are there ({', '.join(node for node, _ in nodes)}): "
            "start this script on the other with NODE_RANK=1 "
            f"MASTER_ADDR={address.rpartition(':')[0]} NODE_ADDR=its own address, or see what it "
            "says there; both need the same token and RAY_PORT"
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
