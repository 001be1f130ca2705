"""With two sessions the target works on one's tree while the other's draft is made."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from draft_service.engine import Proposal
from draft_service.engines.simulated import DrafterFaults, SimulatedDrafter
from tests.system.local_stack import MODEL, local_stack
from treewire.core.tree import Marginals
from verify_service.engine import Posterior, PrefillChunk, Scoring
from verify_service.engines.simulated import SimulatedTarget

STEP_SECONDS, DRAFT_SECONDS = 0.08, 0.04


class Interval(NamedTuple):
    """A call of an engine."""

    start: float
    end: float

    def shared_with(self, other: Interval) -> float:
        """Seconds that both ran."""
        return max(0.0, min(self.end, other.end) - max(self.start, other.start))


class TimedTarget(SimulatedTarget):
    """A target that notes its steps."""

    steps: list[Interval]

    def step(self, work: Sequence[PrefillChunk | Scoring]) -> Sequence[Posterior]:
        """See SimulatedTarget."""
        started = time.perf_counter()
        posteriors = super().step(work)
        self.steps.append(Interval(started, time.perf_counter()))
        return posteriors


class TimedDrafter(SimulatedDrafter):
    """A drafter that notes its steps."""

    steps: list[Interval]

    def propose(self, proposals: Sequence[Proposal]) -> Sequence[Marginals]:
        """See SimulatedDrafter."""
        started = time.perf_counter()
        marginals = super().propose(proposals)
        self.steps.append(Interval(started, time.perf_counter()))
        return marginals


async def test_target_works_while_a_draft_is_in_flight() -> None:
    """Two sessions that are out of step: nearly all of the drafts' time lies within steps of the target, and a step begins as
    soon as the one before it has ended and a tree is there. The busy time that is counted is that of the steps."""
    target = TimedTarget(MODEL, step_seconds=STEP_SECONDS)
    drafter = TimedDrafter(MODEL, faults=DrafterFaults(step_seconds=DRAFT_SECONDS))
    target.steps, drafter.steps = [], []
    async with local_stack(target, drafter) as stack, stack.client() as client:

        async def generate(delay_seconds: float) -> None:
            await asyncio.sleep(delay_seconds)
            await client.generate("go on", max_tokens=60, ignore_end=True, budget=4)

        await asyncio.gather(generate(0.0), generate(2.5 * STEP_SECONDS))
        assert stack.draft is not None
        busy = stack.verify.metrics.registry.get_sample_value("treewire_engine_busy_seconds_total")
    both = drafter.steps[3:-8]
    overlapped = sum(draft.shared_with(step) for draft in both for step in target.steps)
    assert overlapped > 0.8 * sum(draft.end - draft.start for draft in both)
    assert busy is not None
    assert abs(busy - sum(step.end - step.start for step in target.steps)) < 0.2 * busy
    gaps = sorted(after.start - before.end for before, after in pairwise(target.steps[4:-8]))
    assert gaps[len(gaps) // 2] < DRAFT_SECONDS / 2
