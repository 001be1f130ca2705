"""The sampling chain in torch is the twin of the reference in numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from treewire.core import processing
from treewire.core.history import History
from treewire.core.noise import noise_row
from treewire.core.sampling import Sampling
from treewire.core.tree import DraftTree
from treewire.highest import highest
from verify_service.engines.sampling import NoiseRows, choose, likeliest, process

VOCABULARY_SIZE = 40

samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 5, VOCABULARY_SIZE, 100]),
    top_p=st.sampled_from([0.11, 0.5, 0.93, 1.0]),
    min_p=st.sampled_from([0.0, 0.03, 1.0]),
)
# Few distinct values: many equals, which is where two sorts would differ.
logits_with_equals = arrays(np.float32, (3, VOCABULARY_SIZE), elements=st.integers(-6, 6).map(float))


@given(logits=logits_with_equals, sampling=samplings)
@settings(max_examples=200, deadline=None)
def test_the_chain_is_that_of_the_reference(logits: NDArray[np.float32], sampling: Sampling) -> None:
    """Temperature, top-k, top-p and min-p keep the same tokens with the same log-probs as the reference."""
    np.testing.assert_allclose(
        process(torch.from_numpy(logits), sampling).numpy(), processing.process(logits, sampling), atol=1e-5, rtol=1e-5
    )


@given(
    logits=logits_with_equals,
    said=st.lists(st.integers(0, VOCABULARY_SIZE - 1), max_size=20),
    path=st.tuples(*[st.integers(0, VOCABULARY_SIZE - 1)] * 3),
    sampling=st.builds(
        Sampling,
        temperature=st.sampled_from([0.0, 0.8]),
        top_p=st.sampled_from([0.9, 1.0]),
        repetition_penalty=st.sampled_from([1.0, 1.25]),
        presence_penalty=st.sampled_from([0.0, 0.5]),
        frequency_penalty=st.sampled_from([0.0, 0.25]),
        logit_bias=st.sampled_from([(), ((3, 2.0), (9, -50.0))]),
        min_tokens=st.sampled_from([0, 4, 30]),
        stop_token_ids=st.sampled_from([(), (1, 3)]),
    ),
)
@settings(max_examples=100, deadline=None)
def test_8_9_penalties_are_those_of_the_reference(
    logits: NDArray[np.float32], said: list[int], path: tuple[int, int, int], sampling: Sampling
) -> None:
    """Penalties, bias and min tokens at every node of a tree are those of the reference, and the given logits stay."""
    histories = History(said, len(said) // 2).over(DraftTree(path, (-1, 0, 0)))
    given_logits = torch.from_numpy(logits.copy())
    computed = process(given_logits, sampling, histories).numpy()
    np.testing.assert_allclose(computed, processing.process(logits, sampling, histories), atol=1e-5, rtol=1e-5)
    np.testing.assert_array_equal(given_logits.numpy(), logits)


@pytest.mark.parametrize("top_p", [0.5, 0.9, 0.999])
def test_a_wide_nucleus_is_complete(top_p: float) -> None:
    """On a large vocabulary the nucleus is that of the reference, whether narrow or nearly everything."""
    rng = np.random.default_rng(0)
    logits = np.stack([rng.normal(0, scale, 5000) for scale in (0.1, 1.0, 6.0)]).astype(np.float32)
    sampling = Sampling(temperature=1.0, top_p=top_p)
    for rows in (logits, logits[2:]):
        expected = processing.process(rows, sampling)
        np.testing.assert_allclose(process(torch.from_numpy(rows), sampling).numpy(), expected, atol=1e-5, rtol=1e-5)


@given(logits=logits_with_equals, count=st.integers(1, VOCABULARY_SIZE + 1))
@settings(max_examples=100, deadline=None)
def test_of_equals_the_lower_token_comes_first(logits: NDArray[np.float32], count: int) -> None:
    """The highest entries are those of a stable sort, and the greedy choice is the first of them."""
    ranked = highest(torch.from_numpy(logits), count)
    assert (ranked.token_ids.numpy() == np.argsort(-logits, axis=1, kind="stable")[:, :count]).all()
    assert torch.equal(choose(torch.from_numpy(logits), None), ranked.token_ids[:, 0])


def test_highest_orders_equals_zeros_and_infinities() -> None:
    """Highest first; of equals, and of the two zeros, the lower index."""
    scores = torch.tensor([[0.0, -0.0, 2.5, float("-inf"), 2.5, -1.5, 1e-38]])
    assert highest(scores, 4).token_ids.tolist() == [[2, 4, 6, 0]]
    assert highest(scores, 7).token_ids.tolist() == [[2, 4, 6, 0, 1, 5, 3]]


def test_noise_is_that_of_the_core() -> None:
    """Rows of noise are the core's for seed and position, in the order asked for, siblings alike."""
    rows = NoiseRows(9, VOCABULARY_SIZE).at([4, 3, 4], torch.device("cpu")).numpy()
    expected = [noise_row(9, position, VOCABULARY_SIZE) for position in (4, 3, 4)]
    assert (rows == np.stack(expected)).all()


def test_removed_tokens_are_not_listed_as_likely() -> None:
    """With fewer tokens left than were asked for, only those are listed."""
    log_probs = process(torch.tensor([[3.0, 2.0, 1.0, 0.0]]), Sampling(temperature=1.0, top_k=2))
    (likely,) = likeliest(log_probs, 4)
    assert likely.token_ids == (0, 1)
    assert np.exp(likely.log_probs).sum() == pytest.approx(1.0)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0), Sampling(temperature=1.0, top_k=2, top_p=0.9)])
def test_a_broken_model_raises(sampling: Sampling) -> None:
    """Logits with NaN raise instead of choosing some token."""
    logits = torch.tensor([[0.0, 1.0, 2.0], [0.0, float("nan"), 2.0]])
    noise = None if sampling.is_greedy else torch.zeros(2, 3)
    with pytest.raises(FloatingPointError, match="not finite"):
        choose(process(logits, sampling), noise)
