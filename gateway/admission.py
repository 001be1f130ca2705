"""This file is the door: how many generations run at once, how many wait, who comes next, and who is turned away."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from treewire.errors import Overloaded

_NEWEST_WEIGHT = 0.1  # of the last generation's duration in the running mean
_RETRY_SECONDS = 1.0

_Waiter = asyncio.Future[None]


class Admission:
    """Lets `max_running` generations run and `max_queued` wait, at most `max_wait_seconds`.

    Places go round the keys that wait, and within a key to whoever came first: a caller with a thousand requests delays
    another's one by a single turn. A request that cannot begin before its deadline, by how long generations took so far, is
    turned away when it comes.
    """

    def __init__(
        self,
        *,
        max_running: int,
        max_queued: int,
        max_wait_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_running = max_running
        self._max_queued = max_queued
        self._max_wait_seconds = max_wait_seconds
        self._clock = clock
        self._waiting: OrderedDict[str, deque[_Waiter]] = OrderedDict()
        self._num_queued = 0
        self._num_running = 0
        self._mean_seconds: float | None = None

    @property
    def num_running(self) -> int:
        """Generations that run now."""
        return self._num_running

    @property
    def num_queued(self) -> int:
        """Generations that wait now."""
        return self._num_queued

    @asynccontextmanager
    async def place(self, key: str = "", remaining_seconds: float | None = None) -> AsyncIterator[None]:
        """A place for one generation of `key`, held until the context ends; `remaining_seconds` is until its deadline.

        Overloaded if the queue is full or the wait is, or would be, too long.
        """
        await self._enter(key, remaining_seconds)
        started = self._clock()
        try:
            yield
        finally:
            self._observe(self._clock() - started)
            self._leave()

    def expected_wait_seconds(self, key: str) -> float | None:
        """How long a newcomer of `key` would wait; None before the first generation has ended."""
        if self._num_running < self._max_running:
            return 0.0
        if self._mean_seconds is None:
            return None
        turn = len(self._waiting.get(key, ())) + 1
        num_before = sum(min(len(waiters), turn) for other, waiters in self._waiting.items() if other != key) + turn
        return num_before * self._mean_seconds / self._max_running

    async def _enter(self, key: str, remaining_seconds: float | None) -> None:
        if self._num_running < self._max_running:
            self._num_running += 1
            return
        self._check_queue()
        self._check_deadline(key, remaining_seconds)
        longest_seconds = (
            self._max_wait_seconds if remaining_seconds is None else min(self._max_wait_seconds, remaining_seconds)
        )
        waiter = self._join(key)
        try:
            async with asyncio.timeout(longest_seconds):
                await waiter
        except BaseException as error:
            self._withdraw(key, waiter)
            if not isinstance(error, TimeoutError):
                raise
            raise Overloaded(
                f"waited {longest_seconds:g} s for one of {self._max_running} places",
                retry_after_seconds=self._max_wait_seconds,
            ) from error

    def _check_queue(self) -> None:
        if self._num_queued >= self._max_queued:
            raise Overloaded(
                f"{self._num_running} generations run and {self._num_queued} wait, "
                f"this gateway takes {self._max_running} and {self._max_queued}",
                retry_after_seconds=_RETRY_SECONDS,
            )

    def _check_deadline(self, key: str, remaining_seconds: float | None) -> None:
        expected_seconds = self.expected_wait_seconds(key)
        if remaining_seconds is None or expected_seconds is None or expected_seconds <= remaining_seconds:
            return
        raise Overloaded(
            f"about {expected_seconds:.1f} s of waiting are ahead, the deadline is in {remaining_seconds:.1f} s",
            retry_after_seconds=expected_seconds,
        )

    def _join(self, key: str) -> _Waiter:
        waiter: _Waiter = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(key, deque()).append(waiter)
        self._num_queued += 1
        return waiter

    def _withdraw(self, key: str, waiter: _Waiter) -> None:
        """Leave the queue; or, where the place has come at the same moment, hand it on."""
        if waiter.done() and not waiter.cancelled():
            self._leave()
            return
        self._withdraw_from_queue(key, waiter)

    def _withdraw_from_queue(self, key: str, waiter: _Waiter) -> None:
        self._waiting[key].remove(waiter)
        self._num_queued -= 1
        if not self._waiting[key]:
            del self._waiting[key]

    def _leave(self) -> None:
        """Give the place to the first who waits of the next key, or free it. One that has just given up is passed over."""
        waiting = ((key, waiter) for key, waiters in self._waiting.items() for waiter in waiters if not waiter.done())
        following = next(waiting, None)
        if following is None:
            self._num_running -= 1
            return
        key, waiter = following
        waiter.set_result(None)
        self._withdraw_from_queue(key, waiter)
        if key in self._waiting:
            self._waiting.move_to_end(key)  # behind the other keys

    def _observe(self, seconds: float) -> None:
        mean_seconds = seconds if self._mean_seconds is None else self._mean_seconds
        self._mean_seconds = mean_seconds + _NEWEST_WEIGHT * (seconds - mean_seconds)
