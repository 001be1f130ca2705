"""This file is events of a request's generations as answers: collected into one, or cut into chunks and sent as they come."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import accumulate
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
    ChatLogProbs,
    ChatTokenLogProbs,
    Completion,
    Delta,
    LikelyToken,
    Metrics,
    TextChoice,
    TextLogProbs,
    Usage,
    to_json,
)
from gateway.openai.errors import body_of
from gateway.stopping import Emission
from gateway.tokenization import Tokenization
from treewire import __version__
from treewire.core.tree import TokenLogProbs
from treewire.errors import InternalError, TreewireError
from treewire.runtime.logging import get_logger

EVENTS = "text/event-stream"
_FINGERPRINT = f"treewire-{__version__}"
_DONE = "[DONE]"
_NEVER = -9999.0
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
    num_choices: int


@dataclass(frozen=True)
class Piece:
    """A part of one choice: what one chunk brings, or, as a whole, the choice. `texts` are what each token settled, of which
    the first begins at `offset` in the choice's text; `log_probs` has an entry for each token, if they are wanted."""

    index: int = 0
    texts: tuple[str, ...] = ()
    token_ids: tuple[int, ...] = ()
    log_probs: tuple[TokenLogProbs, ...] = ()
    offset: int = 0
    finish_reason: str | None = None
    stop: str | None = None

    @property
    def text(self) -> str:
        """The text of all tokens."""
        return "".join(self.texts)


@dataclass
class Choice:
    """What one generation has given so far."""

    index: int
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[TokenLogProbs] = field(default_factory=list)
    length: int = 0
    finished: Finished | None = None

    def add(self, emission: Emission) -> Piece:
        """Append an emission; it as a piece of the choice."""
        piece = Piece(self.index, emission.pieces, emission.token_ids, emission.log_probs, self.length)
        self.texts.extend(emission.pieces)
        self.token_ids.extend(emission.token_ids)
        self.log_probs.extend(emission.log_probs)
        self.length += len(piece.text)
        return piece

    def whole(self, finished: Finished) -> Piece:
        """The choice as one piece."""
        parts = tuple(self.texts), tuple(self.token_ids), tuple(self.log_probs)
        return Piece(self.index, *parts, finish_reason=finished.reason.value, stop=finished.stop)


class Shape(Protocol):
    """How one kind of completion is written."""

    @property
    def prefix(self) -> str:
        """What its ids begin with."""

    def opening(self, frame: Frame) -> Iterator[Answer]:
        """Chunks ahead of any text."""

    def chunk(self, frame: Frame, piece: Piece) -> Answer:
        """A chunk."""

    def answer(self, frame: Frame, pieces: Sequence[Piece]) -> Answer:
        """A whole answer of these choices."""

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
            "index": piece.index,
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop,
            **token_ids,
        }


class ChatShape:
    """Chat completions."""

    prefix: ClassVar[str] = "chatcmpl"

    def __init__(self, tokenization: Tokenization) -> None:
        self._tokenization = tokenization

    def opening(self, frame: Frame) -> Iterator[Answer]:
        """See Shape."""
        for index in range(frame.wanted.num_choices):
            delta = Delta(role="assistant", content="")
            choice = ChatChunkChoice(**frame.ending(Piece(index)), logprobs=None, delta=delta)
            yield frame.answer(ChatCompletionChunk, choices=[choice])

    def chunk(self, frame: Frame, piece: Piece) -> Answer:
        """See Shape."""
        delta = Delta(content=piece.text) if piece.text else Delta()
        choice = ChatChunkChoice(**frame.ending(piece), logprobs=self._log_probs(piece), delta=delta)
        return frame.answer(ChatCompletionChunk, choices=[choice])

    def answer(self, frame: Frame, pieces: Sequence[Piece]) -> Answer:
        """See Shape."""
        choices = [
            ChatChoice(
                **frame.ending(piece),
                logprobs=self._log_probs(piece),
                message=AssistantMessage(role="assistant", content=piece.text, refusal=None),
            )
            for piece in pieces
        ]
        return frame.answer(ChatCompletion, choices=choices)

    def last(self, frame: Frame) -> Answer:
        """See Shape."""
        return frame.answer(ChatCompletionChunk, choices=[])

    def _log_probs(self, piece: Piece) -> ChatLogProbs | None:
        if not piece.log_probs:
            return None
        content = [
            ChatTokenLogProbs(
                **dict(self._likely(token_id, entry.log_prob)),
                top_logprobs=[self._likely(*each) for each in _top(entry)],
            )
            for token_id, entry in zip(piece.token_ids, piece.log_probs, strict=True)
        ]
        return ChatLogProbs(content=content, refusal=None)

    def _likely(self, token_id: int, log_prob: float) -> LikelyToken:
        return LikelyToken(
            token=self._tokenization.piece(token_id),
            logprob=_finite(log_prob),
            bytes=list(self._tokenization.bytes_of(token_id)),
        )


