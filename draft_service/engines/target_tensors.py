"""This file is what drafters share with their target: its embedding and its output head, read from its checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from treewire.checkpoint import StoredTensor, read_config, stored_tensors

_EMBEDDINGS = (
    "model.embed_tokens.weight",
    "model.language_model.embed_tokens.weight",
    "language_model.model.embed_tokens.weight",
)
_HEADS = ("lm_head.weight", "language_model.lm_head.weight")


@dataclass(frozen=True, eq=False)
class TargetTensors:
    """Embedding and output head [vocabulary, hidden], one tensor where they are tied; `max_context` is the target's."""

    embedding: Tensor
    head: Tensor
    max_context: int


def load_target_tensors(directory: Path, *, device: str, dtype: torch.dtype) -> TargetTensors:
    """Of a checkpoint in the Hugging Face layout, read without the rest of the model. Raises ValueError if it lacks one."""
    stored, config = stored_tensors(directory), read_config(directory)
    config = config.get("text_config", config)
    embedding_name = _first(stored, _EMBEDDINGS)
    if embedding_name is None:
        raise ValueError(f"{directory} has none of {', '.join(_EMBEDDINGS)}: a drafter shares its target's embedding")
    embedding = _read(stored[embedding_name], embedding_name, device, dtype)
    head_name = _first(stored, _HEADS)
    if head_name is None and not config.get("tie_word_embeddings", True):
        raise ValueError(f"{directory} has none of {', '.join(_HEADS)}: a drafter shares its target's output head")
    head = embedding if head_name is None else _read(stored[head_name], head_name, device, dtype)
    return TargetTensors(embedding, head, int(config["max_position_embeddings"]))


def load_tensors(directory: Path, *, device: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Every tensor of a checkpoint; those of integers keep their type."""
    return {name: _read(tensor, name, device, dtype) for name, tensor in stored_tensors(directory).items()}


def _first(stored: Mapping[str, StoredTensor], names: Sequence[str]) -> str | None:
    return next((name for name in names if name in stored), None)


def _read(stored: StoredTensor, name: str, device: str, dtype: torch.dtype) -> Tensor:
    with safe_open(stored.path, framework="pt", device=device) as file:
        tensor: Tensor = file.get_tensor(name)
    return tensor.to(dtype) if tensor.is_floating_point() else tensor
