"""`python -I -S private_ray_guard.py DIRECTORY PID SECONDS` looks after the run of process PID,
which holds DIRECTORY, its Ray's temporary files.

A process below PID that was stopped SECONDS ago, for which the others would wait for ever, is
killed and named in DIRECTORY/stopped. When PID is gone and has not ended this one, its last words
are said here, and DIRECTORY is removed. A program of its own, since no thread of PID runs while
Ray's C++ part starts, and small: one runs beside every run.
"""

import fcntl
import os
import re
import shutil
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

STAT = re.compile(
    r"(\d+) \((.*)\) (\S) (\d+) ", re.DOTALL
)  # proc(5): pid, name, state, the parent's pid
FRESH = 120  # seconds within which the end of a process may be that of the run


def stopped_below(run: int) -> dict[int, str]:
    """Pids and names of the descendants of `run` that SIGSTOP or a debugger has stopped; none while
    `run` itself is (Ctrl-Z stops them all).
    """
    names, states, parents = {}, {}, {run: 0}
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            pid, name, state, parent = STAT.match(file.read_text(errors="replace")).groups()
        except OSError:  # it ended
            continue
        names[int(pid)], states[int(pid)], parents[int(pid)] = name, state, int(parent)

    def is_below(pid: int) -> bool:
        while pid not in (run, 0):
            pid = parents.get(pid, 0)
        return pid == run

    stopped = {pid for pid, state in states.items() if state in "Tt"}
    return {} if run in stopped else {pid: names[pid] for pid in stopped if is_below(pid)}


def has_ended(lock: IO) -> bool:
    """Whether no process holds `lock`."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_named(directory: Path) -> bool:
    """Whether a process has `directory` in its command line, as Ray's services do: they end some
    seconds after the process that started them, and write until then.
    """
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes()
        except OSError:  # it ended
            continue
        if process.name != str(os.getpid()) and os.fsencode(directory) in words:
            return True
    return False


def watch(directory: Path, run: int, seconds: float) -> str:
    """Kills what is stopped, until `run` has ended. What to say of a process whose end may have
    been `run`'s, too.
    """
    since: dict[int, float] = {}
    killed, words = -FRESH, ""
    with open(directory / "lock") as lock:
        while not has_ended(lock):
            time.sleep(seconds / 30)
            now, stopped = time.monotonic(), stopped_below(run)
            since = {pid: since.get(pid, now) for pid in stopped}
            for pid in stopped:
                if now - since[pid] >= seconds:
                    killed = now
                    words = (
                        f"(pid {pid}) was stopped {seconds:.0f} s ago (SIGSTOP, or a debugger), "
                        "and the run waited. It was killed; resume the run"
                    )
                    with suppress(OSError), open(directory / "stopped", "a") as file:
                        file.write(f"{pid}\tRay's {stopped[pid]}\t{words}\n")
                    kill(pid)
                    words = f"Ray's {stopped[pid]} {words}"
    for pid in since:  # nobody else would
        kill(pid)
    return words if time.monotonic() - killed < FRESH else ""


def kill(pid: int) -> None:
    with suppress(OSError):  # it ended, or is another user's
        os.kill(pid, signal.SIGKILL)


def last_words(directory: Path, run: int) -> str:
    """Of a run that has none of its own."""
    if (directory / "start.log").exists():
        return f"process {run} was killed while Ray started, or a process of Ray was, and it could not go on"
    return (
        f"process {run} ended without a word: it was killed (SIGKILL, no memory left, a closed "
        "terminal) or crashed, or Ray's gcs_server did. Resume the run"
    )


if __name__ == "__main__":
    directory, run, seconds = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    said = watch(directory, run, seconds) or last_words(directory, run)
    with suppress(OSError):  # the terminal was closed
        print(f"error: {said}", file=sys.stderr, flush=True)
    until = time.monotonic() + 120  # the next start removes what cannot be removed now
    while directory.exists() and time.monotonic() < until:
        time.sleep(0.1)
        if not is_named(directory):
            shutil.rmtree(directory, ignore_errors=True)
