"""This file is the price of a drafter's step: measured on the engine itself, over sessions and new positions of each."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from treewire.core.budget import StepPrice
from treewire.core.sampling import Sampling
from treewire.core.tree import Commit

if TYPE_CHECKING:
    from draft_service.engine import DraftEngine

BATCH_SIZES = (1, 2, 4, 8, 16)
PROMPT_TOKENS = 64
ROUND_TOKENS = 2
_NUM_REPEATS = 7
_SMALLEST_SECONDS = 1e-6
_FALLBACK_VOCABULARY = 1024  # of a drafter that fits any target


def draft_prices(engine: DraftEngine, *, clock: Callable[[], float] = time.perf_counter) -> list[StepPrice]:
    """Steps that take in ROUND_TOKENS tokens of each session, and one that takes in a prompt; the fastest of a few counts."""
    prices = []
    for batch_size in BATCH_SIZES:
        sessions = range(1, batch_size + 1)
        for session in sessions:
            engine.start(session, _tokens(engine, session, PROMPT_TOKENS), Sampling())
        first = _seconds(engine, sessions, PROMPT_TOKENS + 1, 1, PROMPT_TOKENS, clock)
        lengths = range(PROMPT_TOKENS + 1 + ROUND_TOKENS, PROMPT_TOKENS + 2 + ROUND_TOKENS * _NUM_REPEATS, ROUND_TOKENS)
        later = [_seconds(engine, sessions, length, ROUND_TOKENS, ROUND_TOKENS, clock) for length in lengths]
        for session in sessions:
            engine.release(session)
        prices.append(StepPrice(ROUND_TOKENS, batch_size, max(min(later), _SMALLEST_SECONDS)))
        if batch_size == 1:
            prices.append(StepPrice(PROMPT_TOKENS, batch_size, max(first, prices[-1].seconds)))
    return prices


def _seconds(
    engine: DraftEngine,
    sessions: Sequence[int],
    length: int,
    num_tokens: int,
    num_features: int,
    clock: Callable[[], float],
) -> float:
    """Of one step whose commits bring the sessions to `length` tokens."""
    from draft_service.engine import Proposal

    drafter, proposals = engine.drafter, []
    for session in sessions:
        commit = Commit(_tokens(engine, session, num_tokens), length)
        features = None
        if drafter.needs_features:
            shape = (num_features, drafter.feature_size)
            features = np.random.default_rng(session).normal(size=shape).astype(np.float32)
        proposals.append(Proposal(session, commit, drafter.horizon, drafter.width, features))
    started = clock()
    engine.propose(proposals)
    return clock() - started


def _tokens(engine: DraftEngine, session: int, count: int) -> tuple[int, ...]:
    vocabulary_size = engine.drafter.vocabulary_size or _FALLBACK_VOCABULARY
    return tuple((session * 97 + index) % vocabulary_size for index in range(count))
