"""The playground over HTTP on loopback, in front of a real stack of this process."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import asynccontextmanager

import grpc
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse

from gateway.playground.routes import routes
from treewire.errors import InvalidRequest, Overloaded, TreewireError, from_rpc_error
from treewire.v1 import generate_pb2, generate_pb2_grpc

HTTP_STATUSES = {InvalidRequest: 400, Overloaded: 429}
UNAVAILABLE = 503


class _Server(uvicorn.Server):
    """A server of a test: signals belong to the test runner."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def gateway_app(address: str) -> Starlette:
    """The playground's routes over the gateway at this gRPC address."""

    async def generations(request: generate_pb2.GenerateRequest) -> AsyncGenerator[generate_pb2.GenerateResponse, None]:
        async with grpc.aio.insecure_channel(address) as channel:
            call = generate_pb2_grpc.GenerateServiceStub(channel).Generate(request)
            try:
                async for response in call:
                    yield response
            except grpc.aio.AioRpcError as error:
                raise from_rpc_error(error) from error
            finally:
                call.cancel()

    async def model() -> generate_pb2.GetModelResponse:
        async with grpc.aio.insecure_channel(address) as channel:
            try:
                return await generate_pb2_grpc.GenerateServiceStub(channel).GetModel(generate_pb2.GetModelRequest())
            except grpc.aio.AioRpcError as error:
                raise from_rpc_error(error) from error

    return Starlette(routes=routes(generations, model), exception_handlers={TreewireError: refuse})


async def refuse(request: Request, error: Exception) -> JSONResponse:
    """The answer to a request that failed before its first event."""
    assert isinstance(error, TreewireError)
    body = {"error": {"message": error.message, "code": error.reason}}
    return JSONResponse(body, HTTP_STATUSES.get(type(error), UNAVAILABLE))


@asynccontextmanager
async def serving(app: Starlette) -> AsyncIterator[str]:
    """The app on a free port of loopback; its address as a URL without a slash at the end."""
    config = uvicorn.Config(app, host="127.0.0.1", port=0, log_config=None, lifespan="off", timeout_graceful_shutdown=1)
    server = _Server(config)
    running = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    try:
        host, port = server.servers[0].sockets[0].getsockname()
        yield f"http://{host}:{port}"
    finally:
        server.should_exit = True
        await running
