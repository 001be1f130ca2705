"""The builder against one that lists every prefix and sorts them."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.core.notation import text, token
from treewire.core.build import BranchWeights, BuiltTree, build_tree, perturb
from treewire.core.hybrid import build_hybrid_tree
from treewire.core.noise import noise_row
from treewire.core.tree import Marginals

ROOT = 1000
Path = tuple[int, ...]


def dyadic_rows(width: st.SearchStrategy[int], lowest: int = -6) -> st.SearchStrategy[list[list[float]]]:
    """Rows of one width, best first, of few different log-probs: many ties, and sums without rounding."""
    eighths = st.one_of(st.integers(lowest, 0).map(lambda eighth: eighth / 8), st.just(-math.inf))
    return width.flatmap(
        lambda number: st.lists(st.lists(eighths, min_size=number, max_size=number).map(best_first), max_size=3)
    )


def best_first(scores: list[float]) -> list[float]:
    return sorted(scores, reverse=True)


def marginals_of(rows: list[list[float]]) -> Marginals:
    """Token 10 * depth + rank has the log-prob in that place."""
    return Marginals.from_rows(
        [[(10 * row + rank, score) for rank, score in enumerate(scores)] for row, scores in enumerate(rows)]
    )


def best_prefixes(rows: list[list[float]], budget: int, max_depth: int) -> list[tuple[float, Path]]:
    """Every prefix as its ranks, the best first: by score, then the smaller rank tuple, a prefix ahead of its extension."""
    prefixes = [
        (sum(rows[row][rank] for row, rank in enumerate(ranks)), ranks)
        for depth in range(1, min(len(rows), max_depth) + 1)
        for ranks in itertools.product(*(range(len(scores)) for scores in rows[:depth]))
    ]
    possible = [(score, ranks) for score, ranks in prefixes if score > -math.inf]
    return sorted(possible, key=lambda prefix: (-prefix[0], prefix[1]))[:budget]


def prefixes_of(built: BuiltTree) -> list[tuple[float, Path]]:
    """Each node below the root as its cumulative score and the ranks on its path, in node order."""
    paths = [built.tree.path(node)[1:] for node in range(1, len(built.tree))]
    return [(built.scores[path[-1]], tuple(built.ranks[node] for node in path)) for path in paths]


def token_paths(built: BuiltTree) -> list[Path]:
    return [tuple(built.tree.token_ids[node] for node in built.tree.path(node)) for node in range(len(built.tree))]


@given(dyadic_rows(st.integers(0, 4)), st.integers(0, 90), st.integers(0, 4))
def test_best_prefixes(rows: list[list[float]], budget: int, max_depth: int) -> None:
    """The tree is the best prefixes in order, ties included, with their scores, ranks and tokens."""
    built = build_tree(ROOT, marginals_of(rows), budget, max_depth=max_depth)
    expected = best_prefixes(rows, budget, max_depth)
    assert prefixes_of(built) == expected
    assert token_paths(built)[1:] == [(ROOT, *(10 * row + rank for row, rank in enumerate(ranks))) for _, ranks in expected]
    assert (built.tree.token_ids[0], built.scores[0], built.ranks[0]) == (ROOT, 0.0, 0)


@given(st.integers(0, 2**32 - 1), st.integers(1, 40), st.sampled_from([0.3, 1.0, 3.0]))
def test_best_prefixes_of_a_softmax(seed: int, budget: int, spread: float) -> None:
    """With real log-probs, in which sums round, the scores are the best there are."""
    logits = np.random.default_rng(seed).normal(size=(3, 5)) * spread
    log_probs = np.sort(logits - np.log(np.exp(logits).sum(1, keepdims=True)))[:, ::-1].astype(np.float32)
    built = build_tree(ROOT, marginals_of(log_probs.tolist()), budget)
    expected = best_prefixes(log_probs.astype(np.float64).tolist(), budget, 3)
    assert [score for score, _ in prefixes_of(built)] == pytest.approx([score for score, _ in expected], abs=1e-12)


@given(dyadic_rows(st.integers(1, 4)), st.integers(0, 90), st.integers(0, 90))
def test_nested_in_the_budget(rows: list[list[float]], budget: int, smaller: int) -> None:
    """Cutting a tree is building it with the smaller budget, certificate included."""
    marginals = marginals_of(rows)
    small, large = sorted((budget, smaller))
    cut = build_tree(ROOT, marginals, large).cut(small)
    assert cut == build_tree(ROOT, marginals, small)
    assert cut.exact == build_tree(ROOT, marginals, small).exact


@given(dyadic_rows(st.just(6)), st.integers(1, 5), st.integers(0, 60))
def test_certificate(rows: list[list[float]], width: int, budget: int) -> None:
    """A tree certified exact is the best one of its size from marginals of full width."""
    narrow = build_tree(ROOT, marginals_of([scores[:width] for scores in rows]), budget)
    full = build_tree(ROOT, marginals_of(rows), narrow.tree.num_draft_tokens)
    uses_last_rank = any(rank == width - 1 for rank in narrow.ranks[1:])
    assert narrow.exact == (not uses_last_rank)
    if narrow.exact:
        assert narrow.tree == full.tree
        assert narrow.scores == full.scores


def test_certificate_is_given_and_withheld() -> None:
    """Width 2: rank 1 in the tree withholds the certificate, and a full-width tree is in fact another one."""
    full, narrow = [[-1.0, -1.125, -1.25]], [[-1.0, -1.125]]
    assert build_tree(ROOT, marginals_of(narrow), 1).exact
    built = build_tree(ROOT, marginals_of(narrow), 3)
    assert not built.exact
    assert built.tree != build_tree(ROOT, marginals_of(full), 3).tree


def test_order_of_equals() -> None:
    """All log-probs 0: the order is that of the rank tuples, a prefix ahead of its extension."""
    built = build_tree(ROOT, marginals_of([[0.0, 0.0], [0.0, 0.0]]), 6)
    assert [ranks for _, ranks in prefixes_of(built)] == [(0,), (0, 0), (0, 1), (1,), (1, 0), (1, 1)]


def test_drawn() -> None:
    """A tree by hand: b 0.5, c 0.25; then d 0.5, e 0.25 below either."""
    half, quarter = math.log(0.5), math.log(0.25)
    rows = [[(token("b"), half), (token("c"), quarter)], [(token("d"), half), (token("e"), quarter)]]
    drawings = [text(build_tree(token("a"), Marginals.from_rows(rows), budget).tree) for budget in (1, 2, 3, 4, 6)]
    assert drawings == ["a(b)", "a(b(d))", "a(b(d) c)", "a(b(d e) c)", "a(b(d e) c(d e))"]


@pytest.mark.parametrize("budget", [0, 16])
@pytest.mark.parametrize("marginals", [Marginals.empty(), Marginals.from_rows([[], []]), marginals_of([[-math.inf] * 2] * 2)])
def test_lone_root(marginals: Marginals, budget: int) -> None:
    """Without a guess the tree is a lone root, and no better tree of its size exists."""
    built = build_tree(ROOT, marginals, budget)
    assert (built.tree.token_ids, built.scores, built.ranks, built.exact) == ((ROOT,), (0.0,), (0,), True)


@given(dyadic_rows(st.just(4)), st.integers(0, 40))
def test_order_of_the_row_does_not_matter(rows: list[list[float]], budget: int) -> None:
    """Rows in any order build the same tree: ranks are by log-prob, equals by the lower token id."""
    marginals = marginals_of(rows)
    order = np.random.default_rng(budget).permutation(4)
    shuffled = Marginals(marginals.token_ids[:, order], marginals.log_probs[:, order]) if rows else marginals
    assert build_tree(ROOT, shuffled, budget) == build_tree(ROOT, marginals, budget)


def test_log_probs_above_zero_count_as_zero() -> None:
    """Rounding above 0 makes no child better than its parent."""
    built = build_tree(ROOT, marginals_of([[1e-4, -1.0], [1e-4, -1.0]]), 6)
    assert max(built.scores) == 0.0
    assert list(built.scores) == sorted(built.scores, reverse=True)


def test_refusals() -> None:
    """What cannot be built is refused with its value."""
    marginals = marginals_of([[-1.0, -2.0]])
    with pytest.raises(ValueError, match="budget is -1"):
        build_tree(ROOT, marginals, -1)
    with pytest.raises(ValueError, match="max_depth is -1"):
        build_tree(ROOT, marginals, 1, max_depth=-1)
    with pytest.raises(ValueError, match="start at 0"):
        build_tree(-5, marginals, 1)
    with pytest.raises(ValueError, match="shape"):
        build_tree(ROOT, marginals, 1, branch_scores=np.zeros((2, 2)))
    for wrong in (math.nan, math.inf):
        with pytest.raises(ValueError, match="NaN"):
            build_tree(ROOT, marginals, 1, branch_scores=np.array([[0.0, wrong]]))


branches = st.lists(st.lists(st.floats(-5, 40), min_size=4, max_size=4), min_size=3, max_size=3)


def normalised(branch_scores: NDArray[np.float64]) -> NDArray[np.float64]:
    log_probs: NDArray[np.float64] = branch_scores - np.log(np.exp(branch_scores).sum(1, keepdims=True))
    return log_probs


@given(branches, st.integers(0, 84))
def test_branch_scores(rows: list[list[float]], budget: int) -> None:
    """Branch scores decide which prefixes are in the tree, even where they are positive; the scores shown stay log-probs."""
    branch_scores = np.array(rows)
    marginals = marginals_of([[-0.5, -1.0, -1.5, -2.0]] * 3)
    built = build_tree(ROOT, marginals, budget, branch_scores=branch_scores)
    ranked = np.sort(normalised(branch_scores))[:, ::-1].tolist()
    grown_by = [sum(ranked[row][rank] for row, rank in enumerate(ranks)) for _, ranks in prefixes_of(built)]
    assert grown_by == pytest.approx([score for score, _ in best_prefixes(ranked, budget, 3)], abs=1e-9)
    log_probs = dict(zip(marginals.token_ids.ravel().tolist(), marginals.log_probs.ravel().tolist(), strict=True))
    for path, score in zip(token_paths(built), built.scores, strict=True):
        assert score == sum(log_probs[token_id] for token_id in path[1:])
    assert built.cut(budget // 2) == build_tree(ROOT, marginals, budget // 2, branch_scores=branch_scores)


def test_branch_scores_do_not_bring_back_the_impossible() -> None:
    """A token of log-prob -inf stays out whatever its branch score, a row of them ends the tree."""
    marginals = marginals_of([[-1.0, -math.inf], [-math.inf, -math.inf]])
    built = build_tree(ROOT, marginals, 6, branch_scores=np.full((2, 2), 9.0))
    assert token_paths(built) == [(ROOT,), (ROOT, 0)]


def test_perturb() -> None:
    """Branch scores are the weighted log-prob plus the weighted noise of the position that the row speaks of."""
    marginals = marginals_of([[-0.5, -1.0], [-0.25, -math.inf]])
    scores = perturb(marginals, 7, 100, BranchWeights(0.5, 2.0))
    noise = np.stack([noise_row(7, 101, 32)[[0, 1]], noise_row(7, 102, 32)[[10, 11]]])
    np.testing.assert_array_equal(scores, 0.5 * marginals.log_probs.astype(np.float64) + 2.0 * noise)
    assert perturb(Marginals.empty(), 7, 100).shape == (0, 0)


@pytest.mark.parametrize("weights", [(0.0, 1.0), (math.nan, 1.0), (math.inf, 1.0), (1.0, -1.0), (1.0, math.nan)])
def test_weights_that_are_refused(weights: tuple[float, float]) -> None:
    """Weights that would turn the ranking around or make NaN are refused."""
    with pytest.raises(ValueError, match="weight is"):
        BranchWeights(*weights)


def test_weights_at_a_temperature() -> None:
    """In proportion to it up to 1; greedy decoding has no noise to weigh."""
    weights = BranchWeights(0.8, 0.4)
    assert weights.at(0.5) == BranchWeights(0.4, 0.2)
    assert weights.at(1.0) == weights.at(2.0) == weights
    with pytest.raises(ValueError, match="weight is"):
        weights.at(0.0)


ALPHABET = range(4)
Row = list[tuple[int, float]]


@st.composite
def conditional_marginals(draw: st.DrawFn) -> Marginals:
    """Rows of few tokens for up to three depths and for up to six paths, reachable or not: ties, and sums without rounding."""
    width = draw(st.integers(1, 3))
    eighths = st.one_of(st.integers(-6, 0).map(lambda eighth: eighth / 8), st.just(-math.inf))
    tokens = st.lists(st.sampled_from(ALPHABET), min_size=width, max_size=width, unique=True)
    row = st.tuples(tokens, st.lists(eighths, min_size=width, max_size=width)).map(lambda pair: list(zip(*pair, strict=True)))
    paths = st.lists(st.lists(st.sampled_from(ALPHABET), min_size=1, max_size=3).map(tuple), max_size=6, unique=True)
    prefixes = tuple(draw(paths))
    num_rows = draw(st.integers(1, 3)) + len(prefixes)
    by_row = Marginals.from_rows(draw(st.lists(row, min_size=num_rows, max_size=num_rows)))
    return Marginals(by_row.token_ids, by_row.log_probs, prefixes)


def children_of(marginals: Marginals, scores: NDArray[np.float64], path: Path) -> Row:
    """What may follow a path of tokens, best first, equals by the lower token id."""
    if path in marginals.prefixes:
        row = marginals.num_depths + marginals.prefixes.index(path)
    elif len(path) < marginals.num_depths:
        row = len(path)
    else:
        return []
    pairs = zip(marginals.token_ids[row].tolist(), scores[row].tolist(), strict=True)
    return sorted(pairs, key=lambda pair: (-pair[1], pair[0]))


def every_prefix(
    marginals: Marginals, scores: NDArray[np.float64], max_depth: int, path: Path = (), ranks: Path = (), score: float = 0.0
) -> list[tuple[float, Path, Path]]:
    """Every possible prefix as score, ranks and tokens, by walking down all children of all of them."""
    found = []
    if len(path) < max_depth:
        for rank, (token_id, step) in enumerate(children_of(marginals, scores, path)):
            if step > -math.inf:
                below = (*path, token_id), (*ranks, rank), score + step
                found += [(below[2], below[1], below[0]), *every_prefix(marginals, scores, max_depth, *below)]
    return found


@given(conditional_marginals(), st.integers(0, 60), st.integers(0, 4))
def test_best_prefixes_of_conditional_marginals(marginals: Marginals, budget: int, max_depth: int) -> None:
    """Where a path has a row of its own its children come from there, else from its depth's: the best prefixes, in order."""
    built = build_tree(ROOT, marginals, budget, max_depth=max_depth)
    every = every_prefix(marginals, marginals.log_probs.astype(np.float64), max_depth)
    expected = sorted(every, key=lambda prefix: (-prefix[0], prefix[1]))[:budget]
    assert prefixes_of(built) == [(score, ranks) for score, ranks, _ in expected]
    assert [path[1:] for path in token_paths(built)[1:]] == [path for _, _, path in expected]


