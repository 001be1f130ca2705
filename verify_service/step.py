"""This file is the verify service's heartbeat: one forward for whatever waits, then acceptance, then keep."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from treewire.core.acceptance import Acceptance
from treewire.core.budget import StepPrice
from treewire.core.sampling import Sampling
from treewire.core.tree import DraftTree, TokenLogProbs
from treewire.errors import Overloaded, TreewireError, Unavailable
from treewire.kv.pages import KvExhausted
from treewire.runtime.engine_thread import EngineDied
from verify_service.engine import EngineLost, HasGraphs, Posterior, PrefillChunk, Scoring, SessionId, TargetEngine
from verify_service.price import LivePrices, Measure, no_prices
from verify_service.rules import Rule, shared_noise
from verify_service.structures.pruning import Pruning

_WARM_UP_SESSION: SessionId = 0  # sessions of callers count from 1
_KV_RETRY_SECONDS = 1.0


@dataclass(frozen=True)
class Work:
    """What one session waits for: its next chunk or its tree.

    `rule` accepts of the tree, None leaves that to the caller. With `num_log_probs` every token that is committed comes with
    its log-prob and with so many of the likeliest tokens. With a `pruning` the item's tree is what that leaves; the answer is
    one to the whole tree.
    """

    item: PrefillChunk | Scoring
    rule: Rule | None = shared_noise
    num_log_probs: int | None = None
    pruning: Pruning | None = None

    @property
    def tree(self) -> DraftTree:
        """The whole tree that the answer is to. Raises ValueError for a chunk."""
        if self.pruning is not None:
            return self.pruning.tree
        if isinstance(self.item, PrefillChunk):
            raise ValueError("a chunk has no tree")
        return self.item.tree

    @property
    def num_tokens(self) -> int:
        """Positions that the target computes for it."""
        return len(self.item.tree) if isinstance(self.item, Scoring) else len(self.item.token_ids)


@dataclass(frozen=True)
class Answer:
    """What the target said, what was accepted (None for a chunk, or when the caller accepts), and what the step cost.

    `log_probs` are those of the committed tokens, if asked for. `walk_seconds` went into acceptance and keep.
    """

    posterior: Posterior
    acceptance: Acceptance | None
    step_seconds: float
    batch_size: int
    log_probs: tuple[TokenLogProbs, ...] = ()
    walk_seconds: float = 0.0


class Step:
    """Runs batches of work through the engine. Called on the engine thread alone.

    A session for whose work the KV memory has no room is answered with Overloaded; the rest of its batch runs.
    """

    def __init__(
        self,
        build: Callable[[], TargetEngine],
        *,
        measure: Measure = no_prices,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._build = build
        self._measure = measure
        self._clock = clock
        self._prices = LivePrices(())
        self._engine: TargetEngine | None = None

    @property
    def engine(self) -> TargetEngine:
        """The engine; Unavailable until it is loaded."""
        if self._engine is None:
            raise Unavailable("the target is loading", retry_after_seconds=1.0)
        return self._engine

    @property
    def prices(self) -> tuple[StepPrice, ...]:
        """What steps take, as measured and observed since; empty if nothing was measured."""
        return self._prices.prices

    def num_missed_graphs(self) -> int:
        """Steps that ran outside the engine's graphs; 0 for an engine without any."""
        return self._engine.num_missed_graphs if isinstance(self._engine, HasGraphs) else 0

    def load(self) -> None:
        """Build the engine, run one small tree through it, so that the first caller finds it warm, and measure its prices."""
        engine = self._build()
        token_id = engine.target.vocabulary_size - 1  # one that no caller's prompt begins with, so that it shares no prefix
        num_known = engine.open(_WARM_UP_SESSION, (token_id, token_id), Sampling())
        engine.step([PrefillChunk(_WARM_UP_SESSION, (token_id, token_id)[num_known:], last=True)])
        engine.step([Scoring(_WARM_UP_SESSION, DraftTree((token_id, token_id), (-1, 0)))])
        engine.release(_WARM_UP_SESSION)
        self._prices = LivePrices(self._measure(engine))
        self._engine = engine

    def __call__(self, batch: Sequence[Work]) -> Sequence[Answer | Exception]:
        started = self._clock()
        posteriors = self._posteriors(batch)
        seconds = self._clock() - started
        self._observe(batch, posteriors, seconds)
        return [
            posterior if isinstance(posterior, Exception) else self._answer(work, posterior, seconds, len(batch))
            for work, posterior in zip(batch, posteriors, strict=True)
        ]

    def lose(self, reason: str) -> None:
        """The engine is lost though no step runs. Raises EngineDied, which ends the thread that calls this."""
        raise EngineDied(reason)

    def _observe(self, batch: Sequence[Work], posteriors: Sequence[Posterior | TreewireError], seconds: float) -> None:
        """A step over trees alone, all of them scored, says what such a step takes."""
        trees = [work.item.tree for work in batch if isinstance(work.item, Scoring)]
        if len(trees) == len(batch) and all(isinstance(posterior, Posterior) for posterior in posteriors):
            self._prices.observe([len(tree) for tree in trees], seconds)

    def _posteriors(self, batch: Sequence[Work]) -> Sequence[Posterior | TreewireError]:
        refused: dict[SessionId, Overloaded] = {}
        while True:
            items = [work.item for work in batch if work.item.session not in refused]
            try:
                answered = iter(self.engine.step(items))
            except KvExhausted as error:
                refused[error.session] = Overloaded(str(error), retry_after_seconds=_KV_RETRY_SECONDS)
                continue
            except EngineLost as error:
                raise EngineDied(str(error)) from error
            return [refused.get(work.item.session) or next(answered) for work in batch]

    def _answer(self, work: Work, posterior: Posterior, seconds: float, batch_size: int) -> Answer:
        acceptance, started = None, self._clock()
        if work.pruning is not None:
            posterior = work.pruning.spread(posterior)
        if isinstance(work.item, Scoring) and work.rule is not None:
            acceptance = work.rule(work.tree, posterior)
            kept = acceptance if work.pruning is None else work.pruning.within(acceptance)
            self.engine.keep(work.item.session, kept)
        log_probs = _log_probs(work, posterior, acceptance)
        walk_seconds = self._clock() - started
        return Answer(replace(posterior, distributions=None), acceptance, seconds, batch_size, log_probs, walk_seconds)


def _log_probs(work: Work, posterior: Posterior, acceptance: Acceptance | None) -> tuple[TokenLogProbs, ...]:
    """Of the tokens that are committed: a tree's accepted ones and the bonus, a last chunk's one."""
    if work.num_log_probs is None or posterior.distributions is None:
        return ()
    if acceptance is None:
        return posterior.distributions.log_probs([0], posterior.token_ids[:1], work.num_log_probs)
    return posterior.distributions.log_probs(acceptance.nodes, acceptance.token_ids(work.tree), work.num_log_probs)
