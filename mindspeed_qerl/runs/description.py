"""What describes a run: a label for its folder, its data files, and in what two configs differ."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mindspeed_qerl.common.files import sha256
from mindspeed_qerl.families.fingerprint import weights_digest

# characters; a folder's name may have 255 bytes, and date, seed and "-2" take 35
LABEL_LENGTH = 80
SEEDS = ("seed", "megatron_training.seed")


def label_of(overrides: Sequence[str]) -> str:
    """Overrides of a command line, short, as a part of a folder's name: group=choice, last part of
    a key=value, at most `LABEL_LENGTH` characters. Left out are the seed, which stands behind the
    label, and `run.*`, which changes nothing but where the run is.

    >>> label_of(["aqn=off", "actor_config.lr=1e-5", "seed=3", "run.root=/tmp"])
    'aqn=off_lr=1e-5'
    >>> label_of(["aqn.enabled=false", "model=/models/Qwen3 30B", "+aqn.targets=[input,final]"])
    'aqn.enabled=false_model=Qwen3-30B_targets=input-final'
    """
    words = []
    for override in overrides:
        key, _, value = override.lstrip("+~").partition("=")
        if key in SEEDS or key.startswith("run."):
            continue
        parts = key.split(".")
        short_key = ".".join(parts[-2:] if parts[-1] in ("enabled", "seed") else parts[-1:])
        short_value = value.rstrip("/").rpartition("/")[2] or "none"
        pair = [
            re.sub(r"[^A-Za-z0-9.+_]+", "-", text).strip("-") for text in (short_key, short_value)
        ]
        words.append("=".join(pair))
    return "_".join(words)[:LABEL_LENGTH]


def describe_data(data_files: Mapping[str, Path | str]) -> dict[str, dict[str, Any]]:
    """Absolute path, sha256, size in bytes and rows (of .parquet and .jsonl; None for other kinds)
    of each data file; of a folder with weights the digest of these (fingerprint.py), and no size.
    FileNotFoundError for one that is missing.
    """
    described = {}
    for label, path in data_files.items():
        path = Path(path)
        if path.is_dir():
            digest, size, rows = weights_digest(path), None, None
        elif path.is_file():
            digest, size, rows = sha256(path), path.stat().st_size, _count_rows(path)
        else:
            raise FileNotFoundError(f"data file {path} does not exist or is not a file")
        entry = {"path": str(path.absolute()), "sha256": digest, "bytes": size, "rows": rows}
        described[label] = entry
    return described


def _count_rows(path: Path) -> int | None:
    if path.suffix == ".parquet":
        import pyarrow.parquet

        return pyarrow.parquet.read_metadata(path).num_rows
    if path.suffix == ".jsonl":
        with open(path, "rb") as file:
            return sum(1 for line in file if line.strip())
    return None


def dotted(value: Any, name: str = "") -> dict[str, Any]:
    """The values of a nested config by dotted key; a section that is empty is a value.

    >>> dotted({"aqn": {"enabled": True, "exclude": []}, "task": {}})
    {'aqn.enabled': True, 'aqn.exclude': [], 'task': {}}
    """
    if not isinstance(value, dict) or not value:
        return {name: value}
    leaves: dict[str, Any] = {}
    for part in value:
        leaves |= dotted(value[part], f"{name}.{part}".lstrip("."))
    return leaves


def differences(before: Any, after: Any) -> dict[str, str]:
    """A line for each key whose value changed, `run.resume` aside; a missing one counts as null."""
    before, after = dotted(before), dotted(after)
    lines = {}
    for key in dict.fromkeys([*before, *after]):
        was, now = (
            repr(values[key]) if key in values else "not there" for values in (before, after)
        )
        if before.get(key) != after.get(key) and key != "run.resume":
            lines[key] = f"{key} was {was} and is {now}"
    return lines
