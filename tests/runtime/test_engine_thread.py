"""The bridge between asyncio and engines: batches, order, failure, death, and an event loop that never waits."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from treewire.errors import InternalError, InvalidRequest, Overloaded, Unavailable
from treewire.runtime.engine_thread import EngineDied, EngineThread


class GatedEngine:
    """Echoes its items; each step waits until it is let through, and notes its batch."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        self.entered = threading.Semaphore(0)
        self.gate = threading.Semaphore(0)
        self.log: list[str] = []

    def step(self, items: Sequence[str]) -> Sequence[str | Exception]:
        self.batches.append(list(items))
        self.log.append("step " + " ".join(items))
        self.entered.release()
        assert self.gate.acquire(timeout=20)
        return [item.upper() for item in items]

    async def inside_step(self) -> None:
        await asyncio.to_thread(self.entered.acquire)


def gated(engine: GatedEngine, **limits: Any) -> EngineThread[str, str]:
    return EngineThread(engine.step, **{"max_batch_size": 8, "max_queue_length": 64, **limits}, name="test", cost=len)


def started(step: Callable[[Sequence[str]], Sequence[str | Exception]], **limits: Any) -> EngineThread[str, str]:
    return EngineThread(step, **{"max_batch_size": 8, "max_queue_length": 64, **limits}, name="test")


def echo(items: Sequence[str]) -> Sequence[str | Exception]:
    return list(items)


def fail() -> None:
    raise ZeroDivisionError


async def submit_all(thread: EngineThread[str, str], *items: str) -> list[asyncio.Task[str]]:
    tasks = [asyncio.create_task(thread.submit(item)) for item in items]
    await asyncio.sleep(0)
    return tasks


async def test_what_arrives_during_a_step_is_the_next_batch() -> None:
    """While one item is stepped, three more arrive; they share the next step, in order of arrival."""
    engine = GatedEngine()
    async with gated(engine) as thread:
        first = await submit_all(thread, "a")
        await engine.inside_step()
        rest = await submit_all(thread, "b", "c", "d")
        assert thread.queue_length == 3
        engine.gate.release(2)
        assert await asyncio.gather(*first, *rest) == ["A", "B", "C", "D"]
    assert engine.batches == [["a"], ["b", "c", "d"]]


@pytest.mark.parametrize(
    ("limits", "batches"),
    [
        ({"max_batch_size": 2}, [["aa", "b"], ["cccc", "d"]]),
        ({"max_batch_cost": 3}, [["aa", "b"], ["cccc"], ["d"]]),
        ({"max_batch_cost": 1}, [["aa"], ["b"], ["cccc"], ["d"]]),
    ],
)
async def test_a_batch_is_the_head_of_the_queue_up_to_its_limits(limits: dict[str, int], batches: list[list[str]]) -> None:
    """A batch ends at its size or cost, never skips ahead, and has an item even if that alone exceeds the cost."""
    engine = GatedEngine()
    thread = gated(engine, **limits)
    tasks = await submit_all(thread, "aa", "b", "cccc", "d")
    engine.gate.release(4)
    async with thread:
        await asyncio.gather(*tasks)
    assert engine.batches == batches


async def test_posts_and_submissions_of_one_caller_keep_their_order() -> None:
    """A call posted before an item is submitted has run when the item is stepped, however busy the thread is."""
    engine = GatedEngine()

    def open_session() -> str:
        engine.log.append("open")
        return "opened"

    async with gated(engine) as thread:
        running = await submit_all(thread, "x")
        await engine.inside_step()
        thread.post(lambda: engine.log.append("keep"))
        waiting = await submit_all(thread, "y")
        opened = asyncio.create_task(thread.call(open_session))
        await asyncio.sleep(0)
        engine.gate.release(2)
        await asyncio.gather(*running, *waiting)
        assert await opened == "opened"
    assert engine.log == ["step x", "keep", "open", "step y"]


