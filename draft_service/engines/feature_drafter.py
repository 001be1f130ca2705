"""This file is the engine of drafters that read the target's context features: its sessions, and what they have taken in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draft_service.engine import Drafter, Proposal, SessionId
from draft_service.engines.admission import check_proposals, check_room, check_start, grant
from draft_service.engines.torch_ranking import SessionNoise
from treewire.core.build import USUAL_WEIGHTS
from treewire.core.sampling import Sampling
from treewire.core.tree import Marginals
from treewire.kv.pages import PagedKv
from treewire.kv.rows import SessionRows, Slots

_KEY_BYTES = 16  # of the digest that stands for a position: enough that no two positions share one


@dataclass(frozen=True, eq=False)
class Committed:
    """Consecutive committed positions that a session takes in, the first at `position`: their tokens, their features float32
    [positions, size], the feature [size] before them, zeros before position 0, and the slots where their rows go."""

    position: int
    token_ids: Sequence[int]
    features: Tensor
    preceding_feature: Tensor
    slots: Slots


@dataclass(frozen=True, eq=False)
class Root:
    """Where a session's proposal starts: its last committed token, which has no features yet, at `position`.

    `slots` are those of all positions before it, `last_feature` [size] is that of the last of them. Conditional rows may be
    answered if `takes_conditional`.
    """

    slots: Slots
    last_feature: Tensor
    token_id: int
    position: int
    depths: int
    width: int
    noise: SessionNoise
    takes_conditional: bool = False


class FeatureNetwork(Protocol):
    """A drafting network over context features, and its store of keys and values by slot. `candidate_ids` int64 are the tokens
    it can guess; None are all."""

    @property
    def device(self) -> torch.device:
        """Where it runs."""

    @property
    def candidate_ids(self) -> Tensor | None:
        """The tokens it can guess, in ascending order."""

    def take_in(self, committed: Sequence[Committed]) -> None:
        """Compute what later rounds need of these positions into their slots. It is a function of a position's token and
        feature and of those before it."""

    def draft(self, roots: Sequence[Root]) -> Sequence[Marginals]:
        """Guess after each root, in common forwards. No slot is written."""


@dataclass
class _Session:
    """`token_ids` are all committed tokens; `rows` are of the positions that have been taken in, `last_feature` is theirs."""

    rows: SessionRows
    last_feature: Tensor
    token_ids: list[int]
    noise: SessionNoise

    @property
    def length(self) -> int:
        return len(self.token_ids)

    @property
    def num_features(self) -> int:
        return self.rows.num_committed


class _Arrival(NamedTuple):
    """A session's next features, float32 [positions, feature size], and what tells their positions apart."""

    session: _Session
    features: NDArray[np.float32]
    keys: Sequence[int]


