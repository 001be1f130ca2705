"""This file is the playground's routes: the page, what it is told of the model, and the events of a generation.

The door that mounts them authenticates, and answers a TreewireError that is raised before the first event.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any, TypeAlias

from google.protobuf import json_format
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import Receive, Scope, Send

from treewire.errors import InvalidRequest, TreewireError
from treewire.events import event_from_message
from treewire.trace import Failure, TimedEvent, TraceEvent, event_line
from treewire.types import ModelInfo
from treewire.v1 import generate_pb2

STATIC = Path(__file__).parent / "static"
PAGE = "/playground/"
_ENTRY, _MODEL, _GENERATE = "/playground", "/playground/model", "/playground/generate"
MAX_BODY_BYTES = 16 * 2**20
_JSON = "application/json"
_EVENT_STREAM = "text/event-stream"
_PAGE_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
_STREAM_HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}

Generations: TypeAlias = Callable[[generate_pb2.GenerateRequest], AsyncGenerator[generate_pb2.GenerateResponse, None]]
Model: TypeAlias = Callable[[], Awaitable[generate_pb2.GetModelResponse]]


def routes(generations: Generations, model: Model) -> list[BaseRoute]:
    """The page at /playground/, `GET /playground/model`, and `POST /playground/generate`.

    `generations` gives the events of one generation; closing it early aborts the generation. The body of a post is a
    GenerateRequest in protobuf's JSON form; the answer is a stream of server-sent events, each a line of docs/trace.md.
    """

    async def describe(request: Request) -> Response:
        return JSONResponse(vars(ModelInfo.from_message(await model())))

    async def generate(request: Request) -> Response:
        return await _EventStream.of(generations(await _asked(request)))

    async def to_page(request: Request) -> Response:
        return RedirectResponse(PAGE)

    return [
        Route(_ENTRY, to_page),
        Route(_MODEL, describe),
        Route(_GENERATE, generate, methods=["POST"]),
        Mount(_ENTRY, _Page(directory=STATIC, html=True)),
    ]


def is_page(path: str) -> bool:
    """True for the page and its files, which need no key: they say nothing of the model, and a browser asks without one."""
    return path == _ENTRY or (path.startswith(PAGE) and path not in (_MODEL, _GENERATE))


async def _asked(request: Request) -> generate_pb2.GenerateRequest:
    """The request of a body, asking for its rounds. InvalidRequest if it is not one.

    Only JSON by name is taken: a page of another site cannot send that without the browser asking us first.
    """
    if request.headers.get("content-type", "").partition(";")[0].strip() != _JSON:
        raise InvalidRequest(f"content-type is {request.headers.get('content-type', 'not set')!r}, {_JSON} is taken")
    body = await _body(request)
    try:
        message = json_format.Parse(body, generate_pb2.GenerateRequest())
    except (json_format.ParseError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"the body is no GenerateRequest: {error}") from error
    message.include_rounds = True
    return message


async def _body(request: Request) -> bytes:
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise InvalidRequest(f"the body is longer than {MAX_BODY_BYTES:,} bytes")
    return bytes(body)


class _Page(StaticFiles):
    """The page's files, with headers that keep all else out of it."""

    def file_response(self, *arguments: Any, **options: Any) -> Response:
        """A file, as its path is asked for."""
        response = super().file_response(*arguments, **options)
        response.headers.update(_PAGE_HEADERS)
        return response


class _EventStream(StreamingResponse):
    """A generation as server-sent events. However the response ends, the generation is closed."""

    def __init__(self, events: AsyncGenerator[generate_pb2.GenerateResponse, None], lines: AsyncGenerator[str, None]) -> None:
        self._events, self._lines = events, lines
        super().__init__(lines, media_type=_EVENT_STREAM, headers=_STREAM_HEADERS)

    @classmethod
    async def of(cls, events: AsyncGenerator[generate_pb2.GenerateResponse, None]) -> _EventStream:
        """The response, once the generation has started; what refuses it is raised, so that the status says so."""
        asked = time.perf_counter()
        return cls(events, _lines(asked, await anext(events), events))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events as they come, until the last or until the browser is gone."""
        async with aclosing(self._events), aclosing(self._lines):
            await super().__call__(scope, receive, send)


async def _lines(
    asked: float, first: generate_pb2.GenerateResponse, rest: AsyncGenerator[generate_pb2.GenerateResponse, None]
) -> AsyncGenerator[str, None]:
    yield _line(asked, event_from_message(first))
    try:
        async for message in rest:
            yield _line(asked, event_from_message(message))
    except TreewireError as error:
        yield _line(asked, Failure.of(error))


def _line(asked: float, event: TraceEvent) -> str:
    return f"data: {event_line(TimedEvent(time.perf_counter() - asked, event))}\n\n"
