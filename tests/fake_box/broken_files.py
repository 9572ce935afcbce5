"""What is done to the files of `prepared.prepare`: functions of (model, base weights, folder of the
data).
"""

import json
import shutil
import zipfile

from mindspeed_qerl.tasks.packed import indexed_format
from mindspeed_qerl.tasks.rows import read_rows

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 4096\n"
WEIGHTS = "model-00001-of-00001.safetensors"


def config_says(**values):
    def change(model, base, data):
        file = model / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **values}))

    return change


def without(name):
    """`packed`, or a file below model/, base/ or data/."""

    def change(model, base, data):
        if name == "packed":
            shutil.rmtree(data / model.name)
        else:
            place, _, file = name.partition("/")
            ({"model": model, "base": base, "data": data}[place] / file).unlink()

    return change


def pointers(of):
    def change(model, base, data):
        files = {
            "base": sorted(base.glob("iter_*/*/*.pt")),
            "weights": [model / WEIGHTS],
            "tokenizer": [model / "tokenizer.json"],
        }[of]
        for file in files:
            file.write_text(POINTER)

    return change


def half(model, base, data):
    with open(model / WEIGHTS, "r+b") as file:
        file.truncate(30 * 10**9)


def tiny_base(model, base, data):
    """Sixteen whole zips, each of a few bytes."""
    for file in base.glob("iter_*/*/*.pt"):
        with zipfile.ZipFile(file, "w") as whole:
            whole.writestr("data.pkl", file.parent.name)


def another_layout(model, base, data):
    for folder in sorted(base.glob("iter_*/mp_rank_00_*"))[4:]:
        shutil.rmtree(folder)


def cut(model, base, data):
    with open(next(base.glob("iter_*/mp_rank_00_003/*.pt")), "r+b") as file:
        file.truncate(10**9)


def same_split(model, base, data):
    (data / "train_chat.parquet").write_bytes((data / "test_chat.parquet").read_bytes())


def empty_labels(model, base, data):
    write_packed(data / model.name, "labels", [[7]] * 7000 + [[]] * 473)


def packed_test_split(model, base, data):
    rows = read_rows(data / "test_chat.parquet")
    write_packed(data / model.name, "input_ids", [[number] for number, _ in enumerate(rows)])
    write_packed(data / model.name, "labels", [[1]] * len(rows))


def write_packed(folder, column, rows):
    for ending, content in zip(("bin", "idx"), indexed_format(rows)):
        file = next(folder.glob(f"*_packed_{column}_document.{ending}"))
        file.unlink()  # it may be a link
        file.write_bytes(content)
