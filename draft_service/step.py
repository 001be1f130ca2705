"""This file is the draft service's heartbeat: one forward of the drafter for whatever waits."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from draft_service.engine import DraftEngine, Proposal, SessionId
from treewire.core.tree import Marginals
from treewire.errors import Overloaded, Unavailable
from treewire.kv.pages import KvExhausted

_KV_RETRY_SECONDS = 1.0


class Answer(NamedTuple):
    """A proposal's answer, and what the step that it shared took."""

    marginals: Marginals
    step_seconds: float


class Step:
    """Runs batches of proposals through the engine. Called on the engine thread alone.

    A session for whose commit the KV memory has no room is answered with Overloaded; the rest of its batch runs.
    """

    def __init__(self, build: Callable[[], DraftEngine], clock: Callable[[], float] = time.perf_counter) -> None:
        self._build = build
        self._clock = clock
        self._engine: DraftEngine | None = None

    @property
    def engine(self) -> DraftEngine:
        """The engine; Unavailable until it is loaded."""
        if self._engine is None:
            raise Unavailable("the drafter is loading", retry_after_seconds=1.0)
        return self._engine

    def load(self) -> None:
        """Build the engine."""
        self._engine = self._build()

    def __call__(self, proposals: Sequence[Proposal]) -> Sequence[Answer | Exception]:
        started = self._clock()
        proposed = self._proposed(proposals)
        seconds = self._clock() - started
        return [each if isinstance(each, Exception) else Answer(each, seconds) for each in proposed]

    def _proposed(self, proposals: Sequence[Proposal]) -> Sequence[Marginals | Exception]:
        refused: dict[SessionId, Overloaded] = {}
        while True:
            try:
                answered = iter(self.engine.propose([each for each in proposals if each.session not in refused]))
            except KvExhausted as error:
                refused[error.session] = overloaded(error)
                continue
            return [refused.get(each.session) or next(answered) for each in proposals]


def overloaded(error: KvExhausted) -> Overloaded:
    """What a caller is told whose session has no room."""
    return Overloaded(str(error), retry_after_seconds=_KV_RETRY_SECONDS)
