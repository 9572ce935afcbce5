"""`python -I -S private_ray_guard.py DIRECTORY` removes a Ray's temporary directory when the process that holds it was
killed. It imports nothing that takes time or memory: one runs beside every run."""

import fcntl
import os
import shutil
import sys
import time
from pathlib import Path


def is_named(directory: Path) -> bool:
    """Whether a process has `directory` in its command line, as Ray's services do: they end some seconds after the
    process that started them, and write until then."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes()
        except OSError:  # it ended
            continue
        if process.name != str(os.getpid()) and os.fsencode(directory) in words:
            return True
    return False


if __name__ == "__main__":
    directory = Path(sys.argv[1])
    with open(directory / "lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until its process ends
        until = time.monotonic() + 120  # the next start removes what cannot be removed now
        while directory.exists() and time.monotonic() < until:
            time.sleep(0.1)
            if not is_named(directory):
                shutil.rmtree(directory, ignore_errors=True)
