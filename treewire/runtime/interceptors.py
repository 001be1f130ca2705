"""This file is what surrounds every RPC: request id, the caller, errors as statuses, counting, and an end at shutdown."""

from __future__ import annotations

import asyncio
import inspect
import re
import time
import uuid
from collections.abc import AsyncIterable, Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Any, NoReturn, cast
from urllib.parse import unquote

import grpc
from google.protobuf.message import DecodeError

from treewire.errors import (
    REQUEST_ID_KEY,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    TreewireError,
    Unavailable,
    to_status,
)
from treewire.runtime.calls import TRACEPARENT_KEY, TRACESTATE_KEY, Call, Trace, answering
from treewire.runtime.keys import Keys
from treewire.runtime.logging import get_logger
from treewire.runtime.metrics import Metrics

AUTHORIZATION_KEY = "authorization"
_HEALTH = "/grpc.health.v1.Health/"
_SANE_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_NO_CODES = (None, 0)

_Behaviour = Callable[[Any, Any], Any]
_Context = Any  # grpc.aio's own context: its stubs lack code() and details()
_log = get_logger()


class RpcInterceptor(grpc.aio.ServerInterceptor):
    """Runs every handler, an async generator or a coroutine, of all four kinds of RPC.

    The caller must be one of `keys`; only health checks need not. A TreewireError ends the RPC with its status,
    another Exception with INTERNAL and a traceback in the log. The request id goes back in the trailing metadata.
    """

    def __init__(self, metrics: Metrics, keys: Keys, stalled_reader_seconds: float) -> None:
        self._stalled_reader_seconds = stalled_reader_seconds
        self._metrics = metrics
        self._keys = keys
        self._running: set[asyncio.Task[Any]] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._ending: TreewireError | None = None

    async def wait_until_idle(self) -> None:
        """Return when no RPC runs; those on health, which last as long as their watchers, do not count."""
        await self._idle.wait()

    def end_running(self, error: TreewireError) -> None:
        """End every running RPC, and each that still starts, with `error`."""
        self._ending = error
        for task in self._running:
            task.cancel()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """The handler of the method, surrounded."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or method.startswith(_HEALTH):
            return handler
        return _with_behaviour(handler, self._surround(method, _behaviour_of(handler), bool(handler.response_streaming)))

    def _surround(self, method: str, behaviour: _Behaviour, response_streaming: bool) -> _Behaviour:
        async def surrounded(request: Any, context: _Context) -> Any:
            call = _call(context)
            request_id = call.request_id
            context.set_trailing_metadata(((REQUEST_ID_KEY, request_id),))
            code = grpc.StatusCode.CANCELLED
            self._enter()
            try:
                with answering(call):
                    response = await self._answer(method, behaviour, request, context, call)
                code = _code(context)
                return response
            except grpc.aio.AbortError:
                code = _code(context)
                raise
            finally:
                self._leave()
                self._metrics.rpcs.labels(method, code.name).inc()

        return surrounded

    async def _answer(self, method: str, behaviour: _Behaviour, request: Any, context: _Context, call: Call) -> Any:
        request_id = call.request_id
        try:
            if self._ending is not None:
                raise self._ending
            caller = self._keys.caller(_metadata(context, AUTHORIZATION_KEY))
            with answering(replace(call, caller=caller)):
                return await _run(behaviour, _readable(request), context, self._stalled_reader_seconds)
        except grpc.aio.AbortError:
            raise
        except TreewireError as error:
            await _abort(context, error, request_id)
        except asyncio.CancelledError:
            if self._ending is not None:
                await _abort(context, self._ending, request_id)
            if _is_cancelled():
                raise
            # A future of somebody else was cancelled. Were it to escape, the client would wait for ever.
            _log.exception("stray cancellation", method=method)
            await _abort(context, Unavailable("the RPC lost what it waited for, try again"), request_id)
        except Exception:  # noqa: BLE001 - logged, and told to the caller without its text
            _log.exception("RPC failed", method=method)
            await _abort(context, InternalError(f"internal error, see the server's log for request {request_id}"), request_id)

    def _enter(self) -> None:
        self._running.add(_current_task())
        self._idle.clear()

    def _leave(self) -> None:
        self._running.discard(_current_task())
        if not self._running:
            self._idle.set()


class _Malformed:
    """Stands for a message that cannot be parsed: gRPC's own answer to one is INTERNAL, though the fault is the caller's."""


_MALFORMED = _Malformed()


def _parsing(deserializer: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    """The deserializer, which gives _MALFORMED instead of failing."""
    if deserializer is None:
        return None

    def parse(data: bytes) -> Any:
        try:
            return deserializer(data)
        except DecodeError:
            return _MALFORMED

    return parse


def _readable(request: Any) -> Any:
    """The request or the stream of requests, whose malformed messages are InvalidRequest."""
    if request is _MALFORMED:
        raise InvalidRequest("the message is not one of this RPC's: it cannot be parsed")
    return _ReadableStream(request) if isinstance(request, AsyncIterable) else request


class _ReadableStream:
    """A stream of requests."""

    def __init__(self, requests: AsyncIterable[Any]) -> None:
        self._requests = aiter(requests)

    def __aiter__(self) -> _ReadableStream:
        return self

    async def __anext__(self) -> Any:
        return _readable(await anext(self._requests))


async def _run(behaviour: _Behaviour, request: Any, context: _Context, stalled_reader_seconds: float) -> Any:
    """What a coroutine returns; what an async generator yields is written to the caller."""
    answer = behaviour(request, context)
    if inspect.isasyncgen(answer):
        async with aclosing(answer):
            await _write_all(answer, context, stalled_reader_seconds)
        return None
    if isinstance(answer, AsyncIterable):
        return await _write_all(answer, context, stalled_reader_seconds)
    return await answer


async def _write_all(responses: AsyncIterable[Any], context: _Context, stalled_reader_seconds: float) -> None:
    """Write each response as soon as the reader has room: what it has not taken waits nowhere but in its connection."""
    async for response in responses:
        try:
            async with asyncio.timeout(stalled_reader_seconds):
                await context.write(response)
        except TimeoutError as error:
            raise DeadlineExceeded(f"the reader took no message for {stalled_reader_seconds:g} s") from error


async def _abort(context: _Context, error: TreewireError, request_id: str) -> NoReturn:
    error.request_id = request_id
    status = to_status(error)
    await context.abort(status.code, status.message, status.trailing_metadata)
    raise AssertionError("abort returned")


def _current_task() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    assert task is not None
    return task


def _is_cancelled() -> bool:
    """True if the RPC's own task was cancelled, by its client or by the server's stop."""
    return _current_task().cancelling() > 0


def _code(context: _Context) -> grpc.StatusCode:
    """The status that the handler or an abort set; OK if none did."""
    code = context.code()
    if code in _NO_CODES:
        return grpc.StatusCode.OK
    if isinstance(code, grpc.StatusCode):
        return code
    return next(status for status in grpc.StatusCode if status.value[0] == code)


def _metadata(context: _Context, key: str) -> str | None:
    for entry_key, value in context.invocation_metadata() or ():
        if entry_key == key:
            return cast(str, value)
    return None


def _call(context: _Context) -> Call:
    """Who calls, of which request and trace, and until when."""
    remaining_seconds = context.time_remaining()
    return Call(
        sane_request_id(_metadata(context, REQUEST_ID_KEY)),
        trace=Trace.parse(_metadata(context, TRACEPARENT_KEY), _metadata(context, TRACESTATE_KEY)),
        peer=_host(context.peer()),
        deadline=None if remaining_seconds is None else time.monotonic() + remaining_seconds,
    )


def _host(peer: str) -> str:
    """The host in "ipv4:1.2.3.4:5" or "ipv6:%5B::1%5D:5", as gRPC writes peers; "unix:/path" as it is."""
    if not peer.startswith("ip"):
        return peer
    return unquote(peer).partition(":")[2].rpartition(":")[0].strip("[]")


def sane_request_id(given: str | None) -> str:
    """The caller's, if it is sane; else a new one."""
    return given if given is not None and _SANE_REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


def _behaviour_of(handler: grpc.RpcMethodHandler[Any, Any]) -> _Behaviour:
    behaviours = (handler.unary_unary, handler.unary_stream, handler.stream_unary, handler.stream_stream)
    return cast(_Behaviour, next(behaviour for behaviour in behaviours if behaviour is not None))


def _with_behaviour(handler: grpc.RpcMethodHandler[Any, Any], behaviour: _Behaviour) -> grpc.RpcMethodHandler[Any, Any]:
    make = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }[bool(handler.request_streaming), bool(handler.response_streaming)]
    return make(behaviour, _parsing(handler.request_deserializer), handler.response_serializer)
