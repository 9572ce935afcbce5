"""A Ray of one run's own on this machine, that no one else can reach, and that leaves nothing
behind.
"""

import atexit
import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any

import psutil
import ray
from ray._private import node, parameter, ray_constants

from mindspeed_qerl.common.errors import EngineError
from mindspeed_qerl.common.files import hold

PREFIX = "qerl_ray_"
SETTINGS = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    # No record of every call, for a dashboard that is not there: it took 45 MiB in 2,000 steps.
    "RAY_task_events_report_interval_ms": "0",
    # `ray.init` would wait for a worker that nobody needs yet, and for ever if it is killed.
    "RAY_prestart_worker_first_driver": "0",
    "RAY_BACKEND_LOG_LEVEL": "fatal",
    # A busy raylet is not given up after five answers that came late.
    "RAY_health_check_failure_threshold": "20",
}
# temporary directory of this process's Ray: its lock, and earlier children
_started: dict[Path, tuple[IO, list]] = {}


def start(**options: Any) -> Path:
    """`ray.init` of a new Ray that listens on the loopback interface only; `options` are its other
    arguments.

    Returns its temporary directory, which `stop` removes; if this process is killed, the next
    `start` does, and Ray's processes end by themselves within a minute. EngineError if Ray does not
    start.
    """
    os.environ.update(SETTINGS)
    _configure_ray()
    directory = _new_directory()
    try:
        with _stderr_into(directory / "start.log"):  # Ray prints there which log level it was given
            ray.init(
                address="local",
                include_dashboard=False,
                log_to_driver=False,
                logging_level="ERROR",
                _temp_dir=str(directory),
                **options,
            )
    except SystemExit as error:  # Ray's own handler of SIGTERM
        raise KeyboardInterrupt from error
    except Exception as error:  # of many classes
        raise EngineError(
            "Ray did not start; usually one of its processes was killed, or there is no memory or "
            f"disk left. Ray says: {' '.join(str(error).split())}"
        ) from error
    directory.chmod(0o700)  # Ray opens it to everybody
    return directory


def _configure_ray() -> None:
    """Sets what Ray has no options for; here and not at import, since a process may join another
    Ray.

    Ray takes 127.0.0.1 for the host's public address and listens on every interface, unless it is
    told not to be a cluster, which it asks when it is imported
    (ray/_private/services.py:resolve_ip_for_localhost, ray_constants.py:ENABLE_RAY_CLUSTER).
    """
    ray_constants.ENABLE_RAY_CLUSTER = False
    # Under `uv run` Ray would start every worker by uv, in a copy of this folder (ray-project/ray
    # issues 56697 and 59639).
    ray_constants.RAY_ENABLE_UV_RUN_RUNTIME_ENV = False
    # Three services that one machine does not need cost two seconds of each start: an autoscaler,
    # log files to a driver that does not want them, and the dashboard's server.
    parameter.RayParams = partial(parameter.RayParams, no_monitor=True, include_log_monitor=False)
    node.Node.start_api_server = lambda *_, **__: None


def _new_directory() -> Path:
    """A temporary directory that this process holds."""
    parent = Path(tempfile.gettempdir())
    # a socket's whole path may have 107 characters (unix(7)), and Ray's part is long
    if len(str(parent)) > 20:
        parent = Path("/tmp")
    remove_left(parent)
    # it gets its name when it is locked
    making = Path(tempfile.mkdtemp(prefix=f".{PREFIX}", dir=parent))
    lock = hold(making)
    directory = making.rename(parent / making.name.removeprefix("."))
    _started[directory] = lock, psutil.Process().children(recursive=True)
    return directory


def remove_left(parent: Path) -> None:
    """Remove the temporary directories in `parent` that this user's killed processes left there."""
    for left in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # held by a living process, or gone
            if left.lstat().st_uid == os.getuid():  # in another user's even `lock` could be a trap
                with hold(left):
                    shutil.rmtree(left, ignore_errors=True)


def is_whole() -> bool:
    """Returns True if Ray's own processes are all alive, if `start` started some."""
    return not _started or ray._private.services.remaining_processes_alive()


def stop() -> None:
    """End this process's Ray, if there is one; returns when its processes and its temporary
    directory are gone.
    """
    children = psutil.Process().children(recursive=True) if _started else []
    ray.shutdown()
    for directory, (lock, others) in list(_started.items()):
        ended = [child for child in children if child not in others]
        psutil.wait_procs(ended, timeout=10)
        shutil.rmtree(directory, ignore_errors=True)
        lock.close()
        del _started[directory]  # last: a second Ctrl-C may come in between


atexit.register(stop)


@contextlib.contextmanager
def _stderr_into(file: Path) -> Iterator[None]:
    """Inside, what this process and its C++ libraries write to stderr goes into `file`."""
    screen = os.dup(2)
    with open(file, "wb") as aside:
        os.dup2(aside.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(screen, 2)
        os.close(screen)
