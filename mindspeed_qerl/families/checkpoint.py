"""A Hugging Face model's tensors on disk, in safetensors."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindspeed_qerl.common.errors import ConfigError
from mindspeed_qerl.families.fingerprint import INDEX, SINGLE, unreadable, weight_files

if TYPE_CHECKING:
    import torch


class Checkpoint:
    """The safetensors of a Hugging Face model directory, read tensor by tensor; files are mapped,
    opened once.

    `files` has each tensor's file; of a tensor in several the last one's, as transformers and vLLM
    have it.

    Args:
        framework: of the tensors that are read; "np" opens the files without torch.

    Raises:
        ConfigError: there are none, not all, or two sets of them; a file is cut short, or no
            safetensors.
    """

    def __init__(self, directory: str | Path, framework: str = "pt"):
        self.directory, self.framework = Path(directory), framework
        self._open: dict[str, Any] = {}
        names = whole_files(self.directory)
        self.files = {tensor: name for name in names for tensor in self.open(name).offset_keys()}

    def open(self, file: str) -> Any:
        """safetensors' `safe_open` of one file."""
        from safetensors import SafetensorError, safe_open

        if (
            file not in self._open
        ):  # an index of thousands of experts takes longer to read than a tensor
            path = self.directory / file
            try:
                self._open[file] = safe_open(path, self.framework)
            except (SafetensorError, OSError) as error:
                raise ConfigError(unreadable(path, error)) from error
        return self._open[file]

    def read(self, name: str) -> "torch.Tensor":
        """The tensor called `name`."""
        return self._file_of(name).get_tensor(name)

    def header(self, name: str) -> Any:
        """safetensors' shape and dtype of the tensor called `name`, which is not read."""
        return self._file_of(name).get_slice(name)

    def _file_of(self, name: str) -> Any:
        if name not in self.files:
            raise ConfigError(
                f"{self.directory} has no tensor {name!r}, which the model's config.json calls for"
            )
        return self.open(self.files[name])


def whole_files(directory: Path) -> list[str]:
    """The names of the model's files, all there. ConfigError if they are not, or are not read alike
    by transformers and vLLM.
    """
    has_single, has_index = ((directory / name).is_file() for name in (SINGLE, INDEX))
    if not has_index and not has_single:
        others = sorted(
            file.name
            for pattern in ("*.safetensors", "*.bin", "*.pth", "*.gguf")
            for file in directory.glob(pattern)
        )
        there = (
            f" It has {others[0]}: load the model with transformers and save_pretrained it."
            if others
            else ""
        )
        raise ConfigError(
            f"{directory} has neither {INDEX} nor {SINGLE}: give the directory of a Hugging Face "
            f"model, in safetensors.{there}"
        )
    try:
        names = weight_files(directory)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    stale = (
        f"move {INDEX} away if {SINGLE} is the whole model"
        if has_single and SINGLE not in names
        else ""
    )
    if missing := [name for name in names if not (directory / name).is_file()]:
        raise ConfigError(
            f"{directory} has {len(names) - len(missing)} of {len(names)} files: {missing[0]}"
            f"{' ...' * (len(missing) > 1)} is missing, which {INDEX} names. Fetch the whole model"
            f"{stale and f', or {stale}'}"
        )
    if stale:  # transformers reads the one, vLLM the others
        raise ConfigError(
            f"{directory} has {SINGLE} beside the files that {INDEX} names: {stale}, else the "
            "former"
        )
    if below := [name for name in names if "/" in name]:
        raise ConfigError(
            f"{directory / INDEX} names {below[0]}, and vLLM does not look into folders below: "
            "load the model with transformers and save_pretrained it"
        )
    return names


def beside_single(directory: str | Path) -> list[str]:
    """A fault for safetensors beside a model.safetensors: without an index vLLM reads them all."""
    directory = Path(directory)
    others = sorted(file.name for file in directory.glob("*.safetensors") if file.name != SINGLE)
    if not others or (directory / INDEX).is_file() or not (directory / SINGLE).is_file():
        return []
    return [
        (
            f"{directory} has {others[0]} beside {SINGLE}, and vLLM reads every .safetensors of a "
            f"folder without {INDEX}: move it elsewhere"
        )
    ]
