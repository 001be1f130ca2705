"""This file is the target's distributions at the nodes of a tree, in numpy: for acceptance by probability, and log-probs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from treewire.core.tree import TokenLogProbs


class Likeliest(NamedTuple):
    """Tokens with their log-probs, likeliest first."""

    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]


class RowDistributions:
    """Raw and processed rows of the same nodes, both float32 [nodes, vocabulary]; greedy ones are certain."""

    def __init__(self, logits: NDArray[np.float32], processed: NDArray[np.float32], *, is_greedy: bool) -> None:
        self._logits, self._processed, self._is_greedy = logits, processed, is_greedy

    def probabilities(self, node: int) -> NDArray[np.float64]:
        """The processed distribution after a node, float64 [vocabulary]."""
        row = self._processed[node].astype(np.float64)
        certain: NDArray[np.float64] = np.zeros_like(row)
        certain[row.argmax()] = 1.0
        return certain if self._is_greedy else np.exp(row, out=certain)

    def log_probs(self, nodes: Sequence[int], token_ids: Sequence[int], num_top: int) -> tuple[TokenLogProbs, ...]:
        """For each node the log-prob of the token after it, with the `num_top` likeliest; before any processing."""
        return tuple(
            TokenLogProbs(float(log_softmax(self._logits[node])[token_id]), *highest(self._logits[node], num_top))
            for node, token_id in zip(nodes, token_ids, strict=True)
        )


def log_softmax(scores: NDArray[np.float32]) -> NDArray[np.float64]:
    """Log-probs of scores [vocabulary], float64."""
    shifted = scores.astype(np.float64) - scores.max()
    log_probs: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum())
    return log_probs


def highest(scores: NDArray[np.float32], count: int) -> Likeliest:
    """The `count` likeliest tokens of scores [vocabulary], fewer where fewer are left, equals by the lower token id."""
    log_probs = log_softmax(scores)
    order = np.argsort(-log_probs, kind="stable")[:count]
    kept = order[log_probs[order] > -np.inf]
    return Likeliest(tuple(kept.tolist()), tuple(log_probs[kept].tolist()))