async def test_a_failing_item_fails_alone() -> None:
    """An Exception among the results reaches its own caller as it is; the others get their results."""

    def step(items: Sequence[str]) -> Sequence[str | Exception]:
        return [KeyError(item) if item == "bad" else item for item in items]

    async with started(step) as thread:
        outcomes = await asyncio.gather(*(thread.submit(item) for item in ("a", "bad", "b")), return_exceptions=True)
    assert outcomes[::2] == ["a", "b"]
    assert isinstance(outcomes[1], KeyError)


@pytest.mark.parametrize(
    ("raised", "expected"), [(RuntimeError("cuda"), InternalError), (InvalidRequest("no"), InvalidRequest)]
)
async def test_a_raising_step_fails_its_batch_and_no_other(raised: Exception, expected: type[Exception]) -> None:
    """Everybody in the batch gets InternalError, or the TreewireError itself; the next batch is served."""

    def step(items: Sequence[str]) -> Sequence[str | Exception]:
        if "bad" in items:
            raise raised
        return list(items)

    async with started(step) as thread:
        failed = await asyncio.gather(thread.submit("bad"), thread.submit("neighbour"), return_exceptions=True)
        assert [type(error) for error in failed] == [expected, expected]
        assert await thread.submit("good") == "good"
        assert not thread.died.is_set()


async def test_a_step_with_too_few_results_fails_its_batch() -> None:
    """Results that cannot be told apart are nobody's."""
    async with started(lambda items: []) as thread:
        with pytest.raises(InternalError, match="0 results for 1 items"):
            await thread.submit("a")


def raising(error: BaseException) -> Callable[[Sequence[str]], Sequence[str | Exception]]:
    def step(items: Sequence[str]) -> Sequence[str | Exception]:
        raise error

    return step


@pytest.mark.parametrize("death", [EngineDied("device lost"), SystemExit(3), KeyboardInterrupt()])
async def test_a_dead_engine_fails_everyone_at_once(death: BaseException) -> None:
    """The batch, the queue and every later caller get Unavailable; `died` is set; posting is still no error."""
    thread = started(raising(death), max_batch_size=1)
    tasks = await submit_all(thread, "a", "b", "c")
    async with thread:
        async with asyncio.timeout(20):
            await thread.died.wait()
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [Unavailable] * 3
        with pytest.raises(Unavailable, match="the test engine died"):
            await thread.submit("late")
        with pytest.raises(Unavailable, match="the test engine died"):
            await thread.call(lambda: None)
        thread.post(lambda: None)


async def test_failures_in_a_row_are_death() -> None:
    """Two failing steps and a good one are survived; three in a row are not."""
    outcomes = iter([OSError(), OSError(), None, OSError(), OSError(), OSError()])

    def step(items: Sequence[str]) -> Sequence[str | Exception]:
        error = next(outcomes)
        if error is not None:
            raise error
        return list(items)

    async with started(step) as thread:
        seen = [type((await asyncio.gather(thread.submit("a"), return_exceptions=True))[0]) for _ in range(6)]
        assert seen == [InternalError, InternalError, str, InternalError, InternalError, Unavailable]
        async with asyncio.timeout(20):
            await thread.died.wait()


async def test_refusals_are_not_death() -> None:
    """A step that knowingly refuses its items, as often as clients like, does not end the engine."""

    def step(items: Sequence[str]) -> Sequence[str | Exception]:
        raise InvalidRequest("no")

    async with started(step) as thread:
        for _ in range(5):
            with pytest.raises(InvalidRequest):
                await thread.submit("a")
        assert await thread.call(lambda: "alive") == "alive"


async def test_a_call_can_die_too() -> None:
    """An engine that dies in a call takes along the batch that was to follow."""
    thread = started(echo)
    opening = asyncio.create_task(thread.call(lambda: raising(EngineDied("lost"))([])))
    tasks = await submit_all(thread, "a")
    async with thread:
        async with asyncio.timeout(20):
            outcomes = await asyncio.gather(opening, *tasks, return_exceptions=True)
            await thread.died.wait()
    assert [type(outcome) for outcome in outcomes] == [Unavailable, Unavailable]


async def test_a_failing_call_is_its_callers() -> None:
    """What a called function raises reaches its caller as it is, what a posted one raises reaches nobody; work goes on."""
    async with started(echo) as thread:
        with pytest.raises(ZeroDivisionError):
            await thread.call(fail)
        thread.post(fail)
        assert await thread.submit("a") == "a"


