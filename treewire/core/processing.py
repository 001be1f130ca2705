"""This file is the sampling chain in numpy, the reference for every target: from logits to p', and the choice from p'."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from treewire.core.history import NodeHistories
from treewire.core.sampling import Sampling


@np.errstate(over="ignore")  # a vanishing temperature sends all but the best to -inf
def process(logits: NDArray[np.float32], sampling: Sampling, histories: NodeHistories | None = None) -> NDArray[np.float32]:
    """Log-probs after the whole chain; float32 [nodes, vocabulary] like the logits.

    In this order: repetition, presence and frequency penalty, logit bias, min tokens (see `adjust`), temperature, top-k,
    top-p and min-p. `histories` has a row for each node; it is needed where `sampling.reads_history`.

    Removed tokens have -inf; the rest is renormalised. Top-k keeps exactly k tokens, top-p the fewest best tokens whose mass
    reaches p, min-p those with at least that share of the best token's probability; equals stay by the lower token id, the
    best token always stays. A logit of -inf is a token already removed. Greedy needs no probabilities: logits are returned
    as they are after min tokens. Raises ValueError on NaN or +inf, on a row without a finite logit, on anything but
    [nodes, vocabulary], and without the histories that the parameters read.
    """
    _check_logits(logits)
    logits = adjust(logits, sampling, histories)
    if sampling.is_greedy:
        return logits
    scaled = logits.astype(np.float64)
    scaled -= scaled.max(axis=1, keepdims=True)
    scaled /= sampling.temperature
    if sampling.top_k or sampling.top_p < 1.0:
        scaled = _keep_best(scaled, sampling.top_k or scaled.shape[1], sampling.top_p)
    scaled[np.exp(scaled) < sampling.min_p] = -np.inf
    scaled -= np.log(np.exp(scaled).sum(axis=1, keepdims=True))
    return scaled.astype(np.float32)


def allow_only(logits: NDArray[np.float32], rows: NDArray[np.int32] | None) -> NDArray[np.float32]:
    """Logits [nodes, vocabulary] in which tokens that may not be chosen are removed: what the chain takes for the target's own.

    `rows` int32 [nodes, ceil(vocabulary / 32)]: bit v % 32 of word v // 32 is set if token v may be; None allows all.
    """
    if rows is None:
        return logits
    allowed = np.unpackbits(rows.astype("<i4").view(np.uint8), axis=1, bitorder="little")[:, : logits.shape[1]]
    return np.where(allowed, logits, np.float32(-np.inf))


def choose(log_probs: NDArray[np.float32], noise_rows: NDArray[np.float32] | None) -> NDArray[np.int64]:
    """The token with the highest log-prob plus noise after each node, int64 [nodes]; of equals the lower id.

    Both are [nodes, vocabulary]. With noise of the next token's position this is a sample from p' (the Gumbel-max trick);
    without, the greedy choice.
    """
    chosen: NDArray[np.int64] = np.argmax(log_probs if noise_rows is None else log_probs + noise_rows, axis=1)
    return chosen


def adjust(logits: NDArray[np.float32], sampling: Sampling, histories: NodeHistories | None) -> NDArray[np.float32]:
    """Logits after penalties, logit bias and min tokens: the part of the chain that also concerns greedy choices.

    The repetition penalty divides positive and multiplies negative logits of tokens in prompt or output (CTRL, Keskar et al.
    2019); presence is subtracted once, frequency once an occurrence, both for tokens in the output. Stop tokens of a node
    with fewer than `min_tokens` output tokens before it are removed. The given logits stay as they are.
    """
    if not sampling.reads_history and not sampling.logit_bias:
        return logits
    adjusted = logits.copy()
    if sampling.reads_history:
        if histories is None:
            raise ValueError("the sampling parameters read the history, none is given")
        _penalise(adjusted, sampling, histories)
    for token_id, bias in sampling.logit_bias:
        adjusted[:, token_id] += np.float32(bias)
    if sampling.min_tokens and histories is not None:
        is_short = histories.num_output_tokens < sampling.min_tokens
        adjusted[np.ix_(is_short, np.asarray(sampling.stop_token_ids, np.int64))] = -np.inf
        _check_logits(adjusted)
    return adjusted


def _penalise(logits: NDArray[np.float32], sampling: Sampling, histories: NodeHistories) -> None:
    counts = histories.output_counts
    scores = logits[:, histories.token_ids]
    repetition = np.float32(sampling.repetition_penalty)
    repeated = np.where(scores > 0, scores / repetition, scores * repetition)
    scores = np.where(histories.in_prompt | (counts > 0), repeated, scores)
    scores -= np.float32(sampling.presence_penalty) * (counts > 0)
    scores -= np.float32(sampling.frequency_penalty) * counts.astype(np.float32)
    logits[:, histories.token_ids] = scores


def _check_logits(logits: NDArray[np.float32]) -> None:
    if logits.ndim != 2 or logits.shape[1] == 0:
        raise ValueError(f"logits have shape {logits.shape}, they must be [nodes, vocabulary]")
    if not (logits < np.inf).all():  # also catches NaN
        raise ValueError("logits are below infinity, these have +inf or NaN")
    if (logits.max(axis=1) == -np.inf).any():
        raise ValueError("every token of a row has logit -inf, at least one must be left")


def _keep_best(scaled: NDArray[np.float64], top_k: int, top_p: float) -> NDArray[np.float64]:
    order = np.argsort(-scaled, axis=1, kind="stable")[:, :top_k]  # stable: equals by the lower token id
    best = np.take_along_axis(scaled, order, 1)
    reached = np.cumsum(np.exp(best), axis=1)
    best[:, 1:][reached[:, :-1] >= top_p * reached[:, -1:]] = -np.inf
    kept = np.full_like(scaled, -np.inf)
    np.put_along_axis(kept, order, best, 1)
    return kept
