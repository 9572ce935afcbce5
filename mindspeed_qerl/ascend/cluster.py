"""What a Ray has, what of it is free, who holds the rest, and whether a run fits. Importing it
imports no Ray: the preflight asks in a process of its own.
"""

import time
from collections.abc import Sequence
from typing import Any

import psutil

from mindspeed_qerl.common.errors import EngineError
from mindspeed_qerl.recipe.types import Recipe

from .limits import TRANSFER_DOCK_CPUS, needed_cpus

# What to do where Ray has too few of a resource.
WAYS_OUT = {
    "NPU": "Usual causes: ASCEND_RT_VISIBLE_DEVICES names fewer, the container maps fewer "
    "/dev/davinci*, or `ray start` ran with other --resources",
    "CPU": "CPUs are places, not threads: start Ray with a larger --num-cpus, or lower "
    "rl_config.num_cpus_for_placement_group",
}


def look() -> dict[str, Any]:
    """The cluster that this process has joined: its resources, what is available of them, its
    nodes, the NPUs of each and the CPUs that each has free, and every other job that runs in it, in
    words. From Ray's GCS: a Ray without a dashboard has no other state API.
    """
    import ray
    from ray._private import state

    nodes = [node for node in ray.nodes() if node["Alive"]]
    own = ray.get_runtime_context().get_job_id()
    free = state.available_resources_per_node()
    jobs = [job for job in state.jobs() if not job["IsDead"] and job["JobID"] != own]
    return {
        "resources": ray.cluster_resources(),
        "available": ray.available_resources(),
        "nodes": len(nodes),
        "npus": [int(node["Resources"].get("NPU", 0)) for node in nodes],
        "cpus": [int(free.get(node["NodeID"], {}).get("CPU", 0)) for node in nodes],
        "jobs": [
            f"process {job['DriverPid']} on {job['DriverIPAddress']} ({job['Entrypoint'][:120]})"
            for job in jobs
        ],
    }


def interface_of(address: str) -> str | None:
    """The network interface of this machine that has `address`; None if none has, as behind an
    address translation.

    >>> interface_of("127.0.0.1"), interface_of("203.0.113.1")
    ('lo', None)
    """
    for name, addresses in psutil.net_if_addrs().items():
        if address in [entry.address.partition("%")[0] for entry in addresses]:
            return name
    return None


def holders(cluster: dict[str, Any]) -> str:
    """Who holds what is not free, of `look`.

    >>> holders({"jobs": ["process 7 on 10.0.0.1 (python train.py)"]})
    'held by process 7 on 10.0.0.1 (python train.py)'
    """
    if cluster["jobs"]:
        return f"held by {'; '.join(cluster['jobs'])}"
    return "held by no running job: by actors or placement groups that were left detached"


def placed(width: int, npus: int, rooms: Sequence[int]) -> list[int] | None:
    """Returns the NPUs of each node that upstream's placement groups take; None if Ray cannot give
    them: as many NPUs in each as the driver's node shows, `width`, all on one node
    (launcher.py:64-104, STRICT_PACK). rooms: NPUs of each node.

    >>> placed(8, 16, [8, 8]), placed(16, 16, [8, 8]), placed(8, 12, [8, 8])
    ([8, 8], None, [8, 4])
    """
    taken = [0] * len(rooms)
    for start in range(0, npus, width):
        group = min(width, npus - start)
        node = next((node for node, room in enumerate(rooms) if room >= taken[node] + group), None)
        if node is None:
            return None
        taken[node] += group
    return taken


def check_resources(recipe: Recipe, patience: float = 10) -> None:
    """EngineError if Ray has too few NPUs or CPUs, or if others hold them; upstream would wait for
    ever (`ray.get(pg.ready())`, launcher.py:101); or as `check_nodes`. Within `patience` seconds
    what an earlier run has given back shows again.
    """
    need = {"NPU": recipe.layout.world, "CPU": needed_cpus(recipe)}
    until = time.monotonic() + patience
    while True:
        cluster = look()
        available = cluster["available"]
        short = [name for name, count in need.items() if available.get(name, 0) < count]
        if not short or time.monotonic() >= until:
            break
        time.sleep(0.5)
    for name in short:
        count = int(cluster["resources"].get(name, 0))
        free = int(available.get(name, 0))
        reason = WAYS_OUT[name]
        if count >= need[name]:
            reason = f"{free} are free, the others are {holders(cluster)}: wait, or end it"
        raise EngineError(f"{need[name]} {name}s are needed, Ray has {count}. {reason}")
    if len(cluster["npus"]) > 1 and not recipe.emulate_npu:
        check_nodes(recipe, cluster)


def check_nodes(recipe: Recipe, cluster: dict[str, Any]) -> None:
    """EngineError if the nodes cannot hold upstream's groups, or if upstream would wait for CPUs,
    for ever and without a message, where all nodes together have enough: each node needs those of
    its ranks and of a reward process (cli/train_grpo.py:150-155, SPREAD), one of them those of the
    transfer dock.
    """
    dies = dies_of_a_node()
    width = min(dies, recipe.layout.world)
    taken = placed(width, recipe.layout.world, cluster["npus"])
    if taken is None:
        raise EngineError(
            f"this node shows {dies} dies to CANN, and upstream asks Ray for groups of {width} on "
            f"one node each (launcher.py:64-101); the nodes have "
            f"{', '.join(map(str, cluster['npus']))}: it would wait for ever. Set "
            "ASCEND_RT_VISIBLE_DEVICES on every node to the dies that the run has there, from 0 on"
        )
    cpus = cluster["cpus"]
    ranks = [npus * recipe.npu.cpus_per_npu for npus in taken]
    free = [have - reserved for have, reserved in zip(cpus, ranks)]
    if min(free) < 0 or max(free) < TRANSFER_DOCK_CPUS + recipe.npu.cpus_for_tasks:
        raise EngineError(
            f"the nodes have {', '.join(map(str, cpus))} CPUs free; their ranks reserve "
            f"{', '.join(map(str, ranks))}, a reward process on each {recipe.npu.cpus_for_tasks}, "
            f"and the transfer dock {TRANSFER_DOCK_CPUS} on one of them (transfer_dock.py:248): "
            f"upstream would wait for ever. {WAYS_OUT['CPU']}"
        )


def dies_of_a_node() -> int:
    """As upstream counts them, in this process (launcher.py:64-77)."""
    try:
        import acl

        count, error = acl.rt.get_device_count()
    except ImportError:
        return 8
    return 8 if error else count
