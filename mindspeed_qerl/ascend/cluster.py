"""What a Ray that was joined has, what of it is free, who else is in it, and whether a run fits.
Importing it imports no Ray: the preflight asks in a process of its own.
"""

import contextlib
import os
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, TypeVar

import psutil

from mindspeed_qerl.ascend.limits import TRANSFER_DOCK_CPUS, needed_cpus
from mindspeed_qerl.common.errors import EngineError
from mindspeed_qerl.recipe.types import Recipe

Answer = TypeVar("Answer")


def look() -> dict[str, Any]:
    """The cluster that this process has joined: its resources, what is available of them, its
    nodes, the NPUs of each and the CPUs that each has free, and every other job that runs in it, in
    words. From Ray's GCS: a Ray without a dashboard has no other state API.
    """
    import ray
    from ray._private import state

    nodes = [node for node in ray.nodes() if node["Alive"]]
    own, free = ray.get_runtime_context().get_job_id(), state.available_resources_per_node()
    jobs = [
        f"process {job['DriverPid']} on {job['DriverIPAddress']} since "
        f"{time.strftime('%Y-%m-%d %H:%M', time.localtime(job['StartTime'] / 1000))}"
        + (f" ({job['Entrypoint'][:120]})" if job["Entrypoint"] else "")
        for job in state.jobs()
        if not job["IsDead"] and job["JobID"] != own
    ]
    return {
        "resources": ray.cluster_resources(),
        "available": ray.available_resources(),
        "nodes": len(nodes),
        "npus": [int(node["Resources"].get("NPU", 0)) for node in nodes],
        "cpus": [int(free.get(node["NodeID"], {}).get("CPU", 0)) for node in nodes],
        "jobs": jobs,
    }


def other_nodes() -> dict[str, str]:
    """The nodes but for this one: Ray's name of each, and its address."""
    import ray

    own = ray.get_runtime_context().get_node_id()
    return {
        node["NodeID"]: node["NodeManagerAddress"]
        for node in ray.nodes()
        if node["Alive"] and node["NodeID"] != own
    }


def interface_of(address: str) -> str | None:
    """The network interface of this machine that has `address`; None if none has, as behind an
    address translation.

    >>> interface_of("127.0.0.1"), interface_of("203.0.113.1")
    ('lo', None)
    """
    for name, addresses in psutil.net_if_addrs().items():
        if address in [each.address.partition("%")[0] for each in addresses]:
            return name
    return None


