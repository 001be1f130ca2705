"""The ranking of drafted tokens: best first, by the scores that the target's choice is made by."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from draft_service.engines.ranking import Row, pad, rank_candidates, rank_vocabulary, to_marginals
from treewire.core.noise import noise_row
from treewire.core.processing import choose, process
from treewire.core.sampling import Sampling

LOGITS = st.lists(st.integers(-3, 3), min_size=1, max_size=30).map(lambda values: np.array(values, np.float32))
SAMPLINGS = st.sampled_from(
    [Sampling(), Sampling(temperature=0.7, seed=3), Sampling(temperature=1.0, top_k=3, seed=4), Sampling(1.0, top_p=0.5)]
)


def test_the_sampling_chain_is_the_targets() -> None:
    """At a temperature the first token is the target's own choice from the same logits, removed tokens come last with -inf."""
    logits = np.random.default_rng(0).normal(size=50).astype(np.float32)
    sampling = Sampling(temperature=0.8, top_k=4, seed=9)
    row = rank_vocabulary(logits, sampling, 17, 10)
    assert row.token_ids[0] == choose(process(logits[np.newaxis], sampling), noise_row(9, 17, 50)[np.newaxis])[0]
    assert np.isfinite(row.log_probs).tolist() == [True] * 4 + [False] * 6


@given(LOGITS, SAMPLINGS, st.integers(1, 40))
def test_rows_are_the_head_of_the_sorted_vocabulary(logits: np.ndarray, sampling: Sampling, width: int) -> None:
    """Best first, equals by the lower token, as if the whole vocabulary were sorted; never wider than it."""
    row = rank_vocabulary(logits, sampling, 5, width)
    if sampling.is_greedy:
        log_probs = logits.astype(np.float64) - np.log(np.exp(logits.astype(np.float64)).sum())
        scores = log_probs.astype(np.float32)
    else:
        log_probs = process(logits[np.newaxis], sampling)[0].astype(np.float64)
        scores = log_probs.astype(np.float32) + noise_row(sampling.seed, 5, len(logits))
    expected = sorted(range(len(logits)), key=lambda token: (-scores[token], token))[:width]
    assert row.token_ids.tolist() == expected
    np.testing.assert_allclose(row.log_probs, log_probs[expected], atol=1e-6)


@given(LOGITS, SAMPLINGS.filter(lambda sampling: not sampling.top_k and sampling.top_p == 1.0))
def test_candidates_rank_as_in_the_vocabulary(logits: np.ndarray, sampling: Sampling) -> None:
    """Ranking all tokens as candidates is ranking the vocabulary."""
    whole = rank_vocabulary(logits, sampling, 5, len(logits))
    order = np.argsort(whole.token_ids)
    row = rank_candidates(whole.token_ids[order], whole.log_probs[order], sampling, 5, len(logits))
    np.testing.assert_array_equal(row.token_ids, whole.token_ids)


def test_fillers_are_distinct_and_impossible() -> None:
    """A padded row keeps its tokens, and its fillers have log-prob -inf and are not among them."""
    row = pad(Row(np.array([1, 9], np.int32), np.array([-0.5, -1.0], np.float32)), 5)
    assert row.token_ids.tolist() == [1, 9, 0, 2, 3]
    assert row.log_probs.tolist() == [-0.5, -1.0] + [-np.inf] * 3
    assert to_marginals([row]).width == 5


def test_no_rows_are_no_guess() -> None:
    """Without rows the marginals are empty."""
    assert to_marginals([]).num_depths == 0
