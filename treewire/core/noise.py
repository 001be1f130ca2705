"""This file is the shared noise: standard Gumbel noise that is a pure function of (seed, position, token).

A counter-based hash makes 64-bit integers, identical in numpy and torch on every device, with the finaliser of SplitMix64
(Steele, Lea & Flood, OOPSLA 2014). The Gumbel value made of them may differ in the last bit between libraries.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

MAX_SEED = 2**64 - 1
NUM_POSITIONS = 2**31
NUM_TOKENS = 2**31

# Odd 64-bit constants, as the signed integers with the same bits.
_WEYL = 0x9E3779B97F4A7C15 - 2**64
_POSITION_WEYL = 0xD1B54A32D192ED03 - 2**64
_FIRST_FACTOR = 0xBF58476D1CE4E5B9 - 2**64
_SECOND_FACTOR = 0x94D049BB133111EB - 2**64

_UNIFORM_BITS = 53
_CHUNK = 8192  # entries that stay in the first-level caches between two passes

Integers = TypeVar("Integers", bound=Any)  # an int64 numpy array or an int64 torch tensor


def noise_integers(seed: int, position: int | Integers, token_ids: Integers) -> Integers:
    """64 hashed bits for each token, as int64 of the shape of `token_ids` (broadcast with `position`, if that is an array).

    `token_ids`, and a `position` that is not one int, are int64 numpy arrays or int64 torch tensors of at least one
    dimension; written with operators alone, so that both give the same bits. Seeds are below 2**64, positions and tokens
    below 2**31. Raises ValueError on another seed, on an int position out of range and on other types of array.
    """
    _check_int64(token_ids)
    integers: Integers = _mix(token_ids * _WEYL ^ _key(seed, position))
    return integers


def hashed_seed(seed: int) -> int:
    """What of a seed goes into the noise at any position: 64 bits, as int64. Raises ValueError if it is no seed."""
    if not 0 <= seed <= MAX_SEED:
        raise ValueError(f"seed is {seed}, it must be from 0 to {MAX_SEED}")
    return int(_mix(np.array([seed], np.uint64).view(np.int64) + _WEYL)[0])


def noise_integers_of(hashed_seeds: Integers, positions: Integers, token_ids: Integers) -> Integers:
    """As `noise_integers`, of many seeds at once: three int64 arrays or tensors that broadcast together."""
    integers: Integers = _mix(token_ids * _WEYL ^ _mix(positions * _POSITION_WEYL ^ hashed_seeds))
    return integers


def gumbel(integers: Any, xp: ModuleType = np) -> Any:
    """Standard Gumbel noise of hashed integers, float64 of the same shape; `xp` is the array's library, numpy or torch.

    With w an odd multiple of 2**-53 in (0, 1): -log(-log1p(-w)), from -3.6 to 36.7. The tail of large values is the fine one.
    """
    numerators = integers >> (64 - _UNIFORM_BITS) & (1 << _UNIFORM_BITS) - 1 | 1
    uniform = xp.asarray(numerators, dtype=xp.float64) * 2.0**-_UNIFORM_BITS
    return -xp.log(-xp.log1p(-uniform))


def noise_row(seed: int, position: int, vocabulary_size: int, first_token_id: int = 0) -> NDArray[np.float32]:
    """Noise of every token at one position, float32 [vocabulary]: what the target's choice of the token there adds.

    With a first token, of the tokens from it on: float32 [vocabulary - first].
    """
    if not 0 < vocabulary_size <= NUM_TOKENS:
        raise ValueError(f"vocabulary size is {vocabulary_size}, it must be from 1 to {NUM_TOKENS}")
    key = _key(seed, position)
    row = np.empty(vocabulary_size - first_token_id, np.float32)
    for start in range(first_token_id, vocabulary_size, _CHUNK):
        token_ids = np.arange(start, min(start + _CHUNK, vocabulary_size), dtype=np.int64)
        row[start - first_token_id :][:_CHUNK] = gumbel(_mix(token_ids * _WEYL ^ key))
    return row


def noise_at(
    seed: int, position: int | NDArray[np.int64], token_ids: Sequence[int] | NDArray[np.integer[Any]]
) -> NDArray[np.float32]:
    """Noise of some tokens, float32 of their shape; bit for bit the entries of `noise_row`.

    `position` is one for all tokens, or an int64 array that broadcasts against them.
    """
    values: NDArray[np.float64] = gumbel(noise_integers(seed, position, np.asarray(token_ids, np.int64)))
    return values.astype(np.float32)


def _key(seed: int, position: int | Integers) -> int | Integers:
    """The hashed (seed, position), one int if the position is one; different at every position of a seed."""
    own_seed = hashed_seed(seed)
    if not isinstance(position, int):
        _check_int64(position)
        keys: Integers = _mix(position * _POSITION_WEYL ^ own_seed)
        return keys
    if not 0 <= position < NUM_POSITIONS:
        raise ValueError(f"position is {position}, it must be from 0 to {NUM_POSITIONS - 1}")
    return int(_mix(np.array([position]) * _POSITION_WEYL ^ own_seed)[0])


def _mix(state: Integers) -> Integers:
    """The finaliser of SplitMix64, a bijection of 64 bits. Overwrites its argument: callers pass a fresh array."""
    state ^= state >> 30 & (1 << 34) - 1
    state *= _FIRST_FACTOR
    state ^= state >> 27 & (1 << 37) - 1
    state *= _SECOND_FACTOR
    state ^= state >> 31 & (1 << 33) - 1
    return state


def _check_int64(array: Any) -> None:
    if str(array.dtype) not in ("int64", "torch.int64") or array.ndim == 0:
        raise ValueError(f"noise takes int64 arrays of at least one dimension, not {array.dtype} of {array.ndim}")
