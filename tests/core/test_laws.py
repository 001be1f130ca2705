"""The law of whole sequences against a target whose law can be enumerated: vocabulary 8, length 4, 200,000 samples a case.

Samples are made in bulk by `Bulk`, with the core's own numbers and its rule for drawn nodes; that bulk walks are the walks of
`accept_hybrid` and `accept` over trees of the core's builders is tested token for token on the first samples of every case.
Sample i is a generation whose prompt has FIRST_POSITION + 4 i tokens: positions of different samples never meet.

Bounds: chi-square over all sequences (rarest ones together) p > 0.001, seeds being fixed; total variation below 1.15 times
what that many samples of the law itself have on average.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from treewire.core.acceptance import accept
from treewire.core.build import build_tree, perturb
from treewire.core.history import History
from treewire.core.hybrid import Purpose, accept_hybrid, build_hybrid_tree, choose_after_draw, pick, uniforms
from treewire.core.noise import noise_at
from treewire.core.processing import choose, process
from treewire.core.sampling import Sampling
from treewire.core.tree import DraftTree, Marginals

VOCABULARY_SIZE = 8
LENGTH = 4
NUM_SAMPLES = 200_000
NUM_COMPARED = 150
BUDGET = 9
SEED = 20
PROMPT = (1, 4)
FIRST_POSITION = len(PROMPT)
SMALLEST_P_VALUE = 1e-3
LARGEST_EXCESS = 1.15

SAMPLINGS = {
    "plain": Sampling(temperature=1.0, seed=SEED),
    "top-p": Sampling(temperature=0.8, top_k=7, top_p=0.85, min_p=0.02, seed=SEED),
    "penalties": Sampling(
        temperature=1.1,
        repetition_penalty=1.4,
        presence_penalty=0.5,
        frequency_penalty=0.4,
        logit_bias=((3, 1.0),),
        min_tokens=2,
        stop_token_ids=(0,),
        seed=SEED,
    ),
}
Codes = NDArray[np.int64]  # sequences as numbers in base 8, their lengths known
# Log-probs [depths, vocabulary] that a drafter gives after a sequence of this length and code.
Drafter = Callable[["Target", int, int], NDArray[np.float64]]


def tokens_of(code: int, length: int) -> tuple[int, ...]:
    return tuple(code // VOCABULARY_SIZE ** (length - 1 - place) % VOCABULARY_SIZE for place in range(length))


class Target:
    """The toy target: processed log-probs for every sequence, by length and code."""

    def __init__(self, sampling: Sampling) -> None:
        self.sampling = sampling
        self.log_probs = [self._table(length) for length in range(LENGTH)]

    def _table(self, length: int) -> NDArray[np.float32]:
        logits = np.random.default_rng(length).normal(scale=1.3, size=(VOCABULARY_SIZE**length, VOCABULARY_SIZE))
        rows = logits.astype(np.float32)
        return np.concatenate([self._processed(row, tokens_of(code, length)) for code, row in enumerate(rows)])

    def _processed(self, logits: NDArray[np.float32], output: tuple[int, ...]) -> NDArray[np.float32]:
        histories = History((*PROMPT, *output), len(output)).now() if self.sampling.reads_history else None
        return process(logits[np.newaxis], self.sampling, histories)

    def law(self) -> NDArray[np.float64]:
        """Probability of each sequence by its code, float64 [8 ** 4]."""
        law = np.ones(1)
        for table in self.log_probs:
            law = (law[:, np.newaxis] * np.exp(table.astype(np.float64))).ravel()
        return law / law.sum()


@lru_cache
def target(name: str) -> Target:
    return Target(SAMPLINGS[name])


def _normalised(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    return scores - np.logaddexp.reduce(scores, axis=-1, keepdims=True)


def good(target: Target, length: int, code: int) -> NDArray[np.float64]:
    """Knows the target up to some noise; for deeper depths takes what follows its own best token."""
    rows = []
    for depth in range(LENGTH - length):
        row = np.maximum(target.log_probs[length + depth][code].astype(np.float64), -9.0)
        rows.append(row + np.random.default_rng((length, code, depth)).normal(scale=0.3, size=VOCABULARY_SIZE))
        code = VOCABULARY_SIZE * code + int(rows[-1].argmax())
    return _normalised(np.array(rows))


def adversarial(target: Target, length: int, code: int) -> NDArray[np.float64]:
    """Holds likely what the target holds unlikely."""
    return _normalised(-good(target, length, code))


def overconfident(target: Target, length: int, code: int) -> NDArray[np.float64]:
    """The good one at a third of the temperature."""
    return _normalised(3 * good(target, length, code))


def truncated(target: Target, length: int, code: int) -> NDArray[np.float64]:
    """The good one, of which four tokens a depth are shipped."""
    log_probs = good(target, length, code)
    return np.where(log_probs >= np.sort(log_probs, axis=1)[:, -4:-3], log_probs, -np.inf)


def uniform(target: Target, length: int, code: int) -> NDArray[np.float64]:
    """Knows nothing."""
    return np.full((LENGTH - length, VOCABULARY_SIZE), -np.log(VOCABULARY_SIZE))


def marginals(log_probs: NDArray[np.float64]) -> Marginals:
    order = np.argsort(-log_probs, axis=1, kind="stable")
    return Marginals(order.astype(np.int32), np.take_along_axis(log_probs, order, 1).astype(np.float32))


class Case(NamedTuple):
    """Hybrid acceptance with one drafter: up to `width` children a node, the last of them drawn."""

    sampling: str
    drafter: Drafter
    width: int

    def tree(self, length: int, code: int, position: int) -> DraftTree:
        """The round's tree after a sequence whose last token is at this absolute position."""
        proposed = marginals(self.drafter(target(self.sampling), length, code))
        root, deepest = code % VOCABULARY_SIZE, LENGTH - length - 1
        return build_hybrid_tree(
            root, proposed, BUDGET, width=self.width, seed=SEED, root_position=position, max_depth=deepest
        ).tree


