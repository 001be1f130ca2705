"""An output followed through a structure: what fits of a tree, what may follow each node, what is guessed beside it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from treewire.core.acceptance import Acceptance
from treewire.core.hybrid import accept_hybrid
from treewire.core.processing import allow_only
from treewire.core.tree import DraftTree, Draw
from verify_service.engine import Posterior
from verify_service.engines import sampling as torch_sampling
from verify_service.structures.habits import Habits
from verify_service.structures.matching import Match, Rows, pending
from verify_service.structures.pruning import NOT_COMPUTED, Pruning

VOCABULARY = 40
END = 39
LANGUAGE = ("abc", "abd", "axy", "b")


class WordMatcher:
    """Matches a few words, a letter a token; raises where xgrammar would warn or fail: after the end."""

    def __init__(self, words: Sequence[str] = LANGUAGE) -> None:
        self.words = [[*(ord(letter) - ord("a") for letter in word), END] for word in words]
        self.said: list[int] = []

    def _following(self) -> set[int]:
        count = len(self.said)
        return {word[count] for word in self.words if len(word) > count and word[:count] == self.said}

    def accept_token(self, token_id: int) -> bool:
        assert not self.is_terminated(), "used after its end"
        fits = token_id in self._following()
        if fits:
            self.said.append(token_id)
        return fits

    def rollback(self, num_tokens: int) -> None:
        assert num_tokens <= len(self.said)
        del self.said[len(self.said) - num_tokens :]

    def fill_next_token_bitmask(self, bitmask: Rows, index: int) -> bool:
        assert not self.is_terminated(), "used after its end"
        bits = np.zeros(bitmask.shape[1] * 32, np.uint8)
        bits[list(self._following())] = 1
        bitmask[index] = np.packbits(bits, bitorder="little").view("<i4")
        return True

    def is_terminated(self) -> bool:
        return self.said[-1:] == [END]


def match_of(output: str = "", words: Sequence[str] = LANGUAGE) -> Match:
    match = Match(WordMatcher(words), VOCABULARY, (END,))
    match.advance(ids(output))
    return match


def ids(text: str) -> list[int]:
    """Tokens of letters; a full stop is the end."""
    return [END if letter == "." else ord(letter) - ord("a") for letter in text]


def tree(*nodes: tuple[str, int], draws: tuple[Draw, ...] = ()) -> DraftTree:
    """A tree of letters with the parents of the nodes behind the root."""
    letters, parents = zip(*nodes, strict=True) if nodes else ((), ())
    return DraftTree((0, *ids("".join(letters))), (-1, *parents), draws)


def allowed(row: Rows) -> set[int]:
    """Tokens whose bit is set."""
    return set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist())


def test_16_17_what_does_not_fit_is_left_out_with_all_below_it() -> None:
    """In the middle of a burst and behind an end alike; the matcher is as before, and never used behind its end."""
    sent = tree(("a", 0), ("q", 0), ("b", 1), ("c", 3), (".", 4), ("a", 5), ("b", 2), ("x", 1), ("z", 8))
    match = match_of()
    pruning = match.pruned(sent, deepest=0)
    assert pruning.nodes == (0, 1, 3, 4, 5, 8)
    assert pruning.tree == sent
    assert pruning.left == tree(("a", 0), ("b", 1), ("c", 2), (".", 3), ("x", 1))
    rows = match.rows(pruning.left)
    assert [allowed(row) for row in rows] == [set(ids(text)) for text in ("ab", "bx", "cd", ".", ".", "y")]
    match.advance(ids("abd."))


def test_18_after_the_end_only_the_end_is_allowed() -> None:
    """A lone root, a tree and tokens behind the end of the output change nothing more."""
    match = match_of("abc.")
    pruning = match.pruned(tree(("a", 0), ("b", 1)), deepest=9)
    assert pruning.left == DraftTree.lone_root(0)
    assert [allowed(row) for row in match.rows(DraftTree.lone_root(END))] == [{END}]
    match.advance(ids("abc"))
    assert allowed(match.next_row()[0]) == {END}


def test_output_that_does_not_fit_is_refused() -> None:
    """With the token."""
    with pytest.raises(ValueError, match="token 16 does not match"):
        match_of("q")


@pytest.mark.parametrize(("deepest", "grafted"), [(0, []), (1, ["b"]), (2, ["b"]), (4, ["b", "c", "d", "x"])])
def test_forbidden_nodes_give_their_place_to_what_may_follow(deepest: int, grafted: list[str]) -> None:
    """No more of them than nodes were left out, none too deep, none that the tree has; the likeliest first."""
    sent = tree(("a", 0), *[("q", 0)] * 4)
    pruning = match_of().pruned(sent, deepest)
    added = pruning.tree.token_ids[len(sent) :]
    assert pruning.num_sent == len(sent)
    assert pruning.tree.token_ids[: len(sent)] == sent.token_ids
    assert len(added) <= 4
    assert max(pruning.tree.depths) <= max(1, deepest)
    assert set(ids("".join(grafted))) <= set(added) | {0} if deepest in (0, 1) else added
    assert match_of().pruned(pruning.left, deepest=0).nodes == tuple(range(len(pruning.left)))
    siblings = list(zip(pruning.tree.parents[len(sent) :], added, strict=True))
    assert len(set(siblings)) == len(siblings)


def test_what_was_taken_before_is_guessed_first() -> None:
    """Where the same tokens are allowed again: a word, a comma, the word again."""
    words = [f"{first}z{second}" for first in ("bcd", "bce", "f") for second in ("bcd", "bce", "f")]
    match = match_of("bcez", words)
    pruning = match.pruned(tree(("q", 0), ("q", 0), ("q", 0)), deepest=9)
    assert pruning.left.token_ids[1:] == tuple(ids("bce"))


def test_what_was_taken_is_forgotten_beyond_a_bound() -> None:
    """However long the output: the latest sets of allowed tokens are kept, each as the few that they are."""
    habits = Habits(num_kept=3)
    for number in range(100):
        habits.learn((number, number + 1, number + 2), number + 1)
    assert len(habits) == 3
    assert habits.likeliest_first((97, 98, 99)) == [98, 97, 99]
    assert habits.likeliest_first((96, 97, 98)) == [96, 97, 98]
    habits.learn((97, 98, 99), 99)
    habits.learn((5, 6), 6)
    assert habits.likeliest_first((97, 98, 99)) == [99, 97, 98]
    assert habits.likeliest_first((98, 99, 100)) == [98, 99, 100]


def test_answer_to_what_is_left_is_spread_over_the_whole_tree() -> None:
    """Choices, features and distributions by the numbers of the sent nodes; an acceptance goes the other way."""
    sent = tree(("q", 0), ("a", 0), ("q", 2), ("b", 2))
    pruning = Pruning(sent, (0, 2, 4), len(sent))
    features = np.arange(6, dtype=np.float32).reshape(3, 2)
    spread = pruning.spread(Posterior((7, 8, 9), features=features))
    assert spread.token_ids == (7, NOT_COMPUTED, 8, NOT_COMPUTED, 9)
    assert spread.features is not None
    np.testing.assert_array_equal(spread.features[[0, 2, 4]], features)
    assert pruning.within(Acceptance((0, 2, 4), 9)) == Acceptance((0, 1, 2), 9)
    with pytest.raises(ValueError, match="node 1 is forbidden"):
        pruning.within(Acceptance((0, 1), 9))


def test_masks_that_fail_or_are_late_end_their_session_alone() -> None:
    """The step gets rows that allow the end, and the failure is told."""
    release = threading.Event()

    class Slow(WordMatcher):
        def fill_next_token_bitmask(self, bitmask: Rows, index: int) -> bool:
            release.wait(10)
            return super().fill_next_token_bitmask(bitmask, index)

    with ThreadPoolExecutor(1) as threads:
        late = pending(Match(Slow(), VOCABULARY, (END,)), None, threads, 0.05)
        assert [allowed(row) for row in late.rows()] == [{END}]
        assert late.failure == "what may come next was not found within 0.05 s"
        release.set()
        failing = pending(match_of(), tree(("q", 0)), threads, 5.0)
        good = pending(match_of(), None, threads, 5.0)
        assert allowed(good.rows()[0]) == set(ids("ab"))
        assert good.failure is None
        assert len(failing.rows()) == 2


def test_engines_in_numpy_and_torch_remove_the_same_tokens() -> None:
    """Greedy and sampled, with a vocabulary that fills no word; without rows nothing is removed."""
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(5, VOCABULARY)).astype(np.float32)
    rows = rng.integers(-(2**31), 2**31, size=(5, 2)).astype(np.int32)
    removed = allow_only(logits, rows)
    for row, words in zip(removed, rows, strict=True):
        assert set(np.flatnonzero(np.isfinite(row)).tolist()) == {each for each in allowed(words) if each < VOCABULARY}
    np.testing.assert_array_equal(torch_sampling.allow_only(torch.from_numpy(logits), rows).numpy(), removed)
    assert allow_only(logits, None) is logits


def test_rejected_draws_of_forbidden_tokens_leave_the_law_as_it_is() -> None:
    """Hybrid acceptance over a pruned tree: the law is the masked target's, though half the draws are forbidden."""
    rng = np.random.default_rng(1)
    target = np.zeros(VOCABULARY)
    target[[0, 1, 2]] = 0.5, 0.3, 0.2  # after the mask; token 9 is forbidden
    drawn_from = np.array([0.1, 0.4, 0.5])
    counts = np.zeros(VOCABULARY)
    num_samples = 20_000
    for number in range(num_samples):
        drawn = int(rng.choice([0, 2, 9], p=drawn_from))
        draw = Draw(1, (0, 2, 9), tuple(np.log(drawn_from).tolist()))
        sent = DraftTree((5, drawn), (-1, 0), (draw,))
        pruning = Pruning(sent, (0,) if drawn == 9 else (0, 1), 2)
        own = int(rng.choice(VOCABULARY, p=target))
        posterior = pruning.spread(Posterior((own, 3)[: len(pruning.left)]))
        acceptance = accept_hybrid(sent, posterior.token_ids, lambda node: target, seed=number, root_position=7)
        assert pruning.within(acceptance)
        counts[acceptance.token_ids(sent)[0]] += 1
    assert np.abs(counts / num_samples - target).sum() / 2 < 0.015
