"""Health is quick and honest: it flips when the engine dies, and stays when the engine is only busy."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.system.local_stack import MODEL, local_stack
from tests.system.test_processes import process, ready_address
from treewire import AsyncClient
from treewire.errors import TreewireError
from treewire.runtime.channel import open_channel
from verify_service.engine import Posterior, PrefillChunk, Scoring
from verify_service.engines.simulated import SimulatedTarget

VERIFY = "treewire.v1.VerifyService"


async def test_health_flips_within_two_seconds_of_the_death_of_an_engine() -> None:
    """Whoever watches is told that the service does not serve any more, or loses the process, in time."""
    with process("tests.system.dying_verify", "--bind", "127.0.0.1:0") as verify:
        address = await asyncio.to_thread(ready_address, verify)
        async with open_channel(address) as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=VERIFY))
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
            flags = ("--bind", "127.0.0.1:0", "--verify", address, "--draft", "", "--model", "simulated")
            with process("gateway", *flags, "--failover-seconds", "0.5") as gateway:
                async with AsyncClient(await asyncio.to_thread(ready_address, gateway)) as client:
                    dying = asyncio.create_task(_until_error(client))
                    async with asyncio.timeout(30):
                        error_seconds = asyncio.create_task(_flipped(watch))
                        flipped = await error_seconds
                        died = await dying
    assert flipped - died < 2.0


async def _until_error(client: AsyncClient) -> float:
    """When the last token before the death came."""
    last = time.monotonic()
    try:
        async with client.stream("hello", max_tokens=500, ignore_end=True) as stream:
            async for _ in stream:
                last = time.monotonic()
    except TreewireError:
        return last
    raise AssertionError("the engine did not die")


async def _flipped(watch: grpc.aio.UnaryStreamCall[health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse]) -> float:
    try:
        while (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING:
            pass
    except grpc.aio.AioRpcError:
        pass
    return time.monotonic()


class SpinningTarget(SimulatedTarget):
    """Computes hard in pure Python, as a long prefill would at its worst."""

    def step(self, work: Sequence[PrefillChunk | Scoring]) -> Sequence[Posterior]:
        """Spin first."""
        until = time.monotonic() + 1.5
        while time.monotonic() < until:
            sum(range(1000))
        return super().step(work)


async def test_a_busy_prefill_does_not_make_liveness_fail() -> None:
    """While the engine spins without a pause, health answers SERVING, for the process and for the service, again and again."""
    async with local_stack(SpinningTarget(MODEL), with_drafter=False) as stack, stack.client() as client:
        generating = asyncio.create_task(client.generate("go on", max_tokens=2, ignore_end=True))
        async with open_channel(stack.verify_running.address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            num_answers = 0
            while not generating.done():
                for service in ("", VERIFY):
                    response = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=2.0)
                    assert response.status == health_pb2.HealthCheckResponse.SERVING
                num_answers += 1
                await asyncio.sleep(0.1)
        assert num_answers > 10
        assert len((await generating).token_ids) == 2
