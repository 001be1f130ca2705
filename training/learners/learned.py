"""This file is what all learners share: where they learn in a batch, and what they report of it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from training.batches import Batch


class Learned(NamedTuple):
    """Loss per learnt position, and for each depth the share of guesses that agree with the target's argmax."""

    loss: Tensor
    agreement: list[float]


def generated_positions(batch: Batch) -> Tensor:
    """Positions whose next token the target generated and the sequence has, bool [batch, positions]."""
    positions = torch.arange(batch.token_ids.shape[1])
    return (positions >= batch.prompt_lengths[:, None] - 1) & (positions < batch.lengths[:, None] - 1)


def spread_anchors(batch: Batch, count: int, generator: torch.Generator) -> Tensor:
    """Positions spread evenly but not regularly over each sequence's generated part, int64 [batch, count]."""
    spans = (batch.lengths - batch.prompt_lengths).clamp(min=1)[:, None]
    strata = torch.arange(count) + torch.rand(len(batch.lengths), count, generator=generator)
    return batch.prompt_lengths[:, None] - 1 + (strata * spans / count).long()
