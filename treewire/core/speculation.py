"""This file is the adaptive budget: whether a round asks the drafter at all, and how many nodes of its tree are verified."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from treewire.core.budget import Calibration, Claims, Overhead, choose_budget, claims_of, expected_tokens
from treewire.core.build import BuiltTree

_NUM_RECENT = 16  # asked rounds that say what the next one is worth
_FEWEST_RECENT = 2  # before so many were asked, the drafter is asked
_ROUNDS_A_PLAN = 16  # for which one plan holds
_EXPLORED_SHARE = 0.01  # of the rounds' time goes into trials
_FIRST_SAVINGS = 8.0  # rounds of plain decoding that may go into trials at the start
_LARGEST_SAVINGS = 2.0  # trials: what was not spent for long does not pile up
_EXPLORED_NODES = 8

Curve = NDArray[np.float64]


@dataclass(frozen=True)
class RoundCosts:
    """What rounds cost now. `step_seconds[n]` is the target's step over a batch of trees with n nodes beside the root.

    A tree waits `waiting` times a step's duration for the step before its own. `overhead` is everything else.
    """

    step_seconds: Curve
    batch_size: float
    overhead: Overhead
    waiting: float = 0.0

    @cached_property
    def seconds(self) -> Curve:
        """Seconds of rounds with 0, 1, ... nodes; the draft is not in them."""
        curve: Curve = self.overhead.round_seconds + (1.0 + self.waiting) * self.step_seconds
        return curve

    @property
    def plain_seconds(self) -> float:
        """A round of plain decoding."""
        return float(self.seconds[0])

    def shared_seconds(self, budget: float) -> Curve:
        """What a tree of 0, 1, ... nodes costs where the batch's trees have `budget` nodes on average, in seconds of a round.

        Where the price is flat first and steep later, what it costs if all trees are like it: each would count on the others to
        stay small. Where it is steep first and flat later, what this tree makes the whole batch pay: each would count on the
        others to be large.
        """
        if self.batch_size <= 1.0:
            return self.seconds
        budgets = np.arange(len(self.seconds))
        mean = np.interp(budget + (budgets - budget) / self.batch_size, budgets, self.seconds)
        alike = float(np.interp(budget, budgets, self.seconds))
        curve: Curve = np.maximum(self.seconds, alike + self.batch_size * (mean - alike))
        return curve


class _Plan(NamedTuple):
    """What follows from the recent rounds: is the drafter to be asked, how many tokens a second does a round have to give, and
    how many nodes do trees have on average."""

    asks: bool
    tokens_per_second: float
    mean_budget: float = 0.0


class Speculation:
    """What is learnt of one drafter's trees from round to round, by all generations that use them in the same way.

    A round is worth its tokens less its time at the rate that rounds reach. That rate is the best of the recent rounds, each at
    its own best budget, all of them paying for a step that they share. The drafter is asked as long as that beats plain
    decoding.

    One percent of the time goes into rounds that are not believed to pay: without them, a drafter that has become better, or
    was underrated, would never be tried again. What a trial gains after all, in rounds of plain decoding, pays for more.
    """

    def __init__(self, max_budget: int) -> None:
        if max_budget < 1:
            raise ValueError(f"max_budget is {max_budget}, at least 1 is needed")
        self.max_budget = max_budget
        self.calibration = Calibration()
        self._recent: deque[Claims] = deque(maxlen=_NUM_RECENT)
        self._plan = _Plan(asks=True, tokens_per_second=0.0)
        self._num_planned = 0
        self._num_decisions = 0
        self._savings_rounds = _FIRST_SAVINGS

    def asks(self, costs: RoundCosts) -> bool:
        """True if this round's draft is worth its time, or is due as a trial. To be called once a round, before the draft."""
        is_learning = self._num_planned < min(len(self._recent), _NUM_RECENT)
        if is_learning or self._num_decisions % _ROUNDS_A_PLAN == 0:
            self._plan, self._num_planned = self._planned(costs), len(self._recent)
        self._num_decisions += 1
        seconds = costs.shared_seconds(0)
        trial_rounds = (costs.overhead.draft_seconds + float(seconds[self._num_explored] - seconds[0])) / costs.plain_seconds
        self._savings_rounds = min(self._savings_rounds + _EXPLORED_SHARE, max(_FIRST_SAVINGS, _LARGEST_SAVINGS * trial_rounds))
        if self._plan.asks and len(self._recent) >= _FEWEST_RECENT:
            return True
        if not self._plan.asks and self._savings_rounds < trial_rounds:
            return False
        self._savings_rounds -= costs.overhead.draft_seconds / costs.plain_seconds
        return True

    def budget(self, built: BuiltTree, costs: RoundCosts, *, is_whole: bool = True) -> int:
        """How many nodes of the largest tree to verify, root excluded; 0 is plain decoding.

        `is_whole` is False for a tree that the generation's end cut short: what it promises says nothing of other rounds.
        """
        claims = claims_of(built)
        if is_whole:
            self._recent.append(claims)
        rate, seconds = self._plan.tokens_per_second, costs.shared_seconds(self._plan.mean_budget)
        chosen = choose_budget(self._tokens(claims), seconds, rate)
        claimed = choose_budget(expected_tokens(claims.probabilities, self.max_budget), seconds, rate)
        explored = min(max(claimed, self._num_explored), built.tree.num_draft_tokens)
        more_rounds = float(seconds[explored] - seconds[chosen]) / costs.plain_seconds
        if explored <= chosen or more_rounds > self._savings_rounds:
            return chosen
        self._savings_rounds -= more_rounds
        return explored

    def observe(self, built: BuiltTree, accepted_nodes: Sequence[int]) -> None:
        """A tree was verified and these nodes, root first, were accepted."""
        if not built.tree.num_draft_tokens:
            return
        self.calibration = self.calibration.update_from(built, accepted_nodes)
        if not self._plan.asks:
            self._savings_rounds += len(accepted_nodes) - 1

    @property
    def _num_explored(self) -> int:
        return min(_EXPLORED_NODES, self.max_budget)

    def _tokens(self, claims: Claims) -> Curve:
        return expected_tokens(self.calibration.calibrated(claims), self.max_budget)

    def _planned(self, costs: RoundCosts) -> _Plan:
        """The best of the plans for trees of a few mean sizes, since a price that is steep first may have more than one."""
        plain = 1.0 / costs.plain_seconds
        best = _Plan(asks=len(self._recent) < _FEWEST_RECENT, tokens_per_second=plain)
        if best.asks:
            return best
        tokens = np.stack([self._tokens(claims) for claims in self._recent])
        rate = max(self._plan.tokens_per_second, plain)
        for mean_budget in (0, *(2**power for power in range(self.max_budget.bit_length()))):
            budgets = np.argmax(tokens - rate * costs.shared_seconds(mean_budget), axis=1)
            mean = float(budgets.mean())
            seconds = float(np.interp(mean, np.arange(len(costs.seconds)), costs.seconds)) + costs.overhead.draft_seconds
            gained = float(np.take_along_axis(tokens, budgets[:, np.newaxis], 1).mean())
            best = max(best, _Plan(True, gained / seconds, mean), key=lambda plan: plan.tokens_per_second)
        return best
