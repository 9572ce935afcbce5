"""A Hugging Face model's tensors on disk, in safetensors."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindspeed_qerl.common.errors import ConfigError

from .fingerprint import INDEX, SINGLE, unreadable, weight_files

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
        self.directory = Path(directory)
        self.framework = framework
        self._open: dict[str, Any] = {}
        names = whole_files(self.directory)
        self.files = {tensor: name for name in names for tensor in self.open(name).offset_keys()}

    def open(self, file: str) -> Any:
        """safetensors' `safe_open` of one file."""
        from safetensors import SafetensorError, safe_open

        # an index of thousands of experts takes longer to read than a tensor
        if file not in self._open:
            path = self.directory / file
            try:
                self._open[file] = safe_open(path, self.framework)
            except (SafetensorError, OSError) as error:
                raise ConfigError(unreadable(path, error)) from error
        return self._open[file]

    def read(self, name: str) -> "torch.Tensor":
        """The tensor called `name`."""
        if name not in self.files:
            raise ConfigError(
                f"{self.directory} has no tensor {name!r}, which the model's config.json calls for"
            )
        return self.open(self.files[name]).get_tensor(name)


def whole_files(directory: Path) -> list[str]:
    """The names of the model's files, all there. ConfigError if they are not, or are not read alike
    by transformers and vLLM.
    """
    has_single = (directory / SINGLE).is_file()
    has_index = (directory / INDEX).is_file()
    if not has_index and not has_single:
        raise ConfigError(
            f"{directory} has neither {INDEX} nor {SINGLE}: give the directory of a Hugging Face "
            "model, in safetensors (save_pretrained of transformers writes them)"
        )
    names = weight_files(directory)
    way_out = "Fetch the whole model"
    if is_stale := has_single and SINGLE not in names:
        way_out = f"If {SINGLE} is the whole model, move {INDEX} away"
    if missing := [name for name in names if not (directory / name).is_file()]:
        raise ConfigError(
            f"{directory} lacks {len(missing)} of {len(names)} files that {INDEX} names, such as "
            f"{missing[0]}. {way_out}"
        )
    if is_stale:  # transformers reads the one, vLLM the others
        raise ConfigError(f"{directory} has {SINGLE} beside the files of {INDEX}. {way_out}")
    return names


def refuse_beside_single(directory: Path) -> None:
    """ConfigError for safetensors beside a model.safetensors: without an index vLLM reads all."""
    names = sorted(file.name for file in directory.glob("*.safetensors"))
    if SINGLE in names and len(names) > 1 and not (directory / INDEX).is_file():
        names.remove(SINGLE)
        raise ConfigError(
            f"{directory} has {names[0]} beside {SINGLE}, and vLLM reads every .safetensors of a "
            f"folder without {INDEX}: move it elsewhere"
        )
