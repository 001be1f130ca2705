"""This file is gRPC without its wire: a server and channels within one event loop, which hand messages over as they are.

Handlers, interceptor, statuses, cancellation and the order of messages are those of grpc.aio; sockets and serialization are
left out. A message belongs to its reader once it is written.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Generator, Mapping, Sequence
from typing import Any, NoReturn

import grpc

from treewire.runtime.interceptors import RpcInterceptor

_NUM_UNREAD = 16  # messages that may wait for their reader in each direction

_Handler = Any  # grpc.RpcMethodHandler of any messages
_Metadata = tuple[tuple[str, str], ...]


class _Details:
    """What an interceptor is told of a call."""

    def __init__(self, method: str, metadata: _Metadata) -> None:
        self.method = method
        self.invocation_metadata = metadata


class InProcessServer:
    """Takes services as a gRPC server does, and makes channels to them."""

    def __init__(self, interceptor: RpcInterceptor) -> None:
        self._interceptor = interceptor
        self._handlers: dict[str, _Handler] = {}

    def add_generic_rpc_handlers(self, handlers: Sequence[Any]) -> None:
        """What generated code calls beside `add_registered_method_handlers`, which says the same."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, _Handler]) -> None:
        """Offer the methods of a service."""
        self._handlers.update({f"/{service}/{name}": handler for name, handler in handlers.items()})

    def channel(self) -> grpc.aio.Channel:
        """A new channel; its end ends the calls on it."""
        return _Channel(self)

    async def handle(self, method: str, metadata: _Metadata, request: Any, context: _Context) -> Any:
        """Run a method's handler as a server would: with its interceptor, until it returns, aborts or is cancelled."""

        async def found(details: _Details) -> _Handler:
            return self._handlers[details.method]

        handler: Any = await self._interceptor.intercept_service(found, _Details(method, metadata))  # type: ignore[arg-type]
        behaviours = (handler.unary_unary, handler.unary_stream, handler.stream_unary, handler.stream_stream)
        behaviour = next(each for each in behaviours if each is not None)
        return await behaviour(request, context)


class _Context:
    """The server's side of a call: as much of grpc.aio.ServicerContext as handlers and the interceptor use."""

    def __init__(self, metadata: _Metadata, deadline: float | None) -> None:
        self.responses: asyncio.Queue[Any] = asyncio.Queue(_NUM_UNREAD)
        self.trailing: tuple[tuple[str, Any], ...] = ()
        self.message = ""
        self._metadata = metadata
        self._deadline = deadline
        self._code: grpc.StatusCode | None = None

    def invocation_metadata(self) -> _Metadata:
        return self._metadata

    def set_trailing_metadata(self, metadata: Sequence[tuple[str, Any]]) -> None:
        self.trailing = tuple(metadata)

    def time_remaining(self) -> float | None:
        if self._deadline is None:
            return None
        return max(0.0, self._deadline - asyncio.get_running_loop().time())

    def peer(self) -> str:
        return "in-process"

    def code(self) -> grpc.StatusCode | None:
        return self._code

    async def write(self, response: Any) -> None:
        await self.responses.put(response)

    async def abort(
        self, code: grpc.StatusCode, details: str = "", trailing_metadata: Sequence[tuple[str, Any]] = ()
    ) -> NoReturn:
        self._code, self.message = code, details
        if trailing_metadata:
            self.trailing = tuple(trailing_metadata)
        raise grpc.aio.AbortError


_END = object()