class FeatureDrafter:
    """`draft_service.engine.FeatureReader` over one network, whose keys and values lie in the pages of `kv`.

    Each committed position is computed once, when its features arrive: with `take_in`, or with a proposal. `positions_computed`
    counts them. A page that another session has computed from the same tokens and the same features, bit for bit, is shared
    and not computed again. Drafted positions are in no page. Penalties, biases and min tokens are not applied: that costs
    acceptance, never correctness.

    `start` takes the prompt's pages, a proposal those of its commit. Either raises KvExhausted, naming the session, before
    anything is computed or taken.
    """

    def __init__(self, network: FeatureNetwork, drafter: Drafter, kv: PagedKv) -> None:
        self._network = network
        self._drafter = drafter
        self._kv = kv
        self._sessions: dict[SessionId, _Session] = {}
        self.positions_computed = 0

    @property
    def drafter(self) -> Drafter:
        """What this engine is."""
        return self._drafter

    @property
    def num_sessions(self) -> int:
        """Sessions that hold keys and values."""
        return len(self._sessions)

    @property
    def num_free_slots(self) -> int:
        """Token positions for which memory is free, or would be if pages that nobody holds were evicted."""
        return self._kv.num_free

    def start(self, session: SessionId, prompt: Sequence[int], sampling: Sampling) -> None:
        """Make room for a session. Computes nothing: the prompt's features are still to come."""
        check_start(self.drafter, self._sessions, session, prompt)
        check_room(self._kv, session, self._kv.room_for(prompt, self.drafter.horizon + 1, shares=False))
        weights = self.drafter.weights or USUAL_WEIGHTS
        noise = SessionNoise(sampling, self.drafter.vocabulary_size, self._network.candidate_ids, weights)
        nothing = torch.zeros(self.drafter.feature_size, device=self._network.device)
        self._sessions[session] = _Session(SessionRows(self._kv, prompt, shares=False), nothing, list(prompt), noise)

    def take_in(self, session: SessionId, features: NDArray[np.float32]) -> None:
        """Compute the next positions of a session, float32 [positions, feature size], ahead of its next proposal."""
        if session not in self._sessions:
            raise ValueError(f"session {session} has not been started")
        check_room(self._kv, session, self._sessions[session].rows.room_for(len(features)))
        self._take_in([(self._sessions[session], features)])

    def propose(self, proposals: Sequence[Proposal]) -> Sequence[Marginals]:
        """Take in each session's commit and features, then draft for all of them in common forwards."""
        check_proposals(self.drafter, self._sessions, proposals)
        num_taken = 0
        for proposal in proposals:
            self._check_complete(proposal)
            room = self._sessions[proposal.session].rows.room_for(_num_arrived(proposal))
            check_room(self._kv, proposal.session, room, num_taken)
            num_taken += room.num_needed
        for proposal in proposals:
            self._sessions[proposal.session].token_ids.extend(proposal.commit.token_ids)
        self._take_in(
            [(self._sessions[proposal.session], proposal.features) for proposal in proposals if proposal.features is not None]
        )
        return self._network.draft([self._root(proposal) for proposal in proposals])

    def release(self, session: SessionId) -> None:
        """Let go of the session's pages."""
        released = self._sessions.pop(session, None)
        if released is not None:
            released.rows.release()

    def _take_in(self, arrived: Sequence[tuple[_Session, NDArray[np.float32]]]) -> None:
        for session, features in arrived:
            self._check_features(session, features)
        computed = [self._adopt(session, features) for session, features in arrived]
        self._network.take_in([self._committed(arrival) for arrival in computed])
        for session, features, keys in computed:
            session.rows.commit_chunk(keys)
            self._advance(session, features)
            self.positions_computed += len(features)

    def _adopt(self, session: _Session, features: NDArray[np.float32]) -> _Arrival:
        """Take over the pages that are there already; what is left to compute."""
        keys = _keys(session.token_ids[session.num_features :], features)
        num_adopted = session.rows.adopt(keys)
        self._advance(session, features[:num_adopted])
        return _Arrival(session, features[num_adopted:], keys[num_adopted:])

    def _advance(self, session: _Session, features: NDArray[np.float32]) -> None:
        """The session's rows now end with the position of the last of these features, if there are any."""
        if len(features):
            session.last_feature = torch.from_numpy(features[-1].copy()).to(self._network.device)

    def _committed(self, arrival: _Arrival) -> Committed:
        session, features, _ = arrival
        start = session.num_features
        rows = torch.from_numpy(np.ascontiguousarray(features)).to(self._network.device)
        token_ids, slots = session.token_ids[start : start + len(features)], session.rows.next_slots(len(features))
        return Committed(start, token_ids, rows, session.last_feature, slots)

    def _check_features(self, session: _Session, features: NDArray[np.float32]) -> None:
        size = self.drafter.feature_size
        if features.ndim != 2 or features.shape[1] != size:
            raise ValueError(f"features have shape {list(features.shape)}, this drafter reads [positions, {size}]")
        stop = session.num_features + len(features)
        if stop > session.length:
            raise ValueError(f"features reach position {stop - 1}, the committed sequence has {session.length} tokens")

    def _check_complete(self, proposal: Proposal) -> None:
        num_features = self._sessions[proposal.session].num_features + _num_arrived(proposal)
        if num_features != proposal.commit.length - 1:
            raise ValueError(
                f"session {proposal.session} has features of {num_features} positions, a sequence of {proposal.commit.length} "
                f"tokens needs them of {proposal.commit.length - 1}: all but the last"
            )

    def _root(self, proposal: Proposal) -> Root:
        session, granted = self._sessions[proposal.session], grant(self.drafter, proposal)
        return Root(
            session.rows.committed,
            session.last_feature,
            session.token_ids[-1],
            session.length - 1,
            granted.depths,
            granted.width,
            session.noise,
            proposal.takes_conditional,
        )


def _num_arrived(proposal: Proposal) -> int:
    return 0 if proposal.features is None else len(proposal.features)


def _keys(token_ids: Sequence[int], features: NDArray[np.float32]) -> list[int]:
    """What tells positions apart: digests of their tokens and features. Along a path they name all that a row is made of."""
    digests = [
        blake2b(token_id.to_bytes(8, "little") + row.tobytes(), digest_size=_KEY_BYTES).digest()
        for token_id, row in zip(token_ids, features, strict=False)
    ]
    return [int.from_bytes(digest, "little") for digest in digests]
