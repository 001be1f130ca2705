"""How long a generation looks for another target, by what went wrong."""

from __future__ import annotations

import pytest

from gateway.failover import FailoverPatience, Interruption
from treewire.errors import DeadlineExceeded, Incompatible, InternalError, InvalidRequest, Overloaded, Unavailable, Unsupported

PATIENCE = FailoverPatience(num_attempts=3, outage_seconds=60, preempted_seconds=60, admission_seconds=0.0)


@pytest.mark.parametrize("error", [Unavailable("x"), InternalError("x"), DeadlineExceeded("x")])
def test_failing_replicas_are_tried_a_bounded_number_of_times(error: Exception) -> None:
    """Two more tries after the first failure, with a patience of three."""
    interruption = Interruption(PATIENCE, PATIENCE.preempted_seconds)
    assert [interruption.is_worth_another_try(error) for _ in range(3)] == [True, True, False]


@pytest.mark.parametrize("error", [InvalidRequest("x"), Unsupported("x"), Incompatible("x")])
def test_what_is_wrong_with_the_request_is_not_tried_again(error: Exception) -> None:
    """Another replica would say the same."""
    assert not Interruption(PATIENCE, PATIENCE.preempted_seconds).is_worth_another_try(error)


def test_a_full_target_costs_time_and_no_tries() -> None:
    """Waiting for room goes on for as long as the patience for it, which a newcomer may have none of."""
    running = Interruption(PATIENCE, PATIENCE.preempted_seconds)
    assert all(running.is_worth_another_try(Overloaded("x")) for _ in range(100))
    newcomer = Interruption(PATIENCE, PATIENCE.admission_seconds)
    assert not newcomer.is_worth_another_try(Overloaded("x"))