@given(conditional_marginals(), st.integers(0, 60), st.integers(0, 60))
def test_conditional_trees_are_nested_and_certified(marginals: Marginals, budget: int, smaller: int) -> None:
    """Cutting is building with less; a certified tree stays the best when every row, conditional ones too, gets wider."""
    small, large = sorted((budget, smaller))
    built = build_tree(ROOT, marginals, large)
    assert built.cut(small) == build_tree(ROOT, marginals, small)
    order = np.lexsort((marginals.token_ids, -marginals.log_probs))
    narrow = Marginals(
        *(np.take_along_axis(values, order, 1)[:, :2] for values in (marginals.token_ids, marginals.log_probs)),
        marginals.prefixes,
    )
    cheap = build_tree(ROOT, narrow, large)
    if cheap.exact:
        whole = build_tree(ROOT, marginals, cheap.tree.num_draft_tokens)
        assert (cheap.tree, cheap.scores) == (whole.tree, whole.scores)


@given(conditional_marginals(), st.integers(0, 2**32 - 1), st.integers(0, 40))
def test_branch_scores_of_conditional_marginals(marginals: Marginals, seed: int, budget: int) -> None:
    """Perturbed scores rank each path's own children: normalised in its row, with the noise of its children's position."""
    branch_scores = perturb(marginals, seed, 100, BranchWeights(0.5, 2.0))
    for row, depth in enumerate([*range(1, marginals.num_depths + 1), *(len(path) + 1 for path in marginals.prefixes)]):
        noise = noise_row(seed, 100 + depth, 8)[marginals.token_ids[row]]
        np.testing.assert_array_equal(branch_scores[row], 0.5 * marginals.log_probs[row].astype(np.float64) + 2.0 * noise)
    possible = np.where(marginals.log_probs > -math.inf, branch_scores, -math.inf)
    masses = np.exp(possible).sum(1, keepdims=True)
    totals = np.log(masses, where=masses > 0, out=np.zeros_like(masses))
    built = build_tree(ROOT, marginals, budget, branch_scores=branch_scores)
    best = sorted((score for score, _, _ in every_prefix(marginals, possible - totals, 4)), reverse=True)
    grown_by = {path: score for score, _, path in every_prefix(marginals, possible - totals, 4)}
    assert [grown_by[path[1:]] for path in token_paths(built)[1:]] == pytest.approx(best[:budget], abs=1e-9)


