"""This file is what each caller may use: generations at once, and generations that start within a minute."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from treewire.errors import Overloaded
from treewire.runtime.calls import Caller

_MINUTE_SECONDS = 60.0
_RETRY_SECONDS = 1.0


class Quotas:
    """Counts what callers use. Callers without limits are not counted."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._num_open: Counter[str] = Counter()
        self._starts: dict[str, deque[float]] = {}

    @contextmanager
    def use(self, caller: Caller) -> Iterator[None]:
        """One generation of the caller, until the block ends. Overloaded if that is one too many."""
        self._check_open(caller)
        self._check_rate(caller)
        self._num_open[caller.name] += 1
        try:
            yield
        finally:
            self._num_open[caller.name] -= 1
            if not self._num_open[caller.name]:
                del self._num_open[caller.name]

    def _check_open(self, caller: Caller) -> None:
        limit = caller.limits.max_running
        if limit is not None and self._num_open[caller.name] >= limit:
            raise Overloaded(
                f"{self._num_open[caller.name]} generations of {caller.name} run or wait, its limit is {limit}",
                retry_after_seconds=_RETRY_SECONDS,
            )

    def _check_rate(self, caller: Caller) -> None:
        limit = caller.limits.requests_per_minute
        if limit is None:
            self._starts.pop(caller.name, None)
            return
        now = self._clock()
        starts = self._starts.setdefault(caller.name, deque())
        while starts and starts[0] <= now - _MINUTE_SECONDS:
            starts.popleft()
        if len(starts) >= limit:
            raise Overloaded(
                f"{caller.name} started {len(starts)} generations within a minute, its limit is {limit}",
                retry_after_seconds=starts[0] + _MINUTE_SECONDS - now,
            )
        starts.append(now)
