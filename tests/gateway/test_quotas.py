"""What a caller may use: at once, and within a minute."""

from __future__ import annotations

import pytest

from gateway.quotas import Quotas
from treewire.errors import Overloaded
from treewire.runtime.calls import Caller, CallerLimits


class Clock:
    """Time as the test sets it."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_generations_at_once() -> None:
    """As many as the limit, of this caller alone; each that ends makes room, however it ends."""
    quotas, alice, bob = Quotas(), Caller("alice", CallerLimits(max_running=1)), Caller("bob", CallerLimits(max_running=1))
    with pytest.raises(ZeroDivisionError), quotas.use(alice):
        with pytest.raises(Overloaded, match="1 generations of alice run or wait, its limit is 1"), quotas.use(alice):
            raise AssertionError("let in")
        with quotas.use(bob):
            pass
        raise ZeroDivisionError
    with quotas.use(alice):
        pass


def test_starts_within_a_minute() -> None:
    """The window slides: the next may start when the oldest start is a minute ago, and the refusal says when that is."""
    clock = Clock()
    quotas, caller = Quotas(clock), Caller("bob", CallerLimits(requests_per_minute=2))
    for wait in (0.0, 20.0):
        clock.now += wait
        with quotas.use(caller):
            pass
    clock.now += 10.0
    with pytest.raises(Overloaded, match="started 2 generations within a minute") as caught, quotas.use(caller):
        raise AssertionError("let in")
    assert caught.value.retry_after_seconds == pytest.approx(30.0)
    clock.now += 30.0
    with quotas.use(caller):
        pass
    with pytest.raises(Overloaded), quotas.use(caller):
        raise AssertionError("let in")


def test_callers_without_limits_are_not_counted() -> None:
    """Everybody may use what there is."""
    quotas = Quotas()
    with quotas.use(Caller()), quotas.use(Caller()), quotas.use(Caller("carol")), quotas.use(Caller("carol")):
        pass