class TextShape:
    """Plain completions."""

    prefix: ClassVar[str] = "cmpl"

    def __init__(self, tokenization: Tokenization) -> None:
        self._tokenization = tokenization

    def opening(self, frame: Frame) -> Iterator[Answer]:
        """See Shape."""
        yield from ()

    def chunk(self, frame: Frame, piece: Piece) -> Answer:
        """See Shape."""
        return self.answer(frame, [piece])

    def answer(self, frame: Frame, pieces: Sequence[Piece]) -> Answer:
        """See Shape."""
        choices = [TextChoice(**frame.ending(piece), logprobs=self._log_probs(piece), text=piece.text) for piece in pieces]
        return frame.answer(Completion, choices=choices)

    def last(self, frame: Frame) -> Answer:
        """See Shape."""
        return frame.answer(Completion, choices=[])

    def _log_probs(self, piece: Piece) -> TextLogProbs | None:
        if not piece.log_probs:
            return None
        text_of = self._tokenization.piece
        top = [{text_of(token_id): _finite(log_prob) for token_id, log_prob in _top(entry)} for entry in piece.log_probs]
        return TextLogProbs(
            tokens=[text_of(token_id) for token_id in piece.token_ids],
            token_logprobs=[_finite(entry.log_prob) for entry in piece.log_probs],
            top_logprobs=top if any(top) else None,
            text_offset=list(accumulate((len(text) for text in piece.texts[:-1]), initial=piece.offset)),
        )


def _top(entry: TokenLogProbs) -> Iterator[tuple[int, float]]:
    return zip(entry.top_token_ids, entry.top_log_probs, strict=True)


def _finite(log_prob: float) -> float:
    """JSON has no infinities; OpenAI writes this number for what never comes."""
    return max(log_prob, _NEVER)


class Telling:
    """A request's generations on their way to the caller: opened until the first tokens are there, so that what fails before
    them has a status of its own; then told whole or in chunks."""

    def __init__(self, events: AsyncGenerator[Event, None], shape: Shape, wanted: Wanted) -> None:
        self._events = events
        self._shape = shape
        self._wanted = wanted
        self._choices = [Choice(index) for index in range(wanted.num_choices)]
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
        async for event in self._rest():
            if isinstance(event, Advanced):
                self._choices[event.index].add(event.emission)
            elif isinstance(event, Finished):
                self._choices[event.index].finished = event
        finished = self._finished()
        pieces = [choice.whole(end) for choice, end in zip(self._choices, finished, strict=True)]
        return to_json(self._with_usage(self._shape.answer(self._opened, pieces), finished))

    async def chunks(self) -> AsyncIterator[str]:
        """The chunks as server-sent events. What fails now can only be told as one of them."""
        try:
            for answer in self._shape.opening(self._opened):
                yield _event(to_json(answer))
            async for event in self._rest():
                for answer in self._chunks_of(event):
                    yield _event(to_json(answer))
            finished = self._finished()
            if self._wanted.usage:
                yield _event(to_json(self._with_usage(self._shape.last(self._opened), finished)))
            yield _event(_DONE)
        except TreewireError as error:
            yield event_of(error)
        except Exception:  # noqa: BLE001 - logged, and told to the caller without its text
            _log.exception("stream failed")
            yield event_of(InternalError("internal error, see the server's log"))

    def _chunks_of(self, event: Event) -> Iterator[Answer]:
        match event:
            case Advanced(emission, _, index):
                for piece in _pieces(self._choices[index].add(emission), per_token=self._wanted.per_token):
                    yield self._shape.chunk(self._opened, piece)
            case Finished(reason, stop, index=index):
                self._choices[index].finished = event
                yield self._shape.chunk(self._opened, Piece(index, finish_reason=reason.value, stop=stop))

    def _finished(self) -> list[Finished]:
        """The ends of all choices, which have come."""
        finished = [choice.finished for choice in self._choices if choice.finished is not None]
        if len(finished) < len(self._choices):
            raise InternalError("a generation ended without its end")
        return finished

    def _with_usage(self, answer: Answer, finished: Sequence[Finished]) -> Answer:
        answer.usage = Usage.of(finished)
        answer.metrics = Metrics.of(finished, longest_path=self._wanted.longest_path)
        return answer

    async def _rest(self) -> AsyncIterator[Event]:
        assert self._first is not None, "the telling was opened"
        yield self._first
        async for event in self._events:
            yield event


def _pieces(piece: Piece, *, per_token: bool) -> Iterator[Piece]:
    """The piece as chunks: one, or one for each token; none for no tokens."""
    if not per_token:
        yield from [piece] if piece.token_ids else []
        return
    offset = piece.offset
    for place, (token_id, text) in enumerate(zip(piece.token_ids, piece.texts, strict=True)):
        yield Piece(piece.index, (text,), (token_id,), piece.log_probs[place : place + 1], offset)
        offset += len(text)


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
