"""The n-gram drafter: what followed before, counted right, found through an index that grows with the sequence."""

from __future__ import annotations

import math
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draft_service.engine import Proposal
from draft_service.engines.ngram import Match, NgramDrafter, NgramIndex
from treewire.core.build import build_tree
from treewire.core.noise import noise_at
from treewire.core.sampling import Sampling
from treewire.core.tree import Commit, Marginals

TEXTS = st.lists(st.integers(0, 3), min_size=1, max_size=60)
GREEDY = Sampling()
SAMPLED = Sampling(temperature=1.0, seed=5)


def brute_force_matches(text: list[int], max_length: int, window: int, max_matches: int) -> list[Match]:
    """The definition: for each length the newest places in the window that end as the text does, longest lengths first."""
    found: dict[int, int] = {}
    for length in range(max_length, 0, -1):
        suffix = text[len(text) - length :]
        places = [
            end for end in range(len(text) - 1, max(length - 1, len(text) - window), -1) if text[end - length : end] == suffix
        ]
        for end in places[:max_matches]:
            found.setdefault(end, length)
    return [Match(end, length) for end, length in found.items()]


def propose(drafter: NgramDrafter, text: list[int], sampling: Sampling, horizon: int = 5, width: int = 4) -> Marginals:
    """Marginals after the text, all of it but the last token being the prompt."""
    drafter.start(1, text[:-1], sampling)
    (marginals,) = drafter.propose([Proposal(1, Commit((text[-1],), len(text)), horizon, width)])
    drafter.release(1)
    return marginals


@given(TEXTS, st.integers(1, 4), st.integers(5, 30), st.integers(1, 5))
def test_matches_are_those_of_the_definition(text: list[int], max_length: int, window: int, max_matches: int) -> None:
    """The chained index finds what looking at every place finds, in the same order."""
    index = NgramIndex(max_length, window, max_matches, text)
    assert list(index.matches()) == brute_force_matches(text, max_length, window, max_matches)


@given(st.lists(TEXTS, min_size=1, max_size=5), st.integers(5, 30))
def test_an_index_grown_in_pieces_is_the_index_built_at_once(pieces: list[list[int]], window: int) -> None:
    """Commits of any sizes leave the same index, and no more n-grams than the window has."""
    grown = NgramIndex(3, window, 4)
    for piece in pieces:
        grown.extend(piece)
    rebuilt = NgramIndex(3, window, 4, [token for piece in pieces for token in piece])
    assert vars(grown) == vars(rebuilt)
    assert grown.num_ngrams <= 3 * window


@given(TEXTS.filter(lambda text: len(text) > 1))
def test_probabilities_are_shares_of_weighted_counts(text: list[int]) -> None:
    """Each depth is the share of what followed there, longer and newer matches weighing more, summing to less than 1."""
    marginals = propose(NgramDrafter(max_length=3), text, GREEDY)
    matches = brute_force_matches(text, 3, 1 << 14, 32)
    assert marginals.num_depths == (5 if matches else 0)
    for depth in range(marginals.num_depths):
        counts: dict[int, float] = defaultdict(float)
        num_newer: dict[int, int] = defaultdict(int)
        for end, length in matches:
            followed = text[end:]
            counts[followed[depth % len(followed)]] += 2.5 ** (length - 1) * 0.8 ** num_newer[length]
            num_newer[length] += 1
        total = sum(counts.values()) + 4.0
        expected = sorted(((token, math.log(count / total)) for token, count in counts.items()), key=lambda p: (-p[1], p[0]))
        present = np.isfinite(marginals.log_probs[depth])
        assert dict(zip(marginals.token_ids[depth][present].tolist(), marginals.log_probs[depth][present], strict=True)) == (
            pytest.approx(dict(expected[:4]), rel=1e-5)
        )
        assert (np.diff(marginals.log_probs[depth][present]) <= 0).all()
        assert np.exp(marginals.log_probs[depth].astype(np.float64)).sum() < 1.0


