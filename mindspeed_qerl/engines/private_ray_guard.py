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


def is_of_ray(process: Path, directory: Path) -> bool:
    """Whether `process`, its folder in /proc, is one of Ray's services, whose command lines have
    `directory`, or a worker, which has logs open there, also while a debugger has it stopped.
    """
    command = (process / "cmdline").read_bytes()
    if b"/ray/" not in command and not command.startswith(b"ray::"):
        return False
    if os.fsencode(directory) in command:
        return True
    return any(directory in file.readlink().parents for file in (process / "fd").iterdir())


def ray_processes(directory: Path) -> list[int]:
    """Pids of the processes of the Ray that has `directory`."""
    pids = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it ended, or is another user's
            if int(process.name) != os.getpid() and is_of_ray(process, directory.resolve()):
                pids.append(int(process.name))
    return pids


def last_words(directory: Path, pid: int) -> str:
    """What is known of a run that could not say anything itself."""
    if (directory / "start.log").exists():
        return f"process {pid} was killed while Ray started, or a process of Ray was"
    return (
        f"process {pid} ended without a word: it was killed (SIGKILL, no memory left, a closed "
        "terminal) or crashed, or Ray's gcs_server did. Resume the run"
    )


def main(directory: Path, pid: int) -> None:
    with open(directory / "lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # waits for the end of the run
    with suppress(OSError):  # the terminal was closed
        print(f"error: {last_words(directory, pid)}", file=sys.stderr, flush=True)
    until = time.monotonic() + PATIENCE
    while (alive := ray_processes(directory)) or directory.exists():
        for process in alive:
            with suppress(OSError):
                os.kill(process, signal.SIGKILL)
        shutil.rmtree(directory, ignore_errors=True)
        if time.monotonic() > until:
            break
        time.sleep(0.1)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
