"""This file is the engine of drafters that read the target's context features: its sessions, and what they have taken in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draft_service.engine import Drafter, Proposal, SessionId
from draft_service.engines.admission import check_proposals, check_start, grant
from draft_service.engines.torch_ranking import SessionNoise
from treewire.core.build import USUAL_WEIGHTS
from treewire.core.sampling import Sampling
from treewire.core.tree import Marginals

State = TypeVar("State")


@dataclass(frozen=True, eq=False)
class Committed(Generic[State]):
    """Consecutive committed positions that a session takes in: their tokens, and their features float32 [positions, size]."""

    state: State
    token_ids: Sequence[int]
    features: Tensor


@dataclass(frozen=True, eq=False)
class Root(Generic[State]):
    """Where a session's proposal starts: its last committed token, which has no features yet, at `position`.

    Conditional rows may be answered if `takes_conditional`.
    """

    state: State
    token_id: int
    position: int
    depths: int
    width: int
    noise: SessionNoise
    takes_conditional: bool = False


class FeatureNetwork(Protocol[State]):
    """A drafting network over context features. `candidate_ids` int64 are the tokens it can guess; None are all."""

    @property
    def device(self) -> torch.device:
        """Where it runs."""

    @property
    def candidate_ids(self) -> Tensor | None:
        """The tokens it can guess, in ascending order."""

    def open(self) -> State:
        """The state of a session that has taken in nothing."""

    def take_in(self, committed: Sequence[Committed[State]]) -> None:
        """Compute what later rounds need of these positions, which follow what each state has taken in."""

    def draft(self, roots: Sequence[Root[State]]) -> Sequence[Marginals]:
        """Guess after each root, in common forwards. A state is as before afterwards."""


@dataclass
class _Session(Generic[State]):
    """`token_ids` are all committed tokens; the first `num_features` positions have been taken in."""

    state: State
    token_ids: list[int]
    noise: SessionNoise
    num_features: int = 0

    @property
    def length(self) -> int:
        return len(self.token_ids)


class FeatureDrafter(Generic[State]):
    """`draft_service.engine.FeatureReader` over one network.

    Each committed position is computed once, when its features arrive: with `take_in`, or with a proposal. `positions_computed`
    counts them. Penalties, biases and min tokens are not applied: that costs acceptance, never correctness.
    """

    def __init__(self, network: FeatureNetwork[State], drafter: Drafter) -> None:
        self._network = network
        self._drafter = drafter
        self._sessions: dict[SessionId, _Session[State]] = {}
        self.positions_computed = 0

    @property
    def drafter(self) -> Drafter:
        """What this engine is."""
        return self._drafter

    @property
    def num_sessions(self) -> int:
        """Sessions that hold keys and values."""
        return len(self._sessions)

    def start(self, session: SessionId, prompt: Sequence[int], sampling: Sampling) -> None:
        """Make room for a session. Computes nothing: the prompt's features are still to come."""
        check_start(self.drafter, self._sessions, session, prompt)
        weights = self.drafter.weights or USUAL_WEIGHTS
        noise = SessionNoise(sampling, self.drafter.vocabulary_size, self._network.candidate_ids, weights)
        self._sessions[session] = _Session(self._network.open(), list(prompt), noise)

    def take_in(self, session: SessionId, features: NDArray[np.float32]) -> None:
        """Compute the next positions of a session, float32 [positions, feature size], ahead of its next proposal."""
        if session not in self._sessions:
            raise ValueError(f"session {session} has not been started")
        self._take_in([(self._sessions[session], features)])

    def propose(self, proposals: Sequence[Proposal]) -> Sequence[Marginals]:
        """Take in each session's commit and features, then draft for all of them in common forwards."""
        check_proposals(self.drafter, self._sessions, proposals)
        for proposal in proposals:
            self._check_complete(proposal)
        for proposal in proposals:
            self._sessions[proposal.session].token_ids.extend(proposal.commit.token_ids)
        self._take_in(
            [(self._sessions[proposal.session], proposal.features) for proposal in proposals if proposal.features is not None]
        )
        return self._network.draft([self._root(proposal) for proposal in proposals])

    def release(self, session: SessionId) -> None:
        """Drop the session's keys and values."""
        self._sessions.pop(session, None)

    def _take_in(self, arrived: Sequence[tuple[_Session[State], NDArray[np.float32]]]) -> None:
        committed = [self._committed(session, features) for session, features in arrived]
        self._network.take_in(committed)
        for (session, features), _ in zip(arrived, committed, strict=True):
            session.num_features += len(features)
            self.positions_computed += len(features)

    def _committed(self, session: _Session[State], features: NDArray[np.float32]) -> Committed[State]:
        size, start, stop = self.drafter.feature_size, session.num_features, session.num_features + len(features)
        if features.ndim != 2 or features.shape[1] != size:
            raise ValueError(f"features have shape {list(features.shape)}, this drafter reads [positions, {size}]")
        if stop > session.length:
            raise ValueError(f"features reach position {stop - 1}, the committed sequence has {session.length} tokens")
        rows = torch.from_numpy(np.ascontiguousarray(features)).to(self._network.device)
        return Committed(session.state, session.token_ids[start:stop], rows)

    def _check_complete(self, proposal: Proposal) -> None:
        num_arrived = 0 if proposal.features is None else len(proposal.features)
        num_features = self._sessions[proposal.session].num_features + num_arrived
        if num_features != proposal.commit.length - 1:
            raise ValueError(
                f"session {proposal.session} has features of {num_features} positions, a sequence of {proposal.commit.length} "
                f"tokens needs them of {proposal.commit.length - 1}: all but the last"
            )

    def _root(self, proposal: Proposal) -> Root[State]:
        session, granted = self._sessions[proposal.session], grant(self.drafter, proposal)
        return Root(
            session.state,
            session.token_ids[-1],
            session.length - 1,
            granted.depths,
            granted.width,
            session.noise,
            proposal.takes_conditional,
        )
