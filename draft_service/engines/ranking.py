"""This file is the ranking of a drafter's tokens: by log-prob, and at temperatures above 0 by log-prob plus shared noise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from treewire.core.history import History
from treewire.core.noise import noise_at, noise_row
from treewire.core.processing import process
from treewire.core.sampling import Sampling
from treewire.core.tree import Marginals


class Row(NamedTuple):
    """Tokens of one depth, best first, with their log-probs: int32 and float32 [width]."""

    token_ids: NDArray[np.int32]
    log_probs: NDArray[np.float32]


def rank_vocabulary(
    logits: NDArray[np.float32], sampling: Sampling, position: int, width: int, history: History | None = None
) -> Row:
    """The best `width` tokens for the token at `position`, of logits float32 [vocabulary].

    Log-probs are those of the sampling chain; greedy, those of the logits after penalties, bias and min tokens. A token that
    the chain removes has -inf. `history` is what was said before the token; it is needed where `sampling.reads_history`.
    """
    width = min(width, len(logits))
    histories = history.now() if history is not None and sampling.reads_history else None
    processed = process(logits[np.newaxis], sampling, histories)[0]
    log_probs = _log_softmax(processed) if sampling.is_greedy else processed
    aims = not sampling.is_greedy and sampling.shares_noise
    scores = log_probs + noise_row(sampling.seed, position, len(logits)) if aims else log_probs
    token_ids = _highest(scores, width)
    return Row(token_ids.astype(np.int32), log_probs[token_ids])


def rank_candidates(
    token_ids: NDArray[np.int32], log_probs: NDArray[np.float32], sampling: Sampling, position: int, width: int
) -> Row:
    """The best `width` of some tokens [candidates] with their log-probs, for the token at `position`."""
    aims = not sampling.is_greedy and sampling.shares_noise
    scores = log_probs + noise_at(sampling.seed, position, token_ids) if aims else log_probs
    order = np.lexsort((token_ids, -scores))[:width]
    return Row(token_ids[order], log_probs[order])


def pad(row: Row, width: int) -> Row:
    """The row with fillers up to `width`: the lowest tokens it lacks, with log-prob -inf, which no tree ever takes."""
    num_fillers = width - len(row.token_ids)
    lacking = np.setdiff1d(np.arange(width, dtype=np.int32), row.token_ids)[:num_fillers]
    return Row(
        np.concatenate([row.token_ids, lacking]), np.concatenate([row.log_probs, np.full(num_fillers, -np.inf, np.float32)])
    )


def to_marginals(rows: Sequence[Row]) -> Marginals:
    """Marginals of rows of one width, row 0 the children of the root; empty without rows."""
    if not rows:
        return Marginals.empty()
    return Marginals(np.stack([row.token_ids for row in rows]), np.stack([row.log_probs for row in rows]))


def _log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    shifted = logits.astype(np.float64) - logits.max()
    log_probs: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum())
    return log_probs.astype(np.float32)


def _highest(scores: NDArray[np.float32], width: int) -> NDArray[np.int64]:
    """Indices of the `width` highest scores, highest first, equals by the lower index."""
    lowest = np.partition(scores, len(scores) - width)[len(scores) - width]
    above = np.flatnonzero(scores > lowest)
    equal = np.flatnonzero(scores == lowest)[: width - len(above)]
    return np.concatenate([above[np.argsort(-scores[above], kind="stable")], equal])
