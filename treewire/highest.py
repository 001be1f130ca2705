"""This file is the best tokens of rows of scores in torch, in an order that is settled: what drafters and targets rank by."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Ranked(NamedTuple):
    """The highest entries of each row, best first, equals by the lower token id; both [rows, count]."""

    scores: Tensor
    token_ids: Tensor


def highest(scores: Tensor, count: int) -> Ranked:
    """The `count` highest entries of each row; `torch.topk` with a settled order of equals."""
    if count >= scores.shape[1]:
        return Ranked(*scores.sort(dim=-1, descending=True, stable=True))
    top = scores.topk(count + 1, dim=-1)
    if (top.values[:, count - 1] == top.values[:, count]).any():  # equals at the edge: topk took any of them
        token_ids = _ids_of_highest(scores, top.values[:, count - 1 : count], count)
    else:
        token_ids = top.indices[:, :count].sort(dim=-1).values
    ordered = scores.gather(1, token_ids).sort(dim=-1, descending=True, stable=True)
    return Ranked(ordered.values, token_ids.gather(1, ordered.indices))


def _ids_of_highest(scores: Tensor, lowest: Tensor, count: int) -> Tensor:
    """The `count` highest entries of each row in the order of token ids, where `lowest` [rows, 1] is the lowest of them."""
    above, equal = scores > lowest, scores == lowest
    room = count - above.sum(dim=-1, keepdim=True)
    kept = above | (equal & (equal.cumsum(dim=-1) <= room))
    return kept.nonzero()[:, 1].view(-1, count)
