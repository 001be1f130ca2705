"""This file is the HTTP door itself: a server on the gateway's own loop, and what surrounds every request of it."""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace

import uvicorn
from prometheus_client import Counter
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.generations import Generations
from gateway.openai.app import Routes
from gateway.openai.document import DEADLINE_KEY, MAX_DEADLINE_SECONDS, OPERATIONS
from gateway.openai.errors import response_to
from gateway.openai.streams import EVENTS, event_of
from gateway.settings import GatewaySettings
from treewire.errors import REQUEST_ID_KEY, DeadlineExceeded, InternalError, InvalidRequest, TreewireError, Unavailable
from treewire.runtime.calls import TRACEPARENT_KEY, TRACESTATE_KEY, Call, Caller, Trace, answering
from treewire.runtime.endpoint import Endpoint
from treewire.runtime.interceptors import AUTHORIZATION_KEY, sane_request_id
from treewire.runtime.keys import Keys
from treewire.runtime.logging import get_logger
from treewire.runtime.metrics import Metrics
from treewire.runtime.tls import server_context

_BACKLOG = 2048
_LAST_WORDS_SECONDS = 1.0  # for the errors of requests that were ended
_OTHER = "other"
_OPEN = frozenset(each.path for each in OPERATIONS if not each.needs_key)
_KNOWN = frozenset(each.path for each in OPERATIONS)
_log = get_logger()


class Surroundings:
    """Surrounds every request: its id, its caller, its trace, its error, and its place in the counts.

    `is_open` names paths that need no key, beside those of the document that need none.
    """

    def __init__(self, app: ASGIApp, keys: Keys, requests: Counter, is_open: Callable[[str], bool]) -> None:
        self._app = app
        self._keys = keys
        self._requests = requests
        self._is_open = is_open
        self.ending: TreewireError | None = None
        """What requests that were ended are told; None while the door is open."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        call = Call(
            sane_request_id(headers.get(REQUEST_ID_KEY)),
            trace=Trace.parse(headers.get(TRACEPARENT_KEY), headers.get(TRACESTATE_KEY)),
            peer=scope["client"][0] if scope.get("client") else "",
        )
        answer = _Answer(send, call.request_id)
        try:
            with answering(call):
                caller = self._caller(scope["path"], headers)
                await self._answer(scope, receive, answer, replace(call, caller=caller, deadline=_deadline(headers)))
        except TreewireError as error:
            await answer.fail(error, scope, receive)
        finally:
            self._requests.labels(scope["path"] if scope["path"] in _KNOWN else _OTHER, answer.status).inc()

    def _caller(self, path: str, headers: Headers) -> Caller:
        if path in _OPEN or self._is_open(path):
            return Caller()
        return self._keys.caller(headers.get(AUTHORIZATION_KEY))

    async def _answer(self, scope: Scope, receive: Receive, answer: _Answer, call: Call) -> None:
        try:
            with answering(call):
                async with asyncio.timeout(call.remaining_seconds) as deadline:
                    await self._app(scope, receive, answer.send)
        except ClientDisconnect:
            return
        except TimeoutError as error:
            if not deadline.expired():
                raise _fault(scope, call) from error
            await answer.give_up(DeadlineExceeded(f"the request had not ended at its {DEADLINE_KEY}"))
        except asyncio.CancelledError:
            if self.ending is None:
                raise
            await answer.give_up(self.ending)
        except TreewireError:
            raise
        except Exception as error:
            raise _fault(scope, call) from error


def _fault(scope: Scope, call: Call) -> InternalError:
    """What the caller is told of the exception that is being handled; the log has the rest."""
    _log.exception("request failed", path=scope["path"] if scope["path"] in _KNOWN else _OTHER)
    return InternalError(f"internal error, see the server's log for request {call.request_id}")


def _deadline(headers: Headers) -> float | None:
    """When the caller wants an end, on the monotonic clock; None if it does not say. InvalidRequest if it is no time."""
    given = headers.get(DEADLINE_KEY)
    if given is None:
        return None
    try:
        seconds = float(given)
    except ValueError:
        seconds = math.nan
    if not 0.0 < seconds <= MAX_DEADLINE_SECONDS:
        raise InvalidRequest(
            f"{DEADLINE_KEY} is {given[:40]!r}, a number of seconds up to {MAX_DEADLINE_SECONDS:,} is taken",
            metadata={"field": DEADLINE_KEY},
        )
    return time.monotonic() + seconds


class _Answer:
    """An answer on its way: adds the request id to its head, and knows its status."""

    UNSENT = "unsent"

    def __init__(self, send: Send, request_id: str) -> None:
        self._send = send
        self._request_id = request_id
        self._is_stream = False
        self.status = self.UNSENT

    async def send(self, message: Message) -> None:
        """Hand a message on."""
        if message["type"] == "http.response.start":
            self.status = str(message["status"])
            headers = MutableHeaders(scope=message)
            headers[REQUEST_ID_KEY] = self._request_id
            self._is_stream = headers.get("content-type", "").startswith(EVENTS)
        await self._send(message)

    async def fail(self, error: TreewireError, scope: Scope, receive: Receive) -> None:
        """Answer with the error; an answer that has begun is broken off."""
        if self.status != self.UNSENT:
            raise error
        await response_to(error)(scope, receive, self.send)

    async def give_up(self, error: TreewireError) -> None:
        """Raise the error if nothing was sent. It is the last event of a stream that has begun; what is no stream is cut."""
        if self.status == self.UNSENT:
            raise error
        if self._is_stream:
            await self._send({"type": "http.response.body", "body": event_of(error).encode(), "more_body": False})


class _Uvicorn(uvicorn.Server):
    """A server that leaves signals to the process."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpDoor:
    """An open HTTP door. See treewire.runtime.server.Door."""

    name = "http"

    def __init__(
        self, server: _Uvicorn, serving: asyncio.Task[None], surroundings: Surroundings, ready: asyncio.Event, url: str
    ) -> None:
        self._server = server
        self._serving = serving
        self._surroundings = surroundings
        self._ready = ready
        self.url = url

    @property
    def is_ready(self) -> bool:
        """True while new generations are taken."""
        return self._ready.is_set()

    def announce(self) -> None:
        """See Door."""
        self._ready.set()

    async def drain(self, hurry: asyncio.Event, grace_seconds: float) -> None:
        """See Door."""
        self._ready.clear()
        self._server.should_exit = True
        hurrying = asyncio.create_task(hurry.wait())
        await asyncio.wait((self._serving, hurrying), timeout=grace_seconds, return_when=asyncio.FIRST_COMPLETED)
        hurrying.cancel()
        await self.close()

    async def close(self) -> None:
        """End what runs with Unavailable, and return when all is over."""
        self._ready.clear()
        self._surroundings.ending = Unavailable("the server is shutting down")
        self._server.should_exit = True
        while not self._serving.done():
            for task in tuple(self._server.server_state.tasks):
                task.cancel()
            await asyncio.wait((self._serving,), timeout=_LAST_WORDS_SECONDS)
            self._server.force_exit = True
        self._serving.result()


