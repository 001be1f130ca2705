"""This file is the two clients of the gateway, one surface over gRPC's asyncio and synchronous stacks.

    with Client() as client:
        print(client.generate("Why is the sky blue?").text)
        with client.stream("Why is the sky blue?") as stream:
            for event in stream: ...

A stream exists only inside its `with` block, whose end cancels the call however it is left. What fails is one of
`treewire.errors`. A call that finds the gateway unavailable is tried again before its first message; after it only with
`resume`, which replays what was delivered to whatever gateway answers next, and goes on from there.
"""

from __future__ import annotations

import asyncio
import json
import os
import struct
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from types import TracebackType
from typing import Protocol, Self, TypeAlias, Unpack

import grpc

from treewire import __version__
from treewire.errors import DeadlineExceeded, Incompatible, InternalError, TreewireError, Unavailable, from_rpc_error
from treewire.events import Chunk, Event, Finished, Started, event_from_message
from treewire.types import Generation, ModelInfo, Options, Request, TokenLogProbs
from treewire.v1 import generate_pb2, generate_pb2_grpc

ADDRESS_VARIABLE = "TREEWIRE_ADDRESS"
TOKEN_VARIABLE = "TREEWIRE_TOKEN"
DEFAULT_ADDRESS = "127.0.0.1:50050"
DEFAULT_TIMEOUT_SECONDS = 600.0
MAX_MESSAGE_BYTES = 16 * 2**20
KEEPALIVE_MILLISECONDS = 10_000
MAX_RESUMPTIONS = 10
FIRST_RESUMPTION_SECONDS = 0.2
LONGEST_RESUMPTION_SECONDS = 5.0
NUM_SEEDS = 2**64

_RETRIES = {
    "methodConfig": [
        {
            "name": [{"service": "treewire.v1.GenerateService"}],
            "retryPolicy": {
                "maxAttempts": 4,
                "initialBackoff": "0.2s",
                "maxBackoff": "2s",
                "backoffMultiplier": 2,
                "retryableStatusCodes": ["UNAVAILABLE"],
            },
        }
    ]
}
_LOOPBACK_HOSTS = ("127.", "localhost:", "[::1]:", "unix:", "ipv4:127.", "ipv6:[::1]:")


