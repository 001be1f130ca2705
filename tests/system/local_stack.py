"""Three real servers on loopback, in one process and on one loop, so that a test can look into the engines."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import draft_service.assembly
import gateway.assembly
import verify_service.assembly
from draft_service.assembly import DraftProcess
from draft_service.engine import DraftEngine
from draft_service.engines.simulated import SimulatedDrafter
from draft_service.settings import DraftSettings
from gateway.assembly import GatewayProcess
from gateway.openai.door import HttpDoor
from gateway.settings import GatewaySettings
from gateway.tokenization import Tokenization
from treewire import AsyncClient
from treewire.core.simulated import SimulatedModel
from treewire.runtime.server import Server
from verify_service.assembly import VerifyProcess
from verify_service.engine import TargetEngine
from verify_service.engines.simulated import SimulatedTarget
from verify_service.price import Measure, no_prices
from verify_service.settings import VerifySettings

LOOPBACK = "127.0.0.1:0"
MODEL = SimulatedModel()


@cache
def simulated_tokenization() -> Tokenization:
    """What every stack of simulated engines speaks, built once."""
    return Tokenization.simulated()


class Running:
    """A service that a test may stop before its stack ends, as a crash would."""

    def __init__(self, server: Server, lifetime: AsyncExitStack) -> None:
        self.server = server
        self.address = str(server.endpoint)
        self._lifetime = lifetime

    async def stop(self) -> None:
        """Stop at once: running RPCs break off."""
        await self._lifetime.aclose()


class RunningGateway(NamedTuple):
    """A gateway, and its HTTP door if it has one."""

    address: str
    process: GatewayProcess
    door: HttpDoor | None


@dataclass
class LocalStack:
    """The addresses and the insides of a running stack. `draft` is None without a drafter."""

    address: str
    target: Any
    drafter: Any
    verify: VerifyProcess
    draft: DraftProcess | None
    gateway: GatewayProcess
    verify_running: Running
    draft_running: Running | None
    http_url: str = ""
    door: HttpDoor | None = None

    def client(self) -> AsyncClient:
        """A client of the gateway."""
        return AsyncClient(self.address)

    @property
    def num_sessions(self) -> tuple[int, int]:
        """Sessions that are open on the target's engine and on the drafter's."""
        return self.target.num_sessions, 0 if self.drafter is None else self.drafter.num_sessions


async def _entered(lifetime: AsyncExitStack, settings: Any, process: Any, service: str, *, thread: bool) -> Server:
    if thread:
        await lifetime.enter_async_context(process.thread)
    server = Server(settings, register=process.register, services=[service], metrics=process.metrics)
    await lifetime.enter_async_context(server)
    await process.warm_up()
    await server.announce()
    return server


@asynccontextmanager
async def draft_server(
    engine: DraftEngine, bind: str = LOOPBACK, **settings: Any
) -> AsyncIterator[tuple[Running, DraftProcess]]:
    """A draft service over `engine`."""
    async with AsyncExitStack() as lifetime:
        options = DraftSettings(bind=bind, **settings)
        process = draft_service.assembly.assemble(options, lambda: engine)
        server = await _entered(lifetime, options, process, draft_service.assembly.SERVICE, thread=True)
        yield Running(server, lifetime), process


@asynccontextmanager
async def verify_server(
    engine: TargetEngine,
    bind: str = LOOPBACK,
    measure: Measure = no_prices,
    tokenization: Tokenization | None = None,
    **settings: Any,
) -> AsyncIterator[tuple[Running, VerifyProcess]]:
    """A verify service over `engine`, whose steps are priced by `measure`; its tokenizer is that of `tokenization`, else the
    simulated one."""
    tokenizer = (tokenization or simulated_tokenization()).tokenizer
    async with AsyncExitStack() as lifetime:
        options = VerifySettings(bind=bind, **settings)
        process = verify_service.assembly.assemble(options, lambda: engine, measure, tokenizer=lambda: tokenizer)
        lifetime.callback(process.grammars.close)
        server = await _entered(lifetime, options, process, verify_service.assembly.SERVICE, thread=True)
        yield Running(server, lifetime), process


@asynccontextmanager
async def gateway_server(
    verify: str, draft: str, tokenization: Tokenization, bind: str = LOOPBACK, **settings: Any
) -> AsyncIterator[RunningGateway]:
    """A gateway in front of the services at these addresses; an empty `draft` is none. `http_bind` opens the HTTP door."""
    async with AsyncExitStack() as lifetime:
        options = GatewaySettings(bind=bind, verify=verify, draft=draft, model="under-test", **settings)
        process = await lifetime.enter_async_context(gateway.assembly.assemble(options, lambda: tokenization))
        door = await lifetime.enter_async_context(process.http_door()) if options.http_bind else None
        server = await _entered(lifetime, options, process, gateway.assembly.SERVICE, thread=False)
        if door is not None:
            door.announce()
        yield RunningGateway(str(server.endpoint), process, door)


@asynccontextmanager
async def local_stack(
    target: TargetEngine | None = None,
    drafter: DraftEngine | None = None,
    *,
    with_drafter: bool = True,
    tokenization: Tokenization | None = None,
    verify: dict[str, Any] | None = None,
    draft: dict[str, Any] | None = None,
    gateway_bind: str = LOOPBACK,
    **gateway_settings: Any,
) -> AsyncIterator[LocalStack]:
    """A whole stack; simulated engines unless others are given."""
    target = target or SimulatedTarget(MODEL)
    if with_drafter:
        drafter = drafter or SimulatedDrafter(MODEL)
    async with AsyncExitStack() as lifetime:
        verify_running, verify_process = await lifetime.enter_async_context(
            verify_server(target, tokenization=tokenization, **(verify or {}))
        )
        draft_running, draft_process = None, None
        if drafter is not None:
            draft_running, draft_process = await lifetime.enter_async_context(draft_server(drafter, **(draft or {})))
        running = await lifetime.enter_async_context(
            gateway_server(
                verify_running.address,
                draft_running.address if draft_running else "",
                tokenization or simulated_tokenization(),
                gateway_bind,
                **gateway_settings,
            )
        )
        yield LocalStack(
            running.address,
            target,
            drafter,
            verify_process,
            draft_process,
            running.process,
            verify_running,
            draft_running,
            "" if running.door is None else running.door.url,
            running.door,
        )
