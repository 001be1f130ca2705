"""The adaptive budget is nearly the best fixed one and no slower than plain decoding: arithmetic in virtual time, no clock."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import product

import numpy as np
import pytest

from treewire.core.budget import Overhead, PriceTable, StepPrice
from treewire.core.build import BuiltTree, build_tree
from treewire.core.speculation import RoundCosts, Speculation
from treewire.core.tree import Marginals

MAX_BUDGET = 64
FIXED_BUDGETS = (0, 1, 2, 4, 8, 16, 32, 64)
NUM_ROUNDS = 1000
WIDTH, DEPTHS = 12, 10
NODES, BATCHES = (1, 2, 4, 8, 16, 32, 64, 128), (1, 2, 4, 8, 16)


def dense(nodes: int, batch: int) -> float:
    """A dense target: weights are read once, then every row is computed; flat until the two meet."""
    return max(0.010, 0.00025 * nodes * batch) + 0.00002 * nodes * batch


def cpu(nodes: int, batch: int) -> float:
    """A small model on a processor: every row costs from the first on."""
    return 0.008 + 0.0011 * nodes * batch


def experts(nodes: int, batch: int) -> float:
    """A mixture of experts: rows read ever new experts, steep first, until nearly all are read."""
    return 0.004 + 0.020 * (1.0 - np.exp(-nodes * batch / 24.0)) + 0.00001 * nodes * batch


PRICES = {
    curve.__name__: PriceTable(StepPrice(nodes, batch, curve(nodes, batch)) for nodes, batch in product(NODES, BATCHES))
    for curve in (dense, cpu, experts)
}


@dataclass(frozen=True)
class Drafter:
    """A drafter that finds the target's token with probability `skill` (a fading share of it at each depth), whose promises are
    the truth to the power `sharpness`: above 1 it promises too much. In `quiet` of the rounds it has nothing to say."""

    skill: float
    sharpness: float
    draft_seconds: float
    quiet: float = 0.0


DRAFTERS = {
    "good": Drafter(0.85, 1.0, 0.002),
    "fair": Drafter(0.55, 1.0, 0.002),
    "boastful": Drafter(0.4, 3.0, 0.002),
    "modest": Drafter(0.8, 0.4, 0.002),
    "bad": Drafter(0.03, 3.0, 0.004),
    "dear": Drafter(0.7, 1.0, 0.060),
    "rare": Drafter(0.95, 1.0, 0.0003, quiet=0.8),
}


class Guess:
    """One round: the largest tree, and how many of its first nodes must be verified for each accepted token."""

    def __init__(self, drafter: Drafter, rng: np.random.Generator) -> None:
        if rng.random() < drafter.quiet:
            self.built, self.path = build_tree(0, Marginals.empty(), MAX_BUDGET), (0,)
            return
        rows = np.array([_row(drafter.skill * rng.uniform(0.8, 1.15) * 0.96**depth) for depth in range(DEPTHS)])
        promised = rows**drafter.sharpness
        promised /= np.maximum(promised.sum(axis=1, keepdims=True), 1e-9) / np.minimum(1.0, rows.sum(axis=1, keepdims=True))
        token_ids = np.arange(1, WIDTH + 1, dtype=np.int32) + WIDTH * np.arange(DEPTHS, dtype=np.int32)[:, np.newaxis]
        self.built = build_tree(0, Marginals(token_ids, np.log(promised).astype(np.float32)), MAX_BUDGET)
        wanted = [rng.choice(WIDTH + 1, p=[*row, 1.0 - row.sum()]) for row in rows]
        self.path = _walk(self.built, [int(token_ids[d][r]) if r < WIDTH else -1 for d, r in enumerate(wanted)])

    def tokens(self, budget: int) -> int:
        """Tokens of the round with so many nodes."""
        return sum(node <= budget for node in self.path)


@cache
def guesses_of(name: str) -> list[Guess]:
    """The rounds of a drafter: the same whatever the target's prices, and no small part of the work."""
    rng = np.random.default_rng(7)
    return [Guess(DRAFTERS[name], rng) for _ in range(NUM_ROUNDS)]


def _row(top: float) -> np.ndarray:
    """Chances of a depth's tokens, best first, together below 1."""
    top = min(top, 0.97)
    rest = 0.7 * (1.0 - top) * 0.5 ** np.arange(1, WIDTH)
    return np.sort(np.array([top, *rest]))[::-1]


def _walk(built: BuiltTree, wanted: list[int]) -> tuple[int, ...]:
    path = [0]
    for token_id in wanted:
        follower = [node for node in built.tree.children[path[-1]] if built.tree.token_ids[node] == token_id]
        if not follower:
            break
        path.append(follower[0])
    return tuple(path)


class Figures:
    """Tokens and virtual seconds, and what they come to."""

    def __init__(self) -> None:
        self.tokens, self.seconds = 0, 0.0

    @property
    def rate(self) -> float:
        """Tokens a second, all sessions."""
        return self.tokens / self.seconds


def costs_of(prices: PriceTable, drafter: Drafter, batch: int) -> RoundCosts:
    """What every round is told."""
    return RoundCosts(prices.curve(MAX_BUDGET + 1, batch), batch, Overhead(0.001, drafter.draft_seconds))