def positions_of(samples: NDArray[np.int64], length: int) -> NDArray[np.int64]:
    """Absolute position of the token after `length` output tokens, in each sample."""
    return FIRST_POSITION + LENGTH * samples + length


class Bulk:
    """Many generations at once. `codes` and `lengths` are those of each sample's sequence so far."""

    def __init__(self, sampling: str) -> None:
        self.target = target(sampling)
        samples = np.arange(NUM_SAMPLES)
        self.noise = [
            noise_at(SEED, positions_of(samples, length)[:, np.newaxis], np.arange(VOCABULARY_SIZE)) for length in range(LENGTH)
        ]
        self.codes = np.zeros(NUM_SAMPLES, np.int64)
        self.lengths = np.zeros(NUM_SAMPLES, np.int64)

    def posterior(self, samples: NDArray[np.int64], length: int) -> NDArray[np.int64]:
        """The target's own choice after each sample's sequence."""
        return choose(self.target.log_probs[length][self.codes[samples]], self.noise[length][samples])

    def append(self, samples: NDArray[np.int64], token_ids: NDArray[np.int64]) -> None:
        self.codes[samples] = VOCABULARY_SIZE * self.codes[samples] + token_ids
        self.lengths[samples] += 1


@lru_cache
def plain_codes(sampling: str) -> Codes:
    """Plain sampling: each token the target's own choice."""
    bulk, everyone = Bulk(sampling), np.arange(NUM_SAMPLES)
    for length in range(LENGTH):
        bulk.append(everyone, bulk.posterior(everyone, length))
    return bulk.codes


def hybrid_codes(case: Case) -> Codes:
    """The first token, then rounds over trees with drawn nodes until every sample has its length."""
    bulk, everyone = Bulk(case.sampling), np.arange(NUM_SAMPLES)
    bulk.append(everyone, bulk.posterior(everyone, 0))
    for length in range(1, LENGTH):
        for code in range(VOCABULARY_SIZE**length):
            samples = np.flatnonzero((bulk.lengths == length) & (bulk.codes == code))
            if len(samples):
                _walk(bulk, case.tree(length, code, FIRST_POSITION), samples, length)
    return bulk.codes


