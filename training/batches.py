"""This file is the order of training data: which captured sequences make which batch, as a pure function of the step."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from training.capture import SHARD_PATTERN, Shard

BATCHES_SORTED_TOGETHER = 16


class SequenceKey(NamedTuple):
    """Where a captured sequence is, and how long."""

    shard: int
    sequence: int
    length: int


@dataclass(frozen=True, eq=False)
class Batch:
    """Captured sequences, padded on the right: `token_ids` int64 [batch, positions], `taps` [batch, positions, taps, hidden],
    `final` [batch, positions, hidden], `prompt_lengths` and `lengths` int64 [batch]."""

    token_ids: Tensor
    taps: Tensor
    final: Tensor
    prompt_lengths: Tensor
    lengths: Tensor


class Captured:
    """The captured sequences of a directory. Raises ValueError if it has none or its shards disagree on the tapped layers."""

    def __init__(self, directory: Path) -> None:
        self._shards = [Shard(path) for path in sorted(directory.glob(SHARD_PATTERN))]
        tapped = {shard.tapped_layers for shard in self._shards}
        if len(tapped) != 1:
            raise ValueError(
                f"{directory} has shards of {len(tapped)} choices of tapped layers, it must be one: {sorted(tapped)}"
            )
        self.tapped_layers = tapped.pop()
        self.keys = [
            SequenceKey(number, sequence, shard.offsets[sequence + 1] - shard.offsets[sequence])
            for number, shard in enumerate(self._shards)
            for sequence in range(len(shard))
        ]

    @property
    def num_tokens(self) -> int:
        """Positions captured."""
        return sum(key.length for key in self.keys)

    def token_counts(self, vocabulary_size: int) -> Tensor:
        """How often each token was generated, int64 [vocabulary]; prompts do not count."""
        counts = torch.zeros(vocabulary_size, dtype=torch.int64)
        for key in self.keys:
            shard = self._shards[key.shard]
            start, end = shard.offsets[key.sequence], shard.offsets[key.sequence + 1]
            generated = shard.token_ids[start + shard.prompt_lengths[key.sequence] : end]
            counts += generated.bincount(minlength=vocabulary_size)
        return counts

    def last_tap_scale(self) -> float:
        """Median root mean square of the last tapped layer's outputs, over the first sequence."""
        return float(self._shards[0].read("scales", 0)[:, -1].median())

    def batch(self, keys: Sequence[SequenceKey]) -> Batch:
        """These sequences, read and padded."""

        def padded(name: str) -> Tensor:
            return torch.nn.utils.rnn.pad_sequence(
                [self._shards[key.shard].read(name, key.sequence) for key in keys], batch_first=True
            )

        return Batch(
            padded("token_ids").long(),
            padded("taps"),
            padded("final"),
            torch.tensor([self._shards[key.shard].prompt_lengths[key.sequence] for key in keys]),
            torch.tensor([key.length for key in keys]),
        )


def epoch_plan(keys: Sequence[SequenceKey], batch_size: int, seed: int, epoch: int) -> list[list[SequenceKey]]:
    """The batches of an epoch: sequences shuffled, then sorted by length within a few batches to save padding."""
    order, shuffler = list(keys), random.Random(f"{seed} {epoch}")
    shuffler.shuffle(order)
    pool = batch_size * BATCHES_SORTED_TOGETHER
    batches = []
    for start in range(0, len(order), pool):
        near = sorted(order[start : start + pool], key=lambda key: key.length)
        batches += [near[first : first + batch_size] for first in range(0, len(near), batch_size)]
    shuffler.shuffle(batches)
    return batches
