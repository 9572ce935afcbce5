"""A Hugging Face model's tensors on disk, in safetensors."""

import json
from pathlib import Path
from typing import Any

import torch

from mindspeed_qerl.errors import ConfigError


class Checkpoint:
    """The safetensors of a Hugging Face model directory, read tensor by tensor; files are mapped, opened once.

    `files` has each tensor's file. ConfigError: there are none, a file is cut short, or it lacks a tensor.
    """

    def __init__(self, directory: str | Path):
        self.directory, self._open = Path(directory), {}
        index, single = (self.directory / f"model.safetensors{end}" for end in (".index.json", ""))
        if index.is_file():
            self.files = json.loads(index.read_text())["weight_map"]
        elif single.is_file():
            self.files = dict.fromkeys(self.open(single.name).keys(), single.name)
        else:
            raise ConfigError(f"{self.directory} has neither {index.name} nor {single.name}: give the directory of a "
                              "Hugging Face model, in safetensors")

    def open(self, file: str) -> Any:
        """safetensors' `safe_open` of one file."""
        from safetensors import SafetensorError, safe_open

        if file not in self._open:  # an index of thousands of experts takes longer to read than a tensor
            try:
                self._open[file] = safe_open(self.directory / file, "pt")
            except SafetensorError as error:
                raise ConfigError(f"{self.directory / file} cannot be read; it may be cut short: {error}") from error
        return self._open[file]

    def read(self, name: str) -> torch.Tensor:
        """The tensor called `name`."""
        return self._file_of(name).get_tensor(name)

    def header(self, name: str) -> Any:
        """safetensors' shape and dtype of the tensor called `name`, which is not read."""
        return self._file_of(name).get_slice(name)

    def _file_of(self, name: str) -> Any:
        if name not in self.files:
            raise ConfigError(f"{self.directory} has no tensor {name!r}, which the model's config.json calls for")
        return self.open(self.files[name])
