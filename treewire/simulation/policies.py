"""This file is how the simulated gateway chooses trees: none, of a fixed budget, or by the real gateway's own policy."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from treewire.core.budget import Overhead, PriceTable
from treewire.core.speculation import RoundCosts, Speculation
from treewire.simulation.recording import Rounds

CHAIN_WIDTH = 1
_NEWEST = 0.1  # what the newest round counts among those before
_LONGEST_WAIT_STEPS = 4.0  # a tree that waited longer was held up by prefills
_SMALL_MOVE = 0.01
_LONGEST_DRAFT = 4.0  # times the mean: a longer one was held up by something that is not its price
_POLICY = re.compile(r"(?P<kind>plain|chain|tree|adaptive)(?::(?P<budget>\d+))?")
MAX_BUDGET = 512
DEFAULT_BUDGETS = {"chain": 8, "tree": 8, "adaptive": 64}


class RoundTimes(NamedTuple):
    """What a round of a generation took, in seconds, as its gateway sees it. `draft_seconds` is None without a draft, and for a
    generation's first, which waits for the drafter's prefill.

    The tree waited `queue_seconds` for a step of `step_seconds` over `batch_size` trees; the rest of the target's round trip are
    `wire_seconds`.
    """

    draft_seconds: float | None
    queue_seconds: float
    step_seconds: float
    wire_seconds: float
    batch_size: int
    num_sessions: int


class Policy(Protocol):
    """How many nodes are verified, round by round; `row` is the recording's."""

    @property
    def width(self) -> int:
        """Tokens of each depth that trees choose from."""

    def asks(self) -> bool:
        """True if the drafter is asked this round."""

    def budget(self, row: int, num_tokens_left: int) -> int:
        """Nodes beside the root, once the drafter has answered, where so many tokens of the generation are still to come."""

    def observe(self, row: int, budget: int, num_accepted: int, times: RoundTimes) -> None:
        """What came of a round."""


@dataclass(frozen=True)
class PolicyName:
    """A policy and its largest budget: "plain", "chain:8", "tree:16", "adaptive:64". ValueError for anything else."""

    mode: str
    max_budget: int

    @classmethod
    def parse(cls, text: str) -> PolicyName:
        """The policy of that name."""
        parts = _POLICY.fullmatch(text)
        if parts is None or (parts["kind"] == "plain" and parts["budget"]):
            raise ValueError(f"{text!r} is no policy; they are plain, chain:BUDGET, tree:BUDGET, adaptive:BUDGET")
        if parts["kind"] == "plain":
            return cls("plain", 0)
        budget = int(parts["budget"] or DEFAULT_BUDGETS[parts["kind"]])
        if not 1 <= budget <= MAX_BUDGET:
            raise ValueError(f"{text!r} has budget {budget}, from 1 to {MAX_BUDGET} is taken")
        return cls(parts["kind"], budget)

    def policy(self, rounds: Rounds, prices: PriceTable) -> Policy:
        """The policy itself, which has learnt nothing yet."""
        width = CHAIN_WIDTH if self.mode == "chain" else rounds.recording.width
        if self.mode == "adaptive":
            return AdaptivePolicy(rounds, prices, width, self.max_budget)
        return FixedPolicy(width, self.max_budget)


@dataclass(frozen=True)
class FixedPolicy:
    """The same budget in every round; 0 is plain decoding."""

    width: int
    max_budget: int

    def asks(self) -> bool:
        """True unless decoding is plain."""
        return self.max_budget > 0

    def budget(self, row: int, num_tokens_left: int) -> int:
        """The budget."""
        return self.max_budget

    def observe(self, row: int, budget: int, num_accepted: int, times: RoundTimes) -> None:
        """Nothing is learnt."""


class AdaptivePolicy:
    """The gateway's adaptive budget: the same learning, told the same costs as a gateway that serves these streams would see."""

    def __init__(self, rounds: Rounds, prices: PriceTable, width: int, max_budget: int) -> None:
        self.width = width
        self._rounds = rounds
        self._prices = prices
        self._speculation = Speculation(max_budget)
        self._curves: dict[int, NDArray[np.float64]] = {}
        self._draft_seconds = _Average()
        self._wire_seconds = _Average()
        self._sessions = _Average()
        self._waiting = _Average()
        self._batch_size = _Average()

        self._costs = self._costs_now()

    def _costs_now(self) -> RoundCosts:
        batch_size = self._batch_size.value(1.0)
        V = self._curve(round(batch_size)); h = self._wire_seconds.value(0.0); D = self._draft_seconds.value(0.0)
        k = max(1.0, self._sessions.value(1.0) / batch_size)
        cyc = np.maximum(h + V, k * V)
        D = float(max(h + D + V[0], k * V[0]) - cyc[0])
        return RoundCosts(cyc, batch_size, Overhead(0.0, D), 0.0)

    def _curve(self, batch_size: int) -> NDArray[np.float64]:
        known = self._curves.get(batch_size)
        if known is None:
            known = self._curves[batch_size] = self._prices.curve(self._speculation.max_budget + 1, batch_size)
        return known

    def asks(self) -> bool:
        """True if this round's draft is worth its time. Costs that have not moved by much are those of before."""
        now = self._costs_now()
        if _moved(self._costs, now):
            self._costs = now
        return self._speculation.asks(self._costs)

    def budget(self, row: int, num_tokens_left: int) -> int:
        """The budget of the best rate, given what the drafter promises."""
        is_whole = num_tokens_left > self._rounds.recording.horizon
        return self._speculation.budget(self._rounds.tree(row, self.width).built, self._costs, is_whole=is_whole)

    def observe(self, row: int, budget: int, num_accepted: int, times: RoundTimes) -> None:
        """Learn from what was accepted, and from what it took."""
        if budget:
            path = self._rounds.tree(row, self.width).path[:num_accepted]
            self._speculation.observe(self._rounds.cut(row, self.width, budget), (0, *path))
        self._batch_size.update(times.batch_size)
        self._waiting.update(min(times.queue_seconds / times.step_seconds, _LONGEST_WAIT_STEPS))
        self._sessions.update(times.num_sessions)
        self._wire_seconds.update(times.wire_seconds)
        if times.draft_seconds is not None:
            self._draft_seconds.update(
                min(times.draft_seconds, _LONGEST_DRAFT * self._draft_seconds.value(times.draft_seconds))
            )


def _moved(before: RoundCosts, now: RoundCosts) -> bool:
    """True if costs differ by more than a hundredth of a round."""
    return True
    step, than = float(now.step_seconds[0]), _SMALL_MOVE * now.plain_seconds
    return (
        abs(before.overhead.round_seconds - now.overhead.round_seconds) > than
        or abs(before.overhead.draft_seconds - now.overhead.draft_seconds) > than
        or abs(before.waiting - now.waiting) * step > than
        or abs(before.batch_size - now.batch_size) > _SMALL_MOVE * now.batch_size
    )


class _Average:
    """An exponentially weighted mean that begins with its first value."""

    def __init__(self) -> None:
        self._value: float | None = None

    def update(self, value: float) -> None:
        """Take one more value in."""
        self._value = value if self._value is None else self._value + _NEWEST * (value - self._value)

    def value(self, default: float) -> float:
        """The mean, or the default before the first value."""
        return default if self._value is None else self._value
