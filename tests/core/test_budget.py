"""The budget is the best of the whole curve, never worse than plain decoding; calibration learns what drafts are worth."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treewire.core.budget import Calibration, PriceTable, StepPrice, choose_budget, expected_tokens, spine_length
from treewire.core.build import build_tree, perturb
from treewire.core.tree import Marginals

seconds = st.floats(1e-4, 10.0)
probabilities = st.lists(st.floats(0.0, 1.0), max_size=40).map(lambda values: np.array(sorted(values, reverse=True)))
tables = st.dictionaries(st.tuples(st.integers(1, 64), st.integers(1, 16)), seconds, min_size=1, max_size=12).map(
    lambda prices: PriceTable(StepPrice(*step, taken) for step, taken in prices.items())
)


def best_budget(path_probabilities: np.ndarray, prices: PriceTable, rate: float, batch_size: int = 1) -> int:
    """The budget for a round that is only its step."""
    num_nodes = len(path_probabilities)
    return choose_budget(expected_tokens(path_probabilities, num_nodes), prices.curve(num_nodes + 1, batch_size), rate)


def marginals(seed: int, num_depths: int = 6, width: int = 8) -> Marginals:
    """Random rows, best first."""
    rng = np.random.default_rng(seed)
    logits = np.sort(rng.normal(size=(num_depths, width)) * 2.0, axis=1)[:, ::-1]
    log_probs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True)) - 0.1
    token_ids = np.stack([rng.permutation(100)[:width] for _ in range(num_depths)])
    return Marginals(token_ids.astype(np.int32), log_probs.astype(np.float32))


@given(probabilities, tables, st.floats(0.0, 1e4), st.integers(1, 32))
def test_it_is_the_best_of_all_budgets(
    path_probabilities: np.ndarray, prices: PriceTable, rate: float, batch_size: int
) -> None:
    """No budget, plain decoding included, is worth more at the rate; none that is smaller as much."""

    def worth(budget: int) -> float:
        return float(1.0 + path_probabilities[:budget].sum()) - rate * prices.seconds(budget + 1, batch_size)

    chosen = best_budget(path_probabilities, prices, rate, batch_size)
    best = max(range(len(path_probabilities) + 1), key=worth)
    assert worth(chosen) == pytest.approx(worth(best), rel=1e-9, abs=1e-9)


@given(probabilities, st.integers(0, 60))
def test_expected_tokens_are_the_bonus_and_the_nodes(path_probabilities: np.ndarray, max_budget: int) -> None:
    """One token for no nodes, their sum beyond; behind the last node nothing is gained."""
    tokens = expected_tokens(path_probabilities, max_budget)
    assert tokens.tolist() == pytest.approx([1.0 + path_probabilities[:budget].sum() for budget in range(max_budget + 1)])


def test_a_plateau_behind_a_steep_rise_is_found() -> None:
    """A price that is steep first and flat later, as of a mixture of experts, does not stop the search on its slope."""
    prices = PriceTable([StepPrice(1, 1, 1.0), StepPrice(8, 1, 3.0), StepPrice(64, 1, 3.1)])
    path_probabilities = np.full(63, 0.2)
    assert best_budget(path_probabilities[:7], prices, 1.0) == 0
    assert best_budget(path_probabilities, prices, 1.0) == 63


def test_a_larger_batch_makes_nodes_dearer() -> None:
    """Where a full batch pays for each node, fewer are worth it."""
    prices = PriceTable([StepPrice(1, 1, 1.0), StepPrice(33, 1, 1.5), StepPrice(1, 16, 2.0), StepPrice(33, 16, 20.0)])
    path_probabilities = np.power(0.7, np.arange(1, 33), dtype=np.float64)
    budgets = [best_budget(path_probabilities, prices, 0.5, size) for size in (1, 8, 16)]
    assert budgets == sorted(budgets, reverse=True)
    assert budgets[0] > budgets[2]


def test_prices_between_and_beyond_the_measured() -> None:
    """Lines between points and beyond the last; the first price before the first; also over batch sizes."""
    prices = PriceTable([StepPrice(2, 1, 1.0), StepPrice(4, 1, 2.0), StepPrice(2, 3, 3.0), StepPrice(4, 3, 6.0)])
    assert prices.curve(6, 1).tolist() == [1.0, 1.0, 1.5, 2.0, 2.5, 3.0]
    assert (prices.seconds(2, 2), prices.seconds(4, 5)) == (2.0, 10.0)


def test_a_tree_is_never_cheaper_than_a_smaller_one() -> None:
    """A price above that of a larger tree is lowered to it; a flat end is not believed to go on for ever."""
    prices = PriceTable([StepPrice(1, 1, 1.0), StepPrice(2, 1, 9.0), StepPrice(4, 1, 4.0), StepPrice(5, 1, 4.0)])
    assert prices.curve(7, 1).tolist() == [1.0, 4.0, 4.0, 4.0, 4.0, 4.75, 5.5]


@pytest.mark.parametrize("prices", [[], [StepPrice(1, 1, 1.0), StepPrice(1, 1, 2.0)]])
def test_a_table_without_or_with_double_prices_is_refused(prices: list[StepPrice]) -> None:
    """One price for each step, and at least one."""
    with pytest.raises(ValueError, match="price"):
        PriceTable(prices)


@pytest.mark.parametrize("arguments", [(0, 1, 1.0), (1, 0, 1.0), (1, 1, 0.0), (1, 1, math.inf), (1, 1, math.nan)])
def test_a_price_of_nothing_is_refused(arguments: tuple[int, int, float]) -> None:
    """Nodes, trees and seconds are above 0 and finite."""
    with pytest.raises(ValueError, match="above 0"):
        StepPrice(*arguments)


@given(st.integers(0, 1000), st.integers(0, 60), st.booleans())
def test_every_cut_keeps_its_spine(seed: int, budget: int, perturbed: bool) -> None:
    """A tree cut anywhere has the chain of best tokens down to its own depth."""
    rows = marginals(seed)
    branch_scores = perturb(rows, seed, 5) if perturbed else None
    cut = build_tree(0, rows, 60, branch_scores=branch_scores).cut(budget)
    assert spine_length(cut) == max(cut.tree.depths)


def test_calibration_learns_what_a_depth_is_worth() -> None:
    """A drafter that promises 0.8 and holds 0.4 at depth 1, and holds its word at depth 2, is believed so."""
    rng, calibration = random.Random(1), Calibration()
    for _ in range(3000):
        calibration = calibration.update(1, 0.8, rng.random() < 0.4).update(2, 0.3, rng.random() < 0.3)
    assert calibration.factor(1) == pytest.approx(0.5, abs=0.1)
    assert calibration.factor(2) == pytest.approx(1.0, abs=0.25)
    assert calibration.factor(7) == calibration.factor(2)


def test_calibration_follows_a_change_and_starts_neutral() -> None:
    """Nothing known means the drafter's own word; a drafter that turns bad is found out within a few hundred rounds."""
    calibration = Calibration()
    assert calibration.factor(3) == 1.0
    for accepted in [True] * 2000 + [False] * 600:
        calibration = calibration.update(1, 1.0, accepted)
    assert calibration.factor(1) < 0.15


