"""Wait until the Ray at RAY_ADDRESS has its nodes and their NPUs, and say who is missing if they do not come.

exit status: 0 all there, 1 the time is over, 3 Ray ended
"""

import argparse
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, required=True, help="nodes that share the NPUs equally")
    parser.add_argument("--npus", type=int, required=True, help="NPUs of all nodes together")
    parser.add_argument("--timeout", type=float, required=True, help="seconds")
    parser.add_argument("--ray-process", type=int, required=True, help="the process of `ray start --block`")
    args = parser.parse_args()
    address = os.environ["RAY_ADDRESS"]
    end, told = time.monotonic() + args.timeout, None
    while True:
        nodes = joined(address)
        if nodes != told:
            print("launch: Ray has "
                  + (", ".join(f"{npus} NPUs at {node}" for node, npus in nodes) or "not started yet"), flush=True)
            told = nodes
        wanting = missing(nodes, args.nodes, args.npus // args.nodes, address)
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
    return sorted((node["NodeManagerAddress"], int(node["Resources"].get("NPU", 0)))
                  for node in ray.nodes() if node["Alive"])


@contextmanager
def quiet() -> Iterator[None]:
    """Nothing to stderr, from C++ neither: as long as a node registers, Ray says each second that it retries."""
    stderr, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)


def missing(nodes: list[tuple[str, int]], wanted: int, npus: int, address: str) -> str:
    """What is not there of `wanted` nodes with `npus` each, and what to do; "" if nothing."""
    wanting = [f"the node at {node} has {have} of {npus} NPUs" for node, have in nodes if have < npus]
    if not nodes:
        wanting.append(f"nobody answers at {address}")
    elif len(nodes) < wanted:
        wanting.append(f"{len(nodes)} of {wanted} nodes are there ({', '.join(node for node, _ in nodes)}): start "
                       f"this script on the other with NODE_RANK=1 MASTER_ADDR={address.rpartition(':')[0]} "
                       "NODE_ADDR=its own address; both need the same token and RAY_PORT")
    return "; ".join(wanting)


def alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