@dataclass(frozen=True)
class _Connection:
    """Where the gateway is and how it is called; `token` travels as a bearer token."""

    address: str
    token: str
    timeout_seconds: float | None

    @classmethod
    def resolve(cls, address: str | None, token: str | None, timeout_seconds: float | None) -> _Connection:
        """The connection; what is None comes from TREEWIRE_ADDRESS and TREEWIRE_TOKEN."""
        if address is None:
            address = os.environ.get(ADDRESS_VARIABLE, DEFAULT_ADDRESS)
        if token is None:
            token = os.environ.get(TOKEN_VARIABLE, "")
        return cls(address, token, timeout_seconds)

    def options(self) -> list[tuple[str, str | int]]:
        """Options of the channel. A proxy of the environment is never asked for a loopback address."""
        return [
            ("grpc.primary_user_agent", f"treewire-python/{__version__}"),
            ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
            ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
            ("grpc.keepalive_time_ms", KEEPALIVE_MILLISECONDS),
            ("grpc.keepalive_timeout_ms", KEEPALIVE_MILLISECONDS),
            ("grpc.http2.max_pings_without_data", 0),
            ("grpc.initial_reconnect_backoff_ms", 200),
            ("grpc.enable_retries", 1),
            ("grpc.service_config", json.dumps(_RETRIES)),
            ("grpc.enable_http_proxy", int(not self.address.startswith(_LOOPBACK_HOSTS))),
        ]

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Metadata of each call."""
        return (("authorization", f"Bearer {self.token}"),) if self.token else ()

    def deadline_seconds(self, request: Request) -> float | None:
        """Seconds that a call may take; None has no limit."""
        return self.timeout_seconds if request.deadline_seconds is None else request.deadline_seconds


@dataclass
class _Draft:
    """What one generation of a stream has given so far."""

    pieces: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[TokenLogProbs] = field(default_factory=list)
    finished: Finished | None = None
    num_tokens_before: int = 0

    def add(self, chunk: Chunk) -> None:
        """Append a chunk."""
        self.pieces.append(chunk.text)
        self.token_ids.extend(chunk.token_ids)
        self.log_probs.extend(chunk.log_probs)

    def generation(self, started: Started, index: int) -> Generation:
        """The whole generation. InternalError if it was not finished, or does not add up."""
        if self.finished is None:
            raise InternalError("the gateway ended the stream without its last event", request_id=started.request_id)
        num_tokens = self.finished.statistics.output_tokens
        num_sent = len(self.token_ids) - self.num_tokens_before
        if num_tokens != num_sent:
            raise InternalError(f"the gateway sent {num_sent} tokens and counted {num_tokens}", request_id=started.request_id)
        if self.log_probs and len(self.log_probs) != len(self.token_ids):
            raise InternalError(
                f"the gateway sent {len(self.token_ids)} tokens and log-probs of {len(self.log_probs)}",
                request_id=started.request_id,
            )
        return Generation(
            text="".join(self.pieces),
            token_ids=tuple(self.token_ids),
            finish_reason=self.finished.finish_reason,
            stop=self.finished.stop,
            prompt_tokens=self.finished.prompt_tokens,
            statistics=self.finished.statistics,
            model=started.model,
            request_id=started.request_id,
            seed=(started.seed + index) % NUM_SEEDS,
            log_probs=tuple(self.log_probs),
            index=index,
        )


class _Transcript:
    """What a stream has given so far: takes messages, gives events, and the generations at the end."""

    def __init__(self, deadline_seconds: float | None, num_generations: int = 1) -> None:
        self._deadline_seconds = deadline_seconds
        self._drafts = [_Draft() for _ in range(num_generations)]
        self._started: Started | None = None

    @property
    def text(self) -> str:
        """Text of the first generation so far."""
        return "".join(self._drafts[0].pieces)

    @property
    def has_finished(self) -> bool:
        """True once the last event was read."""
        return all(draft.finished is not None for draft in self._drafts)

    def add(self, message: generate_pb2.GenerateResponse) -> Event | None:
        """The event of the next message; None for the start of a resumed stream, since the generation has started before."""
        event = event_from_message(message)
        if isinstance(event, Started):
            return self._start(event)
        if isinstance(event, Chunk):
            self._draft(event.index).add(event)
        elif isinstance(event, Finished):
            self._draft(event.index).finished = event
        return event

    def _start(self, event: Started) -> Started | None:
        if self._started is None:
            self._started = event
            return event
        if event.model != self._started.model:
            raise Incompatible(f"the generation is by {self._started.model}, the gateway that would go on has {event.model}")
        self._drafts[0].num_tokens_before = len(self._drafts[0].token_ids)
        return None

    def continued(self, message: generate_pb2.GenerateRequest) -> generate_pb2.GenerateRequest:
        """The request that goes on where the stream ended; the same one if nothing was delivered."""
        if self._started is None:
            return message
        continued = generate_pb2.GenerateRequest()
        continued.CopyFrom(message)
        continued.sampling.seed = self._started.seed
        token_ids = self._drafts[0].token_ids
        if token_ids:
            continued.delivered.token_ids = struct.pack(f"<{len(token_ids)}i", *token_ids)
        return continued

    def _draft(self, index: int) -> _Draft:
        if not 0 <= index < len(self._drafts):
            raise InternalError(f"the gateway sent generation {index}, {len(self._drafts)} were asked for")
        return self._drafts[index]

    def failure(self, error: grpc.RpcError) -> TreewireError:
        """The error behind a failed call, with the deadline if that is what passed."""
        failure = failure_of(error, self._deadline_seconds)
        if failure.request_id is None and self._started is not None:
            failure.request_id = self._started.request_id
        return failure

    def generations(self) -> tuple[Generation, ...]:
        """The whole generations. InternalError if one was not started and finished, or does not add up."""
        if self._started is None:
            raise InternalError("the gateway ended the stream without its first event")
        return tuple(draft.generation(self._started, index) for index, draft in enumerate(self._drafts))


def failure_of(error: grpc.RpcError, deadline_seconds: float | None) -> TreewireError:
    """The error behind a failed call that had `deadline_seconds` to end."""
    failure = from_rpc_error(error)
    if isinstance(failure, DeadlineExceeded) and deadline_seconds is not None:
        message = f"the call had not ended after its deadline of {deadline_seconds:g} s"
        return DeadlineExceeded(message, metadata=failure.metadata, request_id=failure.request_id)
    return failure


class _Calls:
    """The calls of one generation: the first, and with `resume` those that go on after the gateway was lost."""

    def __init__(self, request: Request, deadline_seconds: float | None) -> None:
        self._message = request.to_message()
        self._may_resume = request.resume
        self._ends = None if deadline_seconds is None else time.monotonic() + deadline_seconds
        self._num_failures = 0
        self.transcript = _Transcript(deadline_seconds, request.n or 1)

    def next_message(self) -> generate_pb2.GenerateRequest:
        """What the next call asks."""
        return self.transcript.continued(self._message)

    def timeout_seconds(self) -> float | None:
        """How long the next call may take."""
        return None if self._ends is None else max(0.0, self._ends - time.monotonic())

    def received(self, message: generate_pb2.GenerateResponse) -> Event | None:
        """The event of a message, if it is one for the caller."""
        self._num_failures = 0
        return self.transcript.add(message)

    def delay_seconds(self, error: grpc.RpcError) -> float:
        """How long to wait before the generation goes on in another call. Raises the failure if it does not."""
        failure = self.transcript.failure(error)
        self._num_failures += 1
        if not (self._may_resume and isinstance(failure, Unavailable) and self._num_failures <= MAX_RESUMPTIONS):
            try:
                raise failure from error
            finally:
                del failure, error  # else its traceback holds this frame, which holds it: the call would await the collector
        return min(FIRST_RESUMPTION_SECONDS * 2.0 ** (self._num_failures - 1), LONGEST_RESUMPTION_SECONDS)


class _Call(Protocol):
    """What is used of a running synchronous call."""

    def __iter__(self) -> Iterator[generate_pb2.GenerateResponse]: ...

    def cancel(self) -> object: ...


_AioCall: TypeAlias = "grpc.aio.UnaryStreamCall[generate_pb2.GenerateRequest, generate_pb2.GenerateResponse]"


class Stream(Iterator[Event]):
    """The events of one generation, in order. Iterating raises one of `treewire.errors` where the call fails."""

    def __init__(self, calls: _Calls, open_call: Callable[[_Calls], _Call]) -> None:
        self._calls = calls
        self._open_call = open_call
        self._call = open_call(calls)
        self._messages = iter(self._call)
        self._is_closed = False

    @property
    def text(self) -> str:
        """The text read so far, of the first generation if there are several."""
        return self._calls.transcript.text

    def __next__(self) -> Event:
        while True:
            _check_open(self._is_closed)
            try:
                event = self._calls.received(next(self._messages))
            except grpc.RpcError as error:
                time.sleep(self._calls.delay_seconds(error))
                self._call = self._open_call(self._calls)
                self._messages = iter(self._call)
                continue
            if event is not None:
                return event

    def final(self) -> Generation:
        """Reads to the end; the whole generation, whatever was read before. Of several the first."""
        return self.finals()[0]

    def finals(self) -> tuple[Generation, ...]:
        """Reads to the end; all generations of the request, by index."""
        if not self._calls.transcript.has_finished:
            for _ in self:
                pass
        return self._calls.transcript.generations()

    def close(self) -> None:
        """Cancels the call; the service frees what it held. The end of the `with` block does this."""
        self._is_closed = True
        self._call.cancel()


class AsyncStream(AsyncIterator[Event]):
    """The events of one generation, in order. Iterating raises one of `treewire.errors` where the call fails."""

    def __init__(self, calls: _Calls, open_call: Callable[[_Calls], _AioCall]) -> None:
        self._calls = calls
        self._open_call = open_call
        self._call = open_call(calls)
        self._is_closed = False

    @property
    def text(self) -> str:
        """The text read so far, of the first generation if there are several."""
        return self._calls.transcript.text

    async def __anext__(self) -> Event:
        while True:
            _check_open(self._is_closed)
            try:
                message = await self._call.read()
            except grpc.RpcError as error:
                await asyncio.sleep(self._calls.delay_seconds(error))
                self._call = self._open_call(self._calls)
                continue
            if not isinstance(message, generate_pb2.GenerateResponse):  # the end of the stream
                raise StopAsyncIteration
            event = self._calls.received(message)
            if event is not None:
                return event

    async def final(self) -> Generation:
        """Reads to the end; the whole generation, whatever was read before. Of several the first."""
        return (await self.finals())[0]

    async def finals(self) -> tuple[Generation, ...]:
        """Reads to the end; all generations of the request, by index."""
        if not self._calls.transcript.has_finished:
            async for _ in self:
                pass
        return self._calls.transcript.generations()

    def close(self) -> None:
        """Cancels the call; the service frees what it held. The end of the `async with` block does this."""
        self._is_closed = True
        self._call.cancel()


def _check_open(is_closed: bool) -> None:
    if is_closed:
        raise RuntimeError("the stream is closed: read it inside its with block")


class Client:
    """A client of one gateway, for threads. Close it, or use it in a `with` block.

    `address` ("host:port") and `token`, when None, are read from TREEWIRE_ADDRESS (else 127.0.0.1:50050) and
    TREEWIRE_TOKEN. `timeout_seconds` bounds each call whole; None has no bound. With `credentials` the channel is
    encrypted; without, text and token travel in the clear.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        token: str | None = None,
        timeout_seconds: float | None = DEFAULT_TIMEOUT_SECONDS,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        self._connection = _Connection.resolve(address, token, timeout_seconds)
        options = self._connection.options()
        if credentials is None:
            self._channel = grpc.insecure_channel(self._connection.address, options)
        else:
            self._channel = grpc.secure_channel(self._connection.address, credentials, options)
        self._stub = generate_pb2_grpc.GenerateServiceStub(self._channel)

    @property
    def address(self) -> str:
        """The gateway that is called, "host:port"."""
        return self._connection.address

    def generate(self, prompt: str | None = None, **options: Unpack[Options]) -> Generation:
        """The whole answer to `prompt`, a user's words; the other inputs and options are those of `types.Request`."""
        with self.stream(prompt, **options) as stream:
            return stream.final()

    def generate_all(self, prompt: str | None = None, **options: Unpack[Options]) -> tuple[Generation, ...]:
        """All `n` answers, by index; seeds count up from that of the first."""
        with self.stream(prompt, **options) as stream:
            return stream.finals()

    @contextmanager
    def stream(self, prompt: str | None = None, **options: Unpack[Options]) -> Iterator[Stream]:
        """The answer as it is made. Leaving the block, however it is left, cancels what is still running."""
        request = Request(prompt, **options)
        stream = Stream(_Calls(request, self._connection.deadline_seconds(request)), self._call)
        try:
            yield stream
        finally:
            stream.close()

    def _call(self, calls: _Calls) -> _Call:
        return self._stub.Generate(calls.next_message(), timeout=calls.timeout_seconds(), metadata=self._connection.metadata())

    def model(self) -> ModelInfo:
        """What the gateway serves."""
        timeout_seconds = self._connection.timeout_seconds
        try:
            message = self._stub.GetModel(
                generate_pb2.GetModelRequest(), timeout=timeout_seconds, metadata=self._connection.metadata()
            )
        except grpc.RpcError as error:
            raise failure_of(error, timeout_seconds) from error
        return ModelInfo.from_message(message)

    def close(self) -> None:
        """Closes the channel; running calls are cancelled."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()


class AsyncClient:
    """A client of one gateway, for asyncio. Close it, or use it in an `async with` block.

    `address` ("host:port") and `token`, when None, are read from TREEWIRE_ADDRESS (else 127.0.0.1:50050) and
    TREEWIRE_TOKEN. `timeout_seconds` bounds each call whole; None has no bound. With `credentials` the channel is
    encrypted; without, text and token travel in the clear.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        token: str | None = None,
        timeout_seconds: float | None = DEFAULT_TIMEOUT_SECONDS,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        self._connection = _Connection.resolve(address, token, timeout_seconds)
        self._credentials = credentials

    @property
    def address(self) -> str:
        """The gateway that is called, "host:port"."""
        return self._connection.address

    @cached_property
    def _channel(self) -> grpc.aio.Channel:
        """Made at the first call, so that it belongs to the loop that runs then."""
        address, options = self._connection.address, self._connection.options()
        if self._credentials is None:
            return grpc.aio.insecure_channel(address, options)
        return grpc.aio.secure_channel(address, self._credentials, options)

    @cached_property
    def _stub(self) -> generate_pb2_grpc.GenerateServiceAsyncStub:
        return generate_pb2_grpc.GenerateServiceStub(self._channel)

    async def generate(self, prompt: str | None = None, **options: Unpack[Options]) -> Generation:
        """The whole answer to `prompt`, a user's words; the other inputs and options are those of `types.Request`."""
        async with self.stream(prompt, **options) as stream:
            return await stream.final()

    async def generate_all(self, prompt: str | None = None, **options: Unpack[Options]) -> tuple[Generation, ...]:
        """All `n` answers, by index; seeds count up from that of the first."""
        async with self.stream(prompt, **options) as stream:
            return await stream.finals()

    @asynccontextmanager
    async def stream(self, prompt: str | None = None, **options: Unpack[Options]) -> AsyncIterator[AsyncStream]:
        """The answer as it is made. Leaving the block, however it is left, cancels what is still running."""
        request = Request(prompt, **options)
        stream = AsyncStream(_Calls(request, self._connection.deadline_seconds(request)), self._call)
        try:
            yield stream
        finally:
            stream.close()

    def _call(self, calls: _Calls) -> _AioCall:
        return self._stub.Generate(calls.next_message(), timeout=calls.timeout_seconds(), metadata=self._connection.metadata())

    async def model(self) -> ModelInfo:
        """What the gateway serves."""
        timeout_seconds = self._connection.timeout_seconds
        try:
            message = await self._stub.GetModel(
                generate_pb2.GetModelRequest(), timeout=timeout_seconds, metadata=self._connection.metadata()
            )
        except grpc.RpcError as error:
            raise failure_of(error, timeout_seconds) from error
        return ModelInfo.from_message(message)

    async def close(self) -> None:
        """Closes the channel; running calls are cancelled."""
        if "_channel" in self.__dict__:  # a client that was never used has none
            await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()