def test_conditional_drawn() -> None:
    """A tree by hand: below b comes e, below c comes d; depth 2 has no row of its own, so nothing follows d at depth 1."""
    rows = [[(token("b"), -0.5), (token("c"), -1.0), (token("d"), -1.5)]]
    rows += [
        [(token("e"), -0.25), (token("f"), -9.0), (token("g"), -9.0)],
        [(token("d"), -0.25), (token("f"), -9.0), (0, -9.0)],
    ]
    flat = Marginals.from_rows(rows)
    marginals = Marginals(flat.token_ids, flat.log_probs, ((token("b"),), (token("c"),)))
    assert (marginals.num_depths, marginals.row_depths.tolist()) == (1, [1, 2, 2])
    assert text(build_tree(token("a"), marginals, 5).tree) == "a(b(e) c(d) d)"
    assert text(build_tree(token("a"), marginals, 5, max_depth=1).tree) == "a(b c d)"
    deep = Marginals(flat.token_ids, flat.log_probs, ((token("c"),),))
    assert text(build_tree(token("a"), deep, 6).tree) == "a(b(e) c(d) d(e))"


@pytest.mark.parametrize(
    ("prefixes", "complaint"),
    [
        (((1,), (2,)), "leave none for the root's children"),
        (((),), "a prefix has at least one token"),
        (((1, -1),), "start at 0"),
    ],
)
def test_prefixes_that_make_no_sense_are_refused(prefixes: tuple[Path, ...], complaint: str) -> None:
    """Each with its own words."""
    two = marginals_of([[-1.0], [-1.0]])
    with pytest.raises(ValueError, match=complaint):
        Marginals(two.token_ids, two.log_probs, prefixes)
    three = marginals_of([[-1.0]] * 3)
    with pytest.raises(ValueError, match="two rows for one prefix"):
        Marginals(three.token_ids, three.log_probs, ((1,), (1,)))


def test_hybrid_trees_are_not_built_from_conditional_marginals() -> None:
    """What follows a drawn token would decide the shape by the draw."""
    flat = marginals_of([[-1.0], [-1.0]])
    with pytest.raises(ValueError, match="hybrid trees are built from marginals by depth alone"):
        build_hybrid_tree(ROOT, Marginals(flat.token_ids, flat.log_probs, ((0,),)), 4, width=2, seed=0, root_position=3)
