"""The door of the gateway: places, the order of those who wait, and who is turned away."""

from __future__ import annotations

import asyncio

import pytest

from gateway.admission import Admission
from treewire.errors import Overloaded


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


async def settle() -> None:
    """Let every task run until it waits."""
    for _ in range(10):
        await asyncio.sleep(0)


class Visitors:
    """Tasks that enter, note their names in order, and leave when told."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._leaving: dict[str, asyncio.Event] = {}
        self.entered: list[str] = []

    async def come(self, *names: str) -> None:
        """Each name's first letter is its key."""
        for name in names:
            self._leaving[name] = asyncio.Event()
            self._tasks[name] = asyncio.create_task(self._visit(name))
            await settle()

    async def leave(self, name: str) -> None:
        self._leaving[name].set()
        await self._tasks[name]
        await settle()

    async def give_up(self, name: str) -> None:
        self._tasks[name].cancel()
        await asyncio.wait([self._tasks[name]])
        await settle()

    async def _visit(self, name: str) -> None:
        async with self._admission.place(name[0]):
            self.entered.append(name)
            await self._leaving[name].wait()


async def test_places_go_round_the_keys() -> None:
    """A key with many requests waits its turn: one place each, first come first served within a key."""
    visitors = Visitors(Admission(max_running=1, max_queued=10, max_wait_seconds=60))
    await visitors.come("a1", "a2", "a3", "a4", "b1", "c1", "b2")
    for _ in range(7):
        await visitors.leave(visitors.entered[-1])
    assert visitors.entered == ["a1", "a2", "b1", "c1", "a3", "b2", "a4"]


async def test_counts_are_those_who_run_and_wait() -> None:
    """Whoever gives up while waiting leaves nothing behind, and whoever ends makes room."""
    admission = Admission(max_running=2, max_queued=3, max_wait_seconds=60)
    visitors = Visitors(admission)
    await visitors.come("a1", "a2", "a3", "b1", "b2")
    assert (admission.num_running, admission.num_queued) == (2, 3)
    with pytest.raises(Overloaded, match="2 generations run and 3 wait, this gateway takes 2 and 3"):
        async with admission.place("c"):
            raise AssertionError("a full queue let somebody in")
    await visitors.give_up("b1")
    assert (admission.num_running, admission.num_queued) == (2, 2)
    for name in ("a1", "a2", "a3", "b2"):
        await visitors.leave(name)
    assert (admission.num_running, admission.num_queued) == (0, 0)


async def test_a_place_that_comes_as_its_waiter_gives_up_goes_to_the_next() -> None:
    """Granted and cancelled within one turn of the loop: the place is not lost."""
    admission = Admission(max_running=1, max_queued=5, max_wait_seconds=60)
    visitors = Visitors(admission)
    await visitors.come("a1", "b1", "c1")
    visitors._leaving["a1"].set()
    await asyncio.sleep(0)
    await visitors.give_up("b1")
    await settle()
    assert visitors.entered[-1] == "c1"
    await visitors.leave("c1")
    assert admission.num_running == 0


async def test_a_wait_has_an_end() -> None:
    """Overloaded after the longest wait, or at the deadline if that is sooner."""
    admission = Admission(max_running=1, max_queued=5, max_wait_seconds=0.05)
    async with admission.place("a"):
        with pytest.raises(Overloaded, match=r"waited 0.05 s for one of 1 places"):
            async with admission.place("b"):
                raise AssertionError("there was no place")
        with pytest.raises(Overloaded, match=r"waited 0.01 s"):
            async with admission.place("b", remaining_seconds=0.01):
                raise AssertionError("there was no place")
    assert admission.num_queued == 0


async def test_a_request_that_cannot_begin_in_time_is_turned_away_when_it_comes() -> None:
    """With generations of 10 s on 2 places, the third in the queue begins after about 15 s: a deadline in 12 s is hopeless."""
    clock = Clock()
    admission = Admission(max_running=2, max_queued=10, max_wait_seconds=60, clock=clock)
    async with admission.place("a"):
        clock.seconds = 10.0
    visitors = Visitors(admission)
    await visitors.come("a1", "a2", "a3", "a4")
    assert admission.expected_wait_seconds("a") == pytest.approx(15.0)
    assert admission.expected_wait_seconds("b") == pytest.approx(10.0), "another key's first turn comes sooner"
    with pytest.raises(Overloaded, match=r"about 15.0 s of waiting are ahead, the deadline is in 12.0 s") as caught:
        async with admission.place("a", remaining_seconds=12.0):
            raise AssertionError("it began")
    assert caught.value.retry_after_seconds == pytest.approx(15.0)
    assert admission.num_queued == 2


async def test_callers_that_leave_together_leave_no_place_taken() -> None:
    """One that runs and those that wait behind it, all cancelled in one turn of the loop, as the choices of a request are."""
    admission = Admission(max_running=1, max_queued=5, max_wait_seconds=60)

    async def visit() -> None:
        async with admission.place("a"):
            await asyncio.sleep(60)

    visits = [asyncio.create_task(visit()) for _ in range(3)]
    await settle()
    assert (admission.num_running, admission.num_queued) == (1, 2)
    for each in visits:
        each.cancel()
    results = await asyncio.gather(*visits, return_exceptions=True)
    assert all(isinstance(result, asyncio.CancelledError) for result in results)
    assert (admission.num_running, admission.num_queued) == (0, 0)
