"""This file is a gateway for the tests of programs that use the client: it answers from a script, over real gRPC.

with FakeGateway("Hello there.") as gateway, Client(gateway.address) as client:
    assert client.generate("Hi").text == "Hello there."
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from types import TracebackType
from typing import Self

import grpc

from treewire import __version__
from treewire.errors import TreewireError, to_status
from treewire.v1 import generate_pb2, generate_pb2_grpc

FAKE_MODEL = "fake"
_MAX_WORKERS = 8


@dataclass(frozen=True)
class Reply:
    """One scripted generation: chunks of text, each with its tokens, and how it ends ("stop" or "length")."""

    chunks: tuple[tuple[str, tuple[int, ...]], ...]
    finish_reason: str = "stop"

    @classmethod
    def of_text(cls, text: str) -> Reply:
        """A reply of one chunk and one token a word; the token ids count up from 0."""
        return cls(tuple((word, (index,)) for index, word in enumerate(re.findall(r"\S+\s*|\s+", text))))


class FakeGateway:
    """A gateway on loopback that gives `replies` in order, the last one again and again.

    A reply is a text, a Reply, or one of `treewire.errors`, which the client then raises. `requests` has every request
    that came. Each token counts as the gain of one round; all times are 0.
    """

    def __init__(self, *replies: str | Reply | TreewireError) -> None:
        if not replies:
            raise ValueError("FakeGateway has 0 replies, at least 1 is needed")
        self._service = ScriptedService(replies)
        self._server = grpc.server(ThreadPoolExecutor(_MAX_WORKERS), options=[("grpc.so_reuseport", 0)])
        generate_pb2_grpc.add_GenerateServiceServicer_to_server(self._service, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"

    @property
    def requests(self) -> tuple[generate_pb2.GenerateRequest, ...]:
        """The requests so far, oldest first."""
        return tuple(self._service.requests)

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._server.stop(grace=None).wait()


class ScriptedService(generate_pb2_grpc.GenerateServiceServicer):
    """The gateway's service, answering from a script; FakeGateway serves it, and so may a server of yours."""

    def __init__(self, replies: tuple[str | Reply | TreewireError, ...]) -> None:
        self._replies = replies
        self._turns = count()
        self.requests: list[generate_pb2.GenerateRequest] = []

    def Generate(  # noqa: N802
        self, request: generate_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[generate_pb2.GenerateResponse]:
        self.requests.append(request)
        turn = next(self._turns)
        reply = self._replies[min(turn, len(self._replies) - 1)]
        if isinstance(reply, TreewireError):
            status = to_status(reply)
            context.set_trailing_metadata(status.trailing_metadata)
            context.abort(status.code, status.message)
        yield from _responses(Reply.of_text(reply) if isinstance(reply, str) else reply, request_id=f"fake-{turn}")

    def GetModel(  # noqa: N802
        self, request: generate_pb2.GetModelRequest, context: grpc.ServicerContext
    ) -> generate_pb2.GetModelResponse:
        return generate_pb2.GetModelResponse(model=FAKE_MODEL, version=__version__)


def _responses(reply: Reply, *, request_id: str) -> Iterator[generate_pb2.GenerateResponse]:
    started = generate_pb2.Started(request_id=request_id, model=FAKE_MODEL, num_prompt_tokens=1)
    yield generate_pb2.GenerateResponse(started=started)
    for text, token_ids in reply.chunks:
        yield generate_pb2.GenerateResponse(chunk=generate_pb2.Chunk(text=text, token_ids=token_ids))
    num_tokens = sum(len(token_ids) for _, token_ids in reply.chunks)
    num_rounds = max(num_tokens - 1, 0)
    finished = generate_pb2.Finished(
        finish_reason=generate_pb2.FinishReason.Value(f"FINISH_REASON_{reply.finish_reason.upper()}"),
        num_prompt_tokens=started.num_prompt_tokens,
        num_output_tokens=num_tokens,
        statistics=generate_pb2.Statistics(num_rounds=num_rounds, num_lone_roots=num_rounds, acceptance_histogram=[num_rounds]),
    )
    yield generate_pb2.GenerateResponse(finished=finished)
