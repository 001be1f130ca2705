"""This file is the one bridge between asyncio and synchronous engines: a thread that turns submissions into batched steps."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Generic, NamedTuple, Self, TypeVar

from treewire.errors import InternalError, Overloaded, TreewireError, Unavailable
from treewire.runtime.logging import get_logger

Item = TypeVar("Item")
Result = TypeVar("Result")
Value = TypeVar("Value")

_SHORTEST_RETRY_SECONDS = 0.1

_log = get_logger()


class EngineDied(Exception):
    """The engine can never step again, for instance because a device or a rank is lost. A `step` may raise it to say so."""


def one(item: object) -> int:
    """The cost of an item where all items cost the same."""
    return 1


def _unobserved(batch_size: int, seconds: float) -> None:
    """The observer of steps that nobody watches."""


@dataclass(frozen=True)
class _Submission(Generic[Item, Result]):
    item: Item
    future: asyncio.Future[Result]


@dataclass(frozen=True)
class _Call:
    """A small call between steps; `future` is None if nobody waits for it."""

    call: Callable[[], Any]
    future: asyncio.Future[Any] | None


class _Work(NamedTuple, Generic[Item, Result]):
    """What the thread does next: the calls, then one step. Both empty: the end."""

    calls: Sequence[_Call]
    batch: Sequence[_Submission[Item, Result]]


class _Outcome(NamedTuple):
    """What becomes of a future: a value or an error."""

    future: asyncio.Future[Any]
    value: Any


def _waiting(calls: Iterable[_Call], submissions: Iterable[_Submission[Any, Any]]) -> list[asyncio.Future[Any]]:
    """The futures that somebody waits for."""
    called = [call.future for call in calls if call.future is not None]
    return called + [submission.future for submission in submissions]


def _is_answer(error: Exception) -> bool:
    """True if the step refused its items knowingly: no sign of a broken engine, however often clients bring it about."""
    return isinstance(error, TreewireError) and not isinstance(error, InternalError)


class EngineThread(Generic[Item, Result]):
    """Runs `step` on its own thread over batches of what callers submit. Made and used on one event loop.

    What arrives during a step is the next batch: the head of the queue up to `max_batch_size` items and `max_batch_cost` of
    `cost`, at least one item. Calls run between steps, ahead of what is still queued: a caller who awaits what it submits
    sees its calls and submissions in order. A submission whose caller was cancelled is dropped, so a `release` posted
    after the cancellation never meets it.

    `step` answers one result an item, in order; an Exception among them fails that item alone. A raising step fails its
    batch with InternalError (a TreewireError passes as it is). `EngineDied`, anything that is not an Exception, or
    `max_consecutive_failures` raising steps in a row (refusals aside) kill the engine: `died` is set, and everything
    queued and everything later fails with Unavailable at once. `on_step(batch_size, seconds)` observes each step, on the
    thread.
    """

    def __init__(
        self,
        step: Callable[[Sequence[Item]], Sequence[Result | Exception]],
        *,
        max_batch_size: int,
        max_batch_cost: int | None = None,
        cost: Callable[[Item], int] = one,
        name: str,
        max_queue_length: int,
        max_consecutive_failures: int = 3,
        on_step: Callable[[int, float], None] = _unobserved,
    ) -> None:
        limits = {
            "max_batch_size": max_batch_size,
            "max_queue_length": max_queue_length,
            "max_consecutive_failures": max_consecutive_failures,
            "max_batch_cost": 1 if max_batch_cost is None else max_batch_cost,
        }
        for limit, value in limits.items():
            if value < 1:
                raise ValueError(f"{limit} is {value}, at least 1 is needed")
        self.name = name
        self.died = asyncio.Event()
        self._step = step
        self._max_batch_size = max_batch_size
        self._max_batch_cost = max_batch_cost
        self._cost = cost
        self._max_queue_length = max_queue_length
        self._max_consecutive_failures = max_consecutive_failures
        self._on_step = on_step
        self._submissions: deque[_Submission[Item, Result]] = deque()
        self._calls: deque[_Call] = deque()
        self._changed = threading.Condition()
        self._refusal: str | None = None  # why nothing more is taken; guarded by _changed
        self._num_consecutive_failures = 0
        self._last_step_seconds = 0.0
        self._ended = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._loop: asyncio.AbstractEventLoop

    def start(self) -> None:
        """Start stepping. Called once, on the event loop that will submit; what was submitted before runs now."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def close(self, timeout_seconds: float = 10.0) -> None:
        """Let the running step finish, fail what is queued with Unavailable, run what was posted, and end the thread.

        A step that outlasts `timeout_seconds` is left behind on its daemon thread, with a warning.
        """
        self._settle(self._refuse_from_now(f"the {self.name} engine is shutting down"))
        if not self._thread.is_alive():
            return
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._ended.wait()
        except TimeoutError:
            _log.warning("engine step outlasts its close", engine=self.name, timeout_seconds=timeout_seconds)

    async def __aenter__(self) -> Self:
        self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def submit(self, item: Item) -> Result:
        """The result of `item`, from whichever step it shares. Overloaded if the queue is full, Unavailable if closed."""
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        with self._changed:
            self._check_room()
            self._submissions.append(_Submission(item, future))
            self._changed.notify()
        return await future

    async def call(self, function: Callable[[], Value]) -> Value:
        """What `function` returns or raises, run between steps. Overloaded if the queue is full, Unavailable if closed."""
        future: asyncio.Future[Value] = asyncio.get_running_loop().create_future()
        with self._changed:
            self._check_room()
            self._calls.append(_Call(function, future))
            self._changed.notify()
        return await future

    def post(self, call: Callable[[], None]) -> None:
        """Run `call` between steps and wait for nothing: for cleanup. Never refused; after the end it has no effect."""
        with self._changed:
            if self._refusal is None:
                self._calls.append(_Call(call, None))
                self._changed.notify()

    @property
    def queue_length(self) -> int:
        """Items and calls that wait for the running step to end."""
        return len(self._submissions) + len(self._calls)

    def _check_room(self) -> None:
        if self._refusal is not None:
            raise Unavailable(self._refusal)
        if self.queue_length >= self._max_queue_length:
            num_steps = 1 + self.queue_length // self._max_batch_size
            raise Overloaded(
                f"the {self.name} engine has {self.queue_length} waiting, {self._max_queue_length} is its limit",
                retry_after_seconds=max(_SHORTEST_RETRY_SECONDS, num_steps * self._last_step_seconds),
            )

    def _run(self) -> None:
        while True:
            work = self._next_work()
            if not work.calls and not work.batch:
                break
            if not (self._run_calls(work) and self._run_step(work.batch)):
                break
        self._on_loop(self._ended.set)

    def _next_work(self) -> _Work[Item, Result]:
        """Waits for work. Calls and batch are taken at one instant: a call posted before an item is never behind it."""
        with self._changed:
            while True:
                calls = tuple(self._calls)
                self._calls.clear()
                batch = self._next_batch()
                if calls or batch or self._refusal is not None:
                    return _Work(calls, batch)
                self._changed.wait()

    def _next_batch(self) -> Sequence[_Submission[Item, Result]]:
        batch: list[_Submission[Item, Result]] = []
        batch_cost = 0
        while self._submissions and len(batch) < self._max_batch_size:
            head = self._submissions[0]
            if not head.future.cancelled():
                batch_cost += self._cost(head.item)
                if batch and self._max_batch_cost is not None and batch_cost > self._max_batch_cost:
                    break
                batch.append(head)
            self._submissions.popleft()
        return batch

    def _run_calls(self, work: _Work[Item, Result]) -> bool:
        """False if a call killed the engine."""
        for position, call in enumerate(work.calls):
            try:
                value = call.call()
            except EngineDied as death:
                self._die(death, _waiting(work.calls[position:], work.batch))
                return False
            except Exception as error:  # noqa: BLE001 - the engine's own, for the caller to judge
                value = error
                if call.future is None:
                    _log.error("posted call failed", engine=self.name, exc_info=error)
            except BaseException as death:  # noqa: BLE001 - whatever it is, the engine is gone
                self._die(death, _waiting(work.calls[position:], work.batch))
                return False
            if call.future is not None:
                self._deliver([_Outcome(call.future, value)])
        return True

    def _run_step(self, batch: Sequence[_Submission[Item, Result]]) -> bool:
        """False if the step killed the engine."""
        if not batch:
            return True
        futures = [submission.future for submission in batch]
        started = time.perf_counter()
        try:
            results = self._step([submission.item for submission in batch])
            if len(results) != len(batch):
                raise InternalError(f"the {self.name} engine answered {len(results)} results for {len(batch)} items")
        except Exception as error:  # noqa: BLE001 - logged, and told to the callers
            return self._outlive(error, futures)
        except BaseException as death:  # noqa: BLE001 - whatever it is, the engine is gone
            self._die(death, futures)
            return False
        self._num_consecutive_failures = 0
        self._last_step_seconds = time.perf_counter() - started
        self._on_step(len(batch), self._last_step_seconds)
        self._deliver([_Outcome(future, result) for future, result in zip(futures, results, strict=True)])
        return True

    def _outlive(self, error: Exception, futures: Sequence[asyncio.Future[Result]]) -> bool:
        """Fails the batch of a raising step. False if the engine is dead after it."""
        self._num_consecutive_failures += 0 if _is_answer(error) else 1
        if isinstance(error, EngineDied) or self._num_consecutive_failures >= self._max_consecutive_failures:
            self._die(error, futures)
            return False
        _log.error("engine step failed", engine=self.name, batch_size=len(futures), exc_info=error)
        failure = error
        if not isinstance(error, TreewireError):
            failure = InternalError(f"the {self.name} engine's step failed with {type(error).__name__}")
        self._deliver([_Outcome(future, failure) for future in futures])
        return True

    def _die(self, cause: BaseException, futures: Sequence[asyncio.Future[Any]]) -> None:
        _log.error("engine died", engine=self.name, exc_info=cause)
        refusal = f"the {self.name} engine died"
        outcomes = [_Outcome(future, Unavailable(refusal)) for future in futures] + self._refuse_from_now(refusal)
        self._deliver(outcomes)
        self._on_loop(self.died.set)

    def _refuse_from_now(self, refusal: str) -> list[_Outcome]:
        """Close the queue. Everyone who waits in it gets Unavailable; posted calls stay, for a thread that still lives."""
        with self._changed:
            if self._refusal is None:
                self._refusal = refusal
            waiting = _waiting(self._calls, self._submissions)
            self._submissions.clear()
            self._calls = deque(call for call in self._calls if call.future is None)
            self._changed.notify()
        return [_Outcome(future, Unavailable(refusal)) for future in waiting]

    def _deliver(self, outcomes: Sequence[_Outcome]) -> None:
        """From the thread: settle these futures on their loop, in one wake-up."""
        self._on_loop(lambda: self._settle(outcomes))

    def _on_loop(self, callback: Callable[[], object]) -> None:
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:  # the loop closed while a step ran: nobody waits any more
            _log.warning("engine outlived its event loop", engine=self.name)

    @staticmethod
    def _settle(outcomes: Sequence[_Outcome]) -> None:
        for future, value in outcomes:
            if future.done():  # its caller was cancelled
                continue
            if isinstance(value, Exception):
                future.set_exception(value)
            else:
                future.set_result(value)
