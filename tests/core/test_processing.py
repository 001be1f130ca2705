"""The sampling chain against one token at a time, and the choice against the law it must follow."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from treewire.core.history import History
from treewire.core.noise import noise_at
from treewire.core.processing import choose, process
from treewire.core.sampling import Sampling
from treewire.core.tree import DraftTree

SMALLEST_P_VALUE = 1e-3  # seeds are fixed: a test either always passes or never does
logit = st.one_of(st.integers(-12, 12).map(lambda quarter: quarter / 4), st.just(-math.inf))
rows = st.lists(logit, min_size=1, max_size=9).filter(lambda row: max(row) > -math.inf)


def one_at_a_time(logits: list[float], sampling: Sampling) -> list[float]:
    """Log-probs by going through the tokens from the best to the worst."""
    weights = {token_id: math.exp((logit - max(logits)) / sampling.temperature) for token_id, logit in enumerate(logits)}
    ordered = sorted(
        (token_id for token_id in weights if weights[token_id] > 0), key=lambda token_id: (-weights[token_id], token_id)
    )
    if sampling.top_k:
        ordered = ordered[: sampling.top_k]
    total, mass = sum(weights[token_id] for token_id in ordered), 0.0
    nucleus: list[int] = []
    for token_id in ordered:
        if nucleus and mass / total >= sampling.top_p:
            break
        nucleus.append(token_id)
        mass += weights[token_id]
    kept = [token_id for token_id in nucleus if weights[token_id] >= sampling.min_p * weights[nucleus[0]]]
    total = sum(weights[token_id] for token_id in kept)
    return [math.log(weights[token_id] / total) if token_id in kept else -math.inf for token_id in weights]


@given(
    rows,
    st.sampled_from([0.25, 0.7, 1.0, 2.0]),
    st.integers(0, 10),
    st.sampled_from([1e-6, 0.31, 0.62, 0.93, 1.0]),
    st.sampled_from([0.0, 0.11, 0.53, 1.0]),
)
def test_chain(logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    """The chain removes the tokens that the definition removes and renormalises the rest, ties included."""
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    processed = process(np.array([logits], np.float32), sampling)
    assert processed.dtype == np.float32
    np.testing.assert_allclose(processed[0], one_at_a_time(logits, sampling), atol=1e-5)
    assert np.exp(processed[0].astype(np.float64)).sum() == pytest.approx(1.0, abs=1e-5)


def kept(logits: list[float], sampling: Sampling) -> list[int]:
    return np.flatnonzero(process(np.array([logits], np.float32), sampling)[0] > -np.inf).tolist()


def test_ties_at_the_boundary() -> None:
    """Equals at the boundary stay by the lower token id: exactly k, and the fewest that reach p."""
    assert kept([1.0, 2.0, 1.0, 1.0], Sampling(temperature=1.0, top_k=2)) == [0, 1]
    assert kept([0.0, 0.0, 0.0, 0.0], Sampling(temperature=1.0, top_p=0.5)) == [0, 1]
    assert kept([0.0, 0.0, 0.0, 0.0], Sampling(temperature=1.0, top_p=0.51)) == [0, 1, 2]
    assert kept([0.0, 0.0, 0.0, -1.0], Sampling(temperature=1.0, min_p=1.0)) == [0, 1, 2]


def test_best_token_always_stays() -> None:
    """However small p is, one token is left, and it is certain."""
    processed = process(np.array([[0.0, 3.0, 3.0]], np.float32), Sampling(temperature=1.0, top_p=1e-9))
    assert processed.tolist() == [[-math.inf, 0.0, -math.inf]]


def test_order_of_the_chain() -> None:
    """Top-p works on what top-k left, renormalised: 0.4 of (0.4, 0.3, 0.3) is 0.57 of the best two."""
    logits = np.log([0.4, 0.3, 0.3]).tolist()
    assert kept(logits, Sampling(temperature=1.0, top_p=0.5)) == [0, 1]
    assert kept(logits, Sampling(temperature=1.0, top_k=2, top_p=0.5)) == [0]


@pytest.mark.parametrize("temperature", [1e-30, 1e-45, 5e-324])
def test_vanishing_temperature(temperature: float) -> None:
    """A temperature next to 0 is greedy in effect, without overflow or NaN."""
    processed = process(np.array([[1.0, 5.0, -3e38]], np.float32), Sampling(temperature=temperature))
    assert processed[0, 1] == 0.0
    assert choose(processed, np.full((1, 3), 36.0, np.float32)).tolist() == [1]


def test_rows_are_independent() -> None:
    """A row alone is processed as in a batch."""
    logits = np.random.default_rng(1).normal(size=(5, 40)).astype(np.float32)
    sampling = Sampling(temperature=0.8, top_k=20, top_p=0.9, min_p=0.02)
    together = process(logits, sampling)
    for row in range(5):
        np.testing.assert_array_equal(process(logits[row : row + 1], sampling)[0], together[row])


def test_logits_stay_as_they_are() -> None:
    """Processing does not change the caller's logits, and greedy hands them back unchanged."""
    logits = np.random.default_rng(2).normal(size=(2, 9)).astype(np.float32)
    before = logits.copy()
    process(logits, Sampling(temperature=0.5, top_k=3, top_p=0.9, min_p=0.1))
    process(logits, Sampling(temperature=0.5))
    np.testing.assert_array_equal(process(logits, Sampling(top_k=1)), before)
    np.testing.assert_array_equal(logits, before)


