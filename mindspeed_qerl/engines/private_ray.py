"""A Ray of one run's own on this machine, that no one else can reach, and that leaves nothing
behind.
"""

import atexit
import contextlib
import os
import shutil
import subprocess
import sys
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
# Three processes that nobody asks anything cost two seconds of each start: an autoscaler, which one
# machine has no use for, log files to a driver that does not want them, and the dashboard's server.
# `ray.init` knows no options for them.
parameter.RayParams = partial(parameter.RayParams, no_monitor=True, include_log_monitor=False)
node.Node.start_api_server = lambda *_, **__: None
# Under `uv run` Ray would start every worker by uv, in a copy of this folder (ray-project/ray
# issues 56697 and 59639).
ray_constants.RAY_ENABLE_UV_RUN_RUNTIME_ENV = False
GUARD = Path(__file__).with_name("private_ray_guard.py")
STOPPED = 60  # seconds that a process may be stopped
# temporary directory of this process's Ray: its lock, its guard, and earlier children
_ours: dict[Path, tuple[IO, subprocess.Popen, list]] = {}


def start(**options: Any) -> Path:
    """`ray.init` of a new Ray that listens on the loopback interface only; `options` are its other
    arguments.

    Ray takes 127.0.0.1 for the host's public address and listens on every interface, unless it is
    told not to be a cluster, which it asks when it is imported
    (ray/_private/services.py:resolve_ip_for_localhost, ray_constants.py:ENABLE_RAY_CLUSTER).

    Returns its temporary directory, which `stop` removes; if this process is killed, the guard that
    is started here does, and if that is killed, too, the next `start`. The guard kills processes
    that were stopped STOPPED seconds ago (`stopped`). EngineError if Ray does not start.
    """
    # Its agents outlive a killed process by the last one's seconds, not by 60. The raylet is not
    # given up, without a word of why, when it did not answer five times, which may take 20 s: what
    # is stopped is the guard's to say. No record of every call is kept, for a dashboard that is not
    # there: it took 45 MiB in 2,000 steps. No worker is started before one is wanted: `ray.init`
    # waits for it, for ever if it is killed.
    os.environ.update(
        RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0",
        RAY_USAGE_STATS_ENABLED="0",
        RAY_task_events_report_interval_ms="0",
        RAY_prestart_worker_first_driver="0",
        RAY_BACKEND_LOG_LEVEL="fatal",
        RAY_gcs_rpc_server_reconnect_timeout_s="5",
        RAY_health_check_failure_threshold="20",
    )
    ray_constants.ENABLE_RAY_CLUSTER = False
    parent = Path(tempfile.gettempdir())
    if (
        len(str(parent)) > 20
    ):  # a socket's whole path may have 107 characters (unix(7)), and Ray's part is long
        parent = Path("/tmp")
    remove_left(parent)
    making = Path(
        tempfile.mkdtemp(prefix=f".{PREFIX}", dir=parent)
    )  # it gets its name when it is locked
    lock, directory = hold(making), parent / making.name.removeprefix(".")
    making.rename(directory)
    # in a session of its own: Ctrl-C ends all the others
    guard = subprocess.Popen(
        [sys.executable, "-I", "-S", GUARD, directory, str(os.getpid()), str(STOPPED)],
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    _ours[directory] = lock, guard, psutil.Process().children(recursive=True)
    start_log = directory / "start.log"
    try:
        with _stderr_into(start_log):  # it says there which log level it was given
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
        if isinstance(error, OSError) and error.errno:  # the system's, like a full disk
            raise
        raise EngineError(
            "Ray did not start; usually one of its processes (raylet, gcs_server, an agent) was "
            f"killed, or found no memory. Ray says: {' '.join(str(error).split())}"
        ) from error
    directory.chmod(0o700)  # Ray opens it to everybody
    start_log.unlink()  # the guard's sign that Ray has started
    return directory


def remove_left(parent: Path) -> None:
    """Temporary directories in `parent` that this user's killed processes left there."""
    for left in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # held by a living process, or gone
            if left.lstat().st_uid == os.getuid():  # in another user's even `lock` could be a trap
                with hold(left):
                    shutil.rmtree(left, ignore_errors=True)


def is_whole() -> bool:
    """Whether Ray's own processes are all alive, if `start` started some."""
    return not _ours or ray._private.services.remaining_processes_alive()


def stopped() -> dict[int, tuple[str, str]]:
    """What the guard has killed: pid -> (whose program it ran, what happened to it)."""
    files = [directory / "stopped" for directory in _ours]
    lines = [line for file in files if file.exists() for line in file.read_text().splitlines()]
    return {int(pid): (name, words) for pid, name, words in (line.split("\t") for line in lines)}


def stop() -> None:
    """End this process's Ray, if there is one; returns when its processes and its temporary
    directory are gone.
    """
    children = psutil.Process().children(recursive=True) if _ours else []
    ray.shutdown()
    for directory, (lock, guard, others) in list(_ours.items()):
        _, alive = psutil.wait_procs(
            [child for child in children if child not in others], timeout=10
        )
        for child in alive:  # one that is stopped does not hear of it
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        shutil.rmtree(directory, ignore_errors=True)
        guard.kill()
        guard.wait()
        lock.close()
        del _ours[directory]  # not before: a second Ctrl-C may come in between


atexit.register(stop)  # a process that ends without it was killed, the guard says


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
