"""This file is the routes of the HTTP door: a body is read and checked, a generation is told, errors get their status."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, generate_latest
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Route

from gateway.generations import Generations
from gateway.openai import mapping
from gateway.openai.answers import Alive, Detokenized, Model, ModelList, Tokenized, Version, to_json
from gateway.openai.bodies import (
    Body,
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationBody,
    TokenizeRequest,
)
from gateway.openai.document import OPERATIONS, Operation, document
from gateway.openai.errors import JSON, UnknownModel, from_validation, response_to, response_to_http
from gateway.openai.streams import ChatShape, EventStream, Shape, Telling, TextShape, Wanted
from gateway.tokenization import Tokenization
from treewire import __version__, wire
from treewire.errors import InvalidRequest, TreewireError
from treewire.types import Request as GenerationAsked

_BODY_SECONDS = 30.0
_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_BodyType = TypeVar("_BodyType", bound=Body)
_Value = TypeVar("_Value")
Handler = Callable[[Request], Awaitable[Response]]


class Routes:
    """The handlers, over one process's generations. `is_ready` says whether new generations are taken."""

    def __init__(
        self,
        generations: Generations,
        registry: CollectorRegistry,
        *,
        max_body_bytes: int,
        is_ready: Callable[[], bool],
    ) -> None:
        self._generations = generations
        self._registry = registry
        self._max_body_bytes = max_body_bytes
        self._is_ready = is_ready
        self._created = int(time.time())
        self._document = document()

    def app(self, more: Sequence[BaseRoute] = ()) -> Starlette:
        """The application: these routes, and `more`."""
        routes = [Route(each.path, self._handler(each), methods=[each.method.upper()]) for each in OPERATIONS]
        app = Starlette(
            routes=[*routes, *more],
            exception_handlers={
                TreewireError: _answer_error,  # type: ignore[dict-item]
                HTTPException: _answer_http_error,  # type: ignore[dict-item]
            },
        )
        app.router.redirect_slashes = False
        return app

    def _handler(self, operation: Operation) -> Handler:
        return {
            "/v1/chat/completions": self.chat_completions,
            "/v1/completions": self.completions,
            "/v1/models": self.models,
            "/tokenize": self.tokenize,
            "/detokenize": self.detokenize,
            "/health": self.health,
            "/ready": self.ready,
            "/version": self.version,
            "/metrics": self.metrics,
            "/openapi.json": self.openapi,
        }[operation.path]

    async def chat_completions(self, request: Request) -> Response:
        """Answer a conversation."""
        body = await self._read(request, ChatCompletionRequest)
        return await self._tell(request, body, partial(mapping.chat_request, body), ChatShape)

    async def completions(self, request: Request) -> Response:
        """Continue a text."""
        body = await self._read(request, CompletionRequest)
        return await self._tell(request, body, partial(mapping.completion_request, body), TextShape)

    async def models(self, request: Request) -> Response:
        """What is served."""
        serving = self._generations.serving
        model = Model(
            id=serving.model,
            object="model",
            created=self._created,
            owned_by="treewire",
            max_model_len=serving.limits.max_context,
        )
        return _json(ModelList(object="list", data=[model]))

    async def tokenize(self, request: Request) -> Response:
        """Token ids of a text or a conversation."""
        body = await self._read(request, TokenizeRequest)
        self._check_model(body.model)
        limits = self._generations.serving.limits
        token_ids = await self._generations.tokenized(partial(_tokenize, body, limits.max_prompt_characters))
        return _json(Tokenized(count=len(token_ids), max_model_len=limits.max_context, tokens=token_ids))

    async def detokenize(self, request: Request) -> Response:
        """Text of token ids."""
        body = await self._read(request, DetokenizeRequest)
        self._check_model(body.model)
        vocabulary_size = self._generations.serving.limits.vocabulary_size
        return _json(Detokenized(prompt=await self._generations.tokenized(partial(_detokenize, body, vocabulary_size))))

    async def health(self, request: Request) -> Response:
        """The process is alive."""
        return _json(Alive(status="alive"))

    async def ready(self, request: Request) -> Response:
        """The gateway takes generations."""
        _ = self._generations.serving
        if not self._is_ready():
            raise HTTPException(503, "the gateway takes no generations")
        return _json(Alive(status="ready"))

    async def version(self, request: Request) -> Response:
        """What runs."""
        return _json(Version(version=__version__, protocol_version=wire.PROTOCOL_VERSION))

    async def metrics(self, request: Request) -> Response:
        """Counters for Prometheus."""
        return PlainTextResponse(generate_latest(self._registry), headers={"content-type": _METRICS_TYPE})

    async def openapi(self, request: Request) -> Response:
        """The document of these routes."""
        return JSONResponse(self._document)

    async def _tell(
        self,
        request: Request,
        body: GenerationBody,
        to_request: Callable[[], GenerationAsked],
        shape: Callable[[Tokenization], Shape],
    ) -> Response:
        """Run the generations that the body asks for, and tell them as it asks."""
        self._check_model(body.model)
        asked = await self._generations.understand(to_request().to_message())
        wanted = Wanted(
            token_ids=bool(body.return_token_ids),
            usage=body.includes_usage,
            per_token=body.is_per_token,
            longest_path=min(asked.budget, self._generations.serving.upstreams.horizon),
            num_choices=asked.num_generations,
        )
        events = self._generations.run_all(asked)
        telling = Telling(events, shape(self._generations.serving.tokenization), wanted)
        try:
            await _unless_left(request, telling.open())
            if not body.stream:
                async with aclosing(events):
                    return Response(await _unless_left(request, telling.whole()), media_type=JSON)
        except BaseException:
            await events.aclose()
            raise
        return EventStream(telling, events)

    def _check_model(self, name: str | None) -> None:
        served = self._generations.serving.model
        if name is not None and name != served:
            raise UnknownModel(f"the model {name[:100]!r} is not served, {served!r} is", metadata={"field": "model"})

    async def _read(self, request: Request, kind: type[_BodyType]) -> _BodyType:
        """The checked body. Raises InvalidRequest, or HTTPException for what is not a body at all."""
        media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if media_type != JSON:
            raise HTTPException(415, f"content-type is {media_type[:100]!r}, {JSON} is taken")
        try:
            async with asyncio.timeout(_BODY_SECONDS):
                data = await self._body(request)
        except TimeoutError as error:
            raise HTTPException(408, f"the body did not come within {_BODY_SECONDS:g} s") from error
        try:
            return kind.model_validate_json(data)
        except ValidationError as error:
            raise from_validation(error) from error

    async def _body(self, request: Request) -> bytes:
        data = bytearray()
        async for piece in request.stream():
            data += piece
            if len(data) > self._max_body_bytes:
                raise HTTPException(413, f"the body is larger than {self._max_body_bytes} bytes")
        return bytes(data)


