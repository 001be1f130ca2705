"""Rounds over trees against plain decoding, with a toy target whose law is known."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from treewire.core.acceptance import accept
from treewire.core.build import build_tree, perturb
from treewire.core.noise import noise_row
from treewire.core.processing import choose, process
from treewire.core.sampling import Sampling
from treewire.core.tree import Marginals

VOCABULARY_SIZE = 6
PROMPT = (1, 4)
NUM_TOKENS = 40
SMALLEST_P_VALUE = 1e-3  # seeds are fixed: a test either always passes or never does


def target_logits(prefix: tuple[int, ...]) -> NDArray[np.float32]:
    """The toy target: logits that depend on the last three tokens."""
    return np.random.default_rng(prefix[-3:]).normal(size=(1, VOCABULARY_SIZE)).astype(np.float32)


def choice_after(prefix: tuple[int, ...], sampling: Sampling) -> int:
    """The target's token at position len(prefix)."""
    noise = None if sampling.is_greedy else noise_row(sampling.seed, len(prefix), VOCABULARY_SIZE)[np.newaxis]
    return int(choose(process(target_logits(prefix), sampling), noise)[0])


def plainly_decoded(sampling: Sampling, num_tokens: int) -> tuple[int, ...]:
    sequence: tuple[int, ...] = PROMPT
    while len(sequence) < len(PROMPT) + num_tokens:
        sequence = (*sequence, choice_after(sequence, sampling))
    return sequence


def drafted(sequence: tuple[int, ...], sampling: Sampling) -> Marginals:
    """A fair drafter that knows the target's logits behind the sequence only, and takes them for every depth."""
    log_probs = process(target_logits(sequence), Sampling(temperature=sampling.temperature or 1.0))
    tokens = np.argsort(-log_probs[0], kind="stable")[:4].astype(np.int32)
    return Marginals(np.tile(tokens, (3, 1)), np.tile(log_probs[0, tokens], (3, 1)))


def decoded_over_trees(sampling: Sampling, num_tokens: int, budget: int) -> tuple[tuple[int, ...], int]:
    """The sequence and the number of rounds that it took."""
    sequence: tuple[int, ...] = (*PROMPT, choice_after(PROMPT, sampling))
    num_rounds = 0
    while len(sequence) < len(PROMPT) + num_tokens:
        marginals = drafted(sequence, sampling)
        branches = None if sampling.is_greedy else perturb(marginals, sampling.seed, len(sequence) - 1)
        tree = build_tree(sequence[-1], marginals, budget, branch_scores=branches).tree
        paths = [tuple(tree.token_ids[node] for node in tree.path(node)) for node in range(len(tree))]
        posterior = [choice_after(sequence[:-1] + path, sampling) for path in paths]
        sequence, num_rounds = sequence + accept(tree, posterior).token_ids(tree), num_rounds + 1
    return sequence[: len(PROMPT) + num_tokens], num_rounds


@pytest.mark.parametrize("budget", [0, 1, 7, 20])
@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(temperature=1.0, seed=3), Sampling(temperature=0.6, top_k=3, seed=2**63)]
)
def test_equals_plain_decoding(sampling: Sampling, budget: int) -> None:
    """Token for token the same as plain decoding with the same seed, whatever the tree; and a tree saves rounds."""
    sequence, num_rounds = decoded_over_trees(sampling, NUM_TOKENS, budget)
    assert sequence == plainly_decoded(sampling, NUM_TOKENS)
    assert num_rounds <= NUM_TOKENS - 1
    if budget >= 7:
        assert num_rounds < NUM_TOKENS - 1


def test_law_of_the_tokens() -> None:
    """Over many seeds the first two tokens have the target's own joint law."""
    first = np.exp(process(target_logits(PROMPT), Sampling(temperature=1.0))[0].astype(np.float64))
    second = [process(target_logits((*PROMPT, token)), Sampling(temperature=1.0))[0] for token in range(VOCABULARY_SIZE)]
    law = (first[:, np.newaxis] * np.exp(np.array(second, np.float64))).ravel()
    counts = np.zeros(VOCABULARY_SIZE**2)
    for seed in range(2000):
        sequence, _ = decoded_over_trees(Sampling(temperature=1.0, seed=seed), 2, 6)
        counts[VOCABULARY_SIZE * sequence[-2] + sequence[-1]] += 1
    assert stats.chisquare(counts, law / law.sum() * counts.sum()).pvalue > SMALLEST_P_VALUE
