"""This file is a model directory in the Hugging Face layout as it lies on disk: its configuration and its tensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from safetensors import safe_open
from torch import Tensor

from treewire.vocabulary import load_tokenizer, vocabulary_hash

_SINGLE_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"


class Weights(Protocol):
    """Named tensors of a model."""

    def __contains__(self, name: str) -> bool:
        """Whether there is a tensor of that name."""

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of the tensor of that name."""

    def tensor(self, name: str) -> Tensor:
        """The tensor of that name."""

    def part(self, name: str, span: slice, *, dim: int = 0) -> Tensor:
        """A span of its rows, or of its columns, `dim` 1."""


class Checkpoint:
    """A directory with config.json and safetensors, in one file or in several with an index.

    Tensors are mapped, not read: one costs memory only while it is used. Raises ValueError if the files are not there.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        if not self.is_one(directory):
            raise ValueError(f"{directory} has no config.json with {_SINGLE_FILE} or {_INDEX_FILE} beside it")
        self.config: Mapping[str, Any] = _json(directory / "config.json")
        self._file_names = _file_names(directory)

    @staticmethod
    def is_one(directory: Path) -> bool:
        """True for a directory that has the files."""
        has_weights = any((directory / name).is_file() for name in (_SINGLE_FILE, _INDEX_FILE))
        return has_weights and (directory / "config.json").is_file()

    def __contains__(self, name: str) -> bool:
        return name in self._file_names

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of the tensor of that name. Raises ValueError if there is none."""
        with self._file_of(name) as file:
            return tuple(file.get_slice(name).get_shape())

    def tensor(self, name: str) -> Tensor:
        """The tensor of that name, in the type that it is stored in. Raises ValueError if there is none."""
        with self._file_of(name) as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor

    def part(self, name: str, span: slice, *, dim: int = 0) -> Tensor:
        """A span of the rows (or of the columns, `dim` 1) of the tensor of that name; no more than that is read."""
        with self._file_of(name) as file:
            stored = file.get_slice(name)
            part: Tensor = stored[span] if dim == 0 else stored[:, span]
        return part

    def _file_of(self, name: str) -> safe_open:
        if name not in self:
            raise ValueError(f"{self.directory} lacks the weights {name}")
        return safe_open(self.directory / self._file_names[name], framework="pt")

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a turn."""
        path = self.directory / "generation_config.json"
        source = _json(path) if path.is_file() else self.config
        end = source.get("eos_token_id", self.config.get("eos_token_id"))
        if end is None:
            return ()
        return (end,) if isinstance(end, int) else tuple(end)

    @property
    def tokenizer_hash(self) -> str:
        """Hash of the vocabulary in tokenizer.json; empty, which is "unknown", where there is none."""
        has_tokenizer = (self.directory / "tokenizer.json").is_file()
        return vocabulary_hash(load_tokenizer(self.directory)) if has_tokenizer else ""


def _json(path: Path) -> Mapping[str, Any]:
    content: Mapping[str, Any] = json.loads(path.read_text())
    return content


def _file_names(directory: Path) -> dict[str, str]:
    """For each tensor the file that has it."""
    if (directory / _INDEX_FILE).is_file():
        weight_map: dict[str, str] = _json(directory / _INDEX_FILE)["weight_map"]
        return weight_map
    with safe_open(directory / _SINGLE_FILE, framework="pt") as file:
        return dict.fromkeys(file.keys(), _SINGLE_FILE)
