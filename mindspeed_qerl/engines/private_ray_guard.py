"""`python -I -S private_ray_guard.py DIRECTORY PID` cleans up after the run of process PID, if it
is killed: prints its last words, kills its Ray and removes DIRECTORY, Ray's temporary files.

The run holds DIRECTORY/lock while it lives, and ends this program before itself. It is a program of
its own, since no thread of PID runs while Ray's C++ part starts, and small: each run has one.
"""

import fcntl
import os
import shutil
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

PATIENCE = 120  # seconds; the next start removes what could not be removed until then


def ray_processes(directory: Path) -> list[int]:
    """Pids of the services of the Ray that has `directory` in their command lines; its workers end
    with them.
    """
    pids = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it ended, or is another user's
            command = (process / "cmdline").read_bytes()
            pid = int(process.name)
            if b"/ray/" in command and os.fsencode(directory) in command and pid != os.getpid():
                pids.append(pid)
    return pids


def main(directory: Path, pid: int) -> None:
    with open(directory / "lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # waits for the end of the run
    last_words = (
        f"error: process {pid} ended without a word: it was killed (SIGKILL, no memory left, a "
        "closed terminal) or crashed, or a process of Ray did. Resume the run"
    )
    with suppress(OSError):  # the terminal was closed
        print(last_words, file=sys.stderr, flush=True)
    for _ in range(10 * PATIENCE):
        alive = ray_processes(directory)
        if not alive and not directory.exists():
            break
        for process in alive:
            with suppress(OSError):
                os.kill(process, signal.SIGKILL)
        shutil.rmtree(directory, ignore_errors=True)
        time.sleep(0.1)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
