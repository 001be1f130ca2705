"""This file is where a generation ends, and what of each commit is emitted: tokens, text, and the reason to stop."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from treewire.core.tree import Commit, TokenLogProbs


class FinishReason(Enum):
    """Why a generation ended."""

    STOP = "stop"
    LENGTH = "length"


class TextDecoder(Protocol):
    """Turns tokens into text, holding back what is not a whole character yet."""

    def push(self, token_ids: Sequence[int]) -> str:
        """New text after these tokens."""

    def finish(self) -> str:
        """What was held back."""


@dataclass(frozen=True)
class StopRules:
    """What ends a generation. `end_token_ids` are the model's own ones, already empty if they are to be ignored."""

    max_tokens: int
    end_token_ids: frozenset[int] = frozenset()
    strings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Emission:
    """What a commit adds to the output. Text, token ids, log-probs and the end agree: all stop at the same token.

    `pieces` are the text that each token settled, which may be empty.
    """

    token_ids: tuple[int, ...]
    pieces: tuple[str, ...]
    finish_reason: FinishReason | None = None
    stop: str | None = None
    log_probs: tuple[TokenLogProbs, ...] = ()

    @property
    def text(self) -> str:
        """The text of all tokens."""
        return "".join(self.pieces)


class Stopping:
    """Scans committed tokens one by one, in order, until one ends the generation.

    The token that ends it is emitted: an end token, or the token that completes a stop string; the text ends before the
    stop string. Text that may be the beginning of a stop string is held back until that is decided.
    """

    def __init__(self, rules: StopRules, decoder: TextDecoder) -> None:
        self._rules = rules
        self._decoder = decoder
        self._held = ""
        self._num_tokens = 0

    @property
    def num_tokens(self) -> int:
        """Tokens emitted so far."""
        return self._num_tokens

    def admit(self, commit: Commit) -> Emission:
        """What of this commit is emitted, and whether the generation ends with it."""
        pieces: list[str] = []
        for count, token_id in enumerate(commit.token_ids, start=1):
            self._num_tokens += 1
            self._held += self._decoder.push([token_id])
            ended = self._ended(token_id)
            pieces.append(self._take(ended))
            if ended is not None:
                return Emission(commit.token_ids[:count], tuple(pieces), ended.reason, ended.stop, commit.log_probs[:count])
        return Emission(commit.token_ids, tuple(pieces), log_probs=commit.log_probs)

    def _ended(self, token_id: int) -> _End | None:
        found = _earliest(self._held, self._rules.strings)
        if found is not None:
            return _End(FinishReason.STOP, found)
        if token_id in self._rules.end_token_ids:
            return _End(FinishReason.STOP)
        if self._num_tokens >= self._rules.max_tokens:
            return _End(FinishReason.LENGTH)
        return None

    def _take(self, ended: _End | None) -> str:
        """The part of the held text that can be emitted now."""
        if ended is None:
            keep = _length_of_possible_start(self._held, self._rules.strings)
            text, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
            return text
        if ended.stop is not None:
            return self._held[: self._held.index(ended.stop)]
        return self._held + self._decoder.finish()


@dataclass(frozen=True)
class _End:
    reason: FinishReason
    stop: str | None = None


def _earliest(text: str, strings: Iterable[str]) -> str | None:
    """The stop string that begins first in the text; of several the longest."""
    found = [(text.index(string), -len(string), string) for string in strings if string in text]
    return min(found)[2] if found else None


def _length_of_possible_start(text: str, strings: Iterable[str]) -> int:
    """Length of the longest end of the text that a stop string may begin with."""
    longest = 0
    for string in strings:
        for length in range(min(len(string) - 1, len(text)), longest, -1):
            if text.endswith(string[:length]):
                longest = length
                break
    return longest
