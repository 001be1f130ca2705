"""All three services in one process, without a wire: the same tokens, errors and ends as over sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

import colocated.assembly
import draft_service.assembly
import verify_service.assembly
from colocated.__main__ import sections
from colocated.assembly import ADDRESSES, Colocated
from draft_service.engines.simulated import SimulatedDrafter
from draft_service.settings import DraftSettings
from gateway.settings import GatewaySettings
from gateway.tokenization import Tokenization
from tests.doors.eventually import eventually
from tests.system.local_stack import LOOPBACK, MODEL, local_stack
from treewire import AsyncClient, Sampling
from treewire.errors import Overloaded
from treewire.runtime.server import Server
from treewire.stack import Stack, StackOptions
from verify_service.engines.simulated import SimulatedTarget
from verify_service.settings import VerifySettings

SEEDED = Sampling(temperature=0.8, seed=5)


@asynccontextmanager
async def running(**verify: Any) -> AsyncIterator[tuple[Colocated, AsyncClient]]:
    """The one process's parts, and a client of its gateway."""
    upstreams = {"verify": (ADDRESSES[1],), "draft": (ADDRESSES[3],)}
    settings = GatewaySettings(bind=LOOPBACK, model="under-test", max_wait_seconds=0.5, **upstreams)
    verifying = verify_service.assembly.assemble(VerifySettings(**verify), lambda: SimulatedTarget(MODEL))
    drafting = draft_service.assembly.assemble(DraftSettings(), lambda: SimulatedDrafter(MODEL))
    async with colocated.assembly.assemble(settings, Tokenization.simulated, verifying, drafting) as process:
        services = [colocated.assembly.gateway.assembly.SERVICE]
        server = Server(settings, register=process.gateway.register, services=services, metrics=process.gateway.metrics)
        async with server:
            await process.warm_up()
            async with AsyncClient(str(server.endpoint)) as client:
                yield process, client


@pytest.mark.parametrize("sampling", [None, SEEDED])
async def test_same_tokens_as_over_sockets(sampling: Sampling | None) -> None:
    """Greedy and seeded; drafts are used in both."""
    async with running() as (_, client), local_stack() as stack, stack.client() as split:
        one, other = [await each.generate("go on", sampling=sampling, max_tokens=80) for each in (client, split)]
    assert one.token_ids == other.token_ids
    assert one.statistics.accepted_tokens > 0


async def test_many_at_once_and_nothing_is_left() -> None:
    """Sixteen streams at once, one of them left early: all sessions of both engines end."""
    async with running() as (process, client):
        assert process.draft is not None
        async with client.stream("left", max_tokens=500, ignore_end=True) as stream:
            await anext(aiter(stream))
        answers = await asyncio.gather(*(client.generate(f"say {number}", max_tokens=30) for number in range(16)))
        engines = (process.verify.step.engine, process.draft.step.engine)
        await eventually(lambda: all(engine.num_sessions == 0 for engine in engines))
    assert len(answers) == 16


async def test_errors_cross_as_themselves() -> None:
    """A refusal of the verify service reaches the client with its class."""
    async with running(max_sessions=1) as (_, client):
        async with client.stream("first", max_tokens=2000, ignore_end=True) as stream:
            await anext(aiter(stream))
            with pytest.raises(Overloaded, match="this service takes 1"):
                await client.generate("second", max_tokens=5)


async def test_up_co_located_is_one_process() -> None:
    """`treewire up --co-located` starts one process, which answers."""
    async with Stack(StackOptions(target="simulated", drafter="simulated", port=0, co_located=True)) as stack:
        assert len(stack.pids) == 1
        async with AsyncClient(stack.address) as client:
            answer = await client.generate("go on", max_tokens=20)
    assert answer.statistics.accepted_tokens > 0


def test_the_command_line_has_parts() -> None:
    """Flags of gateway, verify and draft service, told apart by two dashes."""
    assert sections(["--bind", "x", "--", "--engine", "simulated", "--"]) == [["--bind", "x"], ["--engine", "simulated"], []]
