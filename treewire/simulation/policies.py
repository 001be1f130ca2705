"""This file is how the simulated gateway chooses trees: none, of a fixed budget, or by the real gateway's own policy."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from treewire.core.budget import PriceTable
from treewire.core.speculation import RoundCosts, Speculation
from treewire.costs import LONGEST_DRAFT, Average, TargetCosts
from treewire.simulation.recording import Rounds
from treewire.v1 import verify_pb2

CHAIN_WIDTH = 1
_POLICY = re.compile(r"(?P<kind>plain|chain|tree|adaptive)(?::(?P<budget>\d+))?")
MAX_BUDGET = 512
DEFAULT_BUDGETS = {"chain": 8, "tree": 8, "adaptive": 64}


class RoundTimes(NamedTuple):
    """What a round of a generation took, in seconds, as its gateway sees it. `draft_seconds` is None without a draft, and for a
    generation's first, which waits for the drafter's prefill.

    Of the target's round trip of `verify_seconds` the tree waited `queue_seconds` for a step of `step_seconds` over
    `batch_size` trees, at a replica with `num_sessions`.
    """

    draft_seconds: float | None
    verify_seconds: float
    queue_seconds: float
    step_seconds: float
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
    """The gateway's own adaptive budget: its learning and its costs, told of steps as the target's service tells of them."""

    def __init__(self, rounds: Rounds, prices: PriceTable, width: int, max_budget: int) -> None:
        self.width = width
        self._rounds = rounds
        self._speculation = Speculation(max_budget)
        self._costs = TargetCosts()
        self._costs.tell(
            verify_pb2.StepPrice(num_nodes=price.num_nodes, batch_size=price.batch_size, seconds=price.seconds)
            for price in prices.prices
        )
        self._draft_seconds = Average()

    def asks(self) -> bool:
        """True if this round's draft is worth its time."""
        return self._speculation.asks(self._costs_now())

    def budget(self, row: int, num_tokens_left: int) -> int:
        """The budget of the best rate, given what the drafter promises."""
        is_whole = num_tokens_left > self._rounds.recording.horizon
        return self._speculation.budget(self._rounds.tree(row, self.width).built, self._costs_now(), is_whole=is_whole)

    def observe(self, row: int, budget: int, num_accepted: int, times: RoundTimes) -> None:
        """Learn from what was accepted, and from what it took."""
        if budget:
            path = self._rounds.tree(row, self.width).path[:num_accepted]
            self._speculation.observe(self._rounds.cut(row, self.width, budget), (0, *path))
        scored = verify_pb2.Scored(step_seconds=times.step_seconds, batch_size=times.batch_size)
        scored.stage_seconds["queue"] = times.queue_seconds
        self._costs.num_sessions = times.num_sessions
        self._costs.observe(scored, times.verify_seconds)
        if times.draft_seconds is not None:
            self._draft_seconds.update(min(times.draft_seconds, LONGEST_DRAFT * self._draft_seconds.value(times.draft_seconds)))

    def _costs_now(self) -> RoundCosts:
        costs = self._costs.of_rounds(self._speculation.max_budget, self._draft_seconds.value(0.0))
        assert costs is not None, "a site has prices"
        return costs
