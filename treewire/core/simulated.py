"""This file is the simulated language model: logits made of a hash of the prefix, for engines that need no weights.

It fakes only the model: every token of the prefix changes the logits, so a wrong prefix shows as a wrong token; and the last
token decides most of them, so that phrases come again and drafters have something to find.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

FIRST_BYTE_ID = 3
FIRST_WORD_ID = FIRST_BYTE_ID + 256
DEFAULT_END_TOKEN_ID = 2

# Odd 64-bit constants of SplitMix64 (Steele, Lea & Flood, OOPSLA 2014).
_WEYL = 0x9E3779B97F4A7C15
_FIRST_FACTOR = 0xBF58476D1CE4E5B9
_SECOND_FACTOR = 0x94D049BB133111EB
_MASK = 2**64 - 1

_QUANTILE_BITS = 16
_PEAK = 2.0  # logits are Gumbel times this: the best token has a median probability of about a half, as a language's
_SENSITIVITY = 1.0  # logits move by up to this much with any change of the prefix
_NEVER = np.float32(-1e4)
_PRINTABLE_BYTE = -5.0  # a few of these per hundred tokens
_LEAD_BYTE = -4.0
_STRAY_BYTE = -9.0
_AWAITED_BYTE = 10.0

_TWO_BYTE_LEADS = range(0xC2, 0xE0)
_THREE_BYTE_LEADS = range(0xE1, 0xED)  # those after which any continuation is valid
_CONTINUATIONS = range(0x80, 0xC0)


class SimulatedDeath(BaseException):
    """A scripted end of an engine, not of one step. No Exception, so that nobody mistakes it for a failure to outlive."""


class Prefix(NamedTuple):
    """What the model keeps of a token sequence: the hash of all of it, and its last tokens (-1 where it has fewer)."""

    hash: int
    second_last: int
    last: int

    @classmethod
    def of(cls, token_ids: Sequence[int]) -> Prefix:
        """The prefix made of these tokens."""
        return cls(0, -1, -1).extend(token_ids)

    def extend(self, token_ids: Sequence[int]) -> Prefix:
        """The prefix with these tokens after it."""
        state, second_last, last = self
        for token_id in token_ids:
            state = _mix_int(state + _WEYL * (token_id + 1))
            second_last, last = last, token_id
        return Prefix(state, second_last, last)


class SimulatedModel:
    """A language model made of a hash; the vocabulary is 3 special tokens, 256 bytes, then words and emoji.

    Mostly words, and a few bytes, which are not always valid UTF-8. `mean_length` is the mean number of tokens before the end
    token, math.inf for never; tokens 0 and 1 never come. Two models with the same arguments are the same model.
    """

    def __init__(
        self,
        vocabulary_size: int = 1024,
        seed: int = 0,
        end_token_id: int = DEFAULT_END_TOKEN_ID,
        mean_length: float = 256.0,
    ) -> None:
        if vocabulary_size <= FIRST_WORD_ID:
            raise ValueError(f"vocabulary size is {vocabulary_size}, a simulated one is above {FIRST_WORD_ID}")
        if not 0 <= end_token_id < vocabulary_size:
            raise ValueError(f"end token is {end_token_id}, the vocabulary has {vocabulary_size} tokens")
        if not mean_length >= 1.0:  # also catches NaN
            raise ValueError(f"mean length is {mean_length}, it must be at least 1")
        self.vocabulary_size = vocabulary_size
        self.end_token_id = end_token_id
        self.seed = seed
        self.mean_length = mean_length
        self._hashed_seed = _mix_int(seed + _WEYL)
        self._hazard = int(2**64 / mean_length)
        self._token_hashes = _mix(np.arange(1, vocabulary_size + 1, dtype=np.uint64) * np.uint64(_WEYL))
        self._quantiles = _gumbel_quantiles()
        self._bias, self._bias_inside_character = _biases(vocabulary_size)

    def logits(self, prefixes: Sequence[Prefix]) -> NDArray[np.float32]:
        """Logits of the token after each prefix, float32 [prefixes, vocabulary]; a row depends on its own prefix alone."""
        whole = np.array([self._key(prefix.hash) for prefix in prefixes], np.uint64)[:, np.newaxis]
        last = np.array([self._key(prefix.last + 1) for prefix in prefixes], np.uint64)[:, np.newaxis]
        hashes = _mix(last ^ self._token_hashes)
        logits: NDArray[np.float32] = self._quantiles[hashes >> np.uint64(64 - _QUANTILE_BITS)]
        logits += _signed_unit((hashes ^ whole) * np.uint64(_SECOND_FACTOR)) * np.float32(_SENSITIVITY)
        for row, prefix in zip(logits, prefixes, strict=True):
            row += self._bias_inside_character if _is_inside_character(prefix) else self._bias
            row[self.end_token_id] = row.max() + 10 if self._ends(prefix) else _NEVER
        return logits

    def _key(self, state: int) -> int:
        return _mix_int(self._hashed_seed ^ state)

    def _ends(self, prefix: Prefix) -> bool:
        return self._key(prefix.hash ^ _WEYL) < self._hazard


def hashed_fraction(prefix: Prefix, salt: int) -> float:
    """A number in [0, 1) that depends on the prefix and the salt alone."""
    return _mix_int(prefix.hash ^ _mix_int(salt + _WEYL)) / 2**64


def _is_inside_character(prefix: Prefix) -> bool:
    """True if the last bytes began a character of UTF-8 that they did not complete."""
    second_last, last = prefix.second_last - FIRST_BYTE_ID, prefix.last - FIRST_BYTE_ID
    if last in _CONTINUATIONS:
        return second_last in _THREE_BYTE_LEADS
    return last in _TWO_BYTE_LEADS or last in _THREE_BYTE_LEADS


def _biases(vocabulary_size: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """What is added to logits [vocabulary]: between characters, and inside one."""
    between = np.zeros(vocabulary_size, np.float32)
    between[:FIRST_BYTE_ID] = _NEVER
    for byte in range(256):
        is_lead = byte in _TWO_BYTE_LEADS or byte in _THREE_BYTE_LEADS
        bias = _LEAD_BYTE if is_lead else _PRINTABLE_BYTE if 0x20 <= byte < 0x7F else _STRAY_BYTE
        between[FIRST_BYTE_ID + byte] = bias
    inside = between.copy()
    inside[FIRST_BYTE_ID + _CONTINUATIONS.start : FIRST_BYTE_ID + _CONTINUATIONS.stop] = _AWAITED_BYTE
    return between, inside


def _gumbel_quantiles() -> NDArray[np.float32]:
    """Equally likely values of the peaked Gumbel distribution: a table, so that a row is the same in every batch."""
    fractions = (np.arange(2**_QUANTILE_BITS) + 0.5) / 2**_QUANTILE_BITS
    quantiles: NDArray[np.float64] = -_PEAK * np.log(-np.log(fractions))
    return quantiles.astype(np.float32)


def _signed_unit(hashes: NDArray[np.uint64]) -> NDArray[np.float32]:
    """Hashes as numbers from -1 to 1, of 24 bits."""
    return (hashes >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-23) - np.float32(1.0)


def _mix_int(state: int) -> int:
    state &= _MASK
    state = (state ^ state >> 30) * _FIRST_FACTOR & _MASK
    state = (state ^ state >> 27) * _SECOND_FACTOR & _MASK
    return state ^ state >> 31


def _mix(states: NDArray[np.uint64]) -> NDArray[np.uint64]:
    states = (states ^ states >> np.uint64(30)) * np.uint64(_FIRST_FACTOR)
    states = (states ^ states >> np.uint64(27)) * np.uint64(_SECOND_FACTOR)
    return states ^ states >> np.uint64(31)
