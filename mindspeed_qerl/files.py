"""Files and directories that are there whole or not at all, or held by one process, and the names of checkpoints.
Standard library only."""

import fcntl
import glob
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

POSITION = "data.json"  # of the NPU engine's run, beside a checkpoint's ranks
TRACKER = "latest_checkpointed_iteration.txt"  # megatron/training/checkpointing.py:get_checkpoint_tracker_filename


def write_whole(file: Path, text: str) -> None:
    """Write a file that readers, and a kill at any moment, find either as it was or complete."""
    aside = file.with_name(file.name + ".tmp")
    aside.write_text(text, encoding="utf-8")
    os.replace(aside, file)


@contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """A hidden sibling to write into, which is renamed to `path` at the end; an exception removes it.

    Raises:
        FileExistsError: `path` exists and is not an empty directory. It is left alone.
    """
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise FileExistsError(f"{path} exists already: choose another output directory, or remove it first")
    path.parent.mkdir(parents=True, exist_ok=True)
    for left in path.parent.glob(f".{glob.escape(path.name)}.making-*"):
        if not Path("/proc", left.name.rpartition("-")[2]).exists():  # its process was killed
            shutil.rmtree(left, ignore_errors=True)
    making = path.with_name(f".{path.name}.making-{os.getpid()}")
    making.mkdir()
    try:
        yield making
        making.rename(path)  # replaces an empty directory, and nothing else
    finally:
        shutil.rmtree(making, ignore_errors=True)


def hold(directory: Path) -> IO:
    """The open file `directory`/lock: the folder is held until it is closed, or its process ends, however that happens
    (flock(2)). Raises BlockingIOError when another open file holds it."""
    lock = open(directory / "lock", "w")  # noqa: SIM115
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise
    return lock


def checkpoint_iterations(checkpoints: Path) -> list[int]:
    """The iterations that have a folder `iter_0000010` in `checkpoints`, in order; a folder that is still being
    written has another name."""
    numbers = [folder.name.removeprefix("iter_") for folder in checkpoints.glob("iter_*")]
    return sorted(int(number) for number in numbers if number.isdigit())


def rank_folder(tensor: int, pipeline: int, expert: int, *, pp: int, ep: int) -> str:
    """The folder of one rank's file in Megatron's checkpoints (training/checkpointing.py:get_checkpoint_name)."""
    return f"mp_rank_{tensor:02d}" + (f"_{pipeline:03d}" if pp > 1 else "") + (f"_{expert:03d}" if ep > 1 else "")
