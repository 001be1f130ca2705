"""A service of bytes with all four kinds of RPC, in both styles of handler; also run as a process by signal tests."""

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, ClassVar

import grpc

from treewire.errors import Incompatible, Overloaded
from treewire.runtime.logging import current_request_id
from treewire.runtime.metrics import Metrics
from treewire.runtime.server import run, serve
from treewire.runtime.settings import ServiceSettings, run_command

NAME = "toy.v1.ToyService"


class ToySettings(ServiceSettings):
    service: ClassVar[str] = "toy"


def toy_settings(**values: Any) -> ToySettings:
    """Settings that listen on any port of loopback, unless told otherwise."""
    return ToySettings(**{"bind": "127.0.0.1:0", **values})


async def until(condition: Callable[[], bool | Awaitable[bool]]) -> None:
    """Return once the condition holds; TimeoutError after 20 s."""
    async with asyncio.timeout(20):
        while True:
            holds = condition()
            if holds if isinstance(holds, bool) else await holds:
                return
            await asyncio.sleep(0.01)


class ToyService:
    """Does what a message orders, then repeats it."""

    async def act(self, order: bytes, context: Any) -> None:
        match order:
            case b"overloaded":
                raise Overloaded("4 sessions, 4 is the limit", metadata={"limit": "4"}, retry_after_seconds=1.5)
            case b"incompatible":
                raise Incompatible("vocabulary_size: 8 here, 9 there")
            case b"crash":
                raise ZeroDivisionError("a secret of the server")
            case b"abort":
                await context.abort(grpc.StatusCode.OUT_OF_RANGE, "own words")
            case b"stray":
                lost = asyncio.get_running_loop().create_future()
                lost.cancel()
                await lost
            case b"silent":
                await asyncio.sleep(25)
            case b"hang":
                await asyncio.Event().wait()

    async def unary(self, request: bytes, context: Any) -> bytes:
        await self.act(request, context)
        return current_request_id().encode() if request == b"who" else request

    async def collect(self, requests: AsyncIterator[bytes], context: Any) -> bytes:
        received = [request async for request in requests]
        await self.act(received[0], context)
        return b" ".join(received)

    async def expand(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        yield b"first"
        await self.act(request, context)
        yield request

    async def chat(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for request in requests:
            await self.act(request, context)
            yield request

    async def chat_by_writing(self, requests: AsyncIterator[bytes], context: Any) -> None:
        async for request in requests:
            await self.act(request, context)
            await context.write(request)

    def register(self, server: grpc.aio.Server) -> None:
        handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
            "Unary": grpc.unary_unary_rpc_method_handler(self.unary),
            "Collect": grpc.stream_unary_rpc_method_handler(self.collect),
            "Expand": grpc.unary_stream_rpc_method_handler(self.expand),
            "Chat": grpc.stream_stream_rpc_method_handler(self.chat),
            "ChatByWriting": grpc.stream_stream_rpc_method_handler(self.chat_by_writing),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(NAME, handlers),))


async def serve_toy(settings: ToySettings) -> int:
    return await serve(settings, register=ToyService().register, services=[NAME], metrics=Metrics("toy"))


def main(argv: list[str]) -> int:
    return run_command(ToySettings, argv, lambda settings: run(settings, lambda: serve_toy(settings)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
