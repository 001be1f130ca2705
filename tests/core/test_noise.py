"""The shared noise: the same bits everywhere, and Gumbel noise in law, independent in seed, position and token."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

from treewire.core.noise import gumbel, noise_at, noise_integers, noise_row

MASK = 2**64 - 1
PINNED = ["9198b1708ca41ce4", "45f22692b4a8945b", "e27d79915e6f1369"]
SMALLEST_P_VALUE = 1e-3  # seeds are fixed: a test either always passes or never does
seeds = st.one_of(st.integers(0, 2**64 - 1), st.sampled_from([0, 1, 2**63 - 1, 2**63, 2**64 - 1]))
below_31_bits = st.one_of(st.integers(0, 2**31 - 1), st.sampled_from([0, 1, 2**31 - 1]))


def mix(state: int) -> int:
    """SplitMix64's finaliser on whole numbers."""
    state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & MASK
    state = (state ^ state >> 27) * 0x94D049BB133111EB & MASK
    return state ^ state >> 31


def whole_number_noise(seed: int, position: int, token_id: int) -> int:
    """The definition in whole numbers, without any array."""
    hashed_seed = mix(seed + 0x9E3779B97F4A7C15 & MASK)
    key = mix((position * 0xD1B54A32D192ED03 & MASK) ^ hashed_seed)
    return mix((token_id * 0x9E3779B97F4A7C15 & MASK) ^ key)


@given(seeds, below_31_bits, st.lists(below_31_bits, min_size=1, max_size=8))
def test_integers_are_the_same_everywhere(seed: int, position: int, token_ids: list[int]) -> None:
    """Whole numbers, numpy and torch agree in every bit, for one position and for an array of positions, without a warning."""
    expected = [whole_number_noise(seed, position, token_id) for token_id in token_ids]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        by_numpy = noise_integers(seed, position, np.array(token_ids))
        by_rows = noise_integers(seed, np.array([[position], [position]]), np.array(token_ids))
    by_torch = noise_integers(seed, position, torch.tensor(token_ids))
    by_torch_rows = noise_integers(seed, torch.tensor([[position]]), torch.tensor(token_ids))
    assert by_numpy.view(np.uint64).tolist() == expected
    assert by_rows.view(np.uint64).tolist() == [expected, expected]
    assert by_torch.numpy().view(np.uint64).tolist() == expected
    assert by_torch_rows.numpy().view(np.uint64).tolist() == [expected]


def test_pinned() -> None:
    """The bits are a promise: a seed gives the same tokens in every version."""
    pinned = noise_integers(42, 7, np.array([0, 1, 49151])).view(np.uint64)
    assert [f"{integer:016x}" for integer in pinned.tolist()] == PINNED


def test_arguments_stay_as_they_are() -> None:
    """Hashing in place does not reach the caller's arrays."""
    token_ids, positions = np.arange(4), np.array([[1], [2]])
    tensor = torch.arange(4)
    noise_integers(1, positions, token_ids)
    noise_integers(1, 3, tensor)
    assert token_ids.tolist() == tensor.tolist() == [0, 1, 2, 3]
    assert positions.tolist() == [[1], [2]]


@pytest.mark.parametrize("vocabulary_size", [1, 7, 8191, 8192, 20001])
def test_row_and_entries_agree(vocabulary_size: int) -> None:
    """Entries asked for alone equal the row's bit for bit, in whatever shape and order they are asked for."""
    row = noise_row(2**64 - 1, 2**31 - 1, vocabulary_size)
    some = np.random.default_rng(0).integers(0, vocabulary_size, (3, 5))
    np.testing.assert_array_equal(noise_at(2**64 - 1, 2**31 - 1, some), row[some])
    np.testing.assert_array_equal(noise_at(2**64 - 1, 2**31 - 1, np.arange(vocabulary_size)), row)
    assert noise_at(2**64 - 1, 2**31 - 1, [vocabulary_size - 1])[0] == row[-1]
    assert row.dtype == np.float32


def test_row_of_a_longer_vocabulary_continues_it() -> None:
    """A row depends on seed and position alone: padding a vocabulary changes nothing."""
    np.testing.assert_array_equal(noise_row(5, 6, 10000)[:9000], noise_row(5, 6, 9000))


def test_entries_of_several_positions() -> None:
    """An array of positions is each of them by itself."""
    token_ids = np.array([[3, 1], [4, 1]], np.int32)
    together = noise_at(9, np.array([[5], [6]]), token_ids)
    np.testing.assert_array_equal(together, [noise_at(9, 5, token_ids[0]), noise_at(9, 6, token_ids[1])])


def test_torch_gumbel() -> None:
    """On a tensor the same formula gives the same values, up to the last bits."""
    token_ids = np.arange(20000)
    by_torch = gumbel(noise_integers(3, 4, torch.from_numpy(token_ids)), torch)
    assert by_torch.dtype == torch.float64
    np.testing.assert_allclose(by_torch.numpy(), gumbel(noise_integers(3, 4, token_ids)), rtol=1e-12, atol=1e-12)