@given(st.integers(0, 500), st.lists(st.tuples(st.integers(1, 6), st.floats(0, 1), st.booleans()), max_size=60))
def test_calibrated_probabilities_are_probabilities_of_paths(seed: int, rounds: list[tuple[int, float, bool]]) -> None:
    """Whatever was learnt, a node is at most as likely as its parent, and a fresh calibration says what the drafter says."""
    built = build_tree(0, marginals(seed), 40)
    np.testing.assert_allclose(Calibration().path_probabilities(built), np.exp(built.scores[1:]), rtol=1e-12)
    calibration = Calibration()
    for depth, predicted, accepted in rounds:
        calibration = calibration.update(depth, predicted, accepted)
    likely = [1.0, *calibration.path_probabilities(built)]
    assert all(0.0 <= likely[node] <= likely[parent] for node, parent in enumerate(built.tree.parents[1:], start=1))


def test_a_round_updates_every_depth_of_its_tree() -> None:
    """Depths down to the last accepted node were right, the others of the tree wrong, deeper ones are not judged."""
    built = build_tree(0, marginals(3), 30)
    accepted = built.tree.path(built.tree.children[built.tree.children[0][0]][0])
    calibration = Calibration().update_from(built, accepted)
    assert {kind.depth for kind in calibration.records} == set(built.tree.depths[1:])
    on_path = {(depth, record.accepted > 0) for (depth, on_spine), record in calibration.records.items() if on_spine}
    assert on_path == {(depth, depth <= 2) for depth in set(built.tree.depths[1:])}


@pytest.mark.parametrize(("depth", "predicted"), [(0, 0.5), (1, -0.1), (1, 1.1), (1, math.nan)])
def test_a_wrong_observation_is_refused(depth: int, predicted: float) -> None:
    """The root is no guess, and a probability is from 0 to 1."""
    with pytest.raises(ValueError, match="depth"):
        Calibration().update(depth, predicted, accepted=True)