async def test_a_cancelled_caller_is_dropped() -> None:
    """Cancelled while queued, an item is never stepped; cancelled in a step, its result goes nowhere and neighbours get
    theirs. A release posted after the cancellation runs, and the item does not follow it."""
    engine = GatedEngine()
    async with gated(engine) as thread:
        in_step = await submit_all(thread, "a", "b")
        await engine.inside_step()
        queued = await submit_all(thread, "c", "d")
        in_step[0].cancel()
        queued[0].cancel()
        thread.post(lambda: engine.log.append("release c"))
        engine.gate.release(3)
        assert await in_step[-1] == "B"
        assert await queued[1] == "D"
        outcomes = await asyncio.gather(in_step[0], queued[0], return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [asyncio.CancelledError] * 2
    assert "c" not in " ".join(line.removeprefix("release c") for line in engine.log).split()
    assert "release c" in engine.log


async def test_a_full_queue_is_overload() -> None:
    """Past its length the queue refuses, with the count, the limit and a time to come back; posts are never refused."""
    engine = GatedEngine()
    async with gated(engine, max_queue_length=2) as thread:
        running = await submit_all(thread, "a")
        await engine.inside_step()
        waiting = await submit_all(thread, "b", "c")
        with pytest.raises(Overloaded, match="2 waiting, 2 is its limit") as refused:
            await thread.submit("d")
        assert refused.value.retry_after_seconds is not None
        assert refused.value.retry_after_seconds > 0
        thread.post(lambda: None)
        engine.gate.release(2)
        await asyncio.gather(*running, *waiting)


async def test_close_finishes_the_step_and_fails_the_queue() -> None:
    """The running step's caller gets its result, the queued one Unavailable, and what was posted still runs."""
    engine = GatedEngine()
    thread = gated(engine)
    thread.start()
    running = await submit_all(thread, "a")
    await engine.inside_step()
    waiting = await submit_all(thread, "b")
    thread.post(lambda: engine.log.append("release"))
    closing = asyncio.create_task(thread.close())
    with pytest.raises(Unavailable, match="shutting down"):
        await waiting[0]
    engine.gate.release()
    await closing
    assert await running[0] == "A"
    assert engine.log == ["step a", "release"]
    with pytest.raises(Unavailable):
        await thread.submit("c")


async def test_close_does_not_wait_for_a_hung_step_for_ever() -> None:
    """A step that never ends is left on its daemon thread after the timeout."""
    engine = GatedEngine()
    thread = gated(engine)
    thread.start()
    running = await submit_all(thread, "a")
    await engine.inside_step()
    await thread.close(timeout_seconds=0.05)
    engine.gate.release()
    assert await running[0] == "A"


async def test_the_loop_never_blocks() -> None:
    """While a step runs the event loop goes on turning: it is what lets the step end here."""
    engine = GatedEngine()
    async with gated(engine) as thread:
        tasks = await submit_all(thread, "a")
        await engine.inside_step()
        for _ in range(100):
            await asyncio.sleep(0)
        assert not tasks[0].done()
        engine.gate.release()
        assert await tasks[0] == "A"


async def test_steps_are_observed() -> None:
    """Each step tells its batch size and seconds."""
    seen: list[tuple[int, float]] = []
    thread: EngineThread[str, str] = EngineThread(
        echo,
        max_batch_size=4,
        max_queue_length=9,
        name="test",
        on_step=lambda size, seconds: seen.append((size, seconds)),
    )
    tasks = [asyncio.create_task(thread.submit(item)) for item in "abcde"]
    await asyncio.sleep(0)
    async with thread:
        await asyncio.gather(*tasks)
    assert [size for size, _ in seen] == [4, 1]
    assert all(seconds >= 0 for _, seconds in seen)


async def test_limits_below_one_are_refused() -> None:
    """A thread that could never step is not made."""
    with pytest.raises(ValueError, match="max_batch_size is 0"):
        started(echo, max_batch_size=0)
