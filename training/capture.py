"""This file is the capture: the target's hidden states over a corpus, kept in shards that training maps into memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from training.corpus import Generation
from training.target import Target

SHARD_PATTERN = "*.safetensors"


def capture_shard(
    target: Target, generations: Sequence[Generation], tapped_layers: Sequence[int], path: Path, *, batch_size: int
) -> None:
    """Write one shard; an existing one is left as it is, so a stopped capture goes on where it was.

    Tensors, sequences one after the other: `token_ids` int32 [tokens], `taps` float16 [tokens, taps, hidden], `scales`
    float32 [tokens, taps], `final` float16 [tokens, hidden], `offsets` int64 [sequences + 1], `prompt_lengths` int64
    [sequences]; metadata: the tapped layers. About 1.15 KB x (taps + 1) a token for a hidden size of 576.
    """
    if path.exists():
        return
    ordered = sorted(generations, key=len)
    batches = (ordered[first : first + batch_size] for first in range(0, len(ordered), batch_size))
    rows = [row for batch in batches for row in _capture_batch(target, batch, tapped_layers)]
    lengths = torch.tensor([0, *(len(generation) for generation in ordered)])
    tensors = {name: torch.cat([row[name] for row in rows]) for name in rows[0]}
    tensors["offsets"] = lengths.cumsum(0)
    tensors["prompt_lengths"] = torch.tensor([len(generation.prompt_ids) for generation in ordered])
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    save_file(tensors, partial, metadata={"tapped_layers": " ".join(map(str, tapped_layers))})
    partial.rename(path)


def _capture_batch(target: Target, batch: Sequence[Generation], tapped_layers: Sequence[int]) -> Iterator[dict[str, Tensor]]:
    token_ids = torch.zeros(len(batch), max(map(len, batch)), dtype=torch.int64)
    for row, generation in enumerate(batch):
        token_ids[row, : len(generation)] = torch.tensor(generation.token_ids)
    states = target.hidden_states(token_ids, tapped_layers)
    for row, generation in enumerate(batch):
        length = len(generation)
        yield {
            "token_ids": token_ids[row, :length].to(torch.int32),
            "taps": states.taps[row, :length].half(),
            "scales": states.scales[row, :length].clone(),
            "final": states.final[row, :length].half(),
        }


class Shard:
    """A shard, mapped: a sequence is read when it is asked for."""

    def __init__(self, path: Path) -> None:
        opened: Any = safe_open  # its stubs are partly untyped
        self._file = opened(path, framework="pt")
        self.tapped_layers = tuple(int(layer) for layer in self._file.metadata()["tapped_layers"].split())
        self.offsets: list[int] = self._file.get_tensor("offsets").tolist()
        self.prompt_lengths: list[int] = self._file.get_tensor("prompt_lengths").tolist()
        self.token_ids: Tensor = self._file.get_tensor("token_ids")

    def __len__(self) -> int:
        """Sequences."""
        return len(self.prompt_lengths)

    def read(self, name: str, sequence: int) -> Tensor:
        """The rows of a tensor that belong to a sequence."""
        rows: Tensor = self._file.get_slice(name)[self.offsets[sequence] : self.offsets[sequence + 1]]
        return rows
