"""Nothing is lost: processes die, stop and restart at random, or one after another, under load. `make chaos` runs it longer."""

from __future__ import annotations

import pytest
from rich.console import Console

from tests.chaos.chaos import ROLLING, Plan, run, show


@pytest.mark.timeout(400)
async def test_chaos_loses_duplicates_and_changes_nothing() -> None:
    """Every generation whose gateway lived gives the undisturbed tokens; no session, task or file descriptor is left."""
    plan = Plan(generations=150, concurrency=16, distinct=40, verify=2, draft=1, gateways=2, seed=5, soak_seconds=15)
    report = await run(plan, Console(stderr=True))
    show(report, Console(stderr=True))
    assert report.holds
    assert report.tally.exact + report.tally.gateway_died >= 150
    assert sum(report.tally.faults.values()) >= 3


@pytest.mark.timeout(400)
async def test_rolling_restart_of_every_service_loses_nothing() -> None:
    """SIGTERM and a new start, one process after another, each under load: every generation is exact, whatever it ran on."""
    plan = Plan(generations=60, concurrency=8, distinct=20, verify=2, draft=1, gateways=2, faults=ROLLING)
    report = await run(plan, Console(stderr=True))
    show(report, Console(stderr=True))
    assert report.holds
    assert report.tally.faults == {"drain verify": 2, "drain draft": 1, "drain gateway": 2}
    assert report.tally.gateway_died == 0
