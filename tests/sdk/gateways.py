"""This file is gateways written by hand for the tests of the clients: each serves one behaviour, and sees its callers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import grpc

from treewire.v1 import generate_pb2, generate_pb2_grpc

Behaviour = Callable[[generate_pb2.GenerateRequest, grpc.aio.ServicerContext], AsyncIterator[generate_pb2.GenerateResponse]]


class HandWrittenGateway(generate_pb2_grpc.GenerateServiceServicer):
    """Serves one behaviour; counts attempts, keeps the metadata of the last, and knows when a call has come and ended."""

    def __init__(self, behaviour: Behaviour) -> None:
        self._behaviour = behaviour
        self.attempts = 0
        self.caller_came = asyncio.Event()
        self.metadata: dict[str, str] = {}
        self.call_ended = asyncio.Event()
        self.address = ""

    async def Generate(self, request, context):
        self.attempts += 1
        self.caller_came.set()
        self.metadata = dict(context.invocation_metadata())
        # Not a CancelledError: a handler that is cancelled in mid-write is only ever closed (GeneratorExit).
        context.add_done_callback(lambda context: self.call_ended.set())
        async for response in self._behaviour(request, context):
            yield response


@asynccontextmanager
async def serving(behaviour: Behaviour) -> AsyncIterator[HandWrittenGateway]:
    """A running gateway with this behaviour."""
    gateway = HandWrittenGateway(behaviour)
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    generate_pb2_grpc.add_GenerateServiceServicer_to_server(gateway, server)
    gateway.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield gateway
    finally:
        await server.stop(None)


def started() -> generate_pb2.GenerateResponse:
    """The first event."""
    event = generate_pb2.Started(request_id="request-7", model="toy", num_prompt_tokens=3, seed=2**63)
    return generate_pb2.GenerateResponse(started=event)


def chunk(text: str, *token_ids: int) -> generate_pb2.GenerateResponse:
    """New text."""
    return generate_pb2.GenerateResponse(chunk=generate_pb2.Chunk(text=text, token_ids=token_ids))


def finished(num_output_tokens: int, **statistics: object) -> generate_pb2.GenerateResponse:
    """The last event."""
    event = generate_pb2.Finished(
        finish_reason=generate_pb2.FINISH_REASON_STOP,
        num_prompt_tokens=3,
        num_output_tokens=num_output_tokens,
        statistics=generate_pb2.Statistics(**statistics),
        stop="END",
    )
    return generate_pb2.GenerateResponse(finished=event)


async def one_answer(request, context):
    """A whole generation of four tokens in two rounds after the prefill."""
    yield started()
    yield chunk("Hel", 5)
    yield chunk("", 6)
    yield chunk("lo", 7, 8)
    yield finished(
        4,
        num_rounds=2,
        num_lone_roots=1,
        num_draft_tokens=9,
        num_accepted_tokens=1,
        acceptance_histogram=[1, 1],
        ttft_seconds=0.5,
        total_seconds=2.0,
        stage_seconds={"verify": 1.5, "draft": 0.5},
        num_certificate_violations=1,
    )


async def endless(request, context):
    """Words until the caller leaves."""
    yield started()
    while True:
        yield chunk("word ", 1)
        await asyncio.sleep(0.01)


async def silent(request, context):
    """Admits the generation and says nothing more."""
    yield started()
    await asyncio.Event().wait()
