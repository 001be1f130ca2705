"""Several targets and drafters behind one gateway, on loopback in one process, each of which a test may lose."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from draft_service.engine import DraftEngine
from draft_service.engines.simulated import SimulatedDrafter
from gateway.assembly import GatewayProcess
from gateway.tokenization import Tokenization
from tests.system.local_stack import MODEL, Running, draft_server, gateway_server, verify_server
from treewire import AsyncClient, Sampling
from treewire.types import Generation
from verify_service.assembly import VerifyProcess
from verify_service.engine import TargetEngine
from verify_service.engines.simulated import SimulatedTarget

SEEDED = Sampling(temperature=1.0, seed=11)


@dataclass
class Replicated:
    """The parts of a stack with several replicas, in the order in which their engines were given."""

    address: str
    gateway: GatewayProcess
    targets: Sequence[TargetEngine]
    verify: list[VerifyProcess] = field(default_factory=list)
    verify_running: list[Running] = field(default_factory=list)
    drafters: Sequence[DraftEngine] = ()

    def client(self) -> AsyncClient:
        """A client of the gateway."""
        return AsyncClient(self.address)

    @property
    def loads(self) -> list[int]:
        """Sessions that are open on each target."""
        return [target.num_sessions for target in self.targets]  # type: ignore[attr-defined]

    @property
    def busy(self) -> int:
        """The number of the only target that has a session."""
        (number,) = (number for number, load in enumerate(self.loads) if load)
        return number

    def failovers(self, reason: str) -> float:
        """Times that a generation left its replica for this reason."""
        return self.gateway.metrics.registry.get_sample_value("treewire_failovers_total", {"reason": reason}) or 0.0


@asynccontextmanager
async def replicated(
    targets: Sequence[TargetEngine],
    num_drafters: int = 1,
    verify: dict[str, Any] | None = None,
    drafters: Sequence[DraftEngine] | None = None,
    **gateway: Any,
) -> AsyncIterator[Replicated]:
    """A gateway in front of these targets and of these or simulated drafters; returns when it has found all of them."""
    async with AsyncExitStack() as lifetime:
        verify_running, processes = [], []
        for target in targets:
            running, process = await lifetime.enter_async_context(verify_server(target, **(verify or {})))
            verify_running.append(running)
            processes.append(process)
        drafters = [SimulatedDrafter(MODEL) for _ in range(num_drafters)] if drafters is None else drafters
        draft_running = [(await lifetime.enter_async_context(draft_server(drafter)))[0] for drafter in drafters]
        address, process, _ = await lifetime.enter_async_context(
            gateway_server(
                ",".join(running.address for running in verify_running),
                ",".join(running.address for running in draft_running),
                Tokenization.simulated(),
                **gateway,
            )
        )
        await all_available(process, len(targets))
        yield Replicated(address, process, targets, processes, verify_running, drafters)


async def all_available(process: GatewayProcess, count: int) -> None:
    """Return when the gateway sees `count` targets that serve."""
    async with asyncio.timeout(20):
        while process.verify.num_available != count:
            await asyncio.sleep(0.01)


async def undisturbed(prompt: str, max_tokens: int, sampling: Sampling | None = SEEDED) -> Generation:
    """What one target gives without drafts and without faults."""
    async with replicated([SimulatedTarget(MODEL)], num_drafters=0) as stack, stack.client() as client:
        return await client.generate(prompt, sampling=sampling, max_tokens=max_tokens, ignore_end=True)