def ask(
    nodes: Collection[str], question: Callable[[str], Answer], of: Path, seconds: float
) -> dict[str, Answer]:
    """What `question(of)` is on each of these nodes, of those that answer in `seconds`."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    if (
        nodes and not ray.is_initialized()
    ):  # upstream's `fit` ends with ray.shutdown() (grpo_trainer_hybrid.py:295)
        ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
    there = ray.remote(num_cpus=0, max_retries=0)(question)
    asked = {
        there.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(
            str(of)
        ): node
        for node in nodes
    }
    answers = {}
    for answer in ray.wait([*asked], num_returns=len(asked), timeout=seconds)[0] if asked else ():
        with contextlib.suppress(ray.exceptions.RayError):
            answers[asked[answer]] = ray.get(answer)
    return answers


def check_shared(run: Path, nodes: dict[str, str]) -> None:
    """EngineError if a node cannot see the run that is resumed. A rank without its checkpoint
    starts with random weights, while the others wait for it
    (megatron/training/checkpointing.py:902-930).
    """
    for node, there in ask(nodes, os.path.isdir, run.resolve(), seconds=60).items():
        if not there:
            raise EngineError(
                f"the node at {nodes[node]} has no {run.resolve()}: to be resumed, a run must be "
                "where every node reads it. Put it on a disk that they share, at the same path "
                "(run.root)"
            )


def keep_logs(source: Path, target: Path, nodes: Collection[str]) -> None:
    """Copy what the workers printed, here and on `nodes`, into `target`. source: Ray's folder,
    which is temporary and has the same path on every node. A node that does not answer in ten
    seconds has gone, and its logs with it.
    """

    def printed(folder: str) -> dict[str, bytes]:
        return {
            file.name: content
            for file in Path(folder).glob("worker-*")
            if file.suffix in (".out", ".err") and (content := file.read_bytes())
        }

    for files in (printed(str(source)), *ask(nodes, printed, source, seconds=10).values()):
        for name, content in files.items():
            (target / name).write_bytes(content)


def holders(cluster: dict[str, Any]) -> str:
    """Who holds what is not free.

    >>> holders({"jobs": ["process 7 on 10.0.0.1 since 2026-01-01 12:00"]})
    'held by process 7 on 10.0.0.1 since 2026-01-01 12:00'
    """
    return (
        f"held by {'; '.join(cluster['jobs'])}"
        if cluster["jobs"]
        else ("held by no job that runs: actors or placement groups that were left detached")
    )


def placed(width: int, npus: int, rooms: Sequence[int]) -> bool:
    """Whether Ray can give upstream's placement groups: as many NPUs in each as the driver's node
    shows, `width`, all on one node (launcher.py:64-104, STRICT_PACK). rooms: NPUs of each node.

    >>> placed(8, 16, [8, 8]), placed(16, 16, [8, 8]), placed(8, 12, [8, 8])
    (True, False, True)
    """
    return _left(width, npus, rooms) is not None


def _left(width: int, npus: int, rooms: Sequence[int]) -> list[int] | None:
    """What upstream's groups leave of the NPUs of each node; None if they do not fit."""
    left = list(rooms)
    for group in [width] * (npus // width) + [npus % width] * (npus % width > 0):
        node = next((node for node, room in enumerate(left) if room >= group), None)
        if node is None:
            return None
        left[node] -= group
    return left


def this_node_first(make: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """Upstream's `construct_placement_groups` with this node's groups first in its list, which is
    the order of the ranks (launcher.py:231-246). Ray may put the first one anywhere, and the first
    ranks write the checkpoints: they would lie on the other node, where this one's run directory is
    not.
    """

    def made(*args: Any) -> list[Any]:
        import ray

        here = ray.get_runtime_context().get_node_id()
        return sorted(
            make(*args),
            key=lambda group: (
                here not in ray.util.placement_group_table(group)["bundles_to_node_id"].values()
            ),
        )

    return made


def lacking_cpus(recipe: Recipe, width: int, npus: Sequence[int], cpus: Sequence[int]) -> str:
    """What upstream would wait for, for ever and without a word, where all nodes together have CPUs
    enough: a node those of its ranks, some node those of the transfer dock, after a reward process
    has been put on each (cli/train_grpo.py:150-155, SPREAD). "" if nothing. npus, cpus: of each
    node; `width` as in `placed`, which holds.
    """
    left = _left(width, recipe.layout.world, npus)
    ranks = [(room - over) * recipe.npu.cpus_per_npu for room, over in zip(npus, left, strict=True)]
    free = [have - own for have, own in zip(cpus, ranks, strict=True)]
    if min(free) >= 0 and max(free) >= TRANSFER_DOCK_CPUS + recipe.npu.cpus_for_tasks:
        return ""
    return (
        f"the nodes have {', '.join(map(str, cpus))} CPUs free; their ranks reserve "
        f"{', '.join(map(str, ranks))}, a reward process on each {recipe.npu.cpus_for_tasks}, and "
        f"the transfer dock {TRANSFER_DOCK_CPUS} on one of them (transfer_dock.py:248): upstream "
        "would wait for ever"
    )


def check_resources(recipe: Recipe, patience: float = 10) -> None:
    """EngineError if Ray has too few NPUs or CPUs, or, after `patience` seconds, too few that are
    free; upstream would wait for them for ever (`ray.get(pg.ready())`, launcher.py:101).
    """
    import ray

    have = ray.cluster_resources()
    npus, cpus = int(have.get("NPU", 0)), int(have.get("CPU", 0))
    if npus < recipe.layout.world:
        raise EngineError(
            f"{recipe.layout.world} NPUs are asked for (rl_config.actor_resource.num_npus), Ray "
            f"sees {npus}. Usual causes: ASCEND_RT_VISIBLE_DEVICES names fewer (it is "
            f"{os.environ.get('ASCEND_RT_VISIBLE_DEVICES')!r} here), the container maps fewer "
            "/dev/davinci*, or `ray start` ran with other --resources. Unset it, map davinci0-15, "
            f"then: ray stop; ray start --head --resources='{{\"NPU\": {recipe.layout.world}}}'; "
            f"or ask for {npus}."
        )
    need = needed_cpus(recipe)
    if cpus < need:
        most = (cpus - need + recipe.layout.world * recipe.npu.cpus_per_npu) // recipe.layout.world
        raise EngineError(
            f"{recipe.layout.world} NPUs x rl_config.num_cpus_for_placement_group = "
            f"{recipe.npu.cpus_per_npu}, and the reward process, the advantage task and the "
            f"transfer dock, need {need} CPUs; Ray has {cpus}. They are places, not threads: set "
            f"rl_config.num_cpus_for_placement_group={max(1, most)}, or start Ray with "
            f"--num-cpus={need}."
        )
    check_free(recipe, patience)


def check_free(recipe: Recipe, patience: float) -> None:
    """EngineError if others hold what is asked for of the Ray that was joined, or its nodes cannot
    hold upstream's groups. In `patience` seconds what a run before has just given back is seen
    again.
    """
    need, until = (
        {"NPU": recipe.layout.world, "CPU": needed_cpus(recipe)},
        time.monotonic() + patience,
    )
    while True:
        found = look()
        short = {
            name: int(found["available"].get(name, 0))
            for name, asked in need.items()
            if found["available"].get(name, 0) < asked
        }
        if not short or time.monotonic() > until:
            break
        time.sleep(0.5)
    for name, free in short.items():
        raise EngineError(
            f"{need[name]} {name}s are asked for, Ray has {int(found['resources'][name])}, of "
            f"which {free} are free; the others are {holders(found)}. Upstream would wait for "
            "ever: wait for that job, or end it, or ask for fewer"
        )
    if len(found["npus"]) > 1 and not recipe.emulate_npu:
        count = dies_of_a_node()
        width = min(count, recipe.layout.world)
        if not placed(width, recipe.layout.world, found["npus"]):
            raise EngineError(
                f"this node shows {count} dies to CANN, and upstream asks Ray for groups of "
                f"{width} on one node each (launcher.py:64-101); the nodes have "
                f"{', '.join(map(str, found['npus']))}: it would wait for ever. Set "
                "ASCEND_RT_VISIBLE_DEVICES on every node to the dies that the run has there, from "
                "0 on"
            )
        if lacking := lacking_cpus(recipe, width, found["npus"], found["cpus"]):
            raise EngineError(
                f"{lacking}. CPUs are places, not threads: start each node's Ray with "
                f"--num-cpus={need['CPU']}, or lower rl_config.num_cpus_for_placement_group = "
                f"{recipe.npu.cpus_per_npu}"
            )


def dies_of_a_node() -> int:
    """As upstream counts them, in this process (launcher.py:64-77)."""
    try:
        import acl

        count, error = acl.rt.get_device_count()
    except ImportError:
        return 8
    return 8 if error else count
