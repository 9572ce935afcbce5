"""What a Ray that was joined has, what of it is free, who else is in it, and whether a run fits. Importing it imports
no Ray: the preflight asks in a process of its own."""

import os
import time
from collections.abc import Sequence
from typing import Any

from mindspeed_qerl.ascend.settings import needed_cpus
from mindspeed_qerl.errors import EngineError
from mindspeed_qerl.recipe.types import Recipe


def look() -> dict[str, Any]:
    """The cluster that this process has joined: its resources, what is available of them, its nodes, the NPUs of each,
    and every other job that runs in it, in words. From Ray's GCS: a Ray without a dashboard has no other state API."""
    import ray
    from ray._private import state

    nodes = [node for node in ray.nodes() if node["Alive"]]
    own = ray.get_runtime_context().get_job_id()
    jobs = [f"process {job['DriverPid']} on {job['DriverIPAddress']} since "
            f"{time.strftime('%Y-%m-%d %H:%M', time.localtime(job['StartTime'] / 1000))}"
            + (f" ({job['Entrypoint'][:120]})" if job["Entrypoint"] else "")
            for job in state.jobs() if not job["IsDead"] and job["JobID"] != own]
    return {"resources": ray.cluster_resources(), "available": ray.available_resources(), "nodes": len(nodes),
            "npus": [int(node["Resources"].get("NPU", 0)) for node in nodes], "jobs": jobs}


def holders(cluster: dict[str, Any]) -> str:
    """Who holds what is not free.

    >>> holders({"jobs": ["process 7 on 10.0.0.1 since 2026-01-01 12:00"]})
    'held by process 7 on 10.0.0.1 since 2026-01-01 12:00'
    """
    return f"held by {'; '.join(cluster['jobs'])}" if cluster["jobs"] else (
        "held by no job that runs: actors or placement groups that were left detached")


def placed(width: int, npus: int, rooms: Sequence[int]) -> bool:
    """Whether Ray can give upstream's placement groups: as many NPUs in each as the driver's node shows, `width`, all
    on one node (launcher.py:64-104, STRICT_PACK). rooms: NPUs of each node.

    >>> placed(8, 16, [8, 8]), placed(16, 16, [8, 8]), placed(8, 12, [8, 8])
    (True, False, True)
    """
    left = list(rooms)
    for group in [width] * (npus // width) + [npus % width] * (npus % width > 0):
        node = next((node for node, room in enumerate(left) if room >= group), None)
        if node is None:
            return False
        left[node] -= group
    return True


def check_resources(recipe: Recipe, patience: float = 10) -> None:
    """EngineError if Ray has too few NPUs or CPUs, or, after `patience` seconds, too few that are free; upstream would
    wait for them for ever (`ray.get(pg.ready())`, launcher.py:101)."""
    import ray

    have = ray.cluster_resources()
    npus, cpus = int(have.get("NPU", 0)), int(have.get("CPU", 0))
    if npus < recipe.layout.world:
        raise EngineError(
            f"{recipe.layout.world} NPUs are asked for (rl_config.actor_resource.num_npus), Ray sees {npus}. Usual "
            f"causes: ASCEND_RT_VISIBLE_DEVICES names fewer (it is {os.environ.get('ASCEND_RT_VISIBLE_DEVICES')!r} "
            "here), the container maps fewer /dev/davinci*, or `ray start` ran with other --resources. Unset it, map "
            f"davinci0-15, then: ray stop; ray start --head --resources='{{\"NPU\": {recipe.layout.world}}}'; or ask "
            f"for {npus}.")
    need = needed_cpus(recipe)
    if cpus < need:
        most = (cpus - need + recipe.layout.world * recipe.npu.cpus_per_npu) // recipe.layout.world
        raise EngineError(
            f"{recipe.layout.world} NPUs x rl_config.num_cpus_for_placement_group = {recipe.npu.cpus_per_npu}, and "
            f"the reward process, the advantage task and the transfer dock, need {need} CPUs; Ray has {cpus}. They "
            f"are places, not threads: set rl_config.num_cpus_for_placement_group={max(1, most)}, or start Ray with "
            f"--num-cpus={need}.")
    check_free(recipe, patience)


def check_free(recipe: Recipe, patience: float) -> None:
    """EngineError if others hold what is asked for of the Ray that was joined, or its nodes cannot hold upstream's
    groups. In `patience` seconds what a run before has just given back is seen again."""
    need, until = {"NPU": recipe.layout.world, "CPU": needed_cpus(recipe)}, time.monotonic() + patience
    while True:
        found = look()
        short = {name: int(found["available"].get(name, 0)) for name, asked in need.items()
                 if found["available"].get(name, 0) < asked}
        if not short or time.monotonic() > until:
            break
        time.sleep(0.5)
    for name, free in short.items():
        raise EngineError(f"{need[name]} {name}s are asked for, Ray has {int(found['resources'][name])}, of which "
                          f"{free} are free; the others are {holders(found)}. Upstream would wait for "
                          "ever: wait for that job, or end it, or ask for fewer")
    if len(found["npus"]) > 1 and not recipe.emulate_npu:
        count = dies_of_a_node()
        if not placed(min(count, recipe.layout.world), recipe.layout.world, found["npus"]):
            raise EngineError(
                f"this node shows {count} dies to CANN, and upstream asks Ray for groups of "
                f"{min(count, recipe.layout.world)} on one node each (launcher.py:64-101); the nodes have "
                f"{', '.join(map(str, found['npus']))}: it would wait for ever. Set ASCEND_RT_VISIBLE_DEVICES on "
                "every node to the dies that the run has there, from 0 on")


def dies_of_a_node() -> int:
    """As upstream counts them, in this process (launcher.py:64-77)."""
    try:
        import acl

        count, error = acl.rt.get_device_count()
    except ImportError:
        return 8
    return 8 if error else count
