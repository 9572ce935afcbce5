"""What is done to the files of `prepared.prepare`."""

from mindspeed_qerl.tasks.packed import indexed_format

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 4096\n"
WEIGHTS = "model-00001-of-00001.safetensors"


def write_packed(folder, column, rows):
    for ending, content in zip(("bin", "idx"), indexed_format(rows)):
        file = next(folder.glob(f"*_packed_{column}_document.{ending}"))
        file.unlink()  # it may be a link
        file.write_bytes(content)
