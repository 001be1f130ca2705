"""This file is the n-gram drafter, prompt lookup: what followed the last tokens when they came before.

After Saxena's prompt lookup decoding (2023), with all continuations counted instead of one copied, so that they make a tree.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from draft_service.engine import Drafter, Proposal, SessionId
from draft_service.engines.admission import Grant, check_proposals, check_start, grant
from draft_service.engines.ranking import Row, pad, rank_candidates, to_marginals
from treewire.core.sampling import Sampling
from treewire.core.tree import Marginals

MAX_CONTEXT = 1 << 20

# Chosen on answers of a 135 M chat model: the best token then comes about as often as its probability says.
_LENGTH_WEIGHT = 2.5  # a match one token longer weighs this much more
_RECENCY_WEIGHT = 0.8  # of matches of one length, the next older one weighs this much of the newer
_ESCAPE_WEIGHT = 4.0  # what never followed, in units of a match of one token


class Match(NamedTuple):
    """An earlier place that ends in the last `length` tokens; `end` is the index of the token that followed there."""

    end: int
    length: int


@dataclass
class NgramIndex:
    """A token sequence in which earlier places with the same last tokens are found.

    Each place is chained to the one before it with the same n-gram, so that a token costs O(max_length) to add and a look-up
    O(max_length x max_matches). Only places among the last `window` tokens are indexed; memory for older ones is the
    sequence itself and max_length integers a token.
    """

    max_length: int
    window: int
    max_matches: int
    token_ids: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        token_ids, self.token_ids = self.token_ids, []
        self._latest: dict[tuple[int, ...], int] = {}
        self._previous: list[list[int | None]] = [[None] for _ in range(self.max_length)]
        self.extend(token_ids)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Put tokens at the end of the sequence."""
        for token_id in token_ids:
            self.token_ids.append(token_id)
            end = len(self.token_ids)
            for length, previous in enumerate(self._previous, start=1):
                previous.append(self._replace_latest(length, end))
            self._forget(end - self.window)

    def matches(self) -> Iterator[Match]:
        """Earlier places that end as the sequence does: each once with its longest match, longest first, then the newest."""
        seen: set[int] = set()
        for length in range(self.max_length, 0, -1):
            for end in self._ends(length):
                if end not in seen:
                    seen.add(end)
                    yield Match(end, length)

    def continuation(self, match: Match, depth: int) -> int:
        """The token `depth` places (from 0) after a match; what would lie past the end repeats what followed the match."""
        return self.token_ids[match.end + depth % (len(self.token_ids) - match.end)]

    def __len__(self) -> int:
        """Tokens of the sequence."""
        return len(self.token_ids)

    @property
    def num_ngrams(self) -> int:
        """Different n-grams indexed, of all lengths."""
        return len(self._latest)

    def _replace_latest(self, length: int, end: int) -> int | None:
        """Make `end` the latest place of the n-gram before it; where that was until now."""
        if length > end:
            return None
        ngram = tuple(self.token_ids[end - length : end])
        previous = self._latest.get(ngram)
        self._latest[ngram] = end
        return previous

    def _forget(self, end: int) -> None:
        """Drop the n-grams whose latest place is `end`."""
        for length in range(1, min(self.max_length, end) + 1):
            ngram = tuple(self.token_ids[end - length : end])
            if self._latest.get(ngram) == end:
                del self._latest[ngram]

    def _ends(self, length: int) -> Iterator[int]:
        """Places of the last `length` tokens, newest first, up to the most that are followed."""
        oldest = len(self) - self.window
        end = self._previous[length - 1][-1]
        for _ in range(self.max_matches):
            if end is None or end <= oldest:
                return
            yield end
            end = self._previous[length - 1][end]


@dataclass(frozen=True)
class _Session:
    index: NgramIndex
    sampling: Sampling

    @property
    def length(self) -> int:
        return len(self.index)


class NgramDrafter:
    """Drafts from the session's own prompt and output; needs no model and fits every target.

    For each depth it counts the tokens that followed there after every earlier place which ends as the sequence does; longer
    matches and newer ones weigh more. The probability of a token is its share of all weights, with a share held back for what
    never followed: a depth sums to less than 1. The probabilities are the same at every temperature.
    """

    def __init__(
        self, max_length: int = 4, horizon: int = 8, width: int = 8, window: int = 1 << 14, max_matches: int = 32
    ) -> None:
        for name, value in (("max_length", max_length), ("horizon", horizon), ("width", width), ("max_matches", max_matches)):
            if value < 1:
                raise ValueError(f"{name} is {value}, it must be at least 1")
        if window <= max_length:
            raise ValueError(f"window is {window}, it must be above max_length, which is {max_length}")
        self._max_length, self._window, self._max_matches = max_length, window, max_matches
        self._drafter = Drafter("ngram", f"{max_length}-gram", 0, "", horizon, width, MAX_CONTEXT)
        self._sessions: dict[SessionId, _Session] = {}

    @property
    def drafter(self) -> Drafter:
        """What this engine is."""
        return self._drafter

    @property
    def num_sessions(self) -> int:
        """Sessions that hold state."""
        return len(self._sessions)

    def start(self, session: SessionId, prompt: Sequence[int], sampling: Sampling) -> None:
        """Index the prompt."""
        check_start(self.drafter, self._sessions, session, prompt)
        index = NgramIndex(self._max_length, self._window, self._max_matches, list(prompt))
        self._sessions[session] = _Session(index, sampling)

    def propose(self, proposals: Sequence[Proposal]) -> Sequence[Marginals]:
        """Index each session's commit and look up what followed; empty marginals where nothing came before."""
        check_proposals(self.drafter, self._sessions, proposals)
        return [self._propose(proposal) for proposal in proposals]

    def release(self, session: SessionId) -> None:
        """Forget the session."""
        self._sessions.pop(session, None)

    def _propose(self, proposal: Proposal) -> Marginals:
        session = self._sessions[proposal.session]
        session.index.extend(proposal.commit.token_ids)
        return marginals_of(session.index, session.sampling, grant(self.drafter, proposal))


def marginals_of(index: NgramIndex, sampling: Sampling, granted: Grant) -> Marginals:
    """What may follow the sequence, by depth. Depths with fewer tokens than others have fillers of log-prob -inf."""
    weights = _weights(index.matches())
    if not weights:
        return Marginals.empty()
    total = sum(weights.values()) + _ESCAPE_WEIGHT
    rows = [
        _row(_counts(index, weights, depth), total, sampling, len(index) + depth, granted.width)
        for depth in range(granted.depths)
    ]
    width = max((len(row.token_ids) for row in rows), default=0)
    return to_marginals([pad(row, width) for row in rows])


def _weights(matches: Iterator[Match]) -> dict[Match, float]:
    num_newer: dict[int, int] = {}
    weights = {}
    for match in matches:
        rank = num_newer.get(match.length, 0)
        num_newer[match.length] = rank + 1
        weights[match] = _LENGTH_WEIGHT ** (match.length - 1) * _RECENCY_WEIGHT**rank
    return weights


def _counts(index: NgramIndex, weights: dict[Match, float], depth: int) -> dict[int, float]:
    counts: dict[int, float] = {}
    for match, weight in weights.items():
        token_id = index.continuation(match, depth)
        counts[token_id] = counts.get(token_id, 0.0) + weight
    return counts


def _row(counts: dict[int, float], total: float, sampling: Sampling, position: int, width: int) -> Row:
    token_ids = np.fromiter(counts, np.int32, len(counts))
    log_probs = np.array([math.log(count / total) for count in counts.values()], np.float32)
    return rank_candidates(token_ids, log_probs, sampling, position, width)
