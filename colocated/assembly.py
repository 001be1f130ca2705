"""This file is how the three services become one process: the same parts, met through channels without a wire."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from grpc_health.v1 import health, health_pb2, health_pb2_grpc

import draft_service.assembly
import gateway.assembly
import verify_service.assembly
from draft_service.assembly import DraftProcess
from gateway.assembly import GatewayProcess
from gateway.settings import GatewaySettings
from gateway.tokenization import Tokenization
from treewire.runtime.in_process import InProcessServer
from treewire.runtime.interceptors import RpcInterceptor
from treewire.runtime.keys import Keys
from verify_service.assembly import VerifyProcess

_NEVER_STALLED_SECONDS = 3600.0  # the reader is the gateway, in this process

ADDRESSES = ("--verify", "verify:1", "--draft", "draft:1")
"""What the gateway calls the services of its own process."""


@dataclass(frozen=True)
class Colocated:
    """The parts of the one process; `draft` is None without a drafter."""

    gateway: GatewayProcess
    verify: VerifyProcess
    draft: DraftProcess | None

    async def warm_up(self) -> None:
        """Load the engines, then meet the target."""
        await self.verify.warm_up()
        if self.draft is not None:
            await self.draft.warm_up()
        await self.gateway.warm_up()


@asynccontextmanager
async def assemble(
    settings: GatewaySettings,
    load_tokenization: Callable[[], Tokenization],
    verify: VerifyProcess,
    draft: DraftProcess | None,
) -> AsyncIterator[Colocated]:
    """The one process, its engine threads running for as long as the context lasts."""
    async with AsyncExitStack() as stack:
        servers = {verify_service.assembly.SERVICE: await _offered(stack, verify, verify_service.assembly.SERVICE)}
        if draft is not None:
            servers[draft_service.assembly.SERVICE] = await _offered(stack, draft, draft_service.assembly.SERVICE)
        process = await stack.enter_async_context(
            gateway.assembly.assemble(settings, load_tokenization, lambda service, location: servers[service].channel())
        )
        yield Colocated(process, verify, draft)


async def _offered(stack: AsyncExitStack, process: VerifyProcess | DraftProcess, service: str) -> InProcessServer:
    await stack.enter_async_context(process.thread)
    server = InProcessServer(RpcInterceptor(process.metrics, Keys(), _NEVER_STALLED_SECONDS))
    process.register(server)  # type: ignore[arg-type]
    servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    await servicer.set(service, health_pb2.HealthCheckResponse.SERVING)
    return server
