"""This file is what a target's steps cost as this gateway sees it: the prices that it tells, and what is around its steps."""

from __future__ import annotations

from collections.abc import Iterable

from treewire.core.budget import Overhead, PriceTable, StepPrice
from treewire.core.speculation import Curve, RoundCosts
from treewire.errors import InvalidRequest
from treewire.v1 import verify_pb2

LONGEST_DRAFT = 4.0  # times the mean: a longer one was held up by something that is not its price
_WEIGHT = 0.1  # of the newest observation
_LONGEST_WAIT_STEPS = 4.0  # a tree that waited longer was held up by prefills, which no budget changes


class Average:
    """An exponentially weighted mean that begins with its first value."""

    def __init__(self, weight: float = _WEIGHT) -> None:
        self._weight = weight
        self._value: float | None = None

    def update(self, value: float) -> None:
        """Take one more value in."""
        self._value = value if self._value is None else self._value + self._weight * (value - self._value)

    def value(self, default: float) -> float:
        """The mean, or the default before the first value."""
        return default if self._value is None else self._value


class TargetCosts:
    """The price of steps on one replica of the target, the batch that they run at, and the time that is lost around them.

    `num_sessions` are those that share its steps.
    """

    def __init__(self) -> None:
        self.num_sessions = 0
        self._prices: PriceTable | None = None
        self._curves: dict[tuple[int, int], Curve] = {}
        self._batch_size = Average()
        self._waiting = Average()
        self._wire_seconds = Average()

    def tell(self, messages: Iterable[verify_pb2.StepPrice]) -> None:
        """Take over the prices that the replica tells; those of before are forgotten, even for none. InvalidRequest if they are
        no prices."""
        try:
            prices = [StepPrice(price.num_nodes, price.batch_size, price.seconds) for price in messages]
            self._prices = PriceTable(prices) if prices else None
        except ValueError as error:
            raise InvalidRequest(f"prices: {error}", metadata={"field": "prices"}) from error
        self._curves.clear()

    def observe(self, scored: verify_pb2.Scored, seconds: float) -> None:
        """A tree was answered after so many seconds."""
        if scored.prices:
            self.tell(scored.prices)
        if scored.step_seconds <= 0.0:
            return
        queued = scored.stage_seconds.get("queue", 0.0)
        self._batch_size.update(max(1, scored.batch_size))
        self._waiting.update(min(queued / scored.step_seconds, _LONGEST_WAIT_STEPS))
        self._wire_seconds.update(max(0.0, seconds - queued - scored.step_seconds))

    def of_rounds(self, max_budget: int, draft_seconds: float) -> RoundCosts | None:
        """What rounds with up to `max_budget` nodes cost now; None if the replica tells no prices."""
        if self._prices is None:
            return None
        batch_size = self._batch_size.value(1.0)
        key = (max_budget, round(batch_size))
        if key not in self._curves:
            self._curves[key] = self._prices.curve(max_budget + 1, key[1])
        curve = self._curves[key]
        overhead = Overhead(self._wire_seconds.value(0.0), self._draft_overhead(draft_seconds, float(curve[0]), batch_size))
        return RoundCosts(curve, batch_size, overhead, self._waiting.value(0.0))

    def _draft_overhead(self, draft_seconds: float, step_seconds: float, batch_size: float) -> float:
        """What a draft adds to a round: nothing while the target is busy with the sessions that are not in this batch."""
        others = (self.num_sessions / batch_size - 1.0) * step_seconds
        wire_seconds = self._wire_seconds.value(0.0)
        return max(wire_seconds + draft_seconds, others) - max(wire_seconds, others)
