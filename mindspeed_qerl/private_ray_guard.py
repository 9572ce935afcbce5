"""`python -I -S private_ray_guard.py DIRECTORY PID SECONDS` looks after the run of process PID, which holds DIRECTORY,
its Ray's temporary files.

A process below PID that was stopped SECONDS ago, for which the others would wait for ever, is killed and named in
DIRECTORY/stopped. When PID is gone and DIRECTORY is not, PID was killed: its last words are said here, and DIRECTORY
is removed. A program of its own, since no thread of PID runs while Ray's C++ part starts, and small: one runs beside
every run.
"""

import fcntl
import os
import re
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import IO

STAT = re.compile(r"(\d+) \((.*)\) (\S) (\d+) ", re.DOTALL)  # proc(5): pid, name, state, the parent's pid


def stopped_below(run: int) -> dict[int, str]:
    """Pids and names of the descendants of `run` that SIGSTOP or a debugger has stopped; none while `run` itself is
    (Ctrl-Z stops them all)."""
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


def watch(directory: Path, run: int, seconds: float) -> None:
    """Kills what is stopped, until `run` has ended."""
    since: dict[int, float] = {}
    with open(directory / "lock") as lock:
        while not has_ended(lock):
            time.sleep(seconds / 30)
            now, stopped = time.monotonic(), stopped_below(run)
            since = {pid: since.get(pid, now) for pid in stopped}
            for pid, name in stopped.items():
                if now - since[pid] >= seconds:
                    words = (f"(pid {pid}) was stopped {seconds:.0f} s ago (SIGSTOP, or a debugger), and the run "
                             "waited. It was killed; resume the run")
                    with open(directory / "stopped", "a") as file:
                        file.write(f"{pid}\tRay's {name}\t{words}\n")
                    os.kill(pid, signal.SIGKILL)


def last_words(directory: Path, run: int) -> str:
    """Why `run` ended, as far as can be known."""
    if (directory / "stopped").exists():
        return (directory / "stopped").read_text().splitlines()[-1].partition("\t")[2].replace("\t", " ")
    if (directory / "start.log").exists():
        return f"process {run} was killed while Ray started, or a process of Ray was, and it could not go on"
    return f"process {run} was killed (SIGKILL: by a person, by a scheduler, or because no memory was left)"


if __name__ == "__main__":
    directory, run, seconds = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    watch(directory, run, seconds)
    if directory.exists():
        try:
            print(f"error: {last_words(directory, run)}", file=sys.stderr, flush=True)
        except OSError:  # the terminal was closed
            pass
    until = time.monotonic() + 120  # the next start removes what cannot be removed now
    while directory.exists() and time.monotonic() < until:
        time.sleep(0.1)
        if not is_named(directory):
            shutil.rmtree(directory, ignore_errors=True)
