"""This file is the seam between the draft service and a drafter: what an engine is given, and what it answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from treewire.core.build import BranchWeights
from treewire.core.sampling import Sampling
from treewire.core.tree import Commit, Marginals

SessionId = int

KV_TOKENS = 32768  # positions whose keys and values fit, of all sessions together
KV_PAGE_SIZE: Literal[16] = 16  # drafts are in no page or begin where the sequence ends, so that large pages cost no moves


@dataclass(frozen=True)
class Drafter:
    """What a drafter is and how far it looks. `vocabulary_size` and `tokenizer_hash` are 0 and "" if any target fits.

    A drafter that needs context features says which: their size, the target layers that they are made of, and the hash of the
    projection that makes them. `max_prefixes` is the most that conditional rows of one answer describe, 0 if it has none.
    `weights` are those that branches of its guesses are ranked by, None if they were never fitted to it.
    """

    engine: str
    model: str
    vocabulary_size: int
    tokenizer_hash: str
    horizon: int
    width: int
    max_context: int
    needs_features: bool = False
    feature_size: int = 0
    tapped_layers: tuple[int, ...] = ()
    feature_projection_hash: str = ""
    max_prefixes: int = 0
    weights: BranchWeights | None = None


@dataclass(frozen=True)
class Proposal:
    """A session's new commit, how deep and wide the answer may be, and whether it may have conditional rows.

    `features`, float32 [positions, feature size], of the positions since the last proposal, for engines that need them.
    """

    session: SessionId
    commit: Commit
    horizon: int
    width: int
    features: NDArray[np.float32] | None = None
    takes_conditional: bool = False


class DraftEngine(Protocol):
    """A drafter on one device. One thread calls, one call at a time; batches in and out.

    Engines with keys and values raise `treewire.kv.pages.KvExhausted`, naming the session, where memory has no room for it;
    nothing has changed then.
    """

    @property
    def drafter(self) -> Drafter:
        """What this engine is."""

    def start(self, session: SessionId, prompt: Sequence[int], sampling: Sampling) -> None:
        """Make room for a session that continues this prompt."""

    def propose(self, proposals: Sequence[Proposal]) -> Sequence[Marginals]:
        """Take in each session's commit and guess what follows; one answer each, in order. At temperature above 0 the
        log-probs are those at the session's temperature and rows rank by log-prob plus shared noise."""

    def release(self, session: SessionId) -> None:
        """Free everything the session holds. An unknown session is no error."""


@runtime_checkable
class FeatureReader(DraftEngine, Protocol):
    """A drafter that reads context features: of every committed position but the last, in order."""

    def take_in(self, session: SessionId, features: NDArray[np.float32]) -> None:
        """Take in the next positions' features ahead of the next proposal, as the prompt's arrive."""
