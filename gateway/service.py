"""This file is the gateway over gRPC: a request in, one generation through the loop, typed events out."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing
from typing import Any

import grpc

from gateway.generations import Advanced, Event, Finished, Generations, Started
from gateway.requests import GenerationRequest
from gateway.rounds import RoundRecord
from gateway.stopping import Emission, FinishReason
from gateway.tokenization import Tokenization
from treewire import __version__, wire
from treewire.types import Statistics
from treewire.v1 import generate_pb2, generate_pb2_grpc

_FINISH_REASONS = {
    FinishReason.STOP: generate_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: generate_pb2.FINISH_REASON_LENGTH,
}


class GenerateService(generate_pb2_grpc.GenerateServiceServicer):
    """Runs generations for callers of the RPC."""

    def __init__(self, generations: Generations) -> None:
        self._generations = generations

    async def Generate(  # noqa: N802 - named by the contract
        self, request: generate_pb2.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[generate_pb2.GenerateResponse]:
        """The generations of a request: started, then of each chunks (and rounds) and finished."""
        async with aclosing(self.messages(request)) as messages:
            async for message in messages:
                yield message

    async def GetModel(  # noqa: N802 - named by the contract
        self, request: generate_pb2.GetModelRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> generate_pb2.GetModelResponse:
        """What is served."""
        return await self.model()

    async def messages(self, request: generate_pb2.GenerateRequest) -> AsyncGenerator[generate_pb2.GenerateResponse, None]:
        """The events of a request's generations as messages; leaving early ends them."""
        understood = await self._generations.understand(request)
        async with aclosing(self._generations.run_all(understood)) as events:
            async for event in events:
                for message in _to_messages(event, understood, self._generations.serving.tokenization):
                    yield message

    async def model(self) -> generate_pb2.GetModelResponse:
        """What is served, as a message."""
        serving = self._generations.serving
        return generate_pb2.GetModelResponse(
            model=serving.model,
            max_context=serving.limits.max_context,
            default_budget=serving.limits.default_budget,
            adaptive_budget=serving.limits.adaptive_budget > 0,
            max_budget=serving.limits.max_budget,
            default_max_tokens=serving.limits.default_max_tokens,
            version=__version__,
            protocol_version=wire.PROTOCOL_VERSION,
            fingerprint=serving.upstreams.target,
            max_prompt_characters=serving.limits.max_prompt_characters,
        )


def _to_messages(
    event: Event, request: GenerationRequest, tokenization: Tokenization
) -> Iterator[generate_pb2.GenerateResponse]:
    match event:
        case Started():
            yield generate_pb2.GenerateResponse(started=_started_to_message(event))
        case Advanced(emission, record, index):
            yield generate_pb2.GenerateResponse(chunk=_chunk_to_message(emission, index))
            if request.include_rounds and record.built is not None:
                yield generate_pb2.GenerateResponse(round=_round_to_message(record, tokenization, index))
        case Finished():
            yield generate_pb2.GenerateResponse(finished=_finished_to_message(event))


def _started_to_message(event: Started) -> generate_pb2.Started:
    return generate_pb2.Started(
        request_id=event.request_id, model=event.model, num_prompt_tokens=event.num_prompt_tokens, seed=event.seed
    )


def _finished_to_message(event: Finished) -> generate_pb2.Finished:
    return generate_pb2.Finished(
        finish_reason=_FINISH_REASONS[event.reason],
        num_prompt_tokens=event.num_prompt_tokens,
        num_output_tokens=event.num_output_tokens,
        statistics=_statistics_to_message(event.statistics),
        stop=event.stop,
        index=event.index,
    )


def _statistics_to_message(statistics: Statistics) -> generate_pb2.Statistics:
    return generate_pb2.Statistics(
        num_rounds=statistics.rounds,
        num_lone_roots=statistics.lone_roots,
        num_draft_tokens=statistics.draft_tokens,
        num_accepted_tokens=statistics.accepted_tokens,
        acceptance_histogram=statistics.acceptance_histogram,
        ttft_seconds=statistics.ttft_seconds,
        total_seconds=statistics.total_seconds,
        stage_seconds=statistics.stage_seconds,
        num_certificate_violations=statistics.certificate_violations,
        rounds_by_nodes=statistics.rounds_by_nodes,
    )


def _chunk_to_message(emission: Emission, index: int) -> generate_pb2.Chunk:
    log_probs = wire.log_probs_to_messages(emission.log_probs)
    return generate_pb2.Chunk(text=emission.text, token_ids=emission.token_ids, log_probs=log_probs, index=index)


def _round_to_message(record: RoundRecord, tokenization: Tokenization, index: int) -> generate_pb2.Round:
    assert record.built is not None
    assert record.scored is not None
    assert record.commit is not None
    return generate_pb2.Round(
        tree=wire.tree_to_message(record.built.tree),
        scores=record.built.scores,
        accepted_nodes=record.scored.accepted_nodes,
        commit=wire.commit_to_message(record.commit),
        stage_seconds=record.stage_seconds,
        node_texts=[tokenization.piece(token_id) for token_id in record.built.tree.token_ids],
        bonus_text=tokenization.piece(record.commit.token_ids[-1]),
        index=index,
    )
