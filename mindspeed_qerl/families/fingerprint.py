"""Which model a folder holds: a digest of its weights that takes seconds, however large it is."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

from mindspeed_qerl.common.errors import ConfigError

# bytes; samples of a file that does not say where its tensors are
SAMPLE = 4096
SAMPLES = 64
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
POINTER = b"version https://git-lfs"
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")
# What decides, beside the weights, which tokens go in and which come out.
TEXTS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)


def weight_files(directory: Path) -> list[str]:
    """Names of a Hugging Face model's safetensors, whether they are there or not: those in its
    index, else model.safetensors, else all in the folder. What lies beside them, such as an
    adapter, is not the model's. ConfigError: the index is none.
    """
    index = directory / INDEX
    if index.is_file():
        try:
            names = json.loads(index.read_text())["weight_map"].values()
            return sorted({Path(name).as_posix() for name in names})
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(unreadable(index, error)) from error
    if (directory / SINGLE).is_file():
        return [SINGLE]
    return sorted(file.name for file in directory.glob("*.safetensors"))


def unreadable(file: Path, error: Exception) -> str:
    """Returns what to say of a file that should be safetensors or their index."""
    if isinstance(error, OSError) and error.strerror:
        return f"{file} cannot be read: {error.strerror}"
    if is_pointer(file):
        return f"{file} is a pointer of git-lfs, not weights: (cd {file.parent} && git lfs pull)"
    return f"{file} cannot be read; it may be cut short: {error}. Fetch it again"


def is_pointer(file: Path) -> bool:
    """Returns True if git-lfs has left its pointer in the file's place (spec.md of git-lfs)."""
    with open(file, "rb") as content:
        return content.read(len(POINTER)) == POINTER


def weights_digest(directory: Path) -> str:
    """SHA-256 of all tensors' names, dtypes, shapes and first 4 KiB, of the model's safetensors in
    `directory`: the same however they are divided among files. Of other files with weights, also in
    folders below, if there are no safetensors: their names and sizes, and 64 samples of 4 KiB.
    ConfigError: a file is cut short.

    What changes a tensor only behind its first 4 KiB is not seen; training changes all of it.
    """
    files = [directory / name for name in weight_files(directory) if (directory / name).is_file()]
    if not files:
        files = [file for file in directory.rglob("*") if file.suffix in WEIGHTS]
    samples: list[bytes] = []
    for file in files:
        samples += _samples(file, str(file.relative_to(directory)))
    digest = hashlib.sha256()
    for sample in sorted(samples):
        digest.update(len(sample).to_bytes(8, "little") + sample)
    return digest.hexdigest()


def _samples(file: Path, name: str) -> Iterator[bytes]:
    with open(file, "rb") as content:
        if file.suffix != ".safetensors":
            size = file.stat().st_size
            for number in range(SAMPLES):
                content.seek(number * size // SAMPLES)
                yield f"{name} {size} {number} ".encode() + content.read(SAMPLE)
            return
        try:  # eight bytes with the header's length, the header, the tensors
            length = int.from_bytes(content.read(8), "little")
            header = json.loads(content.read(length))
            for tensor, entry in header.items():
                if tensor != "__metadata__":
                    start, end = entry["data_offsets"]
                    content.seek(8 + length + start)
                    label = f"{tensor} {entry['dtype']} {entry['shape']} "
                    yield label.encode() + content.read(min(SAMPLE, end - start))
        except (ValueError, KeyError, TypeError, OverflowError, MemoryError) as error:
            raise ConfigError(unreadable(file, error)) from error


def model_files(directory: str | Path) -> dict[str, Path]:
    """By label, the files of a Hugging Face model that a run depends on; safetensors, if it has
    some, are one: their folder.
    """
    directory = Path(directory)
    files = {f"model/{name}": directory / name for name in TEXTS if (directory / name).is_file()}
    if any(directory.glob("*.safetensors")):
        files["model/weights"] = directory
    return files