@pytest.mark.parametrize(
    ("logits", "reason"),
    [
        ([1.0, 2.0], "shape"),
        ([[]], "shape"),
        ([[1.0, math.nan]], "NaN"),
        ([[1.0, math.inf]], "NaN"),
        ([[-math.inf] * 2], "every token"),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_refusals(logits: list[float], reason: str, temperature: float) -> None:
    """Logits that leave nothing to choose from are refused, also when greedy."""
    with pytest.raises(ValueError, match=reason):
        process(np.array(logits, np.float32), Sampling(temperature=temperature))


def test_choice() -> None:
    """The best after each node, noise included; of equals the lower id."""
    log_probs = np.array([[0.0, 2.0, 2.0], [1.0, 0.0, 0.5]], np.float32)
    assert choose(log_probs, None).tolist() == [1, 0]
    assert choose(log_probs, np.array([[0.0, 0.0, 1.0], [0.0, 1.0, 0.5]], np.float32)).tolist() == [2, 0]
    assert choose(log_probs, None).dtype == np.int64


@pytest.mark.parametrize("sampling", [Sampling(temperature=1.0), Sampling(temperature=1.7, top_k=6, top_p=0.95)])
def test_choice_is_a_sample(sampling: Sampling) -> None:
    """With shared noise the tokens chosen over many positions have the frequencies of p', and none that was removed."""
    processed = process(np.array([[2.0, 1.0, 0.5, 0.0, -1.0, -2.5, -3.0, -4.0]], np.float32), sampling)
    positions = np.arange(30_000)[:, np.newaxis]
    chosen = choose(processed, noise_at(123, positions, np.arange(8)))
    counts, probabilities = np.bincount(chosen, minlength=8), np.exp(processed[0].astype(np.float64))
    assert counts[probabilities == 0].sum() == 0
    left = probabilities > 0
    expected = probabilities[left] / probabilities[left].sum() * len(chosen)
    assert stats.chisquare(counts[left], expected).pvalue > SMALLEST_P_VALUE


def test_successive_choices_are_independent() -> None:
    """Pairs of choices at neighbouring positions have the product law."""
    processed = process(np.array([[1.0, 0.5, 0.0]], np.float32), Sampling(temperature=1.0))
    chosen = choose(processed, noise_at(5, np.arange(40_001)[:, np.newaxis], np.arange(3)))
    pairs = np.bincount(3 * chosen[:-1] + chosen[1:], minlength=9).reshape(3, 3)
    assert stats.chi2_contingency(pairs).pvalue > SMALLEST_P_VALUE


def penalised(logits: list[float], sampling: Sampling, prompt: list[int], output: list[int]) -> list[float]:
    """Penalties, bias and min tokens for one node, token by token."""
    adjusted = []
    for token_id, logit in enumerate(logits):
        if token_id in prompt or token_id in output:
            logit = logit / sampling.repetition_penalty if logit > 0 else logit * sampling.repetition_penalty
        if token_id in output:
            logit -= sampling.presence_penalty + sampling.frequency_penalty * output.count(token_id)
        logit += dict(sampling.logit_bias).get(token_id, 0.0)
        barred = token_id in sampling.stop_token_ids and len(output) < sampling.min_tokens
        adjusted.append(-math.inf if barred else logit)
    return adjusted


def tree_of(token_ids: list[int], picks: list[float]) -> DraftTree:
    """A tree in which `picks` in [0, 1) choose the parents among the earlier nodes."""
    return DraftTree(tuple(token_ids), (-1, *(int(pick * (node + 1)) for node, pick in enumerate(picks[: len(token_ids) - 1]))))


tokens = st.lists(st.integers(0, 6), max_size=8)
penalties = st.builds(
    Sampling,
    repetition_penalty=st.sampled_from([0.5, 1.0, 1.7]),
    presence_penalty=st.sampled_from([-1.0, 0.0, 0.6]),
    frequency_penalty=st.sampled_from([0.0, 0.25]),
    logit_bias=st.sampled_from([(), ((2, 3.0), (5, -100.0))]),
    min_tokens=st.sampled_from([0, 3, 6]),
    stop_token_ids=st.sampled_from([(), (1, 4)]),
)


@given(
    tokens, tokens, st.lists(st.integers(0, 6), min_size=1, max_size=7), st.lists(st.floats(0, 0.999), min_size=7), penalties
)
def test_8_9_each_node_is_penalised_for_its_own_path(
    prompt: list[int], output: list[int], token_ids: list[int], picks: list[float], sampling: Sampling
) -> None:
    """Every node of a tree gets the penalties of prompt, output and its own path; siblings do not meet."""
    tree = tree_of(token_ids, picks)
    logits = np.random.default_rng(len(prompt)).normal(size=(len(tree), 7)).astype(np.float32)
    histories = History([*prompt, *output], len(output)).over(tree)
    expected = [
        penalised(logits[node].tolist(), sampling, prompt, [*output, *(tree.token_ids[step] for step in tree.path(node))])
        for node in range(len(tree))
    ]
    np.testing.assert_allclose(process(logits, sampling, histories), expected, atol=1e-5)


@given(tokens, tokens, penalties)
def test_9_a_history_that_grows_is_that_of_the_whole(prompt: list[int], output: list[int], sampling: Sampling) -> None:
    """Tokens added one by one count as if they had been there at first; a copy goes its own way."""
    grown = History(prompt)
    for token_id in output:
        grown.copy().extend([0, 1, 2])
        grown.extend([token_id])
    logits = np.random.default_rng(3).normal(size=(1, 7)).astype(np.float32)
    whole = History([*prompt, *output], len(output))
    np.testing.assert_array_equal(process(logits, sampling, grown.now()), process(logits, sampling, whole.now()))


def test_8_a_chain_that_reads_the_history_is_given_one() -> None:
    """Penalties without a history are an error, never ignored."""
    logits = np.zeros((1, 4), np.float32)
    for sampling in (Sampling(repetition_penalty=2.0), Sampling(min_tokens=1, temperature=1.0)):
        with pytest.raises(ValueError, match="history"):
            process(logits, sampling)


def test_tokens_of_parameters_are_in_the_vocabulary() -> None:
    """A bias or stop token beyond the vocabulary is refused with its value and the limit."""
    with pytest.raises(ValueError, match="logit_bias: token is 9, it must be from 0 to 8"):
        Sampling(logit_bias=((9, 1.0),)).check_vocabulary(9)
    with pytest.raises(ValueError, match="logit_bias of token 1 is nan"):
        Sampling(logit_bias=((1, math.nan),))
