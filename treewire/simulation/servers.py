"""This file is what streams wait for, in virtual time: an agenda of events, lines that serve in turn, and engines."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from typing import Generic, NamedTuple, TypeVar

from treewire.simulation.site import StepSeconds

Item = TypeVar("Item")


class Agenda:
    """Events in the order of their time; those of one time in the order in which they were put down."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()

    def at(self, seconds: float, event: Callable[[], None]) -> None:
        """Have the event happen at that time, which is not before now."""
        heappush(self._events, (seconds, next(self._numbers), event))

    def run(self) -> None:
        """Until nothing is to happen any more."""
        while self._events:
            self.now, _, event = heappop(self._events)
            event()


@dataclass
class Line:
    """Does one thing at a time, first come first served: a gateway's event loop, a direction of a link."""

    busy_seconds: float = 0.0
    _free_at: float = 0.0

    def done_at(self, now: float, seconds: float) -> float:
        """When something that arrives now and takes so long is done."""
        self._free_at = max(now, self._free_at) + seconds
        self.busy_seconds += seconds
        return self._free_at


class Stepped(NamedTuple):
    """What a step tells of itself."""

    seconds: float
    batch_size: int


@dataclass
class Engine(Generic[Item]):
    """An engine thread as `treewire.runtime.engine_thread` has it: what arrives during a step is the next batch, the head of
    the queue up to `max_batch_size` items and `max_batch_tokens` positions, at least one item. The next step begins at the end
    of the one before, ahead of what its answers bring about. `num_sessions` is the count of those who choose among engines.
    """

    agenda: Agenda
    prices: StepSeconds
    max_batch_size: int
    max_batch_tokens: int | None
    on_done: Callable[[Item, Stepped], None]
    busy_seconds: float = 0.0
    num_steps: int = 0
    num_items: int = 0
    num_sessions: int = 0
    _waiting: deque[tuple[Item, int]] = field(default_factory=deque)
    _is_stepping: bool = False

    def submit(self, item: Item, num_tokens: int) -> None:
        """Have an item computed, of so many new positions."""
        self._waiting.append((item, num_tokens))
        if not self._is_stepping:
            self._step()

    def _step(self) -> None:
        batch: list[Item] = []
        batch_tokens = 0
        while self._waiting and len(batch) < self.max_batch_size:
            item, num_tokens = self._waiting[0]
            if batch and self.max_batch_tokens is not None and batch_tokens + num_tokens > self.max_batch_tokens:
                break
            self._waiting.popleft()
            batch.append(item)
            batch_tokens += num_tokens
        self._is_stepping = bool(batch)
        if not batch:
            return
        seconds = self.prices.seconds(batch_tokens, len(batch))
        self.busy_seconds += seconds
        self.num_steps += 1
        self.num_items += len(batch)
        stepped = Stepped(seconds, len(batch))
        self.agenda.at(self.agenda.now + seconds, lambda: self._finish(batch, stepped))

    def _finish(self, batch: list[Item], stepped: Stepped) -> None:
        self._step()
        for item in batch:
            self.on_done(item, stepped)