@given(TEXTS.filter(lambda text: len(text) > 1))
def test_sampling_keeps_the_probabilities_and_ranks_by_the_noise(text: list[int]) -> None:
    """At a temperature each row is the greedy row's tokens, best first by log-prob plus shared noise of its position."""
    greedy, sampled = (propose(NgramDrafter(), text, sampling) for sampling in (GREEDY, SAMPLED))
    assert sampled.num_depths == greedy.num_depths
    for depth in range(sampled.num_depths):
        rows = [dict(zip(m.token_ids[depth].tolist(), m.log_probs[depth].tolist(), strict=True)) for m in (greedy, sampled)]
        assert rows[0] == rows[1]
        scores = sampled.log_probs[depth] + noise_at(SAMPLED.seed, len(text) + depth, sampled.token_ids[depth])
        finite = scores[np.isfinite(scores)]
        assert (np.diff(finite) <= 0).all()


def test_several_continuations_make_a_tree() -> None:
    """Where the same words went on in two ways, both are in the tree, the newer one first, and no filler ever is."""
    text = [7, 8, 20, 21, 9, 7, 8, 30, 31, 9, 7, 8]
    tree = build_tree(8, propose(NgramDrafter(), text, GREEDY), budget=16, max_depth=1).tree
    assert [tree.token_ids[child] for child in tree.children[0]] == [30, 20]
    deep = build_tree(8, propose(NgramDrafter(), text, GREEDY), budget=64).tree
    assert set(deep.token_ids) <= set(text)


def test_a_repetition_goes_on_repeating() -> None:
    """A match that runs into the end of the text goes on with what it has repeated so far."""
    marginals = propose(NgramDrafter(), [5, 6, 7, 5, 6, 7, 5], GREEDY)
    assert marginals.token_ids[:, 0].tolist() == [6, 7, 5, 6, 7]


def test_nothing_seen_before_is_no_guess() -> None:
    """Without an earlier place the answer is empty and the tree a lone root."""
    assert propose(NgramDrafter(), [1, 2, 3], GREEDY).num_depths == 0


def test_a_place_beyond_the_window_is_forgotten() -> None:
    """Memory is bounded: what lies further back than the window is not found."""
    text = [1, 2, *range(10, 30), 1]
    assert propose(NgramDrafter(window=64), text, GREEDY).num_depths == 5
    assert propose(NgramDrafter(window=16), text, GREEDY).num_depths == 0


@given(st.lists(TEXTS.filter(lambda text: len(text) > 2), min_size=2, max_size=4), st.sampled_from([GREEDY, SAMPLED]))
def test_a_session_alone_is_the_session_in_a_batch(texts: list[list[int]], sampling: Sampling) -> None:
    """Neighbours change nothing, over two rounds."""
    batched = NgramDrafter()
    for session, text in enumerate(texts):
        batched.start(session, text[:-2], sampling)
    for back in (1, 0):
        together = batched.propose(
            [
                Proposal(session, Commit((text[len(text) - 1 - back],), len(text) - back), 5, 4)
                for session, text in enumerate(texts)
            ]
        )
        for text, marginals in zip(texts, together, strict=True):
            alone = propose(NgramDrafter(), text[: len(text) - back], sampling)
            np.testing.assert_array_equal(marginals.token_ids, alone.token_ids)
            np.testing.assert_array_equal(marginals.log_probs, alone.log_probs)


def test_any_target_fits() -> None:
    """The drafter names no vocabulary and a context longer than any target's."""
    drafter = NgramDrafter(horizon=6, width=3).drafter
    assert (drafter.vocabulary_size, drafter.tokenizer_hash, drafter.horizon, drafter.width) == (0, "", 6, 3)
    assert drafter.max_context == 1 << 20


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"max_length": 0}, "max_length is 0"), ({"max_matches": 0}, "max_matches is 0"), ({"window": 4}, "window is 4")],
)
def test_impossible_settings_are_refused(arguments: dict[str, int], message: str) -> None:
    """A setting that finds nothing is refused with the value."""
    with pytest.raises(ValueError, match=message):
        NgramDrafter(**arguments)