@asynccontextmanager
async def http_door(
    settings: GatewaySettings,
    generations: Generations,
    metrics: Metrics,
    *,
    routes: Sequence[BaseRoute] = (),
    is_open: Callable[[str], bool] = lambda path: False,
) -> AsyncIterator[HttpDoor]:
    """The HTTP door of the gateway, listening while the context lasts. OSError if the address cannot be listened on, or the
    certificates cannot be used.

    `routes` are served beside those of the document; `is_open` names the paths among them that need no key.
    """
    requests = Counter("treewire_http_requests_total", "HTTP requests that ended.", ["path", "code"], registry=metrics.registry)
    ready = asyncio.Event()
    handlers = Routes(generations, metrics.registry, max_body_bytes=settings.max_message_bytes, is_ready=ready.is_set)
    surroundings = Surroundings(handlers.app(routes), settings.keys(), requests, is_open)
    server = _Uvicorn(_config(settings, surroundings))
    with contextlib.closing(_listen(settings.http_listen)) as listener:
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        door = HttpDoor(server, serving, surroundings, ready, _url(settings, listener))
        try:
            yield door
        finally:
            await door.close()


def _config(settings: GatewaySettings, app: ASGIApp) -> uvicorn.Config:
    certificates = settings.certificates
    config = uvicorn.Config(
        app,
        http="h11",
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        ssl_context_factory=None if certificates is None else lambda config, default: server_context(certificates),
    )
    config.load()  # reads the certificates: the server would only read them, and fail, once it runs
    return config


def _listen(endpoint: Endpoint) -> socket.socket:
    family = socket.AF_INET6 if ":" in endpoint.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((endpoint.host, endpoint.port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise OSError(f"cannot listen on {endpoint} for HTTP: is the address in use, or not of this machine?") from error
    listener.setblocking(False)
    return listener


def _url(settings: GatewaySettings, listener: socket.socket) -> str:
    scheme = "http" if settings.certificates is None else "https"
    return f"{scheme}://{Endpoint(settings.http_listen.host, listener.getsockname()[1])}"
