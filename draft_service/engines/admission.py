"""This file is what every drafter checks before it works: that prompts and commits fit it and follow each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from draft_service.engine import Drafter, Proposal, SessionId
from treewire.kv.pages import KvExhausted, PagedKv, Room


class Committed(Protocol):
    """A session's state, of which the checks need the length of the committed sequence."""

    @property
    def length(self) -> int:
        """Committed tokens, prompt included."""


class Grant(NamedTuple):
    """How many depths, and tokens at each, an answer has at most."""

    depths: int
    width: int


def check_start(drafter: Drafter, sessions: Mapping[SessionId, Committed], session: SessionId, prompt: Sequence[int]) -> None:
    """Raises ValueError unless `session` is new and its prompt has tokens of the vocabulary, and no more than fit."""
    if session in sessions:
        raise ValueError(f"session {session} has been started before")
    if not prompt:
        raise ValueError("a prompt has at least 1 token, this one has none")
    if len(prompt) > drafter.max_context:
        raise ValueError(f"prompt has {len(prompt)} tokens, this drafter follows {drafter.max_context}")
    _check_tokens(drafter, prompt)


def check_proposals(drafter: Drafter, sessions: Mapping[SessionId, Committed], proposals: Sequence[Proposal]) -> None:
    """Raises ValueError unless each proposal is of another started session, follows its sequence and fits the drafter.

    Engines call it before they change anything, so that a refused batch leaves every session as it was.
    """
    if len({proposal.session for proposal in proposals}) != len(proposals):
        raise ValueError("a batch has one proposal of a session at most, this one has more")
    for proposal in proposals:
        if proposal.session not in sessions:
            raise ValueError(f"session {proposal.session} has not been started")
        commit = proposal.commit
        length = sessions[proposal.session].length + len(commit.token_ids)
        if length != commit.length:
            raise ValueError(f"commit makes a sequence of {length} tokens but claims {commit.length}")
        if length > drafter.max_context:
            raise ValueError(f"sequence has {length} tokens, this drafter follows {drafter.max_context}")
        if proposal.horizon < 0:
            raise ValueError(f"horizon is {proposal.horizon}, it must be at least 0")
        if proposal.width < 1:
            raise ValueError(f"width is {proposal.width}, it must be at least 1")
        _check_tokens(drafter, commit.token_ids)


def check_room(kv: PagedKv, session: SessionId, room: Room, num_taken: int = 0) -> None:
    """Raises KvExhausted unless what the session needs is free, `num_taken` slots being promised to others of its batch."""
    if room.num_needed > room.num_free - num_taken:
        raise KvExhausted(session, room.num_needed, room.num_free - num_taken, kv.num_slots)


def grant(drafter: Drafter, proposal: Proposal) -> Grant:
    """What is asked for, as far as the drafter goes; no depth lies past the longest context, which may leave none."""
    room = drafter.max_context - proposal.commit.length
    return Grant(min(proposal.horizon, drafter.horizon, room), min(proposal.width, drafter.width))


def _check_tokens(drafter: Drafter, token_ids: Sequence[int]) -> None:
    if min(token_ids) < 0:
        raise ValueError(f"token ids start at 0, not {min(token_ids)}")
    if 0 < drafter.vocabulary_size <= max(token_ids):
        raise ValueError(f"token {max(token_ids)} is not in the drafter's vocabulary of {drafter.vocabulary_size}")
