"""This file is events of a generation as answers: collected into one, or cut into chunks and sent as they come."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeVar

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from gateway.generations import Advanced, Event, Finished, Started
from gateway.openai.answers import (
    Answer,
    AssistantMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    Delta,
    Metrics,
    TextChoice,
    Usage,
    to_json,
)
from gateway.openai.errors import body_of
from gateway.stopping import Emission
from treewire import __version__
from treewire.errors import InternalError, TreewireError
from treewire.runtime.logging import get_logger

EVENTS = "text/event-stream"
_FINGERPRINT = f"treewire-{__version__}"
_DONE = "[DONE]"
_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
_log = get_logger()
_AnswerType = TypeVar("_AnswerType", bound=Answer)


@dataclass(frozen=True)
class Wanted:
    """What the caller wants beside the text. `longest_path` is the most drafted tokens that a round can accept."""

    token_ids: bool
    usage: bool
    per_token: bool
    longest_path: int


@dataclass(frozen=True)
class Piece:
    """A part of the output: what one chunk brings, or, as a whole, the answer."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = None
    stop: str | None = None


class Shape(Protocol):
    """How one kind of completion is written."""

    @property
    def prefix(self) -> str:
        """What its ids begin with."""

    def opening(self, frame: Frame) -> Iterator[Answer]:
        """Chunks ahead of any text."""

    def chunk(self, frame: Frame, piece: Piece) -> Answer:
        """A chunk."""

    def answer(self, frame: Frame, piece: Piece) -> Answer:
        """A whole answer."""

    def last(self, frame: Frame) -> Answer:
        """A chunk without choices, for usage."""


@dataclass(frozen=True)
class Frame:
    """What every answer and chunk of one generation says again."""

    started: Started
    prefix: str
    created: int
    wanted: Wanted

    def answer(self, kind: type[_AnswerType], **parts: Any) -> _AnswerType:
        """An answer with these parts; a chunk says that its usage is still to come, if there will be one."""
        usage = {"usage": None} if self.wanted.usage else {}
        return kind.model_validate(
            {
                "id": f"{self.prefix}-{self.started.request_id}",
                "object": kind.model_fields["object"].default,
                "created": self.created,
                "model": self.started.model,
                "system_fingerprint": _FINGERPRINT,
                **usage,
                **parts,
            }
        )

    def ending(self, piece: Piece) -> dict[str, Any]:
        """What every choice says."""
        token_ids = {"token_ids": list(piece.token_ids)} if self.wanted.token_ids else {}
        return {
            "index": 0,
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop,
            "logprobs": None,
            **token_ids,
        }


class ChatShape:
    """Chat completions."""

    prefix: ClassVar[str] = "chatcmpl"

    def opening(self, frame: Frame) -> Iterator[Answer]:
        """See Shape."""
        choice = ChatChunkChoice(**frame.ending(Piece("", ())), delta=Delta(role="assistant", content=""))
        yield frame.answer(ChatCompletionChunk, choices=[choice])

    def chunk(self, frame: Frame, piece: Piece) -> Answer:
        """See Shape."""
        delta = Delta(content=piece.text) if piece.text else Delta()
        return frame.answer(ChatCompletionChunk, choices=[ChatChunkChoice(**frame.ending(piece), delta=delta)])

    def answer(self, frame: Frame, piece: Piece) -> Answer:
        """See Shape."""
        message = AssistantMessage(role="assistant", content=piece.text, refusal=None)
        return frame.answer(ChatCompletion, choices=[ChatChoice(**frame.ending(piece), message=message)])

    def last(self, frame: Frame) -> Answer:
        """See Shape."""
        return frame.answer(ChatCompletionChunk, choices=[])


class TextShape:
    """Plain completions."""

    prefix: ClassVar[str] = "cmpl"

    def opening(self, frame: Frame) -> Iterator[Answer]:
        """See Shape."""
        yield from ()

    def chunk(self, frame: Frame, piece: Piece) -> Answer:
        """See Shape."""
        return frame.answer(Completion, choices=[TextChoice(**frame.ending(piece), text=piece.text)])

    def answer(self, frame: Frame, piece: Piece) -> Answer:
        """See Shape."""
        return self.chunk(frame, piece)

    def last(self, frame: Frame) -> Answer:
        """See Shape."""
        return frame.answer(Completion, choices=[])