def _played(guesses: list[Guess], costs: RoundCosts, batch: int, speculation: Speculation) -> Figures:
    """Sessions that share steps, each with the tree that the adaptive budget gives it; a step costs what trees of the mean size
    do, and a draft holds up only the session that waits for it."""
    figures = Figures()
    for start in range(0, len(guesses) - batch + 1, batch):
        sizes, num_drafts = [], 0
        for guess in guesses[start : start + batch]:
            budget = 0
            if speculation.asks(costs):
                budget = speculation.budget(guess.built, costs)
                speculation.observe(guess.built.cut(budget), [node for node in guess.path if node <= budget])
                num_drafts += 1
            sizes.append(budget)
            figures.tokens += guess.tokens(budget)
        figures.seconds += _seconds(costs, float(np.mean(sizes)), num_drafts / batch)
    return figures


def _seconds(costs: RoundCosts, budget: float, share_drafted: float) -> float:
    seconds = np.interp(budget, np.arange(len(costs.seconds)), costs.seconds)
    return float(seconds) + costs.overhead.draft_seconds * share_drafted


def _fixed(guesses: list[Guess], costs: RoundCosts, batch: int, budget: int) -> Figures:
    figures = Figures()
    figures.tokens = sum(guess.tokens(budget) for guess in guesses)
    figures.seconds = len(guesses) / batch * _seconds(costs, budget, float(budget > 0))
    return figures


UNDERRATED = pytest.mark.xfail(
    strict=True, reason="eight sessions of a drafter that promises too little: 0.90 and 0.94 of the best"
)
CASES = [
    pytest.param(prices, name, marks=[UNDERRATED] if name == "modest" and prices != "dense" else [])
    for prices, name in product(PRICES, DRAFTERS)
]


@pytest.mark.parametrize(("prices", "name"), CASES)
@pytest.mark.timeout(600)
def test_nearly_the_best_fixed_budget_and_never_below_plain(prices: str, name: str) -> None:
    """At every batch size above 0.97 of plain decoding from the first round on, and within 5 % of the best of the fixed budgets
    once half of the rounds have been learnt from."""
    drafter, guesses = DRAFTERS[name], guesses_of(name)
    for batch in BATCHES:
        costs, speculation = costs_of(PRICES[prices], drafter, batch), Speculation(MAX_BUDGET)
        half = NUM_ROUNDS // 2
        learning = _played(guesses[:half], costs, batch, speculation)
        learnt = _played(guesses[half:], costs, batch, speculation)
        plain = _fixed(guesses, costs, batch, 0).rate
        whole = (learning.tokens + learnt.tokens) / (learning.seconds + learnt.seconds)
        assert whole >= 0.97 * plain, (batch, whole, plain)
        rates = {budget: _fixed(guesses[half:], costs, batch, budget).rate for budget in FIXED_BUDGETS}
        assert learnt.rate >= 0.95 * max(rates.values()), (batch, learnt.rate, rates)


def test_a_drafter_that_has_become_better_is_found_out() -> None:
    """After a thousand rounds of nonsense the trials show that drafts have become worth it, and they are used again."""
    rng = np.random.default_rng(3)
    costs = costs_of(PRICES["cpu"], DRAFTERS["bad"], 1)
    speculation = Speculation(MAX_BUDGET)
    _played([Guess(DRAFTERS["bad"], rng) for _ in range(1000)], costs, 1, speculation)
    assert sum(speculation.asks(costs) for _ in range(40)) <= 2
    _played([Guess(DRAFTERS["good"], rng) for _ in range(1200)], costs, 1, speculation)
    assert sum(speculation.asks(costs) for _ in range(20)) == 20


def test_trials_take_one_percent_of_the_time() -> None:
    """A draft that costs ten plain rounds is tried about once in a thousand rounds, once the first trials are over."""
    rng = np.random.default_rng(4)
    drafter = Drafter(0.7, 1.0, 0.091)
    costs = costs_of(PRICES["cpu"], drafter, 1)
    speculation = Speculation(MAX_BUDGET)
    _played([Guess(drafter, rng) for _ in range(600)], costs, 1, speculation)
    assert 1 <= sum(speculation.asks(costs) for _ in range(4000)) <= 5


def test_others_nodes_decide_what_one_more_costs() -> None:
    """At the batch's own mean a tree costs a round's time; a lone large tree pays a steep price; a flat one nobody pays."""
    costs = costs_of(PRICES["experts"], DRAFTERS["good"], 8)
    for mean in (0, 8, 64):
        assert costs.shared_seconds(mean)[mean] == pytest.approx(costs.seconds[mean])
    assert costs.shared_seconds(0)[8] > costs.seconds[8]
    alone = costs_of(PRICES["experts"], DRAFTERS["good"], 1)
    assert (alone.shared_seconds(8) == alone.seconds).all()


def test_a_budget_of_nothing_is_refused() -> None:
    """Trees of an adaptive budget have room for a node."""
    with pytest.raises(ValueError, match="max_budget is 0"):
        Speculation(0)
