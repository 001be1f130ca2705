"""This file is the sampling chain in torch, the twin of `treewire.core.processing`: from logits to the target's choice."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache, partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from treewire.core.history import NodeHistories
from treewire.core.noise import noise_row
from treewire.core.sampling import Sampling
from treewire.core.tree import TokenLogProbs
from treewire.highest import Ranked, highest
from verify_service.engine import NodeProbabilities

_NUM_NOISE_ROWS = 32  # per session: the depth of a usual tree, so that a row is made once and serves siblings and later rounds
_NUCLEUS_WIDTH = 1024  # a nucleus is nearly always smaller; finding this many is eight times faster than sorting 49k tokens

_REMOVED = float("-inf")
_WORD_BITS = 32


class NoiseRows:
    """A session's shared noise, one row for each position; the latest rows are kept."""

    def __init__(self, seed: int, vocabulary_size: int, first_token_id: int = 0) -> None:
        """Rows of the tokens from `first_token_id` on."""
        self.seed = seed
        row = partial(noise_row, seed, vocabulary_size=vocabulary_size, first_token_id=first_token_id)
        self._row = lru_cache(_NUM_NOISE_ROWS)(row)

    def at(self, positions: Sequence[int], device: torch.device) -> Tensor:
        """Noise of the tokens at these absolute positions, float32 [positions, vocabulary]."""
        distinct = sorted(set(positions))
        rows = torch.stack([torch.from_numpy(self._row(position)) for position in distinct]).to(device)
        number = {position: row for row, position in enumerate(distinct)}
        return rows[torch.tensor([number[position] for position in positions], device=device)]


def allow_only(logits: Tensor, rows: NDArray[np.int32] | None) -> Tensor:
    """Logits [rows, vocabulary] without the tokens that may not be chosen: what the chain takes for the target's own.

    The rows are those of `verify_service.engine.Masks`; None allows all.
    """
    if rows is None:
        return logits
    words = torch.from_numpy(rows).to(logits.device)
    bits = torch.arange(_WORD_BITS, dtype=torch.int32, device=logits.device)
    allowed = (words[:, :, None] >> bits & 1).view(len(rows), -1)[:, : logits.shape[1]]
    return logits.masked_fill(allowed == 0, _REMOVED)


def process(logits: Tensor, sampling: Sampling, histories: NodeHistories | None = None) -> Tensor:
    """Log-probs after the whole chain; float32 [rows, vocabulary], removed tokens -inf.

    The rules are those of `treewire.core.processing.process`; like there, greedy takes the logits after min tokens.
    `histories` has a row for each row of logits; it is needed where `sampling.reads_history`.
    """
    logits = adjust(logits, sampling, histories)
    if sampling.is_greedy:
        return logits
    scaled = (logits - logits.amax(dim=-1, keepdim=True)).div_(sampling.temperature)
    if sampling.top_k or sampling.top_p < 1.0:
        scaled = _keep_best(scaled, sampling)
    if sampling.min_p > 0.0:
        scaled.masked_fill_(scaled < math.log(sampling.min_p), _REMOVED)
    return scaled.log_softmax(dim=-1)


def adjust(logits: Tensor, sampling: Sampling, histories: NodeHistories | None) -> Tensor:
    """Logits after penalties, logit bias and min tokens; the given ones stay as they are.

    Tokens are dealt with one by one: of a span of the vocabulary it takes the parameters and histories of that span.
    """
    if not sampling.reads_history and not sampling.logit_bias:
        return logits
    adjusted = logits.clone()
    if sampling.reads_history:
        if histories is None:
            raise ValueError("the sampling parameters read the history, none is given")
        _penalise(adjusted, sampling, histories)
    if sampling.logit_bias:
        token_ids, biases = zip(*sampling.logit_bias, strict=True)
        adjusted[:, torch.tensor(token_ids, device=logits.device)] += torch.tensor(biases, device=logits.device)
    if sampling.min_tokens and sampling.stop_token_ids and histories is not None:
        is_short = torch.from_numpy(histories.num_output_tokens < sampling.min_tokens).to(logits.device)
        stops = torch.tensor(sampling.stop_token_ids, device=logits.device)
        adjusted[:, stops] = adjusted[:, stops].masked_fill(is_short[:, None], _REMOVED)
    return adjusted


