"""Files and directories that are there whole or not at all, or held by one process, and the names
of checkpoints. Standard library only.
"""

import fcntl
import glob
import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import IO, Any

Rows = list[dict[str, Any]]  # of a file of JSON lines

POSITION = "data.json"  # of the NPU engine's run, beside a checkpoint's ranks
# megatron/training/checkpointing.py:get_checkpoint_tracker_filename
TRACKER = "latest_checkpointed_iteration.txt"


def json_text(value: Any) -> str:
    """`value` as JSON, indented, numbers of NumPy included; NaN and infinity, which JSON does not
    know, are null.
    """
    finite = json.loads(json.dumps(value, default=float), parse_constant=lambda name: None)
    return json.dumps(finite, indent=2) + "\n"


def write_whole(file: Path, text: str) -> None:
    """Write a file that readers, and a kill at any moment, find either as it was or complete."""
    aside = file.with_name(file.name + ".tmp")
    with open(aside, "w", encoding="utf-8") as content:
        content.write(text)
        content.flush()
        # else a machine that loses power may keep the name, and no bytes
        os.fsync(content.fileno())
    os.replace(aside, file)


def read_jsonl(path: Path) -> Rows:
    """The rows of a file of JSON lines, such as a run's metrics; a missing file has none.

    A last row that was cut off before its newline is what a kill leaves behind, and is dropped. Any
    other line that is not a JSON object raises ValueError with file and line.
    """
    if not path.exists():
        return []
    *lines, _ = path.read_bytes().split(b"\n")
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            nonfinite = row.pop("nonfinite", {})
            rows.append(row | {name: float(text) for name, text in nonfinite.items()})
        except (ValueError, AttributeError, TypeError) as error:
            raise ValueError(
                f"{path}:{number}: damaged line, expected a JSON object ({error}): {line[:80]!r}. "
                "Remove the line to read the rest"
            ) from error
    return rows


def sha256(file: Path) -> str:
    """Returns the digest of a file's content, in hexadecimal."""
    with open(file, "rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def row_files(path: Path | str) -> list[Path]:
    """The files that `path` means, in the order of their names: itself; all .jsonl and .parquet in
    a folder, and below; those that a pattern matches. FileNotFoundError if there is none.
    """
    if os.path.isfile(path):
        return [Path(path)]
    pattern = f"{glob.escape(str(path))}/**/*" if os.path.isdir(path) else str(path)
    names = sorted(glob.glob(pattern, recursive=True))
    found = [Path(name) for name in names if name.endswith((".jsonl", ".parquet"))]
    if not found:
        raise FileNotFoundError(f"{path}: no such file")
    return found


def describe_files(folder: Path, files: Iterable[Path]) -> dict[str, dict[str, Any]]:
    """Bytes and SHA-256 of each of `files`, by its path below `folder`."""
    return {
        str(file.relative_to(folder)): {"bytes": file.stat().st_size, "sha256": sha256(file)}
        for file in sorted(files)
    }


def fault_of_files(folder: Path, described: Mapping[str, Mapping[str, Any]]) -> str | None:
    """The first of the files that `describe_files` described that is not what it was, in words;
    None: all are.
    """
    for name, was in described.items():
        file = folder / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != was["bytes"]:
            return f"{name} has {file.stat().st_size:,} bytes and had {was['bytes']:,}"
        if sha256(file) != was["sha256"]:
            return f"the content of {name} has changed since it was written (SHA-256)"
    return None


@contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """A hidden sibling to write into, which is renamed to `path` at the end; an exception removes
    it.

    Raises:
        FileExistsError: `path` exists and is not an empty directory. It is left alone.
    """
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise FileExistsError(
            f"{path} exists already: choose another output directory, or remove it first"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    making = path.with_name(f".{path.name}.making-{os.getpid()}")
    # of a killed process of this number, in another container
    shutil.rmtree(making, ignore_errors=True)
    making.mkdir()
    try:
        yield making
        making.rename(path)  # replaces an empty directory, and nothing else
    finally:
        shutil.rmtree(making, ignore_errors=True)


def hold(directory: Path) -> IO:
    """The open file `directory`/lock: the folder is held until it is closed, or its process ends,
    however that happens (flock(2)). Raises BlockingIOError when another open file holds it.
    """
    lock = open(directory / "lock", "w")  # noqa: SIM115
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise
    return lock


def checkpoint_iterations(checkpoints: Path) -> list[int]:
    """The iterations that have a folder `iter_0000010` in `checkpoints`, in order; one that the
    local engine still writes has another name.
    """
    numbers = [folder.name.removeprefix("iter_") for folder in checkpoints.glob("iter_*")]
    return sorted(int(number) for number in numbers if number.isdigit())


def whole_checkpoints(checkpoints: Path) -> list[int]:
    """Returns the same without what the NPU engine had not finished when it was killed: Megatron
    writes in place, and then the number into its tracker.
    """
    try:
        last = float((checkpoints / TRACKER).read_text())
    except FileNotFoundError:
        last = -math.inf
    except ValueError:  # killed while that was written
        last = math.inf
    return [
        number
        for number in checkpoint_iterations(checkpoints)
        if number <= last or not (checkpoints / f"iter_{number:07d}" / POSITION).exists()
    ]


def rank_folders(tp: int, pp: int, ep: int) -> dict[tuple[int, int, int], str]:
    """The folder of each rank's file in Megatron's checkpoints, by its tensor, pipeline and expert
    rank (training/checkpointing.py:get_checkpoint_name).
    """
    folders = {}
    for tensor, stage, expert in product(range(tp), range(pp), range(ep)):
        stages = f"_{stage:03d}" if pp > 1 else ""
        experts = f"_{expert:03d}" if ep > 1 else ""
        folders[tensor, stage, expert] = f"mp_rank_{tensor:02d}{stages}{experts}"
    return folders


def forget_shared_memory() -> None:
    """Take the names off the shared memory that vLLM made and this process has mapped, once all
    engines have it: of engines that are killed nothing is left.
    """
    for path in re.findall(r"/dev/shm/(?:psm_|.*cpushm).*", Path("/proc/self/maps").read_text()):
        Path(path).unlink(missing_ok=True)
