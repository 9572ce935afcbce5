"""The Ray of a run: joined or started, asked about its other nodes, and left."""

import contextlib
import os
import signal
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from mindspeed_qerl.ascend.limits import needed_cpus
from mindspeed_qerl.common.errors import EngineError
from mindspeed_qerl.engines import private_ray
from mindspeed_qerl.recipe.types import Recipe

Answer = TypeVar("Answer")
QUIET = {"log_to_driver": False, "logging_level": "ERROR"}


@contextlib.contextmanager
def ray_session(
    recipe: Recipe, environment: dict[str, str], logs: Path
) -> Iterator[dict[str, str]]:
    """Ray inside the block, which gets the addresses of its other nodes by their ids. At the end
    what the workers printed is in the folder `logs`, a Ray of our own has ended, and SIGTERM does
    again what it did before. environment: the variables of every worker.
    """
    handler = signal.getsignal(signal.SIGTERM) or signal.SIG_DFL  # None: not Python's own
    try:
        start_ray(recipe, environment)
        # a scheduler's stop is an interrupt; Ray's own handler would abort
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        node = ray._private.worker.global_worker.node
        printed, others = Path(node.get_logs_dir_path()), other_nodes()
        try:
            yield others
        finally:
            keep_logs(printed, logs, others)
    finally:
        private_ray.stop()
        signal.signal(signal.SIGTERM, handler)


def start_ray(recipe: Recipe, environment: dict[str, str]) -> None:
    """Join the cluster of RAY_ADDRESS, or the one of `ray start` here, or start one."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    runtime_env = {"env_vars": environment}
    if recipe.emulate_npu:
        npus = {"NPU": recipe.layout.world}
        private_ray.start(runtime_env=runtime_env, num_cpus=needed_cpus(recipe), resources=npus)
        return
    # Ray's own reading of RAY_ADDRESS=local listens on every interface
    if os.environ.get("RAY_ADDRESS") != "local":
        with contextlib.suppress(ConnectionError):
            ray.init(address="auto", runtime_env=runtime_env, **QUIET)
            return
    private_ray.start(runtime_env=runtime_env)


def other_nodes() -> dict[str, str]:
    """The nodes but for this one: Ray's id of each, and its address."""
    own = ray.get_runtime_context().get_node_id()
    alive = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    alive.pop(own, None)
    return alive


def ask(
    nodes: Collection[str], question: Callable[[str], Answer], path: Path, seconds: float
) -> dict[str, Answer]:
    """`question(path)` on each of these nodes, of those that answer within `seconds`."""
    if not nodes:
        return {}
    # upstream's `fit` ends with ray.shutdown() (grpo_trainer_hybrid.py:295)
    if not ray.is_initialized():
        ray.init(address="auto", **QUIET)
    remote = ray.remote(num_cpus=0, max_retries=0)(question)
    calls = {}
    for node in nodes:
        place = NodeAffinitySchedulingStrategy(node, soft=False)
        calls[remote.options(scheduling_strategy=place).remote(str(path))] = node
    answered, _ = ray.wait([*calls], num_returns=len(calls), timeout=seconds)
    answers = {}
    for call in answered:
        with contextlib.suppress(ray.exceptions.RayError):
            answers[calls[call]] = ray.get(call)
    return answers


def check_shared(run: Path, nodes: dict[str, str]) -> None:
    """EngineError if a node cannot see the run that is resumed. A rank without its checkpoint
    starts with random weights, while the others wait for it
    (megatron/training/checkpointing.py:902-930).
    """
    for node, is_there in ask(nodes, os.path.isdir, run.resolve(), seconds=60).items():
        if not is_there:
            raise EngineError(
                f"the node at {nodes[node]} has no {run.resolve()}: to be resumed, a run must be "
                "where every node reads it. Put it on a disk that they share, at the same path "
                "(run.root)"
            )


def keep_logs(source: Path, target: Path, nodes: Collection[str]) -> None:
    """Copy what the workers printed, here and on `nodes`, into `target`. source: Ray's folder,
    which is temporary and has the same path on every node. A node that does not answer within ten
    seconds is gone, and its logs with it.
    """

    def printed(folder: str) -> dict[str, bytes]:
        files = Path(folder).glob("worker-*.[oe][ur][tr]")
        return {file.name: file.read_bytes() for file in files if file.stat().st_size}

    elsewhere = ask(nodes, printed, source, seconds=10)
    for contents in (printed(str(source)), *elsewhere.values()):
        for name, content in contents.items():
            (target / name).write_bytes(content)


def this_node_first(construct: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """Upstream's `construct_placement_groups` with this node's groups first in its list, which is
    the order of the ranks (launcher.py:231-246). Ray may put the first one anywhere, and the first
    ranks write the checkpoints: they would lie on the other node, where this one's run directory is
    not.
    """

    def ordered(*args: Any) -> list[Any]:
        here = ray.get_runtime_context().get_node_id()

        def is_elsewhere(group: Any) -> bool:
            nodes = ray.util.placement_group_table(group)["bundles_to_node_id"]
            return here not in nodes.values()

        return sorted(construct(*args), key=is_elsewhere)

    return ordered
