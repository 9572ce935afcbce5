"""The Ray of a run: joined or started, asked about its other nodes, and left."""

import contextlib
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from mindspeed_qerl.common.errors import EngineError
from mindspeed_qerl.engines import private_ray
from mindspeed_qerl.recipe.types import Recipe

from .limits import needed_cpus


@contextlib.contextmanager
def ray_session(recipe: Recipe, environment: dict[str, str], logs: Path) -> Iterator[None]:
    """Ray inside the block. At the end what this node's workers printed is in the folder `logs`, a
    Ray of our own has ended, and SIGTERM does again what it did before. environment: the variables
    of every worker.
    """
    handler = signal.getsignal(signal.SIGTERM) or signal.SIG_DFL  # None: not Python's own
    try:
        start_ray(recipe, environment)
        # a scheduler's stop is an interrupt; Ray's own handler would abort
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        printed = Path(ray._private.worker.global_worker.node.get_logs_dir_path())
        try:
            yield
        finally:
            for file in printed.glob("worker-*.[oe][ur][tr]"):
                if file.stat().st_size:
                    shutil.copy(file, logs)
    finally:
        private_ray.stop()
        signal.signal(signal.SIGTERM, handler)


def start_ray(recipe: Recipe, environment: dict[str, str]) -> None:
    """Join the cluster of RAY_ADDRESS, or the one of `ray start` here, or start one."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    options = {"runtime_env": {"env_vars": environment}}
    if recipe.emulate_npu:
        options["num_cpus"] = needed_cpus(recipe)
        options["resources"] = {"NPU": recipe.layout.world}
    # Ray's own reading of RAY_ADDRESS=local listens on every interface
    elif os.environ.get("RAY_ADDRESS") != "local":
        with contextlib.suppress(ConnectionError):
            ray.init(address="auto", log_to_driver=False, logging_level="ERROR", **options)
            return
    private_ray.start(**options)


def check_shared(run: Path) -> None:
    """EngineError if a node cannot see the run that is resumed. A rank without its checkpoint
    starts with random weights, while the others wait for it
    (megatron/training/checkpointing.py:902-930).
    """
    is_there = ray.remote(num_cpus=0)(os.path.isdir)
    for node in ray.nodes():
        if not node["Alive"]:
            continue
        place = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        there = is_there.options(scheduling_strategy=place).remote(str(run.resolve()))
        if not ray.get(there):
            raise EngineError(
                f"the node at {node['NodeManagerAddress']} has no {run.resolve()}: to be resumed, "
                "a run must be where every node reads it. Put it on a disk that they share, at the "
                "same path (run.root)"
            )


def in_order_of_nodes(groups: list[Any]) -> list[Any]:
    """Puts upstream's placement groups on this node first, then by the NODE_RANK that the launcher
    gave the nodes: their order is that of the ranks (launcher.py:231-246). Ray may put the first
    one anywhere, and the first ranks write the checkpoints: they would lie on another node, where
    this one's run directory is not.
    """
    here = ray.get_runtime_context().get_node_id()
    labels = {node["NodeID"]: node["Labels"] for node in ray.nodes()}

    def place(group: Any) -> tuple[bool, int]:
        """STRICT_PACK: all of a group is on one node (launcher.py:98)."""
        (node,) = set(ray.util.placement_group_table(group)["bundles_to_node_id"].values())
        return node != here, int(labels[node].get("NODE_RANK", 0))

    return sorted(groups, key=place)
