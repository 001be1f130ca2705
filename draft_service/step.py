"""This file is the draft service's heartbeat: one forward of the drafter for whatever waits."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from draft_service.engine import DraftEngine, Proposal
from treewire.core.tree import Marginals
from treewire.errors import Unavailable


class Answer(NamedTuple):
    """A proposal's answer, and what the step that it shared took."""

    marginals: Marginals
    step_seconds: float


class Step:
    """Runs batches of proposals through the engine. Called on the engine thread alone."""

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

    def __call__(self, proposals: Sequence[Proposal]) -> Sequence[Answer]:
        started = self._clock()
        proposed = self.engine.propose(proposals)
        seconds = self._clock() - started
        return [Answer(marginals, seconds) for marginals in proposed]
