"""This file is the draft service's heartbeat: one forward of the drafter for whatever waits."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from draft_service.engine import DraftEngine, Proposal
from treewire.core.tree import Marginals
from treewire.errors import Unavailable


class Step:
    """Runs batches of proposals through the engine. Called on the engine thread alone."""

    def __init__(self, build: Callable[[], DraftEngine]) -> None:
        self._build = build
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

    def __call__(self, proposals: Sequence[Proposal]) -> Sequence[Marginals]:
        return self.engine.propose(proposals)
