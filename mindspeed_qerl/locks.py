"""A folder that one living process holds at a time."""

import fcntl
from pathlib import Path
from typing import IO


def hold(directory: Path) -> IO:
    """The open file `directory`/lock: the folder is held until it is closed, or its process ends, however that happens
    (flock(2)).

    Raises BlockingIOError when another open file holds it.
    """
    lock = open(directory / "lock", "w")  # noqa: SIM115
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise
    return lock