async def _answer_error(request: Request, error: TreewireError) -> Response:
    return response_to(error)


async def _answer_http_error(request: Request, error: HTTPException) -> Response:
    return response_to_http(error)


def _json(answer: Any) -> Response:
    return Response(to_json(answer), media_type=JSON)


async def _unless_left(request: Request, work: Coroutine[Any, Any, _Value]) -> _Value:
    """The result of the work; ClientDisconnect if the caller leaves first, which cancels the work."""
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_left(request))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return await working
    finally:
        leaving.cancel()
        working.cancel()
        await asyncio.wait((working, leaving))


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _tokenize(body: TokenizeRequest, max_characters: int, tokenization: Tokenization) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("exactly one of prompt and messages is taken", metadata={"field": "prompt"})
    if body.messages is None:
        assert body.prompt is not None
        _check_characters("prompt", len(body.prompt), max_characters)
        return tokenization.encode(body.prompt, add_special_tokens=body.add_special_tokens)
    _check_characters("messages", sum(len(turn.text) for turn in body.messages), max_characters)
    try:
        return tokenization.encode_chat(
            [{"role": turn["role"], "content": turn["content"]} for turn in mapping.to_messages(body.messages)]
        )
    except ValueError as error:
        raise InvalidRequest(f"messages: {error}", metadata={"field": "messages"}) from error


def _check_characters(field: str, length: int, limit: int) -> None:
    if length > limit:
        raise InvalidRequest(f"{field} is {length} characters long, at most {limit:,} are taken", metadata={"field": field})


def _detokenize(body: DetokenizeRequest, vocabulary_size: int, tokenization: Tokenization) -> str:
    for place, token_id in enumerate(body.tokens):
        if token_id >= vocabulary_size:
            field, limit = f"tokens[{place}]", f"the vocabulary has ids from 0 to {vocabulary_size - 1}"
            raise InvalidRequest(f"{field} is {token_id}, {limit}", metadata={"field": field})
    decoder = tokenization.decoder(skip_special_tokens=False)
    return decoder.push(body.tokens) + decoder.finish()