def test_refusals() -> None:
    """Out of range and of another type is refused with the value; wrapping in silence would break the agreement."""
    token_ids = np.arange(3)
    for seed in (-1, 2**64):
        with pytest.raises(ValueError, match=f"seed is {seed}"):
            noise_integers(seed, 0, token_ids)
    for position in (-1, 2**31):
        with pytest.raises(ValueError, match=f"position is {position}"):
            noise_integers(0, position, token_ids)
    for wrong in (np.arange(3, dtype=np.int32), np.array(3), torch.arange(3, dtype=torch.int32)):
        with pytest.raises(ValueError, match="int64"):
            noise_integers(0, 0, wrong)
    for size in (0, 2**31 + 1):
        with pytest.raises(ValueError, match=f"vocabulary size is {size}"):
            noise_row(0, 0, size)


def gumbel_of(numerators: list[int]) -> NDArray[np.float64]:
    """Gumbel values of w = numerator * 2**-53."""
    values: NDArray[np.float64] = gumbel(np.array([numerator << 11 for numerator in numerators], np.uint64).view(np.int64))
    return values


def test_gumbel_quantiles() -> None:
    """Values are the closed form's upper quantiles, far beyond 17 where 24 bits would end, and finite at either end."""
    numerators = [1, 3, 5, 1001, 2**20 + 1, 2**30 + 1, 2**40 + 1, 2**52 + 1, 2**53 - 3, 2**53 - 1]
    expected = stats.gumbel_r.isf(np.array(numerators) * 2.0**-53)
    np.testing.assert_allclose(gumbel_of(numerators), expected, rtol=1e-12)
    assert gumbel_of([1])[0] == pytest.approx(53 * np.log(2))
    assert np.isfinite(gumbel_of([0, 2**53 - 1])).all()


def test_gumbel_tail_is_fine() -> None:
    """Beyond 17 neighbouring uniforms still make different values, a ten-thousandth apart at most."""
    start = int(np.exp(-17.5) * 2**53) | 1
    values = gumbel_of([start + 2 * step for step in range(1000)])
    assert values[0] > 17
    assert (np.diff(values) < 0).all()
    assert (np.diff(values) > -1e-4).all()


def test_gumbel_law() -> None:
    """A long row follows the Gumbel law, by Kolmogorov-Smirnov and by counts in the far tail."""
    row = noise_row(11, 12, 2_000_000).astype(np.float64)
    assert stats.kstest(row, stats.gumbel_r.cdf).pvalue > SMALLEST_P_VALUE
    for threshold in (8.0, 10.0, 12.0):
        count, mean = int((row > threshold).sum()), len(row) * stats.gumbel_r.sf(threshold)
        assert stats.poisson.cdf(count, mean) > SMALLEST_P_VALUE
        assert stats.poisson.sf(count - 1, mean) > SMALLEST_P_VALUE


def buckets(integers: NDArray[np.int64], bits: int = 4) -> NDArray[np.int64]:
    return (integers.view(np.uint64) >> np.uint64(64 - bits)).astype(int).ravel()


@pytest.mark.parametrize("varied", ["token", "position", "seed"])
def test_uniform_in_every_argument(varied: str) -> None:
    """Bits are uniform along each argument with the others fixed."""
    many = np.arange(40_000)
    rows = {
        "token": [noise_integers(5, 6, many)],
        "position": [noise_integers(5, many, np.array([6]))],
        "seed": [noise_integers(seed, 5, np.array([6])) for seed in range(4000)],
    }
    integers = np.concatenate(rows[varied])
    assert stats.chisquare(np.bincount(buckets(integers, 8), minlength=256)).pvalue > SMALLEST_P_VALUE
    assert stats.kstest(integers.view(np.uint64) * 2.0**-64, "uniform").pvalue > SMALLEST_P_VALUE


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((0, 0, 0), (0, 1, 0)),
        ((0, 0, 0), (1, 0, 0)),
        ((0, 1, 0), (1, 0, 0)),
        ((0, 0, 0), (0, 0, 1)),
        ((0, 1, 0), (0, 0, 1)),
        ((1, 0, 0), (0, 0, 1)),
        ((3, 5, 0), (5, 3, 0)),
        ((0, 0, 0), (2**63, 0, 0)),
        ((0, 0, 0), (0, 2**30, 0)),
    ],
)
def test_independent_of_its_neighbours(first: tuple[int, int, int], second: tuple[int, int, int]) -> None:
    """Noise of two (seed, position, first token) is independent: pairs are uniform on a grid and uncorrelated."""
    one, other = (noise_integers(seed, position, start + np.arange(60_000)) for seed, position, start in (first, second))
    pairs = np.bincount(16 * buckets(one) + buckets(other), minlength=256)
    assert stats.chisquare(pairs).pvalue > SMALLEST_P_VALUE
    assert stats.pearsonr(gumbel(one), gumbel(other)).pvalue > SMALLEST_P_VALUE


def test_many_rows_are_uncorrelated() -> None:
    """Among rows of 8 seeds and 8 positions no two correlate, nor does any repeat a value of another."""
    rows = np.concatenate([noise_integers(seed, np.arange(8)[:, np.newaxis], np.arange(8000)) for seed in range(8)])
    correlations = np.corrcoef(gumbel(rows))[np.triu_indices(64, 1)]
    assert abs(correlations).max() < 5 / np.sqrt(8000)
    assert len(np.unique(rows)) == rows.size