def _walk(bulk: Bulk, shape: DraftTree, samples: NDArray[np.int64], root_length: int) -> None:
    """All samples through trees of one shape, whose drawn tokens are each sample's own."""
    nodes = {0: samples}
    for node in range(len(shape)):
        here = nodes.pop(node, None)
        if here is None or not len(here):
            continue
        length = root_length + shape.depths[node]
        draw, drawn = shape.drawn_children.get(node), np.full(len(here), -1)
        if draw is None:
            token_ids = bulk.posterior(here, length)
        else:
            positions = positions_of(here, length)
            weights = np.tile(draw.probabilities, (len(here), 1))
            drawn = np.array(draw.token_ids)[pick(weights, uniforms(SEED, positions, Purpose.DRAW))]
            drawn_from = np.zeros((len(here), VOCABULARY_SIZE))
            drawn_from[:, list(draw.token_ids)] = draw.probabilities
            token_ids = choose_after_draw(
                drawn,
                drawn_from,
                np.exp(bulk.target.log_probs[length][bulk.codes[here]].astype(np.float64)),
                uniforms(SEED, positions, Purpose.ACCEPT),
                uniforms(SEED, positions, Purpose.RESIDUAL),
            )
        bulk.append(here, token_ids)
        for child in shape.children[node]:
            is_drawn = draw is not None and child == draw.node
            nodes[child] = here[token_ids == (drawn if is_drawn else shape.token_ids[child])]


def walked_code(case: Case, sample: int) -> int:
    """One sample through the core's own trees and walks."""
    model, position = target(case.sampling), int(positions_of(np.array([sample]), 0)[0])

    def choice(length: int, code: int) -> int:
        noise = noise_at(SEED, position + length, np.arange(VOCABULARY_SIZE))[np.newaxis]
        return int(choose(model.log_probs[length][code : code + 1], noise)[0])

    length, code = 1, choice(0, 0)
    while length < LENGTH:
        tree = case.tree(length, code, position + length - 1)
        paths = [[tree.token_ids[step] for step in tree.path(node)[1:]] for node in range(len(tree))]
        codes = [code_after(code, path) for path in paths]
        posterior = [choice(length + len(path), after) for path, after in zip(paths, codes, strict=True)]
        acceptance = accept_hybrid(
            tree,
            posterior,
            lambda node, codes=codes, paths=paths, length=length: np.exp(  # type: ignore[misc]
                model.log_probs[length + len(paths[node])][codes[node]].astype(np.float64)
            ),
            seed=SEED,
            root_position=position + length - 1,
        )
        committed = acceptance.token_ids(tree)
        length, code = length + len(committed), code_after(code, committed)
    return code


def code_after(code: int, token_ids: list[int] | tuple[int, ...]) -> int:
    for token_id in token_ids:
        code = VOCABULARY_SIZE * code + token_id
    return code


def p_value(codes: Codes, law: NDArray[np.float64]) -> float:
    """Of the chi-square test; sequences that are expected less than five times count as one."""
    counts, expected = np.bincount(codes, minlength=len(law)), law * len(codes)
    rare = expected < 5
    observed = np.append(counts[~rare], counts[rare].sum())
    predicted = np.append(expected[~rare], expected[rare].sum())
    if predicted[-1] == 0:
        assert observed[-1] == 0, "a sequence of probability 0 came"
        observed, predicted = observed[:-1], predicted[:-1]
    return float(stats.chisquare(observed, predicted).pvalue)


def excess(codes: Codes, law: NDArray[np.float64]) -> float:
    """Total variation between samples and law, over what samples of the law itself have on average."""
    frequencies = np.bincount(codes, minlength=len(law)) / len(codes)
    average = np.sqrt(2 * law * (1 - law) / (np.pi * len(codes))).sum()
    return float(np.abs(frequencies - law).sum() / average)