def _penalise(logits: Tensor, sampling: Sampling, histories: NodeHistories) -> None:
    """Only the columns of tokens that came up are read and written."""
    token_ids = torch.from_numpy(histories.token_ids).to(logits.device)
    counts = torch.from_numpy(histories.output_counts).to(logits.device)
    seen = torch.from_numpy(histories.in_prompt).to(logits.device) | (counts > 0)
    scores = logits[:, token_ids]
    repeated = torch.where(scores > 0, scores / sampling.repetition_penalty, scores * sampling.repetition_penalty)
    scores = torch.where(seen, repeated, scores)
    scores -= sampling.presence_penalty * (counts > 0)
    scores -= sampling.frequency_penalty * counts
    logits[:, token_ids] = scores


class TensorDistributions:
    """`verify_service.engine.Distributions` of raw and processed rows, both [nodes, vocabulary]; greedy ones are certain."""

    def __init__(self, logits: Tensor, processed: Tensor, *, is_greedy: bool) -> None:
        self._logits, self._processed, self._is_greedy = logits, processed, is_greedy

    def probabilities(self, node: int) -> NDArray[np.float64]:
        """The processed distribution after a node, float64 [vocabulary]."""
        row = self._processed[node].double()
        row = torch.zeros_like(row).index_fill_(0, row.argmax(), 1.0) if self._is_greedy else row.exp()
        probabilities: NDArray[np.float64] = row.cpu().numpy()
        return probabilities

    def log_probs(self, nodes: Sequence[int], token_ids: Sequence[int], num_top: int) -> tuple[TokenLogProbs, ...]:
        """For each node the log-prob of the token after it, with the likeliest ones; before any processing."""
        device = self._logits.device
        rows = self._logits[torch.tensor(list(nodes), device=device)].log_softmax(dim=-1)
        own = rows.gather(1, torch.tensor(list(token_ids), device=device)[:, None])[:, 0].tolist()
        top = highest(rows, num_top) if num_top else Ranked(rows[:, :0], rows[:, :0].long())
        return tuple(
            TokenLogProbs(log_prob, tuple(top_ids), tuple(top_log_probs))
            for log_prob, top_ids, top_log_probs in zip(own, top.token_ids.tolist(), top.scores.tolist(), strict=True)
        )


def choose(log_probs: Tensor, noise_rows: Tensor | None) -> Tensor:
    """The token with the highest log-prob plus noise, int64 [rows]; of equals the lower id.

    Raises FloatingPointError if a row has no finite best, as happens when the model computes NaN.
    """
    scores = log_probs if noise_rows is None else log_probs + noise_rows
    chosen = scores.argmax(dim=-1)
    if not scores.gather(1, chosen[:, None]).isfinite().all():
        raise FloatingPointError("the target's logits are not finite")
    return chosen


def likeliest(log_probs: Tensor, count: int) -> tuple[NodeProbabilities, ...]:
    """The `count` likeliest tokens of each row, fewer where fewer are left. Logits are normalised first."""
    ranked = highest(log_probs.log_softmax(dim=-1), count)
    return tuple(
        NodeProbabilities(tuple(token_ids[: len(kept)]), kept)
        for scores, token_ids in zip(ranked.scores.tolist(), ranked.token_ids.tolist(), strict=True)
        for kept in [tuple(score for score in scores if score > _REMOVED)]
    )


def _keep_best(scaled: Tensor, sampling: Sampling) -> Tensor:
    """Top-k, then top-p of what it left. `scaled` has 0 as the highest entry of each row."""
    best = highest(scaled, sampling.top_k) if sampling.top_k else _nucleus(scaled, sampling.top_p)
    reached = best.scores.double().exp().cumsum(dim=-1)
    total = reached[:, -1:] if sampling.top_k else _mass(scaled)
    beyond = torch.zeros_like(reached, dtype=torch.bool)
    beyond[:, 1:] = reached[:, :-1] >= sampling.top_p * total
    return torch.full_like(scaled, _REMOVED).scatter_(1, best.token_ids, best.scores.masked_fill(beyond, _REMOVED))


def _nucleus(scaled: Tensor, top_p: float) -> Ranked:
    """As many of the best tokens as contain the nucleus of every row."""
    likely = highest(scaled, _NUCLEUS_WIDTH)
    covered = _mass(likely.scores) >= top_p * _mass(scaled)
    return likely if covered.all() else highest(scaled, scaled.shape[1])


def _mass(scaled: Tensor) -> Tensor:
    """What the softmax of each row divides by, float64 [rows, 1]."""
    return scaled.exp().sum(dim=-1, keepdim=True, dtype=torch.float64)