class Telling:
    """One generation on its way to the caller: opened until the first tokens are there, so that what fails before them has a
    status of its own; then told whole or in chunks."""

    def __init__(self, events: AsyncGenerator[Event, None], shape: Shape, wanted: Wanted) -> None:
        self._events = events
        self._shape = shape
        self._wanted = wanted
        self._first: Event | None = None
        self._frame: Frame | None = None

    async def open(self) -> None:
        """Wait for the first tokens."""
        started = await anext(self._events)
        assert isinstance(started, Started), "a generation starts with Started"
        self._frame = Frame(started, self._shape.prefix, int(time.time()), self._wanted)
        self._first = await anext(self._events)

    @property
    def _opened(self) -> Frame:
        assert self._frame is not None, "the telling was opened"
        return self._frame

    async def whole(self) -> str:
        """The answer as JSON."""
        texts: list[str] = []
        token_ids: list[int] = []
        async for event in self._rest():
            if isinstance(event, Advanced):
                texts.append(event.emission.text)
                token_ids.extend(event.emission.token_ids)
            elif isinstance(event, Finished):
                piece = Piece("".join(texts), tuple(token_ids), event.reason.value, event.stop)
                return to_json(self._with_usage(self._shape.answer(self._opened, piece), event))
        raise InternalError("the generation ended without its end")

    async def chunks(self) -> AsyncIterator[str]:
        """The chunks as server-sent events. What fails now can only be told as one of them."""
        try:
            for answer in self._shape.opening(self._opened):
                yield _event(to_json(answer))
            async for event in self._rest():
                for answer in self._chunks_of(event):
                    yield _event(to_json(answer))
            yield _event(_DONE)
        except TreewireError as error:
            yield event_of(error)
        except Exception:  # noqa: BLE001 - logged, and told to the caller without its text
            _log.exception("stream failed")
            yield event_of(InternalError("internal error, see the server's log"))

    def _chunks_of(self, event: Event) -> Iterator[Answer]:
        match event:
            case Advanced(emission):
                for piece in _pieces(emission, per_token=self._wanted.per_token):
                    yield self._shape.chunk(self._opened, piece)
            case Finished(reason, stop):
                yield self._shape.chunk(self._opened, Piece("", (), reason.value, stop))
                if self._wanted.usage:
                    yield self._with_usage(self._shape.last(self._opened), event)

    def _with_usage(self, answer: Answer, finished: Finished) -> Answer:
        answer.usage = Usage.of(finished)
        answer.metrics = Metrics.of(finished, longest_path=self._wanted.longest_path)
        return answer

    async def _rest(self) -> AsyncIterator[Event]:
        assert self._first is not None, "the telling was opened"
        yield self._first
        async for event in self._events:
            yield event


def _pieces(emission: Emission, *, per_token: bool) -> Iterator[Piece]:
    """The emission as chunks; none for tokens whose text is still held back, unless they are asked for one by one."""
    if per_token:
        for token_id, text in zip(emission.token_ids, emission.pieces, strict=True):
            yield Piece(text, (token_id,))
    elif emission.token_ids:
        yield Piece(emission.text, emission.token_ids)


def event_of(error: TreewireError) -> str:
    """The event that tells what broke a stream off."""
    return _event(to_json(body_of(error)))


def _event(data: str) -> str:
    """A server-sent event. JSON has no line breaks of its own."""
    return f"data: {data}\n\n"


class EventStream(StreamingResponse):
    """A response that ends the generation with itself, however it ends."""

    def __init__(self, telling: Telling, events: AsyncGenerator[Event, None]) -> None:
        super().__init__(telling.chunks(), headers=_HEADERS, media_type=EVENTS)
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events):
            await super().__call__(scope, receive, send)