class _Call:
    """The client's side of a call, and the task that is its handler."""

    def __init__(
        self, server: InProcessServer, method: str, metadata: _Metadata, request: Any, timeout_seconds: float | None
    ) -> None:
        loop = asyncio.get_running_loop()
        self._context = _Context(metadata, None if timeout_seconds is None else loop.time() + timeout_seconds)
        self._requests: asyncio.Queue[Any] = asyncio.Queue(_NUM_UNREAD)
        self._callbacks: list[Callable[[Any], None]] = []
        self._handling = loop.create_task(
            server.handle(method, metadata, self._received() if request is None else request, self._context)
        )
        self._handling.add_done_callback(self._ended)
        self._timer = None if timeout_seconds is None else loop.call_later(timeout_seconds, self.cancel)

    async def write(self, request: Any) -> None:
        if self._handling.done():
            raise asyncio.InvalidStateError("the call has ended")
        await self._requests.put(request)

    async def done_writing(self) -> None:
        await self._requests.put(_END)

    async def read(self) -> Any:
        """The next response; EOF at an orderly end, AioRpcError at any other."""
        responses = self._context.responses
        if responses.empty() and not self._handling.done():
            reading = asyncio.ensure_future(responses.get())
            try:
                await asyncio.wait((reading, self._handling), return_when=asyncio.FIRST_COMPLETED)
            finally:
                if not reading.done():
                    reading.cancel()
            if reading.done() and not reading.cancelled():
                return reading.result()
        if not responses.empty():
            return responses.get_nowait()
        self._check()
        return grpc.aio.EOF

    def cancel(self) -> bool:
        return self._handling.cancel()

    def done(self) -> bool:
        return self._handling.done()

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        if self._handling.done():
            callback(self)
        else:
            self._callbacks.append(callback)

    def __await__(self) -> Generator[Any, None, Any]:
        """The one response of a unary call."""
        return self._response().__await__()

    async def __aiter__(self) -> AsyncIterator[Any]:
        while (response := await self.read()) is not grpc.aio.EOF:
            yield response

    async def _response(self) -> Any:
        try:
            await asyncio.wait((self._handling,))
        except asyncio.CancelledError:
            self.cancel()
            raise
        self._check()
        return self._handling.result()

    async def _received(self) -> AsyncIterator[Any]:
        while (request := await self._requests.get()) is not _END:
            yield request

    def _check(self) -> None:
        """AioRpcError if the handler ended in any way but its own."""
        if self._handling.cancelled():
            raise self._error(grpc.StatusCode.CANCELLED, "the call was cancelled")
        error = self._handling.exception()
        if isinstance(error, grpc.aio.AbortError):
            code = self._context.code()
            assert code is not None, "an abort has a code"
            raise self._error(code, self._context.message)
        if error is not None:
            raise self._error(grpc.StatusCode.UNKNOWN, str(error))

    def _error(self, code: grpc.StatusCode, message: str) -> grpc.aio.AioRpcError:
        return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*self._context.trailing), message)

    def _ended(self, handling: asyncio.Task[Any]) -> None:
        if not handling.cancelled():
            handling.exception()  # read when the caller asks; never told to the loop
        if self._timer is not None:
            self._timer.cancel()
        for callback in self._callbacks:
            callback(self)


class _Channel(grpc.aio.Channel):
    """A channel to an InProcessServer."""

    def __init__(self, server: InProcessServer) -> None:
        self._server = server
        self._calls: set[_Call] = set()

    def unary_unary(self, method: str, *_: Any, **__: Any) -> Any:
        return self._callable(method, has_request=True)

    def unary_stream(self, method: str, *_: Any, **__: Any) -> Any:
        return self._callable(method, has_request=True)

    def stream_unary(self, method: str, *_: Any, **__: Any) -> Any:
        return self._callable(method, has_request=False)

    def stream_stream(self, method: str, *_: Any, **__: Any) -> Any:
        return self._callable(method, has_request=False)

    def _callable(self, method: str, *, has_request: bool) -> Any:
        def call(request: Any = None, *, timeout: float | None = None, metadata: Any = (), **_: Any) -> _Call:
            given = request if has_request else None
            made = _Call(self._server, method, tuple(metadata or ()), given, timeout)
            self._calls.add(made)
            made.add_done_callback(self._calls.discard)
            return made

        return call

    async def __aenter__(self) -> _Channel:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        for call in tuple(self._calls):
            call.cancel()

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return grpc.ChannelConnectivity.READY

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """The state never changes."""
        await asyncio.Event().wait()

    async def channel_ready(self) -> None:
        """It always is."""