def assert_law(codes: Codes, law: NDArray[np.float64]) -> None:
    assert p_value(codes, law) > SMALLEST_P_VALUE
    assert excess(codes, law) < LARGEST_EXCESS
    assert np.bincount(codes, minlength=len(law))[law == 0].sum() == 0


CASES = [
    Case("plain", drafter, width) for drafter in (good, adversarial, overconfident, truncated, uniform) for width in (1, 3)
]
CASES += [Case(name, drafter, width) for name in ("top-p", "penalties") for drafter in (good, truncated) for width in (1, 3)]


@pytest.mark.parametrize("name", SAMPLINGS)
def test_shared_noise_has_the_target_s_law(name: str) -> None:
    """Plain sampling with shared noise, which trees do not change (below), is the target's law of whole sequences."""
    assert_law(plain_codes(name), target(name).law())


@pytest.mark.parametrize("drafter", [good, adversarial, overconfident, truncated, uniform])
@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("width", [1, 4], ids=["chain", "tree"])
def test_shared_noise_over_trees_is_plain_sampling(name: str, drafter: Drafter, width: int) -> None:
    """Token for token the same through trees of any drafter, ranked with the noise or without."""
    model, plain = target(name), plain_codes(name)
    for sample in range(NUM_COMPARED // 3):
        position, length, code = FIRST_POSITION + LENGTH * sample, 1, int(plain[sample]) // VOCABULARY_SIZE**3
        while length < LENGTH:
            proposed = marginals(drafter(model, length, code)[:, :])
            proposed = Marginals(proposed.token_ids[:, :width], proposed.log_probs[:, :width])
            scores = perturb(proposed, SEED, position + length - 1) if sample % 2 else None
            root = code % VOCABULARY_SIZE
            tree = build_tree(root, proposed, BUDGET, max_depth=LENGTH - length - 1, branch_scores=scores).tree
            posterior = []
            for node in range(len(tree)):
                path = [tree.token_ids[step] for step in tree.path(node)[1:]]
                noise = noise_at(SEED, position + length + len(path), np.arange(VOCABULARY_SIZE))[np.newaxis]
                row = model.log_probs[length + len(path)][code_after(code, path)][np.newaxis]
                posterior.append(int(choose(row, noise)[0]))
            committed = accept(tree, posterior).token_ids(tree)
            length, code = length + len(committed), code_after(code, committed)
        assert code == plain[sample]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.sampling}-{case.drafter.__name__}-{case.width}")
def test_hybrid_has_the_target_s_law(case: Case) -> None:
    """Chain (width 1) and tree, whatever the drafter: the law of whole sequences; bulk walks are the core's own."""
    codes = hybrid_codes(case)
    assert [walked_code(case, sample) for sample in range(NUM_COMPARED)] == codes[:NUM_COMPARED].tolist()
    assert_law(codes, target(case.sampling).law())


def test_min_p_over_q_on_chosen_tokens_is_biased() -> None:
    """Accepting the drafter's best token, chosen and not drawn, with min(1, p / q) fails the same test by far."""
    bulk, everyone = Bulk("plain"), np.arange(NUM_SAMPLES)
    for length in range(LENGTH):
        drafts = np.exp([good(bulk.target, length, code)[0] for code in range(VOCABULARY_SIZE**length)])
        drawn_from, positions = drafts[bulk.codes], positions_of(everyone, length)
        token_ids = choose_after_draw(
            drawn_from.argmax(axis=1),
            drawn_from,
            np.exp(bulk.target.log_probs[length][bulk.codes].astype(np.float64)),
            uniforms(SEED, positions, Purpose.ACCEPT),
            uniforms(SEED, positions, Purpose.RESIDUAL),
        )
        bulk.append(everyone, token_ids)
    law = bulk.target.law()
    assert p_value(bulk.codes, law) < 1e-100
    assert excess(bulk.codes, law) > 3
